"""Rows of linear attention are those of the whole matrix of weights, at any length."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import acutance
from acutance import theory
from acutance.kernels.whole_rows import BLOCK_ELEMENTS
from acutance.mechanisms import FEATURE_MAPS, MECHANISMS, retnet_decays
from acutance.rowstats import WeightStatistics, observe_weights
from acutance.scores import Features
from acutance.weights import Identity, ReLU

BY_SUM = ReLU(normalize="sum")
DECAYS = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)


def definition(name: str, x: Tensor) -> Tensor:
    """Feature maps as their papers write them."""
    if name == "elu1":
        return torch.nn.functional.elu(x) + 1
    if name == "hedgehog":
        e = torch.cat([x.exp(), (-x).exp()], -1)
        return e / e.sum(-1, keepdim=True)
    if name == "softmax":
        return x.exp() / x.exp().sum(-1, keepdim=True)
    maps = {"identity": x, "relu": x * (x > 0), "relu2": (x * (x > 0)) ** 2, "exp": x.exp()}
    return maps[name]


def products(query_map: str, key_map: str, query: Tensor, key: Tensor) -> Tensor:
    """φ_q(q)·φ_k(k) in float64, (B, Hq, L, S), for query heads that share key heads."""
    k = definition(key_map, key.double()).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return definition(query_map, query.double()) @ k.mT


def tensors(
    rows: int, keys: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows * 1000 + keys)
    shapes = (2, heads[0], rows, 5), (2, heads[1], keys, 5), (2, heads[1], keys, 3)
    query, key, value = (torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes)
    return query, key, value


def gates(x: Tensor) -> Tensor:
    """Gates that depend on the keys, their logarithms (B, H, S)."""
    return logsigmoid(2 + x[..., 0])


def constant(decays: Tensor) -> Any:
    """The same gate at every key of a head."""
    return lambda x: decays.to(x).log()[:, None].expand(x.shape[:3])


@pytest.mark.parametrize("gated", ["", "decay", "gates"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("maps", [*((name, name) for name in FEATURE_MAPS), ("exp", "relu")])
def test_rows_are_those_of_the_whole_matrix(
    maps: tuple[str, str], is_causal: bool, gated: str
) -> None:
    """One map or two, without and with decays and gates, in several blocks of rows."""
    query, key, value = tensors(270, 1100)
    a = products(*maps, query, key)
    place, keys = torch.arange(270)[:, None] + 830, torch.arange(1100)
    log_gate = {"": None, "decay": constant(DECAYS[:2]), "gates": gates}[gated]
    if log_gate is not None:
        total = log_gate(key).cumsum(-1).repeat_interleave(2, 1)
        a = a * (total[:, :, 830:, None] - total[:, :, None]).abs().neg().exp()
    seen = torch.ones_like(a, dtype=torch.bool) & (~torch.tensor(is_causal) | (keys <= place))
    a = torch.where(seen, a, 0.0)
    signed = maps == ("identity", "identity")
    out, stats = acutance.attention(
        query, key, value, is_causal=is_causal, query_offset=830, enable_gqa=True,
        score=Features(FEATURE_MAPS[maps[0]], FEATURE_MAPS[maps[1]], log_gate),
        weights=Identity(normalize="none") if signed else BY_SUM, return_stats=True,
    )  # fmt: skip
    exact = WeightStatistics(observe_weights(a, seen, distribution=not signed))
    share = a if signed else a / a.sum(-1, keepdim=True).clamp(min=1e-300)
    want = share @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-10 * float(want.abs().max()))
    assert set(exact.available) <= set(stats.available)
    assert ("entropy" in exact.available) != signed
    for name in exact.available:
        torch.testing.assert_close(stats[name], exact[name], rtol=1e-9, atol=1e-11, equal_nan=True)


PLAIN = [name for name in MECHANISMS if name.startswith("linear_") and name != "linear_gated"]


@pytest.mark.parametrize("name", PLAIN)
def test_the_table_s_rows_are_those_of_the_whole_matrix(name: str) -> None:
    query, key, value = tensors(30, 60)
    maps = name.removeprefix("linear_"), name.removeprefix("linear_")
    if name == "linear_two_maps":
        maps = "exp", "relu"
    _, stats = MECHANISMS[name].run(query, key, value)
    distribution = name != "linear_identity"
    exact = WeightStatistics(
        observe_weights(products(*maps, query, key), distribution=distribution)
    )
    for metric in exact.available:
        torch.testing.assert_close(
            stats[metric], exact[metric], rtol=1e-9, atol=1e-12, equal_nan=True
        )


def test_cosformer_is_its_definition() -> None:
    query, key, value = tensors(20, 60)
    place = torch.arange(20, dtype=torch.float64)[:, None] + 40
    cosine = torch.cos(math.pi / 2 * (place - torch.arange(60)) / 60)
    a = products("relu", "relu", query, key) * cosine
    out, stats = MECHANISMS["cosformer"].run(query, key, value, query_offset=40)
    exact = WeightStatistics(observe_weights(a, distribution=True))
    total = a.sum(-1, keepdim=True)
    share = torch.where(total > 0, a / total, 0.0)
    torch.testing.assert_close(out, share @ value.repeat_interleave(2, 1))
    for name in exact.available:
        torch.testing.assert_close(stats[name], exact[name], rtol=1e-9, atol=1e-9, equal_nan=True)


def test_retention_is_the_published_parallel_form() -> None:
    query, key, value = tensors(30, 30)
    decays = 1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64))
    torch.testing.assert_close(decays, retnet_decays(4, dtype=torch.float64))
    n, m = torch.arange(30)[:, None], torch.arange(30)
    D = torch.where(n >= m, decays[:, None, None] ** (n - m).clamp(min=0), 0.0)
    a = products("identity", "identity", query, key) * 5**-0.5 * D
    out, stats = MECHANISMS["retention"].run(query, key, value)
    torch.testing.assert_close(out, a @ value.repeat_interleave(2, 1))
    exact = WeightStatistics(observe_weights(a, n >= m))
    for name in exact.available:
        torch.testing.assert_close(stats[name], exact[name], rtol=1e-9, atol=1e-12)


def test_the_recurrence_runs_as_it_is_written() -> None:
    query, key, value = tensors(30, 30)
    form: Any = MECHANISMS["lru"].form
    decay, B, C, D = form._parameters(3, value)
    state, outputs = torch.zeros(2, 2, 64, dtype=torch.complex128), []
    for u in value.unbind(2):
        state = decay * state + u.to(B.dtype) @ B.mT
        outputs.append((state @ C.mT).real + D * u)
    out, stats = MECHANISMS["lru"].run(query, key, value)
    torch.testing.assert_close(out, torch.stack(outputs, 2).repeat_interleave(2, 1))
    age = torch.arange(29, -1, -1)
    row = WeightStatistics(observe_weights(decay.abs()[:, None] ** age, distribution=True))
    assert bool(((decay.abs() >= 0.9) & (decay.abs() <= 0.999)).all())
    for name in row.available:
        torch.testing.assert_close(stats[name][0, :, -1], row[name])


@pytest.mark.parametrize("gated", [False, True])
def test_long_float32_rows_keep_their_digits(gated: bool) -> None:
    n = 200_000
    query, key, value = (x[:1] for x in tensors(3, n, (1, 1), torch.float32))
    score = Features(torch.exp, torch.relu, gates if gated else None)
    out, stats = acutance.attention(
        query, key, value, is_causal=True, query_offset=n - 3, score=score, weights=BY_SUM,
        return_stats=True,
    )  # fmt: skip
    a = products("exp", "relu", query, key)
    if gated:
        total = gates(key.double()).cumsum(-1)
        a = a * (total[:, :, -3:, None] - total[:, :, None]).clamp(max=0).exp()
    seen = torch.arange(n) <= torch.arange(n - 3, n)[:, None]
    a = torch.where(seen, a, 0.0)
    torch.testing.assert_close(
        out.double(), a @ value.double() / a.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5
    )
    exact = WeightStatistics(observe_weights(a, seen, distribution=True))
    for name in ("entropy", "effective_keys", "sparsity", "top_weight"):
        torch.testing.assert_close(stats[name].double(), exact[name], rtol=2e-5, atol=0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest storage that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                size = leaf.untyped_storage().nbytes() // max(1, leaf.element_size())
                self.elements = max(self.elements, size)
        return out


@pytest.mark.parametrize("name", ["linear_elu1", "linear_two_maps", "linear_gated", "retention"])
def test_no_tensor_is_larger_than_two_blocks_of_rows(name: str) -> None:
    """A matrix of 4096 rows and keys would be eight of them."""
    x = torch.randn(1, 1, 4096, 8)
    assert x.shape[2] ** 2 > 8 * 2 * BLOCK_ELEMENTS - 1
    largest = Largest()
    with torch.no_grad(), largest:
        MECHANISMS[name].run(x, x, x, is_causal=True)
    assert largest.elements <= 2 * BLOCK_ELEMENTS


def test_the_watch_sees_a_matrix() -> None:
    x = torch.randn(1, 1, 2048, 8)
    largest = Largest()
    with largest:
        x @ x.mT
    assert largest.elements >= 2048**2


def test_rows_carry_their_gradient() -> None:
    query, key, value = (x.requires_grad_() for x in tensors(7, 7, (2, 1)))
    bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    layer = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Softplus()).double()

    def log_gate(x: Tensor) -> Tensor:
        return logsigmoid(x[..., 0] + bias)

    out, stats = acutance.attention(
        query, key, value, is_causal=True, enable_gqa=True, weights=BY_SUM, return_stats=True,
        score=Features(layer, layer, log_gate),
    )  # fmt: skip
    total = log_gate(key).cumsum(-1)
    a = layer(query) @ layer(key).mT
    a = (a * (total[..., :, None] - total[..., None, :]).abs().neg().exp()).tril()
    exact = WeightStatistics(
        observe_weights(a, torch.ones(7, 7, dtype=torch.bool).tril(), distribution=True)
    )
    leaves = [query, key, value, bias, *layer.parameters()]
    names = ("entropy", "effective_keys", "sparsity", "first_weight")

    def gradients(output: Tensor, rows: WeightStatistics) -> tuple[Tensor, ...]:
        loss = output.sin().sum() + sum(rows[name].sin().sum() for name in names)
        return torch.autograd.grad(loss, leaves)

    got, want = gradients(out, stats), gradients(a / a.sum(-1, keepdim=True) @ value, exact)
    torch.testing.assert_close(got, want)


def test_theory_predicts_the_sparsity_of_random_features() -> None:
    """q' given, k' of independent components: S = (1 + (σ/μ)² ‖q‖²/‖q‖₁²)^(−1/2)."""
    draw = torch.Generator().manual_seed(5)
    query = torch.rand(1, 1, 3, 8, generator=draw, dtype=torch.float64)
    key = torch.rand(1, 1, 65536, 8, generator=draw, dtype=torch.float64)
    _, stats = MECHANISMS["linear_relu"].run(query, key, key)
    for row in range(3):
        want = theory.predict("linear", 65536, q=query[0, 0, row].numpy(), mu=0.5, sigma=12**-0.5)
        # the relative error of a second moment over 65536 keys is about 1/256 of 1 − S²
        assert stats.sparsity[0, 0, row].item() == pytest.approx(want.sparsity, rel=2e-3)
