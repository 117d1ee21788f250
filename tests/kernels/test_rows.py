"""Whole rows, block by block, against one dense float64 formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from acutance import weights as w
from acutance.kernels import whole_rows
from acutance.kernels.call import KernelCall, ScoreTile
from acutance.masks import Masking
from acutance.rowstats import RowStatistics, WeightStatistics, observe, observe_weights

B, H, G, L, S, E, V = 2, 2, 3, 11, 13, 4, 5
WEIGHTINGS = [kind() for name, kind in w.WEIGHTS.items() if name not in ("sink", "entmax")]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H * G, L, E), (B, H, S, E), (B, H, S, V))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.to(dtype), k.to(dtype), v.to(dtype)


PLAIN = Masking(batch=B, heads=H, group=G, queries=L, keys=S)
PADDING = torch.ones(B, S, dtype=torch.bool)
PADDING[1, 9:] = False
SPARSE = torch.rand(B, H * G, L, S, generator=torch.Generator().manual_seed(3)) < 0.6
SPARSE[0, 0, 0] = False
MASKS = {
    "full": PLAIN,
    "causal": replace(PLAIN, causal=True),
    "offset": replace(PLAIN, causal=True, offset=2),
    "window": replace(PLAIN, causal=True, window=4),
    "padding": replace(PLAIN, key_mask=PADDING),
    "boolean": replace(PLAIN, attn_mask=SPARSE),
    "shared": replace(PLAIN, attn_mask=SPARSE[:1, :1]),
    "bias": replace(PLAIN, bias=torch.linspace(-1, 1, S).double().expand(1, 1, 1, S)),
    "alibi": replace(PLAIN, causal=True, alibi_slopes=torch.linspace(0.1, 0.6, H * G).double()),
    "nothing": replace(PLAIN, causal=True, offset=-20),
}


def visible(masking: Masking) -> tuple[Tensor, Tensor]:
    """Which keys rows see and what is added to their scores, from the definitions."""
    position = torch.arange(L)[:, None] + masking.offset
    keys = torch.arange(S)
    seen = torch.ones(B, H * G, L, S, dtype=torch.bool)
    added = torch.zeros(B, H * G, L, S, dtype=torch.float64)
    if masking.causal:
        seen &= keys <= position
    if masking.window is not None:
        seen &= (keys - position).abs() < masking.window
    if masking.key_mask is not None:
        seen &= masking.key_mask[:, None, None]
    if masking.attn_mask is not None:
        seen &= masking.attn_mask
    if masking.bias is not None:
        added += masking.bias
    if masking.alibi_slopes is not None:
        added -= masking.alibi_slopes[:, None, None] * (keys - position).abs()
    return seen, added


def dense(
    q: Tensor, k: Tensor, v: Tensor, masking: Masking, weighting: w.Weighting, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = torch.einsum("bhle,bhse->bhls", q, k.repeat_interleave(G, 1)) * 0.7
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    seen, added = visible(masking)
    s = s + added
    a = weighting(s, seen)
    return a @ v.repeat_interleave(G, 1), s, a, seen


@pytest.fixture(params=[1 << 21, 200], ids=["one block", "blocks"])
def size(request: pytest.FixtureRequest, limits: Callable[..., None]) -> None:
    limits(whole_rows, BLOCK_ELEMENTS=request.param)


def weigh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masking: Masking,
    weighting: w.Weighting,
    scale: float = 0.7,
    softcap: float | None = None,
    score: ScoreTile | None = None,
) -> whole_rows.WeighedRows:
    return whole_rows.weigh_rows(
        KernelCall(q, k, v, masking, scale, softcap, weighting=weighting, score=score)
    )


@pytest.mark.grid(2)
@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda weighting: weighting.name)
def test_blocks_equal_the_whole(weighting: w.Weighting, mask: str) -> None:
    q, k, v = inputs()
    masking = MASKS[mask]
    got = weigh(q, k, v, masking, weighting)
    out, s, a, seen = dense(q, k, v, masking, weighting, None)
    assert got.out is not None
    torch.testing.assert_close(got.out, out, rtol=1e-10, atol=1e-10)
    want = WeightStatistics(observe_weights(a, seen, distribution=weighting.distribution))
    have = WeightStatistics(got.weights)
    assert have.available == want.available
    assert ("entropy" in have.available) == weighting.distribution
    for name in have.available:
        torch.testing.assert_close(have[name], want[name], equal_nan=True, rtol=1e-9, atol=1e-9)
    scores, plain = RowStatistics(got.scores), RowStatistics(observe(s, seen))
    for name in ("n_keys", "max_logit", "logit_mean", "logit_std"):
        torch.testing.assert_close(scores[name], plain[name], equal_nan=True)
    if mask == "nothing":
        assert (have.n_keys == 0).all()
        assert (got.out == 0).all()


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("weighting", [w.ReLU2(), w.Sigmoid(), w.L2(), w.Power(k=3.0)])
def test_gradients_equal_those_of_the_whole(weighting: w.Weighting) -> None:
    found = []
    for whole in (True, False):
        q, k, v = (t.requires_grad_() for t in inputs())
        masking = MASKS["causal"]
        if whole:
            out, _, a, seen = dense(q, k, v, masking, weighting, 2.0)
            stats = WeightStatistics(observe_weights(a, seen))
        else:
            result = weigh(q, k, v, masking, weighting, softcap=2.0)
            assert result.out is not None
            out, stats = result.out, WeightStatistics(result.weights)
        loss = out.sin().sum() + stats.effective_keys[:, :, 2:].nan_to_num().sum()
        found.append(torch.autograd.grad(loss, (q, k, v)))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


def test_parameters_of_a_weighting_get_gradients() -> None:
    q, k, v = inputs()
    bias = torch.zeros(H * G, dtype=torch.float64, requires_grad=True)
    got = weigh(q, k, v, PLAIN, w.Sigmoid(bias))
    assert got.out is not None
    (grad,) = torch.autograd.grad(got.out.square().sum(), bias)
    step = torch.zeros_like(bias)
    step[1] = 1e-5
    loss = [
        float(weigh(q, k, v, PLAIN, w.Sigmoid(bias.detach() + move)).out.square().sum())  # type: ignore[union-attr]
        for move in (step, -step)
    ]
    assert float(grad[1]) == pytest.approx((loss[0] - loss[1]) / 2e-5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    got = weigh(q, k, v, PLAIN, w.ReLU2())
    out, _, a, seen = dense(q.double(), k.double(), v.double(), PLAIN, w.ReLU2(), None)
    assert got.out is not None
    assert got.out.dtype == dtype
    error = 4 * torch.finfo(dtype).eps * float(out.abs().max())
    torch.testing.assert_close(got.out.double(), out, rtol=0, atol=error)
    keys = WeightStatistics(observe_weights(a, seen)).effective_keys
    have = WeightStatistics(got.weights).effective_keys
    assert have.dtype == torch.float32
    torch.testing.assert_close(have.double(), keys, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("size")
def test_scores_that_are_no_product() -> None:
    q, k, v = inputs()

    def distance(q: Tensor, k: Tensor, start: int) -> Tensor:
        return -torch.cdist(q, k.repeat_interleave(G, 1))

    got = weigh(q, k, v, MASKS["causal"], w.ReLU2(), scale=1.0, score=distance)
    s = -torch.cdist(q, k.repeat_interleave(G, 1))
    seen, _ = visible(MASKS["causal"])
    torch.testing.assert_close(got.out, w.ReLU2()(s, seen) @ v.repeat_interleave(G, 1))


@pytest.mark.parametrize("size", [{"B": 0}, {"L": 0}])
def test_nothing_to_do(size: dict[str, int]) -> None:
    b, length = size.get("B", B), size.get("L", L)
    masking = replace(PLAIN, batch=b, queries=length)
    q, k, v = inputs()
    got = weigh(q[:b, :, :length], k[:b], v[:b], masking, w.ReLU2(), scale=1.0)
    assert got.out is not None
    assert got.out.shape == (b, H * G, length, V)
    assert got.weights.n.shape == (b, H * G, length)
