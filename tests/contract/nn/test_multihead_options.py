"""MultiheadAttention with its options is their published formulas."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance import scaling, scores
from acutance import weights as w
from acutance.nn import MultiheadAttention
from acutance.rowstats import RowStatistics, WeightStatistics


def heads_of(module: MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Projections written anew: (B, Hq, L, E) and twice (B, H, L, E)."""
    width, kv = module.embed_dim, module.num_kv_heads * module.head_dim
    packed = x @ module.in_proj_weight.T + module.in_proj_bias
    parts = packed[..., :width], packed[..., width : width + kv], packed[..., width + kv :]
    return tuple(
        part.reshape(*x.shape[:2], -1, module.head_dim).permute(0, 2, 1, 3) for part in parts
    )


def finish(module: MultiheadAttention, out: Tensor) -> Tensor:
    joined = out.permute(0, 2, 1, 3).reshape(out.shape[0], out.shape[2], -1)
    return joined @ module.out_proj.weight.T + module.out_proj.bias


def make(**options: Any) -> tuple[MultiheadAttention, Tensor]:
    module = MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64, **options)
    with torch.no_grad():
        module.in_proj_bias.normal_()
    return module, torch.randn(2, 10, 32, dtype=torch.float64)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_are_repeated_heads(kv_heads: int) -> None:
    grouped, x = make(num_kv_heads=kv_heads)
    assert grouped.in_proj_weight.shape == (32 + 2 * 8 * kv_heads, 32)
    full, _ = make()
    repeat = 4 // kv_heads

    def spread(rows: Tensor) -> Tensor:
        q, k, v = rows.split([32, 8 * kv_heads, 8 * kv_heads])
        k, v = (part.unflatten(0, (kv_heads, 8)).repeat_interleave(repeat, 0).flatten(0, 1)
                for part in (k, v))  # fmt: skip
        return torch.cat([q, k, v])

    with torch.no_grad():
        full.in_proj_weight.copy_(spread(grouped.in_proj_weight))
        full.in_proj_bias.copy_(spread(grouped.in_proj_bias))
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
    for need in (False, True):
        got, want = (m(x, x, x, is_causal=True, need_weights=need) for m in (grouped, full))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def turned(x: Tensor, first: int, base: float) -> Tensor:
    """Rotary by complex numbers: component i with component i + E/2."""
    half = x.shape[-1] // 2
    places = first + torch.arange(x.shape[-2], dtype=torch.float64)
    speeds = [base ** (-2 * i / x.shape[-1]) for i in range(half)]
    angle = torch.outer(places, torch.tensor(speeds, dtype=torch.float64))
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize("base", [10_000.0, 37.0])
def test_rotary_is_the_complex_formula(base: float) -> None:
    module, x = make(positions=acutance.nn.Rotary(base), num_kv_heads=2)
    q, k, v = heads_of(module, x)
    q, k = turned(q, 0, base), turned(k, 0, base)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    s = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(10, 10).triu(1).bool(), -torch.inf)
    want = finish(module, torch.softmax(s, -1) @ v)
    for need in (False, True):
        got, _ = module(x, x, x, need_weights=need, is_causal=True)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    last, _ = module(x[:, 7:], x, x, is_causal=True, query_offset=7)
    torch.testing.assert_close(last, want[:, 7:], rtol=0, atol=1e-12)


def test_rotary_comes_after_the_normalisation() -> None:
    norm = scores.QKNorm(8, "rms", gain=scores.SwinGain(4)).double()
    with torch.no_grad():
        norm.query_weight.normal_()
        norm.key_weight.normal_()
    module, x = make(positions="rotary", score=norm)
    q, k, v = heads_of(module, x)
    q, k = norm(q, k)
    s = turned(q, 0, 1e4) @ turned(k, 0, 1e4).mT / math.sqrt(8)
    want = finish(module, torch.softmax(s, -1) @ v)
    for need in (False, True):
        got, _ = module(x, x, x, need_weights=need)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("slopes", [None, (0.1, 0.2, 0.5, 1.0)])
def test_alibi_is_its_bias(slopes: tuple[float, ...] | None) -> None:
    module, x = make(positions=acutance.nn.Alibi(slopes))
    plain, _ = make()
    plain.load_state_dict(module.state_dict())
    m = torch.tensor(slopes or [2.0 ** (-8 * (h + 1) / 4) for h in range(4)], dtype=torch.float64)
    distance = (torch.arange(10)[:, None] - torch.arange(10)).abs()
    bias = (-m[:, None, None] * distance).repeat(2, 1, 1)
    want, _ = plain(x, x, x, attn_mask=bias)
    for need in (False, True):
        got, _ = module(x, x, x, need_weights=need)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"score": "cosine"},
    {"score": "general"},
    {"score": "additive"},
    {"score": lambda q, k, start: -torch.cdist(q, k)},
    {"weights": "relu2"},
    {"weights": "sink"},
    {"weights": "sparsemax"},
    {"weights": w.Sigmoid(bias=torch.zeros(4))},
    {"scaling": scaling.LogN(train_length=4, n_min=1)},
    {"scaling": scaling.LearnedSSMax(4, train_length=6)},
    {"scaling": scaling.AdaptivePoly(), "score": "dot"},
    {"scaling": scaling.Llama4(length=2), "positions": "rotary"},
    {"score": "additive", "scaling": scaling.LogN(train_length=4, n_min=1), "weights": "sigmoid"},
    {"positions": "alibi", "num_kv_heads": 2, "score": "additive"},
]


@pytest.mark.grid(2)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "defaults")
@pytest.mark.parametrize("call", ["full", "causal", "padded", "masked"])
def test_statistics_and_needed_weights_are_those_of_the_projections(
    options: dict[str, Any], call: str
) -> None:
    module, x = make(**options)
    module.double()
    hidden = torch.zeros(2, 10, dtype=torch.bool)
    hidden[1, 7:] = True
    mask = torch.rand(10, 10) < 0.3
    mask.fill_diagonal_(False)
    given: dict[str, dict[str, Any]] = {
        "full": {}, "causal": {"is_causal": True}, "padded": {"key_padding_mask": hidden},
        "masked": {"attn_mask": mask},
    }  # fmt: skip
    theirs: dict[str, dict[str, Any]] = {
        "full": {}, "causal": {"is_causal": True}, "padded": {"key_mask": ~hidden},
        "masked": {"attn_mask": ~mask},
    }  # fmt: skip
    out, _ = module(x, x, x, **given[call])
    stats = module.last_statistics
    again, table = module(x, x, x, need_weights=True, average_attn_weights=False, **given[call])
    torch.testing.assert_close(again, out, rtol=0, atol=1e-11)
    q, k, v = heads_of(module, x)
    repeat = 4 // module.num_kv_heads
    torch.testing.assert_close(
        finish(module, table @ v.repeat_interleave(repeat, 1)), out, rtol=0, atol=1e-11
    )
    if options.get("positions") == "rotary":
        q, k = turned(q, 0, 1e4), turned(k, 0, 1e4)
    slopes = None
    if options.get("positions") == "alibi":
        slopes = module.positions.of(4, dtype=torch.float64)
    want = acutance.row_statistics(
        q, k, enable_gqa=True, score=module.score, weights=module.weights(),
        scaling=module.scaling, alibi_slopes=slopes, **theirs[call],
    )  # fmt: skip
    assert type(stats) is type(want)
    assert stats.available == want.available
    for name in want.available:
        torch.testing.assert_close(stats[name], want[name], rtol=1e-9, atol=1e-9, equal_nan=True)
        again_stats = module.last_statistics[name]
        torch.testing.assert_close(again_stats, want[name], rtol=1e-9, atol=1e-9, equal_nan=True)
    kinds = (RowStatistics, WeightStatistics)
    assert isinstance(want, kinds[options.get("weights", "sink") != "sink"])


@pytest.mark.parametrize("options", [
    {}, {"positions": "rotary"}, {"positions": "alibi"}, {"num_kv_heads": 2, "positions": "rotary"},
    {"positions": "rotary", "score": scores.QKNorm(8, "layer")}, {"score": "additive"},
    {"weights": "relu2", "scaling": scaling.LogN(train_length=4, n_min=1)}, {"add_bias_kv": True},
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_the_last_rows_are_those_of_one_causal_forward(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    module = MultiheadAttention(32, 4, batch_first=True, **copy.deepcopy(options)).to(dtype)
    x = torch.randn(2, 9, 32, dtype=dtype)
    want, _ = module(x, x, x, is_causal=True)
    rows = module.last_statistics.effective_keys
    outs, end = [], 0
    for piece in x.split([4, 1, 1, 3], 1):
        start, end = end, end + piece.shape[1]
        keys = x[:, :end]
        outs.append(module(piece, keys, keys, is_causal=True, query_offset=start)[0])
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=0, atol=tolerance)
    last = module.last_statistics.effective_keys
    torch.testing.assert_close(last, rows[..., -3:], rtol=0, atol=10 * tolerance)


@pytest.mark.parametrize("weights", ["softmax", "relu2"])
def test_a_detached_record_holds_no_graph(weights: str) -> None:
    module, x = make(weights=weights)
    module(x, x, x)
    stats = module.last_statistics
    records = [getattr(stats, part.name) for part in dataclasses.fields(stats)]
    tensors = [tensor for record in records if isinstance(record, tuple) for tensor in record]
    assert len(tensors) >= 15
    assert all(part.grad_fn is None for part in tensors)


TRAINED: dict[str, Any] = {
    "additive": {"score": "additive"},
    "general": {"score": "general"},
    "location": {"score": scores.LocationScore(8, 12)},
    "qk norm": {"score": scores.QKNorm(8, "l2", gain=scores.SwinGain(4))},
    "ssmax": {"scaling": scaling.LearnedSSMax(4, train_length=8)},
    "temperature": {"scaling": scaling.LearnedTemperature(4)},
    "sink": {"weights": "sink"},
    "sigmoid": {"weights": w.Sigmoid(nn.Parameter(torch.zeros(4)))},
}


@pytest.mark.parametrize("name", TRAINED)
def test_what_options_learn_is_trained(name: str) -> None:
    """Only the options' own parameters move, and twenty steps lower the loss with them alone."""
    torch.manual_seed(3)
    module = MultiheadAttention(32, 4, batch_first=True, **copy.deepcopy(TRAINED[name]))
    plain = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    learned = {k: p for k, p in module.named_parameters() if k not in plain}
    assert learned
    assert set(learned) <= set(module.state_dict())
    x, aim = torch.randn(2, 2, 12, 32).unbind(0)
    optimiser = torch.optim.Adam(learned.values(), lr=0.1)
    losses = []
    for _ in range(20):
        loss = (module(x, x, x, is_causal=True)[0] - aim).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    twin = MultiheadAttention(32, 4, batch_first=True, **copy.deepcopy(TRAINED[name]))
    twin.load_state_dict(module.state_dict())
    assert torch.equal(twin(x, x, x)[0], module(x, x, x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    module = MultiheadAttention(32, 4, batch_first=True, dtype=dtype, positions="rotary")
    x = torch.randn(2, 10, 32, dtype=dtype)
    out, table = module(x, x, x, need_weights=True)
    assert out.dtype == table.dtype == dtype
    near, _ = module(x, x, x)
    # eight products of magnitude one, rounded to the dtype
    torch.testing.assert_close(near, out, rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert module.last_statistics.entropy.dtype == torch.float32


@pytest.mark.few(2)
@pytest.mark.parametrize("options", [
    {}, {"positions": "rotary", "num_kv_heads": 2}, {"positions": "alibi", "weights": "sink"},
    {"score": scores.QKNorm(8), "positions": "rotary"}, {"score": "general"},
])  # fmt: skip
def test_it_compiles_into_one_graph(options: dict[str, Any]) -> None:
    torch.compiler.reset()
    module = MultiheadAttention(32, 4, batch_first=True, **copy.deepcopy(options))
    x = torch.randn(2, 10, 32)
    hidden = torch.zeros(2, 10, dtype=torch.bool)
    hidden[0, 8:] = True
    want, _ = module(x, x, x, hidden, is_causal=True)
    entropy = module.last_statistics.entropy
    module.last_statistics = None
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    got, _ = compiled(x, x, x, hidden, is_causal=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(module.last_statistics.entropy, entropy, equal_nan=True)
