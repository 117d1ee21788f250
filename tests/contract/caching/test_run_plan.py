"""A model under a plan: what its rows read, in one pass, in chunks, in decoding, with padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance import CachePlan, HeadPlan
from acutance.caching import PlanError, PlannedCache
from acutance.judging import HeadsOff
from tests.versions import CACHE

from .conftest import build

STREAMING = HeadPlan("streaming", first=3, recent=9)
OTHER = HeadPlan("streaming", first=0, recent=20)
PACKED = HeadPlan(key_bits=4, value_bits=8)
KEYS = HeadPlan(key_bits=2)
VALUES = HeadPlan(value_bits=4)
DROPPED = HeadPlan("dropped")
SIZES = {"group": 16, "residual": 8}
PLANS = {
    "full": {},
    "streaming": {(0, 0): STREAMING, (1, 1): OTHER, (1, 0): STREAMING},
    "dropped": {(0, 0): DROPPED, 1: STREAMING},
    "packed": {0: PACKED, (1, 0): KEYS, (1, 1): VALUES},
    "everything": {(0, 0): PACKED, (0, 1): DROPPED, (1, 0): STREAMING},
}


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def plan_of(model: torch.nn.Module, name: str) -> CachePlan:
    return CachePlan.of(model, PLANS[name], **SIZES)


@torch.inference_mode()
def in_chunks(model: torch.nn.Module, ids: Tensor, sizes: Sequence[int], **given: Any) -> Any:
    """The logits of a text that is read in chunks, and the cache."""
    cache, parts, start = None, [], 0
    mask = given.get("attention_mask")
    for size in sizes:
        stop = start + size
        if mask is not None:
            given["attention_mask"] = mask[:, :stop]
        output = model(ids[:, start:stop], **{CACHE: cache}, **given)
        cache, start = output.past_key_values, stop
        parts.append(output.logits)
    assert start == ids.shape[1]
    return torch.cat(parts, 1), cache


# -- what rows read -------------------------------------------------------------------------------


def test_streaming_heads_read_what_windows_read(model: torch.nn.Module) -> None:
    plan, ids = plan_of(model, "streaming"), tokens(2, 90)
    with torch.no_grad():
        whole = model(ids).logits
        with acutance.apply(model, plan) as applied:
            cached = model(ids).logits
        with acutance.apply(model, plan.law()):
            masked = model(ids).logits
    assert (masked - whole).abs().max() > 0.1
    torch.testing.assert_close(cached, masked, atol=1e-4, rtol=1e-4)
    assert applied.calls == dict.fromkeys(plan.layers, 1)
    torch.testing.assert_close(model(ids).logits, whole)  # it is off again


def test_dropped_heads_are_switched_off(model: torch.nn.Module) -> None:
    ids = tokens(2, 30)
    with torch.no_grad():
        with acutance.apply(model, CachePlan.of(model, {(1, 0): DROPPED})):
            cached = model(ids).logits
        with HeadsOff({1: [0, 1]}).applied(model):
            off = model(ids).logits
    torch.testing.assert_close(cached, off, atol=1e-5, rtol=1e-5)


# -- one pass, chunks, decoding -------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("sizes", [[50, *[1] * 30, 20], [10, 1, 1, 63, 25], [1] * 40 + [60]])
def test_chunks_and_decoding_read_what_one_pass_reads(name: str, sizes: list[int]) -> None:
    model, ids = build(), tokens(2, 100)
    plan = plan_of(model, name)
    with torch.inference_mode(), acutance.apply(model, plan):
        whole = model(ids, use_cache=False).logits
        chunks, cache = in_chunks(model, ids, sizes)
    assert isinstance(cache, PlannedCache)
    torch.testing.assert_close(chunks, whole, atol=1e-4, rtol=1e-4)


def test_a_cache_of_inference_mode_can_be_continued_outside(model: torch.nn.Module) -> None:
    ids = tokens(1, 40)
    with acutance.apply(model, plan_of(model, "everything")):
        _, cache = in_chunks(model, ids[:, :39], [30, 9])
        last = model(ids[:, 39:], **{CACHE: cache}).logits[:, -1]
        with torch.no_grad():
            whole = model(ids, use_cache=False).logits[:, -1]
    torch.testing.assert_close(last, whole, atol=1e-4, rtol=1e-4)
    last.sum().backward()
    assert all(part.grad is not None for part in model.model.layers[-1].mlp.parameters())


@pytest.mark.parametrize("name", ["streaming", "everything"])
def test_generate_is_greedy_decoding_of_the_model_under_the_plan(
    model: torch.nn.Module, name: str
) -> None:
    plan, ids = plan_of(model, name), tokens(1, 40)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), acutance.apply(model, plan):
        text = ids
        for _ in range(12):
            text = torch.cat([text, model(text, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        generated = model.generate(ids, **options)
        chunked = model.generate(ids, **options, prefill_chunk_size=7)
        uncached = model.generate(ids, **options, use_cache=False)
    assert torch.equal(generated, text)
    assert torch.equal(chunked, text)
    assert torch.equal(uncached, text)
    assert not torch.equal(model.generate(ids, **options), text)


# -- padding and batches --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model: torch.nn.Module, name: str, side: str) -> None:
    ids, lengths = tokens(3, 60), [60, 41, 7]
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(60 - length, None) if side == "left" else slice(length)] = 1
    padded = torch.where(mask.bool(), ids, 0)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.inference_mode(), acutance.apply(model, plan_of(model, name)):
        together = model(padded, attention_mask=mask, position_ids=position).logits
        for row in range(3):
            real = mask[row].bool()
            alone = model(ids[row : row + 1, real]).logits[0]
            torch.testing.assert_close(together[row, real], alone, atol=1e-4, rtol=1e-4)


def test_a_padded_batch_generates_what_each_text_alone_does(model: torch.nn.Module) -> None:
    ids, mask = tokens(2, 50), torch.ones(2, 50, dtype=torch.int64)
    mask[1, :30] = 0
    padded = torch.where(mask.bool(), ids, 0)
    options = {"max_new_tokens": 20, "do_sample": False}
    with torch.no_grad(), acutance.apply(model, plan_of(model, "everything")):
        for more in ({}, {"prefill_chunk_size": 16}):  # the first chunk of one text is all padding
            together = model.generate(padded, attention_mask=mask, **options, **more)
            for row in range(2):
                alone = ids[row : row + 1, mask[row].bool()]
                text = model.generate(alone, attention_mask=torch.ones_like(alone), **options)
                assert torch.equal(together[row, 50:], text[0, -20:])


def test_beams_and_several_sequences(model: torch.nn.Module) -> None:
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :5] = 0
    for given in ({"attention_mask": mask}, {"attention_mask": torch.ones_like(mask)}):
        options = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, **given}
        expected = model.generate(ids, **options, do_sample=False)
        with torch.no_grad(), acutance.apply(model, plan_of(model, "full")):
            assert torch.equal(model.generate(ids, **options, do_sample=False), expected)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("padded", [False, True])
def test_selected_sequences_continue_as_they_would_alone(name: str, padded: bool) -> None:
    model, ids = build(), tokens(2, 61)
    mask = torch.ones_like(ids)
    mask[0, : 9 * padded] = 0
    with torch.inference_mode(), acutance.apply(model, plan_of(model, name)):
        whole, cache = in_chunks(model, ids, [60, 1], attention_mask=mask)
        _, cache = in_chunks(model, ids[:, :60], [60], attention_mask=mask[:, :60])
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([2, 0, 3]))
        order = torch.tensor([1, 0, 1])
        last = model(ids[order, 60:], attention_mask=mask[order], **{CACHE: cache}).logits
    torch.testing.assert_close(last[:, 0], whole[order, 60], atol=1e-4, rtol=1e-4)


# -- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_bytes_are_the_plans(name: str) -> None:
    dtype = torch.bfloat16 if name == "packed" else torch.float32
    model, ids = build().to(dtype), tokens(2, 700)
    plan = plan_of(model, name)
    with acutance.apply(model, plan):
        for sizes in ([700], [1, 699], [675, *[1] * 25]):
            _, cache = in_chunks(model, ids, sizes)
            planned = 2 * plan.bytes(700, itemsize=dtype.itemsize)
            assert cache.bytes() == pytest.approx(planned, rel=0.02)
            assert cache.get_seq_length() == 700


# -- judge ----------------------------------------------------------------------------------------


def test_judge_compares_plans(model: torch.nn.Module) -> None:
    plan, windows = plan_of(model, "streaming"), tokens(3, 60)
    other = plan_of(model, "everything")
    result = acutance.judge(model, windows, {"cache": plan, "mask": plan.law(), "other": other})
    cache, mask, third = result.laws
    assert (cache.name, third.name) == ("cache", "other")
    assert cache.delta == pytest.approx(mask.delta, abs=1e-4)
    assert abs(third.delta - cache.delta) > 1e-3


# -- what cannot run ------------------------------------------------------------------------------


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"for another model, .*: it has width 32"):
        acutance.apply(build(hidden_size=64), plan_of(build(), "full"))


def test_caches_that_are_not_the_plans_are_refused(model: torch.nn.Module) -> None:
    from transformers import DynamicCache, StaticCache

    ids = tokens(1, 8)
    full = model(ids, use_cache=True).past_key_values
    assert isinstance(full, DynamicCache)
    with acutance.apply(model, plan_of(model, "streaming")):
        planned = model(ids).past_key_values
        with pytest.raises(acutance.ApplyError, match=r"got a DynamicCache with 8 tokens"):
            model(ids, **{CACHE: full})
        with pytest.raises(acutance.ApplyError, match=r"got a StaticCache with 0 tokens"):
            model(ids, **{CACHE: StaticCache(config=model.config, max_cache_len=16)})
        with pytest.raises(ValueError, match=r"cannot be cropped"):
            planned.crop(-1)
    with acutance.apply(model, plan_of(model, "full")):
        with pytest.raises(acutance.ApplyError, match=r"the cache of another plan"):
            model(ids, **{CACHE: planned})
        model(ids)
    with pytest.raises(acutance.ApplyError, match=r"read only while its plan is applied"):
        model(ids[:, :1], **{CACHE: planned})


def test_packed_documents_are_refused(model: torch.nn.Module) -> None:
    ids, mask = tokens(1, 8), torch.ones(8, 8).tril().bool()
    mask[4:, :4] = False
    given = mask[None, None]
    if model.config._attn_implementation == "eager":
        given = torch.zeros(1, 1, 8, 8).masked_fill(~given, -1e10)
    with (
        pytest.raises(acutance.ApplyError, match=r"hides keys by more than causality and padding"),
        acutance.apply(model, plan_of(model, "full")),
    ):
        model(ids, attention_mask=given)
    with (
        pytest.raises(acutance.ApplyError, match=r"changed no call of LlamaForCausalLM"),
        acutance.apply(model, plan_of(model, "full")),
    ):
        pass


def test_restore_removes_the_plan(model: torch.nn.Module) -> None:
    ids = tokens(1, 40)
    with torch.no_grad():
        whole = model(ids).logits
        applied = acutance.apply(model, plan_of(model, "streaming"))
        assert not torch.equal(model(ids).logits, whole)
        applied.restore()
        assert torch.equal(model(ids).logits, whole)
    with pytest.raises(acutance.ApplyError, match=r"was removed from its model"), applied:
        pass


def test_judge_reads_plans_from_files(model: torch.nn.Module, tmp_path: Path) -> None:
    plan, windows, path = plan_of(model, "streaming"), tokens(2, 60), tmp_path / "plan.json"
    plan.save(path)
    by_file, itself = acutance.judge(model, windows, [str(path), plan]).laws
    assert (by_file.name, itself.name) == (str(path), plan.name)
    assert by_file.delta == itself.delta != 0
