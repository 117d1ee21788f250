"""Derivatives by `torch.func`, in forward mode and of second order, against differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from acutance import attention, row_statistics
from acutance.mechanisms import FEATURE_MAPS
from acutance.scaling import LogN
from acutance.scores import Features
from acutance.weights import ReLU
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

pytestmark = [
    # torch's own, from its decompositions for forward mode and from torch.compile of torch.func
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]
BACKENDS = ["native", "blocked"]
STEP = 1e-6
#: a metric that has no gradient has no tangent
MOVING = [name for name in EXACT if name not in ("n_keys", "sink_mass", "noise_gain")]


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


#: (1, 4, 5, 6) queries on 7 keys of 2 heads
QUERY, KEY, VALUE = (
    normal(1, 4, 5, 6, seed=0),
    normal(1, 2, 7, 6, seed=1),
    normal(1, 2, 7, 3, seed=2),
)
BIAS, SINKS = normal(4, 5, 7, seed=3), normal(4, seed=4)
TANGENTS = tuple(normal(*part.shape, seed=5) for part in (QUERY, KEY, VALUE, BIAS, SINKS))
INPUTS = (QUERY, KEY, VALUE, BIAS, SINKS)


def weighed(backend: Any) -> Callable[..., Tensor]:
    """A function of all that has a derivative, of the output and of every metric."""
    shares = normal(len(MOVING), seed=6)
    masks: dict[str, Any] = {"is_causal": True, "query_offset": 2, "window": 4, "softcap": 3.0}
    masks["key_mask"] = torch.arange(7)[None] != 3

    def function(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        out, stats = attention(
            query, key, value, enable_gqa=True, return_stats=True, bias=bias, sinks=sinks,
            backend=backend, **masks,
        )  # fmt: skip
        total = out.square().sum()
        for name, share in zip(MOVING, shares, strict=True):
            total = total + share * stats[name].sum()
        return total

    return function


def difference(function: Callable[..., Tensor]) -> Tensor:
    """Its derivative along the tangents, by central differences."""

    def at(step: float) -> Tensor:
        return function(*(x + step * t for x, t in zip(INPUTS, TANGENTS, strict=True)))

    return (at(STEP) - at(-STEP)) / (2 * STEP)


def dual(function: Callable[..., Tensor]) -> Tensor:
    with forward_ad.dual_level():
        found = function(*map(forward_ad.make_dual, INPUTS, TANGENTS))
        return forward_ad.unpack_dual(found).tangent


def along(gradients: tuple[Tensor, ...]) -> Tensor:
    return sum((g * t).sum() for g, t in zip(gradients, TANGENTS, strict=True))


EVERY = tuple(range(len(INPUTS)))
WAYS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {
    "jvp": lambda f: jvp(f, INPUTS, TANGENTS)[1],
    "dual level": dual,
    "jacfwd": lambda f: along(jacfwd(f, EVERY)(*INPUTS)),
    "autograd jvp": lambda f: torch.autograd.functional.jvp(f, INPUTS, TANGENTS)[1],
    "grad": lambda f: along(grad(f, EVERY)(*INPUTS)),
    "vjp": lambda f: along(vjp(f, *INPUTS)[1](torch.ones((), dtype=torch.float64))),
    "jacrev": lambda f: along(jacrev(f, EVERY)(*INPUTS)),
    "vmap of grad": lambda f: along(
        tuple(g[1] for g in vmap(grad(f, EVERY))(*(torch.stack([x * 0.5, x]) for x in INPUTS)))
    ),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_way_to_a_derivative_is_that_of_differences(backend: str, way: str) -> None:
    function = weighed(backend)
    torch.testing.assert_close(WAYS[way](function), difference(function), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", MOVING)
def test_every_metric_has_the_tangent_that_its_gradient_says(name: str) -> None:
    def function(query: Tensor, key: Tensor, sinks: Tensor) -> Tensor:
        options: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "query_offset": 2}
        return row_statistics(query, key, sinks=sinks, **options)[name].sum()

    given, tangents = (QUERY, KEY, SINKS), (TANGENTS[0], TANGENTS[1], TANGENTS[4])
    found = jvp(function, given, tangents)[1]
    pulled = grad(function, (0, 1, 2))(*given)
    want = sum((g * t).sum() for g, t in zip(pulled, tangents, strict=True))
    assert want != 0
    torch.testing.assert_close(found, want)


def test_second_derivatives_are_those_of_differences() -> None:
    whole, shift = weighed("auto"), torch.zeros(6, dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return whole(QUERY + x, KEY, VALUE, BIAS, SINKS)

    def gradient(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x), x)[0]

    steps = torch.eye(6, dtype=torch.float64) * STEP
    want = torch.stack([(gradient(s) - gradient(-s)) / (2 * STEP) for s in steps])
    ways = {
        "hessian": lambda: hessian(function)(shift),
        "backward twice": lambda: torch.autograd.functional.hessian(function, shift),
        "reverse twice": lambda: jacrev(jacrev(function))(shift),
    }
    for name, way in ways.items():
        torch.testing.assert_close(way(), want, rtol=1e-5, atol=1e-5, msg=name)


def test_a_gradient_penalty_reaches_every_input() -> None:
    function = weighed("auto")
    given = [x.clone().requires_grad_() for x in INPUTS]
    first = torch.autograd.grad(function(*given), given, create_graph=True)
    penalty = sum(part.square().sum() for part in first)
    found = torch.autograd.grad(penalty, given)

    def penalised(*inputs: Tensor) -> Tensor:
        return sum(part.square().sum() for part in grad(function, EVERY)(*inputs))

    torch.testing.assert_close(along(found), difference(penalised), rtol=1e-5, atol=1e-5)


def test_vmap_is_a_loop() -> None:
    queries, keys = (
        torch.stack([QUERY, -QUERY, 2 * QUERY]),
        torch.stack([KEY, KEY.flip(2), -KEY], 3),
    )

    def function(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        out, stats = attention(query, key, VALUE, enable_gqa=True, return_stats=True)
        return out, stats.entropy

    found = vmap(function, (0, 3))(queries, keys)
    want = [function(q, k) for q, k in zip(queries, keys.unbind(3), strict=True)]
    for got, each in zip(found, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(each))


def test_vmap_goes_over_keys_and_values_of_whole_rows() -> None:
    def function(key: Tensor, value: Tensor) -> Tensor:
        out = attention(QUERY, key, value, enable_gqa=True, weights="relu2", is_causal=True)
        return out.square().sum()

    found = vmap(grad(function, (0, 1)))(torch.stack([KEY, -KEY]), torch.stack([VALUE, VALUE]))
    want = grad(function, (0, 1))(-KEY, VALUE)
    for got, each in zip(found, want, strict=True):
        torch.testing.assert_close(got[1], each)


LINEAR = Features(FEATURE_MAPS["elu1"], FEATURE_MAPS["elu1"])

#: calls that go by whole rows
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda q: attention(q, KEY, VALUE, enable_gqa=True, weights="relu2"),
    "cosine": lambda q: attention(
        q,
        KEY,
        VALUE,
        enable_gqa=True,
        score="cosine",
        scale=3.0,
        key_mask=torch.arange(7)[None] < 5,
    ),
    "scaled": lambda q: attention(q, KEY, VALUE, enable_gqa=True, scaling=LogN(train_length=3)),
    "linear": lambda q: attention(
        q, KEY, VALUE, enable_gqa=True, is_causal=True, score=LINEAR, weights=ReLU(normalize="sum")
    ),
    "linear statistics": lambda q: (
        row_statistics(q, KEY, enable_gqa=True, score=LINEAR, weights=ReLU(normalize="sum")).entropy
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_mechanisms_have_these_derivatives(case: str) -> None:
    def function(query: Tensor) -> Tensor:
        return OTHERS[case](query).square().sum()

    step = TANGENTS[0] * STEP
    want = (function(QUERY + step) - function(QUERY - step)) / (2 * STEP)
    for found in (
        jvp(function, (QUERY,), (TANGENTS[0],))[1],
        (grad(function)(QUERY) * TANGENTS[0]).sum(),
        (vmap(grad(function))(QUERY[None])[0] * TANGENTS[0]).sum(),
    ):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def test_a_compiled_tangent_is_the_tangent() -> None:
    def tangent(query: Tensor) -> Tensor:
        entropy = jvp(
            lambda q: row_statistics(q, KEY, enable_gqa=True).entropy, (query,), TANGENTS[:1]
        )
        return entropy[1]

    torch.compiler.reset()
    found = torch.compile(tangent, backend="eager")(QUERY)
    torch.compiler.reset()
    torch.testing.assert_close(found, tangent(QUERY))
    assert (found != 0).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("transform", [grad, vmap])
def test_a_compiled_transform_is_one_graph(transform: Callable[..., Any]) -> None:
    def function(query: Tensor) -> Tensor:
        out = attention(query, KEY, VALUE, enable_gqa=True, is_causal=True, query_offset=2)
        return out.square().sum()

    given = QUERY[None] if transform is vmap else QUERY
    torch.compiler.reset()
    found = torch.compile(transform(function), backend="eager", fullgraph=True)(given)
    torch.compiler.reset()
    torch.testing.assert_close(found, transform(function)(given))
