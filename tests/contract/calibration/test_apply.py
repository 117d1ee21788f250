"""A law on a model: what it computes, which n it takes, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acutance
from acutance import scaling
from tests.versions import FLEX_ATTENTION

LAW = scaling.SSMax(s=0.6)
Built = Callable[..., nn.Module]
#: float32, two layers: some ten roundings of logits and outputs of order 10
CLOSE = 5e-5


def logits(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def reweighted(model: nn.Module, x: Tensor, seen: Tensor, law: Any = LAW) -> tuple[Tensor, Tensor]:
    """nn.MultiheadAttention by hand, with a law: output and weights."""
    batch, length, _ = x.shape
    parts = F.linear(x, model.in_proj_weight, model.in_proj_bias).chunk(3, -1)
    query, key, value = (
        part.view(batch, length, model.num_heads, -1).transpose(1, 2) for part in parts
    )
    factor = law.factor(seen.sum(-1)).unsqueeze(-1)
    scores = (query * factor) @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return model.out_proj((weights @ value).transpose(1, 2).reshape(x.shape)), weights


# -- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3"])
def test_the_probe_sees_logits_scaled_by_the_factor(
    built: Built, ids: Tensor, name: str, kind: str
) -> None:
    """In the first layer, whose input no law has changed; the mask is causal for all but bert."""
    model, constant = built(name, kind), scaling.HeadTable([1.0, 2.0, 0.5, 3.0])
    with acutance.probe(model, metrics=["max_logit", "logit_std"]) as plain:
        logits(model, input_ids=ids)
    outer = acutance.probe(model, metrics=["max_logit", "logit_std"])
    with outer, acutance.apply(model, constant) as applied:
        inside = logits(model, input_ids=ids)
    inner = acutance.probe(model, metrics=["max_logit", "logit_std"])
    with acutance.apply(model, constant), inner:
        around = logits(model, input_ids=ids)
    assert torch.equal(inside, around)
    assert outer.summary().columns() == inner.summary().columns()
    assert sorted(applied.calls.values()) == [1, 1]
    before, after = (p.summary().columns()["logit_std_mean"][:4] for p in (plain, inner))
    ratio = [b / a for a, b in zip(before, after, strict=True)]
    assert ratio == pytest.approx([1, 2, 0.5, 3], rel=1e-5)


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["sdpa", FLEX_ATTENTION])
def test_implementations_agree_and_change_the_output(built: Built, ids: Tensor, kind: str) -> None:
    out = {}
    for one in ("eager", kind):
        model = built("llama", one)
        with acutance.apply(model, LAW):
            out[one] = logits(model, input_ids=ids)
    assert (out[kind] - logits(built("llama"), input_ids=ids)).abs().max() > 0.1
    torch.testing.assert_close(out["eager"], out[kind], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("weights", [None, "mean", "heads"])
def test_multihead_attention(weights: str | None) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = 3 * torch.randn(2, 10, 16)
    padding = torch.arange(10) >= torch.tensor([[10], [6]])
    want, each = reweighted(model, x, ~padding[:, None, None].expand(2, 1, 10, 10))
    with acutance.probe(model, verify=True) as probe, acutance.apply(model, LAW) as applied:
        out, given = model(
            x, x, x, key_padding_mask=padding,
            need_weights=weights is not None, average_attn_weights=weights == "mean",
        )  # fmt: skip
    torch.testing.assert_close(out, want, atol=CLOSE, rtol=0)
    assert applied.calls == {"MultiheadAttention": 1}
    assert [layer.status for layer in probe.summary().layers] == ["verified"]
    entropy = -torch.xlogy(each, each).sum(-1).transpose(0, 1)[:, ~padding].mean(1)
    assert probe.summary().columns()["entropy_mean"] == pytest.approx(entropy.tolist(), abs=1e-5)
    if weights is None:
        assert given is None
    else:
        torch.testing.assert_close(given, each.mean(1) if weights == "mean" else each)


@pytest.mark.parametrize("weights", [None, "mean", "heads"])
def test_multihead_attention_at_a_factor_of_one_is_as_it_was(weights: str | None) -> None:
    """To the bit, with dropout as it falls, and with NaN for a row that sees no key."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.2, add_bias_kv=True).train()
    x = 3 * torch.randn(2, 10, 16)
    mask = torch.zeros(10, 10).masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
    asked = {"need_weights": weights is not None, "average_attn_weights": weights == "mean"}

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        return [part for part in model(x, x, x, attn_mask=mask, **asked) if part is not None]

    plain = run()
    with acutance.apply(model, scaling.HeadTable([1.0])) as applied:
        assert all(map(torch.equal, run(), plain))
    assert applied.calls == {"MultiheadAttention": 1}
    with acutance.apply(model, scaling.HeadTable([2.0])):
        doubled = run()
    with torch.no_grad():
        model.in_proj_weight[:16] *= 2
        model.in_proj_bias[:16] *= 2
    for got, want in zip(doubled, run(), strict=True):
        torch.testing.assert_close(got, want, atol=CLOSE, rtol=0)

    bare = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    empty = torch.ones(10, 10).triu(1).bool()
    empty[3] = True
    with torch.no_grad():
        before = bare(x, x, x, attn_mask=empty)
        with acutance.apply(bare, LAW):
            after = bare(x, x, x, attn_mask=empty)
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first.isnan(), second.isnan())
        assert first.isnan().any()


class Plain(nn.Module):
    """A module that calls SDPA."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_sdpa_of_any_rank(rank: int) -> None:
    query, key, value = torch.randn(3, 2, 3, 4, 5, 8, generator=torch.Generator().manual_seed(1))
    query, key, value = (part[(0,) * (5 - rank)] for part in (query, key, value))
    model = Plain()
    with acutance.apply(model, LAW):
        got = model(query, key, value, is_causal=True)
    factor = LAW.factor(torch.arange(1, 6)).unsqueeze(-1)
    want = F.scaled_dot_product_attention(query * factor, key, value, is_causal=True)
    torch.testing.assert_close(got, want)
    assert got.shape == want.shape


def test_sdpa_counts_the_keys_of_a_mask_and_shares_key_heads() -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, 4, 5, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 7, 8, generator=generator)
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    mask = documents[2:, None] == documents  # packed: rows see 3 or 4 keys
    law = scaling.SSMax(s=[0.2, 0.4, 0.6, 0.8])
    model = Plain()
    with acutance.apply(model, law):
        got = model(query, key, value, attn_mask=mask, enable_gqa=True)
    factor = law.factor(torch.tensor([3, 4, 4, 4, 4])).unsqueeze(-1)
    want = F.scaled_dot_product_attention(
        query * factor, key, value, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(got, want)


def test_the_factor_keeps_the_dtype(built: Built, ids: Tensor) -> None:
    model = copy.deepcopy(built("llama")).to(torch.bfloat16)
    with acutance.apply(model, LAW):
        assert logits(model, input_ids=ids).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16), acutance.apply(built("llama"), LAW):
        assert logits(built("llama"), input_ids=ids).isfinite().all()


def test_a_law_reads_the_entropy_of_unscaled_rows() -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(4))
    model, law = Plain(), scaling.AdaptivePoly()
    with acutance.apply(model, law):
        got = model(query, key, value)
    entropy = acutance.row_statistics(query, key).entropy
    factor = law.factor(torch.full((1, 2, 6), 6), entropy=entropy).unsqueeze(-1)
    assert (factor > 1).any()
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query * factor, key, value))


def test_learned_scalings_get_a_gradient(built: Built, ids: Tensor) -> None:
    model, law = built("llama"), scaling.LearnedTemperature(num_heads=4)
    with acutance.apply(model, law) as applied:
        model(input_ids=ids)[0].square().mean().backward()
    assert law.log_factor.grad is not None
    assert law.log_factor.grad.abs().min() > 0
    assert applied.law.everywhere == law.record()
    model.zero_grad()


def test_laws_add_up(built: Built, ids: Tensor) -> None:
    model = built("llama")
    both, once = scaling.HeadTable([2.0] * 4), scaling.HeadTable([4.0] * 4)
    with acutance.apply(model, once):
        want = logits(model, input_ids=ids)
    first = acutance.apply(model, both)
    second = acutance.apply(model, both)
    torch.testing.assert_close(logits(model, input_ids=ids), want)  # powers of two: exact
    first.restore()  # not the last to come
    second.restore()


# -- per layer and head ---------------------------------------------------------------------------


def test_one_head_of_one_layer(built: Built, ids: Tensor) -> None:
    model = built("llama")
    with acutance.probe(model, metrics=["logit_std"]) as plain:
        logits(model, input_ids=ids)
    sharp = scaling.HeadTable([2.0])
    probe = acutance.probe(model, metrics=["logit_std"])
    with acutance.apply(model, {(1, 2): sharp}) as applied, probe:
        logits(model, input_ids=ids)
    assert applied.calls == {"model.layers.1.self_attn": 1}
    before, after = (p.summary().columns()["logit_std_mean"] for p in (plain, probe))
    ratio = [b / a for a, b in zip(before, after, strict=True)]
    assert ratio == pytest.approx([1, 1, 1, 1, 1, 1, 2, 1], rel=1e-5)


def test_layers_by_name_and_number_are_the_same(built: Built, ids: Tensor) -> None:
    model = built("gpt2")
    out = []
    for layer in (1, "transformer.h.1.attn"):
        with acutance.apply(model, {layer: LAW}):
            out.append(logits(model, input_ids=ids))
    assert torch.equal(*out)
    assert not torch.equal(out[0], logits(model, input_ids=ids))


def test_windowed_layers_are_left_alone(built: Built, ids: Tensor) -> None:
    with acutance.apply(built("gpt-oss", "eager"), LAW) as applied:
        logits(built("gpt-oss", "eager"), input_ids=ids)
    assert applied.calls == {"model.layers.1.self_attn": 1}
    assert applied.skipped == {
        "model.layers.0.self_attn": "its rows see only a window (windowed=True scales it)"
    }
    with acutance.apply(built("gpt-oss", "eager"), LAW, windowed=True) as applied:
        logits(built("gpt-oss", "eager"), input_ids=ids)
    assert sorted(applied.calls) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


# -- which n --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "eager"), ("llama", "sdpa"), ("gpt2", "sdpa"), ("mistral", "sdpa"),
        ("qwen3", "sdpa"), ("gpt-oss", "eager"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("cache", [None, "static"])
def test_cached_generation_is_the_uncached_forward(
    built: Built, ids: Tensor, name: str, kind: str, cache: str | None
) -> None:
    model = built(name, kind)
    options: dict[str, Any] = {"cache_implementation": cache, "disable_compile": True}
    with acutance.apply(model, LAW, windowed=True) as applied, torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,
            output_logits=True, return_dict_in_generate=True, pad_token_id=0,
            **(options if cache else {}),
        )  # fmt: skip
        want = model(made.sequences).logits[:, ids.shape[1] - 1 : -1]
    got = torch.stack(made.logits, 1)
    assert sum(applied.calls.values()) == 2 * 7
    assert (want - logits(model, input_ids=made.sequences)[:, -7:-1]).abs().max() > 100 * CLOSE
    torch.testing.assert_close(got, want, atol=CLOSE, rtol=0)


def test_left_padding_does_not_count(built: Built, ids: Tensor) -> None:
    model, mask = built("llama"), torch.ones_like(ids)
    mask[1, :4] = 0
    with acutance.apply(model, LAW):
        together = logits(model, input_ids=ids, attention_mask=mask)
        alone = logits(model, input_ids=ids[1:, 4:])
    torch.testing.assert_close(together[1:, 4:], alone, atol=CLOSE, rtol=0)


def test_implementations_agree_on_padded_batches(built: Built, ids: Tensor) -> None:
    """On real rows; a row of padding sees no key, and each implementation fills it its own way."""
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    out = {}
    for kind in ("eager", "sdpa"):
        with acutance.apply(built("gpt2", kind), LAW):
            out[kind] = logits(built("gpt2", kind), input_ids=ids, attention_mask=mask)
    real = mask.bool()
    torch.testing.assert_close(out["eager"][real], out["sdpa"][real], atol=CLOSE, rtol=0)


def test_right_padding_does_not_count(built: Built, ids: Tensor) -> None:
    model, mask = built("bert"), torch.ones_like(ids)
    mask[1, 6:] = 0
    with acutance.apply(model, LAW):
        together = logits(model, input_ids=ids, attention_mask=mask)
        alone = logits(model, input_ids=ids[1:, :6])
    torch.testing.assert_close(together[1:, :6], alone, atol=CLOSE, rtol=0)


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_model_is_traced_again(built: Built, ids: Tensor) -> None:
    model, graphs = built("llama"), []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    plain = logits(compiled, input_ids=ids)
    with acutance.apply(model, LAW):
        want = logits(model, input_ids=ids)
    with acutance.apply(compiled, LAW) as applied:
        first = logits(compiled, input_ids=ids)
        traced = len(graphs)
        again = [logits(compiled, input_ids=ids) for _ in range(3)]
        assert len(graphs) <= traced + 1  # the first run is counted, once
    assert applied.calls == {"model.layers.0.self_attn": 1, "model.layers.1.self_attn": 1}
    for got in (first, *again):
        torch.testing.assert_close(got, want, atol=CLOSE, rtol=0)
    assert torch.equal(logits(compiled, input_ids=ids), plain)
    torch.compiler.reset()


def test_compiled_plain_torch_runs_uncompiled() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 9, 16)
    with acutance.apply(model, LAW), torch.no_grad():
        want = model(x)
    for target in (model, compiled):
        with acutance.apply(target, LAW) as applied, torch.no_grad():
            assert torch.equal(compiled(x), want)
        assert applied.calls == {"layers.0.self_attn": 1, "layers.1.self_attn": 1}


# -- gradients ------------------------------------------------------------------------------------


def test_a_gradient_is_that_of_the_scaled_rows() -> None:
    """With gradient checkpointing too, where the backward pass runs the model again."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=True).double().eval()
    x = 3 * torch.randn(2, 10, 16, dtype=torch.float64)
    seen = torch.ones(2, 1, 10, 10, dtype=torch.bool)
    want = torch.autograd.grad(
        reweighted(model, x, seen)[0].square().mean(), list(model.parameters())
    )
    with acutance.apply(model, LAW):
        for out in (model(x, x, x)[0], checkpoint(lambda: model(x, x, x)[0], use_reentrant=False)):
            got = torch.autograd.grad(out.square().mean(), list(model.parameters()))
            for mine, hand in zip(got, want, strict=True):
                torch.testing.assert_close(mine, hand, atol=1e-6, rtol=1e-6)


# -- what cannot be done --------------------------------------------------------------------------


def test_a_law_that_changed_nothing_is_reported(built: Built, ids: Tensor) -> None:
    model, match = built("llama"), "scaled no call of LlamaForCausalLM: it did not run"
    with pytest.raises(acutance.ApplyError, match=match), acutance.apply(model, LAW):
        pass
    model, match = (
        built("mistral"),
        r"2 layers, model\.layers\.0\.self_attn: its rows see only a win",
    )
    with pytest.raises(acutance.ApplyError, match=match), acutance.apply(model, LAW):
        logits(model, input_ids=ids)
    with pytest.warns(UserWarning, match="scaled no call of Linear"):
        acutance.apply(nn.Linear(2, 2), LAW).restore()


@pytest.mark.parametrize(
    ("law", "error", "match"),
    [
        ("ssmaxx", ValueError, "did you mean 'ssmax'"),
        ("log_n", ValueError, "log_n needs parameters, for example log_n:train_length=512"),
        (3, TypeError, "law must be a scaling or its name, a Window, a pair of both, a Law, or a"),
        ({}, ValueError, "at least one layer"),
        ({(2, 0): LAW}, ValueError, "layer=2 is not a layer of the model: it has 2 blocks, 0"),
        ({("model.layers.1.self_atn", 0): LAW}, ValueError, r"mean 'model\.layers\.1\.self_attn'"),
        ({1.5: LAW}, TypeError, "a number, a range or the name of a module"),
        ({(0, -1): LAW}, ValueError, "head must be a non-negative whole number"),
        ({(0, 0): LAW, 0: LAW}, ValueError, "one scaling or one for each head"),
    ],
)
def test_bad_laws(built: Built, law: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        acutance.apply(built("llama"), law)


def test_heads_that_do_not_exist(built: Built, ids: Tensor) -> None:
    model = built("llama")
    with pytest.raises(ValueError, match=r"no head 9: .*self_attn has heads 0 to 3"):
        acutance.apply(model, {(0, 9): LAW})
    law, match = scaling.SSMax(s=[1.0, 1.0, 1.0]), "parameters for 3 heads, but the call has 4"
    with pytest.raises(acutance.ApplyError, match=match), acutance.apply(model, law):
        logits(model, input_ids=ids)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        acutance.apply("gpt2", LAW)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # of the global hook below
def test_a_compiled_model_is_traced_without_what_follows_functions(
    built: Built, ids: Tensor
) -> None:
    """A mode of functions would be traced along, at every access to a tensor's shape or device."""
    model, modes = copy.deepcopy(built("llama")), []

    def note(module: Any, inputs: Any) -> None:
        if type(module).__name__ == "OptimizedModule":
            modes.append(torch._C._len_torch_function_stack())

    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    for target in (model, torch.compile(model, backend="eager")):
        with acutance.apply(target, LAW) as applied:
            handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
            logits(target, input_ids=ids)
            handle.remove()
            assert torch._C._len_torch_function_stack() == 0
        assert set(applied.calls) == {
            "model.layers.0.self_attn",
            "model.layers.1.self_attn",
        }
    assert modes
    assert set(modes) == {0}
    torch.compiler.reset()
