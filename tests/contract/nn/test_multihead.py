"""MultiheadAttention with its defaults is PyTorch's, and keeps what it says it keeps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance import scores
from acutance.nn import MultiheadAttention

B, L, S, WIDTH, HEADS = 3, 7, 9, 12, 4
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def pair(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[nn.Module, Any]:
    """PyTorch's module, its biases drawn, and ours with its state."""
    theirs = nn.MultiheadAttention(WIDTH, HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias" in name:
                parameter.normal_()
    ours = MultiheadAttention(WIDTH, HEADS, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(ours: MultiheadAttention, dtype: torch.dtype, length: int = S) -> list[Tensor]:
    sizes = ((L, WIDTH), (length, ours.kdim), (length, ours.vdim))
    drawn = [torch.randn(B, n, width, dtype=dtype) for n, width in sizes]
    return [x if ours.batch_first else x.transpose(0, 1).contiguous() for x in drawn]


def padding() -> Tensor:
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[1, 6:] = True
    hidden[2, :2] = True
    return hidden


def masks(kind: str, dtype: torch.dtype) -> Tensor | None:
    """Every row keeps key 4, which no padding hides."""
    generator = torch.Generator().manual_seed(7)
    shape = (B * HEADS, L, S) if kind.endswith("3d") else (L, S)
    if kind == "none":
        return None
    if kind.startswith("float"):
        return torch.randn(shape, generator=generator, dtype=dtype)
    hidden = torch.rand(shape, generator=generator) < 0.4
    hidden[..., 4] = False
    return hidden


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", ["none", "bool 2d", "bool 3d", "float 2d", "float 3d"])
@pytest.mark.parametrize("padded", ["none", "bool", "float"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 10}])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
def test_output_and_gradients_are_pytorchs(
    kind: str, padded: str, bias: bool, widths: dict[str, int], batch_first: bool
) -> None:
    for dtype in (torch.float64, torch.float32)[: 1 + batch_first]:
        theirs, ours = pair(dtype, bias=bias, batch_first=batch_first, **widths)
        hidden = None if padded == "none" else padding()
        if padded == "float":
            hidden = torch.where(padding(), -torch.inf, 0.5).to(dtype)
        results = []
        given = inputs(ours, dtype)
        upstream = None
        for module in (theirs, ours):
            x = [part.clone().requires_grad_() for part in given]
            out, none = module(
                *x, key_padding_mask=hidden, need_weights=False, attn_mask=masks(kind, dtype)
            )
            assert none is None
            upstream = torch.randn_like(out) if upstream is None else upstream
            named = dict(module.named_parameters())
            grads = torch.autograd.grad(out, [*x, *named.values()], upstream)
            results.append([out, *grads])
            names = ["output", "query", "key", "value", *named]
        assert list(dict(theirs.named_parameters())) == list(dict(ours.named_parameters()))
        for name, want, got in zip(names, *results, strict=True):
            size = max(1.0, float(want.detach().abs().max()))
            torch.testing.assert_close(
                got, want, rtol=0, atol=(1 if name == "output" else 3) * size * TOLERANCE[dtype],
                msg=lambda text, name=name: f"{name}: {text}",
            )  # fmt: skip


@pytest.mark.grid(2)
@pytest.mark.parametrize("extra", [
    {}, {"add_bias_kv": True}, {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True},
])  # fmt: skip
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool 3d", "float 2d", "causal"])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning")
def test_weights_are_pytorchs_with_extra_keys_too(
    extra: dict[str, bool], padded: bool, kind: str, average: bool
) -> None:
    theirs, ours = pair(batch_first=True, **extra)
    x = inputs(ours, torch.float64)
    hidden = padding() if padded else None
    causal = torch.ones(L, S, dtype=torch.bool).triu(3)  # the last row sees eight keys
    mask = causal if kind == "causal" else masks(kind, torch.float64)
    want, table = theirs(*x, key_padding_mask=hidden, attn_mask=mask, average_attn_weights=average)
    options: dict[str, Any] = {"attn_mask": mask}
    if kind == "causal":
        options = {"is_causal": True, "query_offset": 2}
    got, _ = ours(*x, hidden, **options)
    entropy = ours.last_statistics.entropy
    again, weights = ours(*x, hidden, True, average_attn_weights=average, **options)
    for output in (got, again):
        torch.testing.assert_close(output, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, table, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.last_statistics.entropy, entropy, rtol=0, atol=1e-12)


def test_is_causal_goes_with_a_mask_and_keeps_both() -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    hidden = torch.rand(L, L) < 0.3
    hidden.fill_diagonal_(False)
    want, _ = ours(x, x, x, attn_mask=hidden | causal)
    for mask in (hidden, torch.where(hidden, -torch.inf, 0.0)):
        got, _ = ours(x, x, x, attn_mask=mask, is_causal=True)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    alone, _ = ours(x, x, x, is_causal=True)
    torch.testing.assert_close(alone, ours(x, x, x, attn_mask=causal)[0], rtol=0, atol=1e-12)
    assert not torch.allclose(alone, want, atol=1e-3)


def test_inputs_without_a_batch() -> None:
    theirs, ours = pair()
    q, k, v = (x[:, 0] for x in inputs(ours, torch.float64))
    mask = torch.rand(HEADS, L, S) < 0.3
    hidden = torch.zeros(S, dtype=torch.bool)
    hidden[-1], mask[..., 0] = True, False
    want, table = theirs(q, k, v, key_padding_mask=hidden, attn_mask=mask)
    got, weights = ours(q, k, v, hidden, True, mask)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, table, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"kdim": 5}, {"add_bias_kv": True, "vdim": 3}, {"batch_first": True},
])  # fmt: skip
def test_it_starts_where_pytorch_starts(options: dict[str, Any]) -> None:
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options).state_dict()
    torch.manual_seed(5)
    ours = MultiheadAttention(WIDTH, HEADS, **options).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_separate_projections_load_into_packed_ones() -> None:
    theirs, ours = pair(batch_first=True)
    state = theirs.state_dict()
    for name, part in zip("qkv", state.pop("in_proj_weight").chunk(3), strict=True):
        state[f"{name}_proj_weight"] = part
    holder = nn.ModuleDict({"inner": MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)})
    holder.load_state_dict({f"inner.{name}": value for name, value in state.items()})
    assert torch.equal(holder["inner"].in_proj_weight, ours.in_proj_weight)


def test_it_stands_in_an_encoder_layer_whose_fast_path_leaves_it_alone() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dtype=torch.float64)
    layer.eval()
    x = torch.randn(B, L, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        want = layer(x)
        ours = MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
        ours.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = ours
        torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-12)
    assert ours.last_statistics is not None


def test_dropout_is_of_the_weights_and_only_in_training() -> None:
    _, ours = pair(dropout=0.5, batch_first=True)
    x = inputs(ours, torch.float64)
    out, table = ours(*x, need_weights=True, average_attn_weights=False)
    assert (
        0.3 < float((table == 0).double().mean()) < 0.7
    )  # eleven standard deviations of 756 draws
    n = ours.last_statistics.effective_keys
    v = ours._project(2, x[2])
    v = v.reshape(B, S, HEADS, 3).transpose(1, 2)
    joined = (table @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(ours.out_proj(joined), out)
    assert not torch.equal(ours(*x)[0], ours(*x)[0])
    ours.eval()
    assert torch.equal(ours(*x)[0], ours(*x)[0])
    torch.testing.assert_close(ours.last_statistics.effective_keys, n)


def test_statistics_are_kept_as_asked() -> None:
    _, ours = pair(batch_first=True)
    x = inputs(ours, torch.float64)
    assert ours.last_statistics is None
    ours(*x)
    assert not ours.last_statistics.entropy.requires_grad
    names = set(ours.state_dict())
    assert names == {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    ours.statistics = "graph"
    ours(*x)
    ours.last_statistics.entropy.mean().backward()
    assert ours.in_proj_weight.grad.abs().max() > 0
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert twin.last_statistics is None
        assert twin.statistics == "graph"
        assert torch.equal(twin(*x)[0], ours(*x)[0])
    ours.statistics = "off"
    assert ours.last_statistics is None
    ours(*x, need_weights=True)
    assert ours.last_statistics is None
    with pytest.raises(
        ValueError, match="statistics must be one of detached, graph, off, got 'on'"
    ):
        ours.statistics = "on"


def test_rows_that_see_nothing_are_zero_before_the_output_projection() -> None:
    _, ours = pair(batch_first=True)
    x = inputs(ours, torch.float64)
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[0] = True
    for need in (False, True):
        out, _ = ours(*x, key_padding_mask=hidden, need_weights=need)
        torch.testing.assert_close(out[0], ours.out_proj.bias.expand(L, -1))
    assert (ours.last_statistics.n_keys[0] == 0).all()


X = torch.zeros(2, 5, 12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MultiheadAttention(12, 5), ValueError, "num_heads must divide embed_dim"),
        (lambda: MultiheadAttention(12, 0), ValueError, "num_heads must be at least 1, got 0"),
        (lambda: MultiheadAttention(12, 4, num_kv_heads=3), ValueError,
         "num_kv_heads must divide num_heads=4, got 3"),
        (lambda: MultiheadAttention(12, 4, dropout=1.0), ValueError, "must be a finite number"),
        (lambda: MultiheadAttention(12, 4, bias=1), TypeError, "bias must be True or False, got 1"),
        (lambda: MultiheadAttention(12, 4, positions="rope"), ValueError,
         "positions must be None, 'rotary' or 'alibi', got 'rope'"),
        (lambda: MultiheadAttention(12, 4, positions=3), TypeError, "positions must be .* got int"),
        (lambda: MultiheadAttention(12, 4, positions="rotary"), ValueError, "even head width"),
        (lambda: MultiheadAttention(16, 4, positions="rotary", add_zero_attn=True), ValueError,
         "positions cannot be combined with add_bias_kv"),
        (lambda: MultiheadAttention(12, 4, positions=acutance.nn.Alibi((1.0,))), ValueError,
         "slopes must have one number for each of 4 heads, got 1"),
        (lambda: MultiheadAttention(12, 4, score="cosin"), ValueError, "did you mean 'cosine'"),
        (lambda: MultiheadAttention(12, 4, score="location"), ValueError, "pass .*LocationScore"),
        (lambda: MultiheadAttention(12, 4, score=scores.General(nn.Parameter(torch.eye(3)))),
         TypeError, "contains the Parameter weight, .* pass the module scores.GeneralScore"),
        (lambda: MultiheadAttention(12, 4, weights="sofmax"), ValueError, "did you mean 'softmax'"),
        (lambda: MultiheadAttention(12, 4, scaling="logn"), ValueError, "did you mean 'log_n'"),
        (lambda: MultiheadAttention(12, 4)(X, X[0], X), ValueError, "three dimensions, or two"),
        (lambda: MultiheadAttention(12, 4)(X, None, X), TypeError, "key must be a Tensor"),
        (lambda: MultiheadAttention(12, 4)(X, X[..., :3], X), ValueError,
         "key must have the width 12, got 3"),
        (lambda: MultiheadAttention(12, 4)(X, X[:2], X[:1]), ValueError, "same batch size and"),
        (lambda: MultiheadAttention(12, 4)(X, X[:, :2], X[:, :2]), ValueError,
         "query and key must have the same batch size: query has B=5, key has B=2"),
        (lambda: MultiheadAttention(12, 4)(X, X, X, torch.zeros(5, 3)), ValueError,
         r"key_padding_mask must have shape \(B, S\) = \(5, 2\), got \(5, 3\)"),
        (lambda: MultiheadAttention(12, 4)(X, X, X, torch.zeros(5, 2, dtype=torch.int64)),
         TypeError, r"key_padding_mask must be boolean \(True hides\) or"),
        (lambda: MultiheadAttention(12, 4)(X, X, X, attn_mask=torch.zeros(3, 3)), ValueError,
         r"attn_mask must have shape \(L, S\) = \(2, 2\) or .* = \(20, 2, 2\), got \(3, 3\)"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_padded_token_that_is_nan_reaches_no_output() -> None:
    ours, hidden = MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.arange(S) == 5
    x = torch.randn(B, S, WIDTH)
    x[:, 5] = torch.nan
    for need_weights in (False, True):
        out, _ = ours(x, x, x, key_padding_mask=hidden.expand(B, S), need_weights=need_weights)
        assert out[:, ~hidden].isfinite().all()


def test_average_attn_weights_is_a_flag() -> None:
    ours, x = MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.zeros(1, 2, WIDTH)
    with pytest.raises(TypeError, match="average_attn_weights must be True or False, got 'no'"):
        ours(x, x, x, average_attn_weights="no")
