"""A law on a model of transformers: after a pass that was followed, only its doors are watched."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import acutance
from acutance.scaling import LogN
from tests.versions import CACHE

LAW = LogN(train_length=4)


class Calls:
    """Counts the Python functions that are called in its context, by name; of a file path."""

    def __init__(self, of: str | None = None) -> None:
        self.of = of

    def __enter__(self) -> Counter[str]:
        self.names: Counter[str] = Counter()
        sys.setprofile(self._count)
        return self.names

    def _count(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and (self.of is None or self.of in frame.f_code.co_filename):
            self.names[frame.f_code.co_name] += 1

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def gpt2(implementation: str = "sdpa", layers: int = 2) -> Any:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_embd=16, n_head=2, vocab_size=50, n_positions=32)
    return GPT2Model._from_config(config, attn_implementation=implementation).eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(18).view(2, 9)


@pytest.fixture(autouse=True)
def doors_are_as_before() -> Iterator[None]:
    from transformers import GPT2Model

    doors = F.scaled_dot_product_attention, torch.softmax, torch.exp
    with torch.no_grad():
        yield
    assert doors == (F.scaled_dot_product_attention, torch.softmax, torch.exp)
    assert not {"softmax", "log_softmax", "exp", "exp_"} & set(vars(torch.Tensor))
    assert "__call__" not in vars(GPT2Model)
    assert not torch_module._global_forward_pre_hooks


def hidden(model: Any, ids: Tensor, **options: Any) -> Tensor:
    output: Tensor = model(ids, **options).last_hidden_state
    return output


def test_no_function_is_followed_after_the_first_pass(ids: Tensor) -> None:
    model = gpt2()
    plain = hidden(model, ids)
    with acutance.apply(model, LAW) as applied:
        with Calls() as first:
            want = hidden(model, ids)
        with Calls() as names:
            got = hidden(model, ids)
        assert not torch_module._global_forward_pre_hooks
        assert torch._C._len_torch_function_stack() == 0
    assert first["__torch_function__"] > 20
    assert not names["__torch_function__"]
    assert torch.equal(got, want)
    assert not torch.allclose(got, plain)
    assert applied.calls == {"h.0.attn": 2, "h.1.attn": 2}
    assert torch.equal(hidden(model, ids), plain)


@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_in_a_later_pass_takes_few_calls(masked: bool, ids: Tensor) -> None:
    counts = []
    mask = torch.ones_like(ids).index_fill(1, torch.arange(3), 0) if masked else None
    for layers in (2, 6):
        model = gpt2(layers=layers)
        with torch.inference_mode(), acutance.apply(model, LAW):
            hidden(model, ids, attention_mask=mask)
            with Calls(str(Path(acutance.__file__).parent)) as names:
                hidden(model, ids, attention_mask=mask)
        counts.append(names.total())
        assert names["count"] <= 1  # the factor is computed once for all layers
    assert counts[1] - counts[0] <= 4 * 24


def test_opening_a_law_does_not_search_every_parameter() -> None:
    model = gpt2()
    with Calls() as names, acutance.apply(model, LAW) as applied:
        applied.calls["none"] = 1
    assert names["__getattr__"] <= 4  # of nn.Module: before, more than a hundred for each module


def test_masks_of_inference_that_are_written_to_are_read_again(ids: Tensor) -> None:
    model = gpt2()
    masks = [torch.ones(2, 1, 9, 9, dtype=torch.bool).tril() for _ in range(2)]
    masks[1][:, :, 4:, :2] = False
    want = []
    for mask in masks:
        with acutance.apply(model, LAW):
            want.append(hidden(model, ids, attention_mask=mask))

    with torch.inference_mode(), acutance.apply(model, LAW):
        mask = masks[0].clone()
        for _ in range(2):
            assert torch.equal(hidden(model, ids, attention_mask=mask), want[0])
        mask.copy_(masks[1])
        assert torch.equal(hidden(model, ids, attention_mask=mask), want[1])


def test_decoding_under_a_law_is_that_of_passes_which_are_followed(ids: Tensor) -> None:
    def steps(model: Any) -> list[Tensor]:
        output = model(ids[:, :5], use_cache=True)
        rows = [output.last_hidden_state]
        for place in range(5, 9):
            cache = output.past_key_values
            output = model(ids[:, place : place + 1], **{CACHE: cache}, use_cache=True)
            rows.append(output.last_hidden_state)
        return rows

    model = gpt2()
    with acutance.apply(model, LAW), acutance.probe(model):  # a probe keeps passes followed
        want = steps(model)
    with acutance.apply(model, LAW):
        hidden(model, ids)
        got = [steps(model) for _ in range(2)]
    for each in got:
        assert all(torch.equal(left, right) for left, right in zip(each, want, strict=True))


def test_masks_that_change_are_not_taken_for_one_another(ids: Tensor) -> None:
    model = gpt2()
    masks = [torch.ones_like(ids), torch.ones_like(ids).index_fill(1, torch.arange(3), 0)]
    want = []
    for mask in masks:
        with acutance.apply(model, LAW):
            want.append(hidden(model, ids, attention_mask=mask))
    with acutance.apply(model, LAW):
        for turn in (0, 1, 0, 1, 1, 0):
            assert torch.equal(hidden(model, ids, attention_mask=masks[turn]), want[turn])
        short = hidden(model, ids[:, :4])
    with acutance.apply(model, LAW):
        assert torch.equal(hidden(model, ids[:, :4]), short)


def pooled(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.mT, -1) @ x


class Once(nn.Module):
    """Attention by hand, in a module that takes another's place."""

    def forward(self, x: Tensor) -> Tensor:
        return pooled(x)


@pytest.mark.parametrize("how", ["module", "hook", "forward", "class", "setting"])
def test_what_changes_is_followed(how: str, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        if how == "module":
            model.ln_f = Once()
        elif how == "hook":
            model.ln_f.register_forward_hook(lambda *given: pooled(given[-1]))
        elif how == "forward":
            plain = model.ln_f.forward
            model.ln_f.forward = lambda x: pooled(plain(x))
        elif how == "class":
            from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

            monkeypatch.setattr(GPT2MLP, "forward", lambda self, x: pooled(x))
        else:
            model.h[1].attn.reorder_and_upcast_attn = True

    fresh, model = gpt2("eager"), gpt2("eager")
    with acutance.apply(model, LAW) as applied:
        for _ in range(2):
            hidden(model, ids)
        assert not torch_module._global_forward_pre_hooks
        change(model)
        got = hidden(model, ids)
    change(fresh)
    with acutance.apply(fresh, LAW) as want:
        assert torch.equal(hidden(fresh, ids), got)
    assert {name: count + 2 for name, count in want.calls.items() if "attn" in name} == {
        name: count for name, count in applied.calls.items() if "attn" in name
    }


def test_a_probe_inside_sees_what_it_always_sees(ids: Tensor) -> None:
    model = gpt2()
    other = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 8)
    with acutance.apply(model, LAW):
        hidden(model, ids)
        with acutance.probe(other) as probe:
            other(x, x, x)
        with acutance.probe(model) as inner:
            want = hidden(model, ids)
        by_hand = Once()
        with acutance.probe(by_hand, verify=True) as read:
            by_hand(x)
        assert torch.equal(hidden(model, ids), want)
    for each, status in ((probe, "verified"), (inner, "verified"), (read, "unverified")):
        assert {layer.status for layer in each.summary().layers} == {status}


def test_two_laws_and_copies(ids: Tensor) -> None:
    model = gpt2()
    with acutance.apply(model, LAW), acutance.apply(model, LAW) as inner:
        want = hidden(model, ids)
        assert torch.equal(hidden(model, ids), want)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not torch.allclose(hidden(other, ids), want)  # no law is on a copy
    assert set(inner.calls.values()) == {2}


def test_threads_run_one_model_under_a_law(ids: Tensor) -> None:
    model, found, errors = gpt2(), [], []
    with acutance.apply(model, LAW):
        want = hidden(model, ids)

    def run() -> None:
        try:
            with torch.no_grad():
                found.extend(hidden(model, ids) for _ in range(5))
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    with acutance.apply(model, LAW) as applied:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert all(torch.equal(each, want) for each in found)
    assert applied.calls == {"h.0.attn": 15, "h.1.attn": 15}


def test_a_model_compiled_from_outside_runs_compiled_under_the_law(ids: Tensor) -> None:
    torch.compiler.reset()
    model = gpt2()
    with acutance.apply(model, LAW):
        want = hidden(model, ids)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with acutance.apply(model, LAW):
        for _ in range(3):
            torch.testing.assert_close(hidden(compiled, ids), want)
    torch.compiler.reset()
