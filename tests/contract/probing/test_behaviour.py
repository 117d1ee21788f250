"""A probe changes nothing, breaks nothing, counts each call once and leaves no trace."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import acutance
from tests.versions import CACHE, any_global_hook

TOLERANCE = 1e-5


class SelfAttention(nn.Module):
    """A self-attention layer around one SDPA call."""

    def __init__(self, width: int = 16, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(*parts, dropout_p=dropout, is_causal=True)
        return out.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """Two layers of self-attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([SelfAttention(dropout=dropout) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def traces(model: nn.Module) -> tuple[Any, ...]:
    """Everything a probe touches."""
    return (
        AttentionInterface.get_interface,
        F.scaled_dot_product_attention,
        torch._dynamo.eval_frame._stance.stance,
        torch.overrides._len_torch_function_stack(),
        any_global_hook(),
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    )


# -- generation -----------------------------------------------------------------------------------


def reference_rows(
    eager: nn.Module, ids: Tensor, mask: Tensor, entropies: Callable[..., Tensor]
) -> list[Tensor]:
    """Entropies of all real rows of one forward pass without a cache, (heads, rows) per layer."""
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        maps = eager(
            input_ids=ids, attention_mask=mask, position_ids=places, output_attentions=True
        ).attentions
    return [entropies(layer).transpose(0, 1)[:, mask.bool()] for layer in maps]


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(
    family: str,
    kind: str,
    cache: str,
    request: pytest.FixtureRequest,
    entropies: Any,
    left_padding: Any,
    random_tokens: Any,
) -> None:
    models = request.getfixturevalue(f"{family}_models")
    model, ids, mask = models[kind], random_tokens(2, 8), left_padding([8, 5], 8)
    options = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": cache,
        "pad_token_id": 0,
    }
    plain = model.generate(ids, **options)
    with acutance.probe(model, verify=True) as probe:
        probed = model.generate(ids, **options)
    assert torch.equal(plain, probed)
    assert plain.shape == (2, 14)

    summary, steps = probe.summary(), 5  # the prefill makes the first of six tokens
    assert [layer.rows for layer in summary.layers] == [13 + 2 * steps] * len(summary.layers)
    assert {layer.calls for layer in summary.layers} == {1 + steps}
    assert {layer.status for layer in summary.layers} == {"verified"}
    assert probe.unread == []
    long_mask = torch.cat([mask, torch.ones(2, steps, dtype=mask.dtype)], 1)
    rows = torch.cat(reference_rows(models["eager"], plain[:, :-1], long_mask, entropies))
    column = summary.metrics.index("entropy")
    moments = summary.moments
    for measured, expected in [
        (moments.mean, rows.mean(1)),
        (moments.std, rows.std(1, correction=0)),
        (moments.high, rows.amax(1)),
    ]:
        assert float((measured[:, column] - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
@pytest.mark.parametrize("masked", [False, True])
def test_one_decoded_token_is_read_with_the_right_heads(
    llama_models: Any,
    kind: str,
    masked: bool,
    entropies: Any,
    left_padding: Any,
    random_tokens: Any,
) -> None:
    model, ids = llama_models[kind], random_tokens(2, 9)
    mask = left_padding([9, 5], 9) if masked else torch.ones_like(ids)
    options = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        before = model(
            input_ids=ids[:, :-1],
            attention_mask=mask[:, :-1],
            position_ids=options["position_ids"][:, :-1],
            use_cache=True,
        )
        with acutance.probe(model, verify=True) as probe:
            model(
                input_ids=ids[:, -1:],
                attention_mask=mask if masked else None,
                position_ids=options["position_ids"][:, -1:],
                **{CACHE: before.past_key_values},
            )
        maps = llama_models["eager"](
            input_ids=ids, attention_mask=mask, output_attentions=True, **options
        ).attentions
    expected = torch.cat([entropies(layer)[:, :, -1].mean(0) for layer in maps])
    assert float(expected.diff().abs().min()) > 10 * TOLERANCE  # no two heads are alike
    summary = probe.summary()
    assert float((summary.mean("entropy") - expected).abs().max()) < TOLERANCE
    assert [(layer.rows, layer.status, layer.heads) for layer in summary.layers] == [
        (2, "verified", 4),
        (2, "verified", 4),
    ]


# -- what it refuses ------------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    model = Stack()
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        acutance.probe("gpt2")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="metrics must be a sequence of names, got the string 'entropy'"
    ):
        acutance.probe(model, metrics="entropy")
    with pytest.raises(ValueError, match="entropy"):
        acutance.probe(model, metrics=["entropi"])
    with pytest.raises(ValueError, match="metrics must name at least one metric, got none"):
        acutance.probe(model, metrics=[])


def test_a_model_without_attention() -> None:
    model = nn.Linear(4, 4)
    with (
        pytest.raises(
            acutance.ProbeError,
            match=r"no attention call in Linear: .* captures transformers' attention interface, "
            r"F\.scaled_dot_product_attention, nn\.MultiheadAttention, FlexAttention, ",
        ),
        acutance.probe(model) as probe,
    ):
        model(torch.ones(1, 4))
    with pytest.raises(acutance.ProbeError, match="no attention call in Linear"):
        probe.summary()


def test_a_model_that_did_not_run() -> None:
    with (
        pytest.raises(acutance.ProbeError, match="Stack did not run while it was open"),
        acutance.probe(Stack()),
    ):
        Stack()(torch.randn(1, 3, 16))  # another one


def test_opening_an_open_probe() -> None:
    model = Stack()
    with acutance.probe(model) as probe:
        model(torch.randn(1, 3, 16))
        with pytest.raises(acutance.ProbeError, match="already open"):
            probe.__enter__()
        model(torch.randn(1, 3, 16))
    assert [layer.rows for layer in probe.summary().layers] == [6, 6]


def test_chosen_metrics_come_in_the_tables_order() -> None:
    model = Stack()
    with acutance.probe(model, metrics=["noise_gain", "entropy"]) as probe:
        model(torch.randn(1, 3, 16))
    summary = probe.summary()
    assert summary.metrics == ("entropy", "noise_gain")
    assert float(summary.mean("noise_gain").min()) > 0
    with pytest.raises(ValueError, match="'lse' was not recorded; this summary has entropy, noise"):
        summary.mean("lse")


# -- many probes, many runs -----------------------------------------------------------------------


def test_reopening_adds_up() -> None:
    model, x = Stack(), torch.randn(2, 5, 16)
    probe = acutance.probe(model)
    for _ in range(3):
        with probe:
            model(x)
    with acutance.probe(model) as once:
        model(x)
    assert [layer.rows for layer in probe.summary().layers] == [30, 30]
    # the same float32 sums; entropies of waiting calls are taken together, and torch's vectors
    # round the last rows of a stretch otherwise than those before: a rounding of each of two terms
    atol = 4 * torch.finfo(torch.float32).eps
    assert torch.allclose(
        probe.summary().mean("entropy"), once.summary().mean("entropy"), atol=atol, rtol=0
    )
    with pytest.raises(acutance.ProbeError, match="did not run while it was open"), probe:
        pass  # what was read before does not excuse it
    assert [layer.rows for layer in probe.summary().layers] == [30, 30]


@pytest.mark.parametrize("weights", [False, True])
def test_nested_probes_read_the_same(weights: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sdpa, self.mha = SelfAttention(), nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.sdpa(x)
            (x @ x.mT).unsqueeze(1).softmax(-1) @ x.unsqueeze(1)
            return self.mha(x, x, x, need_weights=weights)[0]

    model, x = Model(), torch.randn(2, 5, 16)
    before = traces(model)
    with acutance.probe(model) as alone:
        plain = model(x)
    with acutance.probe(model, verify=True) as outer, acutance.probe(model, verify=True) as inner:
        assert torch.equal(model(x), plain)
    assert traces(model) == before
    expected = alone.summary()
    assert [layer.module for layer in expected.layers] == ["Model", "sdpa", "mha"]
    for probe in (outer, inner):
        summary = probe.summary()
        assert [layer.module for layer in summary.layers] == ["Model", "sdpa", "mha"]
        assert [layer.calls for layer in summary.layers] == [1, 1, 1]
        assert torch.equal(summary.mean("entropy"), expected.mean("entropy"))
        assert [layer.status for layer in summary.layers] == [
            "unverified",
            "verified",
            "verified",
        ]


def test_nested_probes_do_not_take_a_run_without_dropout_for_the_models_own() -> None:
    model, x = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True), torch.randn(2, 5, 16)
    with acutance.probe(model, verify=True) as outer, acutance.probe(model, verify=True) as inner:
        model(x, x, x, need_weights=True)
    for probe in (outer, inner):
        assert [(layer.calls, layer.status) for layer in probe.summary().layers] == [
            (1, "captured")
        ]


def test_an_implementation_that_calls_another_counts_once(
    gpt2_models: Any, random_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = gpt2_models["sdpa"], random_tokens(2, 6)
    plain = model(ids).logits

    def detour(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)(module, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "detour", detour)
    monkeypatch.setattr(model.config, "_attn_implementation", "detour")
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "detour", sdpa_mask)
    with acutance.probe(model, verify=True) as probe:
        assert torch.equal(model(ids).logits, plain)
    layers = probe.summary().layers
    assert [(layer.calls, layer.rows, layer.status) for layer in layers] == [
        (1, 12, "verified")
    ] * 3
    assert {layer.source for layer in layers} == {"transformers detour"}


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_nested_probes_of_a_transformers_model(
    gpt2_models: Any, kind: str, random_tokens: Any
) -> None:
    model, ids = gpt2_models[kind], random_tokens(2, 6)
    with (
        acutance.probe(model) as outer,
        acutance.probe(model.transformer.h[1]) as inner,
        torch.no_grad(),
    ):
        model(ids)
    assert [layer.calls for layer in outer.summary().layers] == [1, 1, 1]
    assert [layer.module for layer in inner.summary().layers] == ["attn"]
    assert torch.equal(inner.summary().mean("entropy"), outer.summary().mean("entropy")[4:8])


# -- it leaves no trace ---------------------------------------------------------------------------


def test_an_exception_of_the_model_passes_unchanged() -> None:
    error = KeyError("of the model")

    class Failing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise error

    model = Failing()
    before = traces(model)
    with pytest.raises(KeyError, match="of the model") as caught, acutance.probe(model) as probe:
        model(torch.randn(1, 3, 16))
    assert caught.value is error
    assert traces(model) == before
    assert len(probe.summary().layers) == 2  # what was read before it is kept


def test_an_exception_before_any_attention_passes_unchanged() -> None:
    model = Stack()
    before = traces(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), acutance.probe(model):
        model(torch.randn(1, 3, 7))
    with pytest.raises(KeyboardInterrupt, match="now"), acutance.probe(model):
        raise KeyboardInterrupt("now")
    assert traces(model) == before


def test_modules_keep_their_names_after_an_exception_the_model_caught() -> None:
    class Retry(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = SelfAttention(), SelfAttention(width=8)

        def forward(self, x: Tensor) -> Tensor:
            try:
                self.second(x)
            except RuntimeError:
                x = self.first(x)
            return F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3)

    model = Retry()

    def refuse(module: nn.Module, args: Any) -> None:
        raise RuntimeError("before the probe's own hook")

    handle = model.second.register_forward_pre_hook(refuse)
    with acutance.probe(model) as probe:
        model(torch.randn(1, 3, 16))
    handle.remove()
    assert [layer.module for layer in probe.summary().layers] == ["Retry", "first"]


def test_everything_is_restored(gpt2_models: Any, random_tokens: Any) -> None:
    model = gpt2_models["sdpa"]
    before = traces(model)
    with acutance.probe(model), torch.no_grad():
        assert traces(model) != before
        model(random_tokens(1, 4))
    assert traces(model) == before
    with pytest.raises(acutance.ProbeError, match="did not run"), acutance.probe(model):
        pass
    assert traces(model) == before


def test_probes_of_two_threads_may_close_in_any_order() -> None:
    here, there, x = Stack(), Stack(), torch.randn(1, 4, 16)
    before = traces(here)
    opened, closed = threading.Event(), threading.Event()
    found: list[Any] = []

    def other() -> None:
        with acutance.probe(there) as probe:
            there(x)
            opened.set()
            assert closed.wait(20)
            there(x)
        found.append(probe.summary())

    thread = threading.Thread(target=other)
    with acutance.probe(here) as probe:
        thread.start()
        assert opened.wait(20)
        here(x)
    closed.set()
    thread.join(20)
    assert traces(here) == before
    assert [layer.rows for layer in found[0].layers] == [8, 8]
    assert [layer.rows for layer in probe.summary().layers] == [4, 4]


def test_a_copy_made_inside_works_and_is_not_recorded() -> None:
    model, x = Stack(), torch.randn(1, 4, 16)
    with acutance.probe(model) as probe:
        model(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x), model(x))
    assert torch.equal(twin(x), model(x))
    assert [layer.rows for layer in probe.summary().layers] == [8, 8]


# -- only the probed model, each call once --------------------------------------------------------


def test_other_models_are_not_recorded(
    gpt2_models: Any, llama_models: Any, random_tokens: Any
) -> None:
    model, other, plain = gpt2_models["sdpa"], llama_models["sdpa"], Stack()
    ids, x, turns = random_tokens(2, 6), torch.randn(1, 4, 16), 5
    started, stop = threading.Event(), threading.Event()

    def run() -> None:
        with torch.no_grad():
            while not stop.is_set():
                other(ids)
                plain(x)
                started.set()

    thread = threading.Thread(target=run)
    with torch.no_grad(), acutance.probe(model, verify=True) as probe:
        thread.start()
        assert started.wait(20)
        for _ in range(turns):
            model(ids)
            other(ids)
            plain(x)
        stop.set()
        thread.join(20)
    layers = probe.summary().layers
    assert [layer.module for layer in layers] == [f"transformer.h.{i}.attn" for i in range(3)]
    assert [(layer.calls, layer.rows) for layer in layers] == [(turns, turns * 12)] * 3
    assert probe.unread == []


def test_another_thread_inside_the_model_does_not_confuse_names() -> None:
    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.gate = SelfAttention(), nn.Identity()

        def forward(self, x: Tensor, wait: bool) -> Tensor:
            if wait:
                inside.set()
                assert go.wait(20)
            return self.attention(self.gate(x))

    inside, go = threading.Event(), threading.Event()
    model, x = Waiting(), torch.randn(1, 4, 16)
    thread = threading.Thread(target=lambda: model(x, True))
    with acutance.probe(model) as probe:
        thread.start()
        assert inside.wait(20)
        model(x, False)
        go.set()
        thread.join(20)
        F.scaled_dot_product_attention(x, x, x)  # outside the model
    assert [(layer.module, layer.calls) for layer in probe.summary().layers] == [("attention", 1)]


def test_a_compiled_model_is_read() -> None:
    model, x = Stack(), torch.randn(2, 5, 16)
    with acutance.probe(model) as expected:
        plain = model(x)
    compiled = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(x), plain)
    before = traces(model)
    with acutance.probe(compiled, verify=True) as probe:
        output = compiled(x)
    assert torch.equal(output, plain)
    assert traces(model) == before
    assert torch.allclose(compiled(x), plain)
    with acutance.probe(model) as by_inner:  # the model itself, running compiled
        compiled(x)
    for found in (probe, by_inner):
        summary = found.summary()
        assert [layer.module for layer in summary.layers] == ["layers.0", "layers.1"]
        assert [layer.rows for layer in summary.layers] == [10, 10]
        assert torch.equal(summary.mean("entropy"), expected.summary().mean("entropy"))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_once(
    gpt2_models: Any, random_tokens: Any, reentrant: bool
) -> None:
    model, ids = gpt2_models["sdpa"], random_tokens(2, 6)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [part.grad.clone() for part in model.parameters() if part.grad is not None]

    plain, runs = gradients(), []
    handle = model.transformer.h[0].attn.register_forward_pre_hook(lambda *_: runs.append(1))
    with acutance.probe(model, verify=True) as probe:
        probed = gradients()
    handle.remove()
    assert len(runs) == 2  # it did run again for the backward pass
    assert len(plain) == len(probed) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))
    layers = probe.summary().layers
    assert [(layer.calls, layer.rows, layer.status) for layer in layers] == [
        (1, 12, "verified")
    ] * 3


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_training_with_dropout(gpt2_models: Any, random_tokens: Any, kind: str) -> None:
    model, ids = gpt2_models[kind], random_tokens(2, 6)
    for module in model.modules():  # dropout in attention alone: both passes see the same rows
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.transformer.h[2].attn.attn_dropout.p = 0.4
    with acutance.probe(model.eval()) as quiet, torch.no_grad():
        model(ids)
    model.train()

    def gradients() -> list[Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [part.grad.clone() for part in model.parameters() if part.grad is not None]

    plain = gradients()
    with acutance.probe(model, verify=True) as probe:
        probed = gradients()
    assert len(plain) == len(probed) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))
    summary = probe.summary()
    assert torch.equal(summary.mean("entropy"), quiet.summary().mean("entropy"))
    assert [layer.status for layer in summary.layers] == ["verified", "verified", "captured"]


def test_dropout_of_sdpa_does_not_shift_the_random_numbers() -> None:
    model, x = Stack(dropout=0.3).train(), torch.randn(2, 5, 16)
    torch.manual_seed(9)
    plain = model(x)
    torch.manual_seed(9)
    with acutance.probe(model, verify=True, noise=True) as probe:
        output = model(x)
    assert torch.equal(output, plain)
    assert {layer.status for layer in probe.summary().layers} == {"captured"}


# -- modes ----------------------------------------------------------------------------------------


def test_autocast(gpt2_models: Any, random_tokens: Any) -> None:
    model, ids = gpt2_models["sdpa"], random_tokens(2, 6)
    with torch.no_grad():
        with acutance.probe(model) as exact:
            model(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain = model(ids).logits
            with acutance.probe(model, verify=True) as probe:
                output = model(ids).logits
    assert torch.equal(output, plain)
    summary = probe.summary()
    assert {layer.status for layer in summary.layers} == {"verified"}
    difference = (summary.mean("entropy") - exact.summary().mean("entropy")).abs().max()
    assert 0 < float(difference) < 0.05
    assert summary.moments.mean.dtype == torch.float64


def test_inference_mode(gpt2_models: Any, random_tokens: Any, tmp_path: Any) -> None:
    model, ids = gpt2_models["sdpa"], random_tokens(2, 6)
    probe = acutance.probe(model, verify=True)
    with torch.inference_mode(), probe:
        model(ids)
    with torch.no_grad(), probe:  # records of both modes join
        model(ids)
    probe.save(tmp_path / "state.safetensors")
    with acutance.probe(model) as expected, torch.no_grad():
        model(ids)
    loaded = acutance.load(tmp_path / "state.safetensors")
    assert [layer.rows for layer in loaded.layers] == [24, 24, 24]
    atol = 4 * torch.finfo(torch.float32).eps  # as in test_reopening_adds_up
    assert torch.allclose(
        loaded.mean("entropy"), expected.summary().mean("entropy"), atol=atol, rtol=0
    )


def test_a_default_device_does_not_reach_the_records() -> None:
    model, x = Stack(), torch.randn(1, 4, 16)
    with torch.device("meta"), acutance.probe(model) as probe:
        model(x)
    assert probe.unread == []
    assert probe.summary().mean("entropy").isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    model, x = Stack().to(dtype), torch.randn(2, 5, 16).to(dtype)
    plain = model(x)
    with acutance.probe(model, verify=True) as probe:
        assert torch.equal(model(x), plain)
    assert {layer.status for layer in probe.summary().layers} == {"verified"}


def test_numbers_that_are_no_numbers_do_not_stop_the_model() -> None:
    model, x = Stack(), torch.randn(2, 5, 16)
    x[1, 2] = torch.nan
    plain = model(x)
    with acutance.probe(model, verify=True) as probe:
        output = model(x)
    assert torch.equal(output.isnan(), plain.isnan())
    summary = probe.summary()
    assert summary.layers[0].status == "mismatch"  # nothing was shown to agree
    column = summary.metrics.index("entropy")
    assert summary.moments.count[0, column] == 7  # rows before the bad token, and the other text
    assert summary.mean("entropy").isfinite().all()
