"""Gradients of the output and of every metric, in float64, float32 and little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acutance import attention, row_statistics
from acutance.rowstats import RowStatistics, dense_statistics
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

#: noise_gain carries no gradient, n_keys is a count.
SMOOTH = [name for name in EXACT if name not in ("n_keys", "noise_gain")]


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def visible(*shape: int, seed: int = 9) -> Tensor:
    """A boolean mask with hidden keys, a row that sees nothing and one that sees a single key."""
    mask = normal(*shape, seed=seed) > -0.4
    mask[..., 0, :] = False
    mask[..., 1, :] = torch.arange(shape[-1]) == 2
    return mask


#: Constant options, and tensors to differentiate, of calls with (1, 4, 3, 2) queries, five keys.
CASES: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "masked": ({"attn_mask": visible(3, 5)}, {}),
    "masked heads": ({"attn_mask": visible(1, 4, 3, 5)}, {}),
    "padding": ({"key_mask": torch.tensor([[False, True, True, False, True]])}, {}),
    "window": ({"window": 2, "is_causal": True, "query_offset": -1}, {}),
    "documents": ({"document_ids": (torch.tensor([0, 1, 7]), torch.tensor([0, 0, 1, 1, 1]))}, {}),
    "softcap": ({"softcap": 1.5, "attn_mask": visible(3, 5)}, {}),
    "sinks": ({"attn_mask": visible(3, 5)}, {"sinks": normal(4, seed=3)}),
    "bias": ({"is_causal": True, "query_offset": -1}, {"bias": normal(4, 3, 5, seed=4)}),
    "bias of keys": ({}, {"bias": normal(5, seed=4)}),
    "bias of rows": ({}, {"bias": normal(1, 4, 3, 1, seed=4)}),
    "capped bias": ({"softcap": 1.0}, {"bias": normal(1, 1, 3, 5, seed=4)}),
    "additive": ({}, {"attn_mask": normal(3, 5, seed=5)}),
    "mask and bias": (
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1], dtype=torch.float64)},
        {"attn_mask": normal(4, 1, 5, seed=5), "bias": normal(3, 5, seed=6)},
    ),
    "scale": ({"scale": -0.6}, {}),
    "everything": (
        {"softcap": 2.0, "window": 2, "key_mask": torch.tensor([[True, True, False, True, True]])},
        {"sinks": normal(4, seed=3), "bias": normal(4, 3, 5, seed=4)},
    ),
}


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(
        part.requires_grad_()
        for part in (normal(1, 4, 3, 2), normal(1, 2, 5, 2, seed=1), normal(1, 2, 5, 3, seed=2))
    )


@pytest.mark.few(6)
# along random directions, and where it matters most entry by entry
@pytest.mark.parametrize(
    ("case", "fast"),
    [
        *((case, True) for case in CASES),
        *(
            pytest.param(case, False, marks=pytest.mark.slow)
            for case in ("plain", "masked", "sinks")
        ),
    ],
)
def test_output_and_every_metric_pass_gradcheck(case: str, fast: bool) -> None:
    options, variables = CASES[case]
    names = list(variables)

    def call(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Tensor:
        out, stats = attention(
            query,
            key,
            value,
            enable_gqa=True,
            return_stats=True,
            **options,
            **dict(zip(names, others, strict=True)),
        )
        found = [stats[name].nan_to_num(0.0, neginf=0.0) for name in SMOOTH]
        return torch.cat([out, torch.stack(found, -1)], -1)

    inputs = (*tensors(), *(variables[name].clone().requires_grad_() for name in names))
    assert torch.autograd.gradcheck(call, inputs, atol=1e-6, fast_mode=fast)


@pytest.mark.parametrize("name", SMOOTH)
def test_one_metric_alone_has_the_dense_gradient(name: str) -> None:
    """Most sums then get no gradient at all, which is not the same as one of zero."""
    results = []
    for measure in (attended, dense):
        query, key, _ = tensors()
        bias = normal(4, 3, 5, seed=4).requires_grad_()
        sinks = normal(4, seed=3).requires_grad_()
        found = measure(query, key, bias=bias, sinks=sinks, enable_gqa=True, key_mask=KEYS)[name]
        variables = (query, key, bias, sinks)
        results.append(torch.autograd.grad(found.sum(), variables, allow_unused=True))
    for ours, theirs in zip(*results, strict=True):
        theirs = torch.zeros(()) if theirs is None else theirs
        ours = torch.zeros_like(theirs) if ours is None else ours
        torch.testing.assert_close(ours, theirs.expand_as(ours).to(ours), rtol=1e-9, atol=1e-12)


KEYS = torch.tensor([[True, False, True, True, True]])


def attended(query: Tensor, key: Tensor, **options: Any) -> dict[str, Tensor]:
    return row_statistics(query, key, **options).as_dict()


def dense(query: Tensor, key: Tensor, **options: Any) -> dict[str, Tensor]:
    return dense_statistics(query, key, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("p", [0.3, 0.7])
def test_dropout_passes_gradcheck(p: float) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(5)
        out, stats = attention(
            query,
            key,
            value,
            visible(3, 5),
            enable_gqa=True,
            dropout_p=p,
            return_stats=True,
        )
        return out, stats.entropy.nan_to_num(0.0)

    assert torch.autograd.gradcheck(call, tensors())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_gradcheck_over_many_tiles(p: float) -> None:
    """Along random directions; the drawn weights are the forward pass's in every tile."""
    value = 1.0 + normal(2, 2, 600, 1, seed=2)
    inputs = normal(2, 4, 5, 2), normal(2, 2, 600, 2, seed=1), value
    # sinks as heavy as the 600 keys together
    added = normal(4, seed=3) + 6, normal(4, 1, 600, seed=4)

    def call(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        out, stats = attention(
            query,
            key,
            value,
            is_causal=True,
            query_offset=550,
            enable_gqa=True,
            sinks=sinks,
            bias=bias,
            dropout_p=p,
            return_stats=True,
        )
        return out, *(stats[name] for name in SMOOTH)

    # one random direction each way: gradcheck, when it fails here, takes minutes to say where
    variables = tuple(part.requires_grad_() for part in (*inputs, *added))
    steps = [normal(*part.shape, seed=index) for index, part in enumerate(variables, 6)]
    with torch.no_grad():
        ahead = call(*[part + 1e-6 * step for part, step in zip(variables, steps, strict=True)])
        behind = call(*[part - 1e-6 * step for part, step in zip(variables, steps, strict=True)])
    for result, after, before in zip(call(*variables), ahead, behind, strict=True):
        weights = normal(*result.shape, seed=11)
        found = torch.autograd.grad(
            (result * weights).sum(), variables, retain_graph=True, materialize_grads=True
        )
        slope = sum((part * step).sum() for part, step in zip(found, steps, strict=True))
        wanted = ((after - before) * weights).sum() / 2e-6
        torch.testing.assert_close(slope, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_gradient_is_nan_where_a_row_sees_nothing(name: str, dtype: torch.dtype) -> None:
    query, key = (part.detach().to(dtype).requires_grad_() for part in tensors()[:2])
    sinks = normal(4, seed=3).to(dtype).requires_grad_()
    bias = normal(3, 5, seed=4).to(dtype).requires_grad_()
    for options in ({}, {"sinks": sinks}, {"softcap": 3.0}):
        stats = row_statistics(
            query, key, attn_mask=visible(3, 5), bias=bias, enable_gqa=True, **options
        )
        assert stats.n_keys[0, :, 0].eq(0).all()
        total = stats[name].masked_fill(stats[name] == -torch.inf, torch.nan).nansum()
        variables = [query, key, bias, *([sinks] if "sinks" in options else [])]
        if not total.requires_grad:
            assert name == "sink_mass"
            continue
        for grad in torch.autograd.grad(total, variables, allow_unused=True):
            if grad is not None:
                assert grad.isfinite().all()
                if grad.shape == query.shape:
                    assert grad[0, :, 0].eq(0).all()


def test_an_output_row_that_sees_nothing_has_no_gradient() -> None:
    query, key, value = tensors()
    out = attention(query, key, value, torch.zeros(3, 5, dtype=torch.bool), enable_gqa=True)
    out.sum().backward()
    for tensor in (query, key, value):
        assert tensor.grad is not None
        assert tensor.grad.eq(0).all()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": normal(40, 300, seed=7) > 0.0},
        {"window": 20, "softcap": 4.0},
    ],
)
@pytest.mark.usefixtures("small_tiles")
def test_float32_gradients_over_many_tiles_are_the_dense_ones(options: dict[str, Any]) -> None:
    """Twice the error of dense float32 autograd, or 1e-5 of the largest entry."""

    def total(found: dict[str, Tensor], out: Tensor) -> Tensor:
        weights = normal(2, 4, 40, seed=8).to(out.dtype)
        names = (
            *("entropy", "varentropy", "lse", "collision", "logit_std", "first_weight"),
            *("top_weight", "max_gap", "mean_field_entropy"),
        )
        return (
            sum((found[name].nan_to_num(0.0) * weights).sum() for name in names)
            + (out * weights.unsqueeze(-1)).sum()
        )

    inputs = normal(2, 4, 40, 16), normal(2, 2, 300, 16, seed=1), normal(2, 2, 300, 8, seed=2)
    exact = [part.clone().requires_grad_() for part in inputs]
    found = dense_statistics(*exact, **options, enable_gqa=True)
    wanted = torch.autograd.grad(total(found, found["output"]), exact)
    single = [part.float().requires_grad_() for part in inputs]
    out, stats = attention(*single, **options, enable_gqa=True, return_stats=True)
    for ours, want in zip(torch.autograd.grad(total(stats, out), single), wanted, strict=True):
        assert ours.dtype == torch.float32
        assert (ours.double() - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_come_back_in_their_dtype(dtype: torch.dtype) -> None:
    inputs = [part.detach().to(dtype).requires_grad_() for part in tensors()]
    out, stats = attention(*inputs, enable_gqa=True, return_stats=True)
    (out.float().sum() + stats.entropy.sum()).backward()
    exact = [part.detach().double().requires_grad_() for part in inputs]
    found = dense_statistics(*exact, enable_gqa=True)
    (found["output"].sum() + found["entropy"].sum()).backward()
    for ours, want in zip(inputs, exact, strict=True):
        assert ours.grad is not None
        assert want.grad is not None
        assert ours.grad.dtype == dtype
        bound = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours.grad.double(), want.grad, rtol=bound, atol=bound)


def test_strides_do_not_matter() -> None:
    results = []
    for contiguous in (True, False):
        query = normal(2, 3, 4, 8).transpose(1, 2)
        bias = normal(5, 3).T
        leaves = [part.contiguous() if contiguous else part for part in (query, bias)]
        leaves = [part.detach().requires_grad_() for part in leaves]
        key = normal(2, 4, 5, 8, seed=1)
        out, stats = attention(leaves[0], key, key, bias=leaves[1], return_stats=True)
        results.append(torch.autograd.grad(out.sum() + stats.entropy.sum(), leaves))
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)


def test_only_what_is_asked_for_is_differentiated() -> None:
    query, key, value = tensors()
    out, stats = attention(query, key.detach(), value.detach(), enable_gqa=True, return_stats=True)
    (grad,) = torch.autograd.grad(out.sum() + stats.entropy.sum(), query)
    whole, everything = attention(query, key, value, enable_gqa=True, return_stats=True)
    (want,) = torch.autograd.grad(whole.sum() + everything.entropy.sum(), query)
    assert torch.equal(grad, want)
    with torch.no_grad():
        assert not attention(query, key, value, enable_gqa=True).requires_grad
    assert not stats.n_keys.requires_grad


def test_noise_gain_says_that_it_has_no_gradient() -> None:
    _, stats = attention(*tensors(), enable_gqa=True, return_stats=True, noise=True)
    assert stats.entropy.requires_grad
    assert not stats.noise_gain.requires_grad


def test_a_second_derivative_through_dropout_is_refused() -> None:
    query, key, value = tensors()
    out = attention(query, key, value, enable_gqa=True, dropout_p=0.5)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


# -- memory -----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the most elements that one tensor made inside holds."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, Tensor):
                size = part.untyped_storage().nbytes() // part.element_size()
                self.storage = max(self.storage, size)
        return result


def test_the_recorder_sees_a_matrix() -> None:
    query = torch.randn(1, 1, 256, 4)
    with Largest() as seen:
        torch.softmax(query @ query.mT, -1)
    assert seen.storage == 256 * 256


def test_statistics_can_be_a_loss() -> None:
    """Gradient descent on the entropy of one row reaches the target."""
    query = normal(1, 1, 1, 4).requires_grad_()
    key = normal(1, 1, 16, 4, seed=1)
    first = row_statistics(query, key).entropy.item()
    for _ in range(200):
        stats: RowStatistics = row_statistics(query, key)
        loss = (stats.entropy - 1.0).square().sum()
        (grad,) = torch.autograd.grad(loss, query)
        with torch.no_grad():
            query -= 0.5 * grad
    assert abs(first - 1.0) > 0.5
    assert row_statistics(query, key).entropy.item() == pytest.approx(1.0, abs=1e-3)
