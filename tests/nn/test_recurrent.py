"""LinearAttention, DecayAttention and Retention: one formula, two forms."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acutance.mechanisms import CosFormer, alibi_decays
from acutance.nn import DecayAttention, LinearAttention, Retention, Rotary
from acutance.nn.linear import LinearHeads
from acutance.rowstats import WeightStatistics, observe_weights

B, L, D, H = 2, 11, 16, 4
FORMS: dict[str, tuple[type[LinearHeads], dict[str, Any]]] = {
    "elu1": (LinearAttention, {}),
    "grouped": (LinearAttention, {"num_kv_heads": 2, "value_dim": 8, "bias": False}),
    "identity": (LinearAttention, {"feature_map": "identity", "scale": 0.5}),
    "cosformer": (LinearAttention, {"feature_map": CosFormer(length=20)}),
    "hedgehog": (LinearAttention, {"feature_map": "hedgehog", "rows": "blockwise"}),
    "decay": (DecayAttention, {}),
    "decay learned": (DecayAttention, {"learned": True, "num_kv_heads": 2}),
    "decay alibi": (DecayAttention, {"decay": "alibi", "feature_map": "elu1", "learned": True}),
    "decay rotary": (DecayAttention, {"decay": 0.7, "positions": "rotary"}),
    "retention": (Retention, {}),
    "retention plain": (Retention, {"positions": None, "expansion": 1, "bias": True}),
    "retention learned": (Retention, {"learned": True, "positions": Rotary(50.0)}),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    kind, options = FORMS[name]
    module = kind(D, H, dtype=dtype, **options)
    with torch.no_grad():
        for label, parameter in module.named_parameters():
            if "bias" in label or label.startswith("norm"):
                parameter.normal_()
    return module, torch.randn(B, L, D, dtype=dtype)


def padding() -> Tensor:
    hidden = torch.zeros(B, L, dtype=torch.bool)
    hidden[0, 3], hidden[1, 8:] = True, True
    return hidden


def project(layer: nn.Linear, x: Tensor, heads: int) -> Tensor:
    y = x @ layer.weight.T + (0.0 if layer.bias is None else layer.bias)
    return y.reshape(B, L, heads, -1).permute(0, 2, 1, 3)


def turned(x: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    speeds = base ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:])
    z = z * torch.exp(1j * torch.outer(torch.arange(L).double(), speeds))
    return torch.cat([z.real, z.imag], -1)


MAPS = {
    "elu1": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
    "identity": lambda x: x,
    "hedgehog": lambda x: torch.softmax(torch.cat([x, -x], -1), -1),
}


def dense(module: Any, x: Tensor, hidden: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Weights before they are normalised (B, Hq, L, L), and the output, from the formulas."""
    q, k = project(module.q_proj, x, H), project(module.k_proj, x, module.num_kv_heads)
    v = project(module.v_proj, x, module.num_kv_heads)
    k, v = (part.repeat_interleave(H // module.num_kv_heads, 1) for part in (k, v))
    if module.positions is not None:
        q, k = turned(q, module.positions.base), turned(k, module.positions.base)
    gap = (torch.arange(L)[:, None] - torch.arange(L)).double()
    name = module.feature_map.name
    if name == "cosformer":
        a = torch.relu(q) @ torch.relu(k).mT * torch.cos(math.pi / 2 * gap / 20)
    else:
        a = MAPS[name](q) @ MAPS[name](k).mT
    a = a / math.sqrt(D / H) if isinstance(module, Retention) else a * module.scale
    decay = module.decay()
    if decay is not None:
        a = a * decay[:, None, None] ** gap.abs()
    seen = torch.ones(B, 1, L, L, dtype=torch.bool)
    if causal:
        seen = seen & (gap >= 0)
    if hidden is not None:
        seen = seen & ~hidden[:, None, None]
    a = torch.where(seen, a, 0.0)
    total = a.sum(-1, keepdim=True)
    p = a if name == "identity" else a / torch.where(total > 0, total, 1.0)
    heads = p @ v
    if isinstance(module, Retention):
        mean = heads.mean(-1, keepdim=True)
        width = (heads - mean).square().mean(-1, keepdim=True)
        heads = (heads - mean) / torch.sqrt(width + 1e-5)
        joined = heads.permute(0, 2, 1, 3).reshape(B, L, -1)
        gate = x @ module.gate.weight.T + (0.0 if module.gate.bias is None else module.gate.bias)
        joined = (joined * module.norm.weight + module.norm.bias) * gate / (1 + torch.exp(-gate))
    else:
        joined = heads.permute(0, 2, 1, 3).reshape(B, L, -1)
    bias = 0.0 if module.out_proj.bias is None else module.out_proj.bias
    return torch.where(seen, a, torch.nan), joined @ module.out_proj.weight.T + bias


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_the_parallel_form_is_the_formula(name: str, causal: bool, padded: bool) -> None:
    module, x = make(name)
    hidden = padding() if padded else None
    out = module(x, hidden, is_causal=causal)
    a, want = dense(module, x, hidden, causal)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
    upstream = torch.randn_like(out)
    parameters = [p for p in module.parameters() if p.requires_grad]
    got = torch.autograd.grad(out, parameters, upstream)
    expected = torch.autograd.grad(want, parameters, upstream)
    for one, two in zip(got, expected, strict=True):
        size = 1 + float(two.abs().max())
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9 * size)

    stats = module.last_statistics
    nonnegative = module.feature_map.nonnegative
    exact = WeightStatistics(observe_weights(a.detach(), ~a.isnan(), distribution=nonnegative))
    assert "n_keys" in stats.available
    assert ("effective_keys" in stats.available) == nonnegative
    for metric in stats.available:
        torch.testing.assert_close(
            stats[metric], exact[metric], rtol=1e-7, atol=1e-9, equal_nan=True
        )
    module.rows = "blockwise"
    module(x, hidden, is_causal=causal)
    for metric in ("effective_keys", "sparsity", "top_weight", "first_weight"):
        torch.testing.assert_close(
            module.last_statistics[metric], exact[metric], rtol=1e-7, atol=1e-9, equal_nan=True
        )


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_recurrent_form_is_the_parallel_one(
    name: str, padded: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(1)
    module, x = make(name, dtype)
    hidden = padding() if padded else None
    want = module(x, hidden, is_causal=True)
    keys = module.last_statistics.n_keys
    state, outs, counts = None, [], []
    for piece in torch.arange(L).split([4, 1, 1, 5]):
        part = None if hidden is None else hidden[:, piece]
        out, state = module.step(x[:, piece], state, part)
        outs.append(out)
        counts.append(module.last_statistics.n_keys)
    size = max(1.0, float(want.detach().abs().max()))
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=0, atol=tolerance * size)
    assert torch.equal(torch.cat(counts, -1), keys)
    assert int(state.position) == L


def test_steps_without_statistics_keep_no_squares() -> None:
    module, x = make("elu1")
    module.statistics = "off"
    _, state = module.step(x)
    assert state.squares.numel() == 0
    module.statistics = "detached"
    _, state = module.step(x, state)
    assert module.last_statistics is None
    assert module(x) is not None
    assert module.last_statistics is not None


def test_decays_survive_half_precision_and_the_ends() -> None:
    module = DecayAttention(D, 16, learned=True).to(torch.bfloat16)
    assert module.decay().dtype == torch.float32
    fixed = DecayAttention(D, 16).to(torch.bfloat16)
    assert torch.equal(fixed.decay(), 1 - torch.exp2(-5.0 - torch.arange(16)))
    assert fixed(torch.randn(1, 5, D, dtype=torch.bfloat16)).dtype == torch.bfloat16
    # ν of head 15 is −14.6, rounded to 8 bits: the rate 2⁻²⁰ keeps its order of magnitude
    assert bool((module.decay() < 1).all())
    with torch.no_grad():
        module.nu.fill_(100.0)
    assert bool((module.decay() > 0).all())


def test_decay_presets_and_numbers() -> None:
    torch.testing.assert_close(DecayAttention(D, H, decay="alibi").decay(), alibi_decays(H))
    assert DecayAttention(D, H, decay=0.5).decay().tolist() == [0.5] * 4
    given = torch.tensor([0.1, 0.5, 0.9, 1.0])
    torch.testing.assert_close(DecayAttention(D, H, decay=given).decay(), given)
    learned = DecayAttention(D, H, decay="alibi", learned=True)
    torch.testing.assert_close(learned.decay().detach(), alibi_decays(H))
    assert "nu" in learned.state_dict()
    assert "nu" not in DecayAttention(D, H).state_dict()


@pytest.mark.parametrize("name", ["elu1", "decay learned", "retention learned"])
def test_it_learns_and_can_be_copied(name: str) -> None:
    torch.manual_seed(2)
    module, x = make(name, torch.float32)
    module.statistics = "graph"
    optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(module(x, is_causal=True), x.roll(1, 1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.last_statistics is None
        assert torch.equal(twin(x), module(x))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["elu1", "decay learned", "retention"])
def test_it_compiles_into_one_graph(name: str) -> None:
    torch.compiler.reset()
    module, x = make(name, torch.float32)
    want = module(x, padding(), is_causal=True)
    counts = module.last_statistics.n_keys
    module.last_statistics = None
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    got = compiled(x, padding(), is_causal=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert torch.equal(module.last_statistics.n_keys, counts)


X = torch.zeros(B, L, D)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LinearAttention(16, 3), ValueError, "num_heads=3 must divide embed_dim, got 16"),
        (lambda: LinearAttention(16, 4, value_dim=6), ValueError, "must divide value_dim"),
        (lambda: LinearAttention(16, 4, num_kv_heads=3), ValueError, "must divide num_heads=4"),
        (lambda: LinearAttention(16, 4, feature_map="elu2"), ValueError, "did you mean"),
        (lambda: LinearAttention(16, 4, rows="all"), ValueError, "must be 'sums' or 'blockwise'"),
        (lambda: LinearAttention(16, 4, scale="x"), TypeError, "scale must be a number, got 'x'"),
        (lambda: LinearAttention(16, 4)(X[0]), ValueError, r"shape \(B, L, embed_dim=16\), got"),
        (lambda: LinearAttention(16, 4).step(X, key_padding_mask=torch.zeros(2, 3)), TypeError,
         "key_padding_mask must be boolean"),
        (lambda: DecayAttention(16, 4, decay="retnets"), ValueError,
         "decay must be a number, a Tensor, 'retnet' or 'alibi', got 'retnets'"),
        (lambda: DecayAttention(16, 4, decay=1.5), ValueError, r"must be in \(0, 1\], got 1.5"),
        (lambda: DecayAttention(16, 4, decay=torch.ones(3)), ValueError, r"= \(4,\), got \(3,\)"),
        (lambda: DecayAttention(16, 4, decay=1, learned=True), ValueError, "start below 1, got 1"),
        (lambda: DecayAttention(16, 4, positions="alibi"), ValueError, "None or 'rotary', got 'al"),
        (lambda: DecayAttention(12, 4, positions="rotary"), ValueError, "even head width, got 3"),
        (lambda: Retention(16, 4, expansion=0), ValueError, "expansion must be at least 1, got 0"),
        (lambda: Retention(16, 4, statistics="yes"), ValueError, "statistics must be one of"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
