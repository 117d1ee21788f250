"""A law of windows on a model: every row against a dense reference, and what is refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance import scaling
from acutance.calibration import ApplyError, Law
from acutance.scaling import Window
from tests.versions import CACHE, FLEX_ATTENTION

Built = Callable[..., nn.Module]
#: float64, two layers; the model's rotation is rounded to float32, some 1e-7 at these positions
CLOSE = 2e-6
LENGTH = 23

WINDOWS = [
    Window(5),
    Window(1, sinks=1),
    Window(5, sinks=2),
    Window(5, sinks=2, sink_positions="window"),
    Window(6, far="clamp"),
    Window(6, sinks=2, far="clamp", beyond=9),
    Window(6, sinks=3, sink_positions="window", far="clamp"),
    Window(7, far="group", group=3),
    Window(4, sinks=2, sink_positions="window", far="group", group=2, beyond=6),
    Window(64, sinks=2, far="group"),
]


def distance(window: Window | None, i: int, j: int, n: int) -> int | None:
    """At which distance a row at position i with n visible keys reads key j; None: it does not."""
    own = i - j
    if window is None or n <= window.beyond or own < window.size:
        return own
    if j < window.sinks:
        edge = window.size + window.sinks - 1 - j
        return min(own, edge) if window.sink_positions == "window" else own
    if window.far == "clamp":
        return window.size
    if window.far == "group":
        query = i // window.group + window.size - window.size // window.group
        return query - j // window.group
    return None


def reference(
    windows: Callable[[int, int], Window | None],
    rates: Tensor,
    factor: Any = None,
    seen_by: Callable[[Tensor], None] | None = None,
) -> Callable[..., Any]:
    """Attention whose scores are formed pair by pair, from vectors that are turned back first."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        batch, heads, rows, width = query.shape
        total = key.shape[2]
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        seen = torch.ones(rows, total).tril(total - rows).bool().expand(batch, 1, rows, total)
        if mask is not None:
            seen = mask if mask.dtype == torch.bool else mask > -1.0
        pairs = [torch.complex(*x.double().chunk(2, -1)) for x in (query, key)]
        every = torch.zeros(batch, heads, rows, total).double()
        output = value.new_zeros(batch, heads, rows, width)
        for b, h in itertools.product(range(batch), range(heads)):
            window = windows(module.layer_idx, h)
            moved = torch.zeros(rows, total)  # by how much the distance differs from the own one
            read = torch.zeros(rows, total, dtype=torch.bool)
            for r in range(rows):
                keys = seen[b, 0, r].nonzero().flatten().tolist()
                for j in keys:
                    at = distance(window, keys[-1] - keys[0], j - keys[0], len(keys))
                    read[r, j] = at is not None
                    moved[r, j] = 0 if at is None else at - (keys[-1] - j)
            turn = torch.polar(torch.ones(()).double(), moved[..., None] * rates)
            products = pairs[0][b, h, :, None] * pairs[1][b, h].conj() * turn
            scores = products.real.sum(-1) * given["scaling"]
            if factor is not None:
                scores = scores * torch.tensor([[factor(int(n))] for n in read.sum(-1)])
            weights = scores.masked_fill(~read, -torch.inf).softmax(-1).nan_to_num()
            every[b, h] = weights
            output[b, h] = weights @ value[b, h].double()
        if seen_by is not None:
            seen_by(every)
        return output.transpose(1, 2).to(query.dtype), None

    return attend


@pytest.fixture
def run() -> Callable[..., Tensor]:
    """Runs a model with the reference in the place of its attention."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def with_reference(model: nn.Module, attend: Callable[..., Any], **inputs: Any) -> Tensor:
        AttentionInterface.register("dense_reference", attend)
        AttentionMaskInterface.register("dense_reference", sdpa_mask)
        twin: Any = copy.deepcopy(model)
        twin.set_attn_implementation("dense_reference")
        return logits(twin, **inputs)

    return with_reference


def logits(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.no_grad():
        output: Tensor = model(**inputs)[0]
    return output


def rates(model: Any) -> Tensor:
    found: Tensor = model.model.rotary_emb.inv_freq.double()
    return found


@pytest.fixture(scope="module")
def llama(built: Built) -> nn.Module:
    return copy.deepcopy(built("llama", "sdpa")).double()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_rows_are_those_of_the_dense_reference(
    llama: nn.Module, tokens: Tensor, run: Callable[..., Tensor], window: Window
) -> None:
    want = run(llama, reference(lambda *_: window, rates(llama)), input_ids=tokens)
    with acutance.apply(llama, window) as applied:
        out = logits(llama, input_ids=tokens)
    torch.testing.assert_close(out, want, atol=CLOSE, rtol=0)
    assert sorted(applied.calls.values()) == [1, 1]
    plain = logits(llama, input_ids=tokens)
    changed = (out - plain).abs().amax((0, 2)) > 1e-3
    assert torch.equal(out[:, : window.beyond], plain[:, : window.beyond])
    assert changed.any() == (window.size < LENGTH)
    assert not changed[: max(window.size, window.beyond)].any()


@pytest.mark.parametrize("window", [WINDOWS[3], WINDOWS[5], WINDOWS[8]], ids=str)
def test_left_padding_changes_nothing(
    llama: nn.Module, tokens: Tensor, run: Callable[..., Tensor], window: Window
) -> None:
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    padded = {"input_ids": tokens, "attention_mask": mask}
    want = run(llama, reference(lambda *_: window, rates(llama)), **padded)
    with acutance.apply(llama, window):
        out = logits(llama, **padded)
        alone = logits(llama, input_ids=tokens[1:, 4:])
    real = mask.bool()
    torch.testing.assert_close(out[real], want[real], atol=CLOSE, rtol=0)
    torch.testing.assert_close(out[1:, 4:], alone, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("kind", ["eager", FLEX_ATTENTION])
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_implementations_agree(built: Built, tokens: Tensor, kind: str) -> None:
    law = Window(5, sinks=2, sink_positions="window", far="group", group=2, beyond=7)
    out = {}
    for one in ("sdpa", kind):
        model = built("llama", one)
        with acutance.apply(model, law):
            out[one] = logits(model, input_ids=tokens)
    torch.testing.assert_close(out["sdpa"], out[kind], atol=5e-5, rtol=0)


def test_heads_and_layers_have_windows_of_their_own(
    llama: nn.Module, tokens: Tensor, run: Callable[..., Tensor]
) -> None:
    """Two heads of one key head differ, one is left alone, and another layer has a pair."""
    clamp, streaming = Window(5, far="clamp"), Window(4, sinks=1, sink_positions="window")
    whole, log_n = Window(6, sinks=2), scaling.LogN(train_length=8)
    law = {(0, 0): clamp, (0, 1): streaming, (0, 3): clamp, 1: (log_n, whole)}

    def windows(layer: int, head: int) -> Window | None:
        return whole if layer else {0: clamp, 1: streaming, 3: clamp}.get(head)

    layered = reference(windows, rates(llama))
    factors = reference(
        windows, rates(llama), lambda n: float(log_n.factor(n, dtype=torch.float64))
    )

    def attend(module: nn.Module, *args: Any, **given: Any) -> Any:
        return (factors if module.layer_idx else layered)(module, *args, **given)

    with acutance.apply(llama, law) as applied:
        out = logits(llama, input_ids=tokens)
        stored = applied.law
    torch.testing.assert_close(out, run(llama, attend, input_ids=tokens), atol=CLOSE, rtol=0)
    assert stored.layers[0][1].windows[1] == (1, streaming)
    assert stored.layers[1][1].window == whole


@pytest.mark.parametrize(
    "window",
    [
        *(WINDOWS[3], WINDOWS[6], WINDOWS[8]),
        {(layer, head): WINDOWS[6 + head % 2] for layer in range(2) for head in range(4)},
    ],
    ids=["drop", "clamp", "group", "by head"],
)
def test_a_cache_gives_what_one_pass_gives(llama: nn.Module, tokens: Tensor, window: Any) -> None:
    """In chunks and token by token, with a dynamic cache and a static one."""
    from transformers import DynamicCache, StaticCache

    config: Any = llama.config
    with acutance.apply(llama, window):
        want = logits(llama, input_ids=tokens)
        for cache in (DynamicCache(config=config), StaticCache(config, max_cache_len=LENGTH + 9)):
            parts = []
            for start, stop in itertools.pairwise([0, 9, 16, *range(17, LENGTH + 1)]):
                part = tokens[:, start:stop]
                places = torch.arange(start, stop)[None]
                parts.append(logits(llama, input_ids=part, **{CACHE: cache}, position_ids=places))
            torch.testing.assert_close(torch.cat(parts, 1), want, atol=CLOSE, rtol=0)


def test_generation_reads_through_windows(llama: Any, tokens: Tensor) -> None:
    """With left padding: each sequence goes on as it does alone."""
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    law = Window(5, sinks=2, sink_positions="window", far="group", group=3)
    asked = {"max_new_tokens": 8, "do_sample": False}
    with acutance.apply(llama, law):
        both = llama.generate(tokens, attention_mask=mask, **asked)
        alone = llama.generate(tokens[1:, 4:], attention_mask=mask[1:, 4:], **asked)
        ids = tokens[1:, 4:]
        for _ in range(8):
            ids = torch.cat([ids, logits(llama, input_ids=ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(both[1:, 4:], alone)
    assert torch.equal(alone, ids)
    assert not torch.equal(alone, llama.generate(ids[:, : LENGTH - 4], **asked))


def test_documents_in_one_row_are_read_apart(llama: Any, tokens: Tensor) -> None:
    """Packed by position_ids: each document is what it is alone."""
    cut = 10
    places = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])[None]
    for law in (WINDOWS[2], WINDOWS[6], Window(4, sinks=1, far="group", group=2)):
        with acutance.apply(llama, law):
            packed = logits(llama, input_ids=tokens[:1], position_ids=places, use_cache=False)
            second = logits(llama, input_ids=tokens[:1, cut:])
        torch.testing.assert_close(packed[:, cut:], second, atol=CLOSE, rtol=0)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
        ("Cohere", {}),  # pairs next to each other
        ("Glm", {"head_dim": 8}),  # the same in half of the components
        ("GPTNeoX", {}),  # a quarter of the components
        ("Gemma3", {"head_dim": 8, "layer_types": ["full_attention"]}),  # two sets of frequencies
        ("SmolLM3", {"no_rope_layers": [0]}),  # no positions
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_rotate(name: str, given: dict[str, Any], dtype: torch.dtype) -> None:
    """With all other keys at distance 1, the last row is that of tokens that stand there."""
    import transformers as hf

    torch.manual_seed(4)
    config = getattr(hf, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        pad_token_id=0, **given,
    )  # fmt: skip
    model = getattr(hf, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
    model = model.to(dtype)
    ids = torch.randint(3, 97, (1, 40))
    places = torch.tensor([[0] * 39 + [1]])
    want = logits(model, input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids))
    with acutance.apply(model, Window(1, far="clamp")):
        out = logits(model, input_ids=ids)
    plain = logits(model, input_ids=ids)
    error, change = ((one - want)[0, -1].float().norm() for one in (out, plain))
    size = want[0, -1].float().norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.02) * size
    assert (change > 0.05 * size) == (name != "SmolLM3")


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_other_models(built: Built, tokens: Tensor, name: str) -> None:
    """A window as long as the text changes nothing; one of the clamp, rows behind it alone."""
    model = built(name, "eager")
    plain = logits(model, input_ids=tokens)
    with acutance.apply(model, Window(LENGTH, sinks=2, far="clamp")) as applied:
        assert torch.equal(logits(model, input_ids=tokens), plain)
    with acutance.apply(model, Window(12, sinks=2, far="clamp")):
        out = logits(model, input_ids=tokens)
        torch.testing.assert_close(out[:, :12], plain[:, :12], atol=5e-5, rtol=0)
        assert (out[:, 12:] - plain[:, 12:]).abs().max() > 1e-3
    assert len(applied.skipped) == (1 if name == "gpt-oss" else 0)


def test_softcaps_and_learned_sinks_stay(tokens: Tensor) -> None:
    """A window in two parts that reads all keys is the plain model, sinks and softcap included."""
    import transformers as hf

    torch.manual_seed(5)
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "layer_types": ["full_attention"],
    }  # fmt: skip
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    models: list[Any] = [
        hf.Gemma2ForCausalLM._from_config(
            hf.Gemma2Config(**sizes, attn_logit_softcapping=0.5), attn_implementation="eager"
        ),
        hf.GptOssForCausalLM._from_config(
            hf.GptOssConfig(**sizes, **experts), attn_implementation="eager"
        ),
    ]
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model = model.eval()
        plain = logits(model, input_ids=tokens)
        with acutance.apply(model, Window(4, sinks=LENGTH)):
            out = logits(model, input_ids=tokens)
        torch.testing.assert_close(out, plain, atol=1e-5 * float(plain.abs().max()), rtol=0)


def test_gradients_are_those_of_the_scores(llama: nn.Module, tokens: Tensor) -> None:
    """Of parameters of the first layer, against differences."""
    model: Any = copy.deepcopy(llama)
    for name, norm in list(model.named_modules()):
        if name.endswith("norm"):  # transformers' own rounds to float32, whatever the dtype
            exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
            exact.weight = norm.weight
            model.set_submodule(name, exact)
    weight = model.model.layers[0].self_attn.k_proj.weight
    law = Window(4, sinks=2, sink_positions="window", far="group", group=3, beyond=6)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)).double()

    def loss() -> Tensor:
        out: Tensor = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(out, tokens[:, 1:].flatten())

    with acutance.apply(model, law):
        loss().backward()
        slope = float((weight.grad * direction).sum())
        values = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                weight.add_(step * direction)
                values.append(float(loss()))
                weight.sub_(step * direction)
    assert slope == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-4)
    assert abs(slope) > 1e-3


# -- the probe ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("padded", "every"), [(False, False), (True, False), (False, True)])
def test_a_probe_measures_what_is_read(
    llama: nn.Module, tokens: Tensor, run: Callable[..., Tensor], padded: bool, every: bool
) -> None:
    """Entropies, first weights and counts of every row are those of the reference's weights."""
    far = Window(5, sinks=2, sink_positions="window", far="group", group=2, beyond=8)
    near, clamp = Window(4, sinks=1), Window(6, far="clamp")
    heads = {0: near, 1: clamp, 2: near, 3: clamp} if every else {0: far, 3: clamp}
    law = {0: near} | {(1, head): window for head, window in heads.items()}

    def windows(layer: int, head: int) -> Window | None:
        return heads.get(head) if layer else near

    weights: list[Tensor] = []
    mask = torch.ones_like(tokens)
    mask[1, : 4 * padded] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    run(llama, reference(windows, rates(llama), seen_by=weights.append), **given)
    probe = acutance.probe(
        llama, verify=True, metrics=["entropy", "first_weight", "n_keys", "noise_gain", "keys_90"]
    )
    with acutance.apply(llama, law), probe:
        logits(llama, **given)
    assert [one.status for one in probe.summary().layers] == ["verified"] * 2
    columns, real = probe.summary().columns(), mask.bool()
    want: dict[str, list[float]] = {"entropy": [], "first_weight": [], "n_keys": []}
    for each in weights:
        rows = each.transpose(0, 1)[:, real]  # (heads, rows, keys)
        first = (rows > 0).to(torch.uint8).argmax(-1, keepdim=True)
        want["entropy"] += torch.special.entr(rows).sum(-1).mean(1).tolist()
        want["first_weight"] += rows.gather(-1, first)[..., 0].mean(1).tolist()
        want["n_keys"] += (rows > 0).sum(-1).double().mean(1).tolist()
    for name, values in want.items():
        assert columns[f"{name}_mean"] == pytest.approx(values, abs=1e-5), name


def test_what_a_probe_cannot_read_of_moved_keys(llama: nn.Module, tokens: Tensor) -> None:
    law = {0: Window(5, sinks=2), 1: Window(5, far="clamp")}
    options: list[dict[str, Any]] = [
        {"structure": True}, {"keep": True}, {"max_rows": 4}, {"heads": [0]},
        {"maps": {(1, 0): [5]}},
    ]  # fmt: skip
    for given in options:
        probe = acutance.probe(llama, **given)
        with acutance.apply(llama, law), probe:
            logits(llama, input_ids=tokens)
        read = [one.module for one in probe.summary().layers]
        assert read == ["model.layers.0.self_attn"], given
        (unread,) = probe.unread
        assert unread.startswith("model.layers.1.self_attn: "), given
        assert "reads keys at other positions" in unread
    probe = acutance.probe(llama, spans={"start": (0, 5)})
    with acutance.apply(llama, law), probe:
        logits(llama, input_ids=tokens)
    assert "weight on the spans is not known" in probe.unread[0]


def test_a_probe_around_hears_nothing_of_the_trial(llama: nn.Module, tokens: Tensor) -> None:
    law = Window(64, far="clamp")
    outer = acutance.probe(llama)
    with outer, acutance.apply(llama, law):
        logits(llama, input_ids=tokens)
    plain = acutance.probe(llama)
    with plain:
        logits(llama, input_ids=tokens)
    assert outer.summary().columns() == plain.summary().columns()


# -- plain modules --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(causal: bool, weights: bool) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = 3 * torch.randn(2, 12, 16)
    hidden = nn.Transformer.generate_square_subsequent_mask(12) if causal else torch.zeros(12, 12)
    row, column = torch.arange(12)[:, None], torch.arange(12)
    read = ((row - column).abs() < 4) | (column < 2)
    law = Window(4, sinks=2)
    want, each = model(x, x, x, attn_mask=hidden.masked_fill(~read, -torch.inf))
    with acutance.apply(model, law):
        out, given = model(x, x, x, attn_mask=hidden, need_weights=weights)
    torch.testing.assert_close(out, want, atol=5e-6, rtol=0)
    if weights:
        torch.testing.assert_close(given, each, atol=5e-6, rtol=0)


class Plain(nn.Module):
    """Attention by SDPA, or with a softmax of its own."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.written, self.num_heads = written, 2

    def forward(self, x: Tensor) -> Tensor:
        query = x.unflatten(-1, (2, -1)).transpose(1, 2)
        if not self.written:
            return F.scaled_dot_product_attention(query, query, query, is_causal=True)
        scores = query @ query.transpose(-1, -2) / query.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ query


@pytest.mark.parametrize("written", [True, False])
def test_plain_attention_by_head(written: bool) -> None:
    torch.manual_seed(1)
    model, x = Plain(written), torch.randn(2, 12, 8)
    row, column = torch.arange(12)[:, None], torch.arange(12)
    read = ((row - column < 3) | (column < 1) | (row < 6)) & (column <= row)
    causal = (column <= row).expand_as(read)
    query = x.unflatten(-1, (2, -1)).transpose(1, 2)
    mask = torch.stack([causal, read])
    want = F.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    with acutance.apply(model, {("Plain", 1): Window(3, sinks=1, beyond=6)}):
        out = model(x)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=0)
    with acutance.apply(model, (scaling.HeadTable([2.0, 0.5]), Window(12))):
        out = model(x)
    factor = torch.tensor([2.0, 0.5]).view(2, 1, 1)
    want = F.scaled_dot_product_attention(query * factor, query, query, is_causal=True)
    torch.testing.assert_close(out, want, atol=1e-6, rtol=0)


def test_cross_attention_is_left_alone() -> None:
    import transformers as hf

    torch.manual_seed(3)
    config = hf.BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    model = hf.BartModel(config).eval()
    ids = torch.randint(4, 40, (1, 12))
    with acutance.apply(model, Window(3)) as applied:
        logits(model, input_ids=ids)
    assert list(applied.skipped) == ["decoder.layers.0.encoder_attn"]
    assert "cross-attention" in applied.skipped["decoder.layers.0.encoder_attn"]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": 4, "group": 0}, ValueError, "group must be at least 1, got 0"),
        ({"size": 4, "sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
        ({"size": 4.0}, TypeError, "size must be an integer"),
        (
            {"size": 4, "far": "clmp"},
            ValueError,
            "far must be drop or clamp or group.*mean 'clamp'",
        ),
        ({"size": 4, "sink_positions": "edge"}, ValueError, "must be keep or window, got 'edge'"),
    ],
)
def test_bad_windows(given: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Window(**given)


def test_bad_laws(llama: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"a pair in a law must be \(scaling, Window\)"):
        acutance.apply(llama, (Window(4), scaling.SSMax()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one window or one for each head, got both"):
        acutance.apply(llama, {0: Window(4), (0, 1): Window(4)})
    with pytest.raises(ValueError, match="reads the entropy of rows, which its window changes"):
        acutance.apply(llama, (scaling.AdaptivePoly(), Window(4)))


def test_what_windows_cannot_do(built: Built, llama: nn.Module, tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no rotary position embedding"):
        acutance.apply(built("gpt2"), Window(4, far="clamp"))
    with pytest.raises(ValueError, match=r"no head 7: .*self_attn has heads 0 to 3"):
        acutance.apply(llama, {(0, 7): Window(4)})
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    with (
        pytest.raises(ApplyError, match="uses transformers' attention interface"),
        acutance.apply(model, Window(4, far="clamp")),
    ):
        model(*[torch.zeros(1, 9, 16)] * 3)
    mistral = built("mistral", "sdpa")
    with (
        pytest.raises(ApplyError, match="a sliding window of its own"),
        acutance.apply(mistral, Window(4), windowed=True),
    ):
        logits(mistral, input_ids=tokens)
    with (
        pytest.raises(ValueError, match="two laws with windows"),
        acutance.apply(llama, Window(4)),
        acutance.apply(llama, Window(5)),
    ):
        logits(llama, input_ids=tokens)


def test_frequencies_that_follow_the_length_are_refused(tokens: Tensor) -> None:
    import transformers as hf

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            max_position_embeddings=64,
            rope_parameters=rope,
        )
    ).eval()
    with pytest.raises(ValueError, match="RoPE of type 'dynamic', whose frequencies depend"):
        acutance.apply(model, Window(4, far="group"))
    with acutance.apply(model, Window(4, sinks=2)):
        logits(model, input_ids=tokens)


# -- names and files ------------------------------------------------------------------------------


def test_a_law_of_windows_is_saved_and_read(llama: nn.Module, tmp_path: Any) -> None:
    window, pair = Window(5, sinks=2, far="clamp"), (scaling.LogN(train_length=8), Window(7))
    for law in (window, pair, {0: pair, (1, 0): window, (1, 2): pair}):
        stored = Law.of(llama, law)
        stored.save(tmp_path / "law.json")
        assert Law.load(tmp_path / "law.json") == stored
        assert Law.of(llama, stored) is stored
    text = (tmp_path / "law.json").read_text(encoding="utf-8")
    assert '"far": "clamp"' in text
