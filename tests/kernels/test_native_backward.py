"""The native kernel's backward pass against the blocked one in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance import attend
from acutance.kernels import blocked, library, native
from acutance.kernels.backward import backward as blocked_backward
from acutance.kernels.call import Gradients, KernelCall, SumGradients, Sums
from acutance.masks import Masking

FOUND = library.load()
pytestmark = pytest.mark.skipif(isinstance(FOUND, str), reason=str(FOUND))
CPUS = () if isinstance(FOUND, str) else FOUND.cpus
INPUTS = (True, True, True, False, False, False)


@pytest.fixture(params=CPUS or ("none",))
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with each instruction set of this machine and build."""
    assert not isinstance(FOUND, str)
    before = FOUND.cpu
    FOUND.use_cpu(request.param)
    yield request.param
    FOUND.use_cpu(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are done before a second thread has come."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def hidden_rows(queries: int, keys: int) -> Tensor:
    """A boolean mask with a row that sees nothing and one that sees a single key."""
    mask = normal(queries, keys, seed=9) > -0.4
    mask[0] = False
    mask[1] = torch.arange(keys) == keys // 2
    return mask


#: Options of the masks, from (batch, query heads, queries, keys).
MASKS: dict[str, Callable[[int, int, int, int], dict[str, Any]]] = {
    "none": lambda b, h, l, s: {},
    "causal": lambda b, h, l, s: {"causal": True, "offset": s - l},
    "causal without keys": lambda b, h, l, s: {"causal": True, "offset": -7},
    "window": lambda b, h, l, s: {"window": 40},
    "causal window": lambda b, h, l, s: {"window": 33, "causal": True, "offset": 5},
    "padding": lambda b, h, l, s: {"key_mask": torch.arange(s).expand(b, s) > 19},
    "some keys": lambda b, h, l, s: {"key_mask": normal(b, s, seed=3) > 0},
    "allowed": lambda b, h, l, s: {"attn_mask": hidden_rows(l, s)},
    "allowed heads": lambda b, h, l, s: {"attn_mask": normal(1, h, l, s, seed=3) > 0},
    "additive": lambda b, h, l, s: {
        "attn_mask": normal(l, s, seed=3).masked_fill(~hidden_rows(l, s), -torch.inf)
    },
    "bias": lambda b, h, l, s: {"bias": normal(h, 1, s, seed=3), "causal": True},
    "documents": lambda b, h, l, s: {
        "query_documents": torch.arange(l).expand(b, l) // 30,
        "key_documents": torch.arange(s).expand(b, s) // 40,
    },
    "slopes": lambda b, h, l, s: {"alibi_slopes": 0.1 * normal(h, seed=5).abs(), "causal": True},
}
RULES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": normal(4, seed=8)},
}


class Case:
    """One call with a random gradient for each of its results."""

    def __init__(
        self,
        dtype: torch.dtype,
        options: dict[str, Any],
        rule: dict[str, Any] | None = None,
        sizes: tuple[int, ...] = (2, 2, 2, 70, 150, 20, 12),
        fields: tuple[str, ...] = SumGradients._fields,
    ) -> None:
        batch, heads, group, queries, keys, width, value_width = sizes
        self.query = normal(batch, heads * group, queries, width).to(dtype)
        self.key = normal(batch, heads, keys, width, seed=1).to(dtype)
        self.value: Tensor | None = None
        if value_width:
            self.value = normal(batch, heads, keys, value_width, seed=2).to(dtype)
        self.masking = Masking(
            batch=batch, heads=heads, group=group, queries=queries, keys=keys, **options
        )
        self.rule = {"scale": width**-0.5, **(rule or {})}
        rows = self.query.shape[:3]
        self.grads = {name: normal(*rows, seed=50 + i) for i, name in enumerate(fields)}
        if "out" in fields:
            self.grads["out"] = normal(*rows, value_width, seed=49).to(dtype).double()

    def gradients(self, sums: Sums, dtype: torch.dtype) -> SumGradients:
        """Those given, but none for the sums of a row that sees nothing."""
        given: dict[str, Tensor | None] = dict.fromkeys(SumGradients._fields)
        for name, part in self.grads.items():
            seen = sums.n.unsqueeze(-1) if name == "out" else sums.n
            given[name] = torch.where(seen == 0, 0.0, part).to(dtype)
        return SumGradients(**given)

    def native(self) -> Gradients:
        call = KernelCall(self.query, self.key, self.value, self.masking, **self.rule)
        sums = native.forward(call)
        return native.backward(self.gradients(sums, sums.Z.dtype), sums, call, self.wanted)

    def exact(self) -> Gradients:
        value = None if self.value is None else self.value.double()
        call = KernelCall(self.query.double(), self.key.double(), value, self.masking, **self.rule)
        sums = blocked.forward(call)
        return blocked_backward(self.gradients(sums, torch.float64), sums, call, self.wanted)

    @property
    def wanted(self) -> tuple[bool, ...]:
        return (True, True, self.value is not None, False, False, "sinks" in self.rule)

    def check(self, bound: float) -> None:
        """Errors within ``bound`` times the largest entry, or one rounding to the dtype."""
        half = self.query.dtype in (torch.bfloat16, torch.float16)
        for name, ours, want in zip(Gradients._fields, self.native(), self.exact(), strict=True):
            assert (ours is None) == (want is None)
            if ours is None or want is None:
                continue
            unit = torch.finfo(ours.dtype).eps if half else 0.0
            error = (ours.double() - want).abs() - unit * want.abs()
            assert error.max() <= bound * want.abs().max(), name


#: float32 sums of a few hundred products round to 3e-6 of the largest entry at most.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}


@pytest.mark.grid
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str, dtype: torch.dtype) -> None:
    options = MASKS[mask](2, 4, 70, 150)
    Case(dtype, options).check(BOUNDS[dtype])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_with_softcap_and_sinks(mask: str, rule: str) -> None:
    Case(torch.float64, MASKS[mask](2, 4, 70, 150), RULES[rule]).check(1e-12)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["none", "causal", "allowed"])
def test_half_precision(mask: str, dtype: torch.dtype) -> None:
    Case(dtype, MASKS[mask](2, 4, 70, 150)).check(BOUNDS[dtype])


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("sizes", [(1, 1, 2, 37, 45, 7, 0), (1, 1, 1, 130, 257, 33, 80)])
@pytest.mark.parametrize("field", SumGradients._fields)
def test_one_gradient_alone(field: str, sizes: tuple[int, ...]) -> None:
    """Most coefficients are then null; sizes are those no vector divides."""
    if field == "out" and sizes[-1] == 0:
        sizes = (*sizes[:-1], 3)
    case = Case(torch.float64, {"causal": True}, sizes=sizes, fields=(field,))
    case.check(1e-12)


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
def test_only_what_is_asked_for(wanted: tuple[int, ...]) -> None:
    case = Case(torch.float32, {"causal": True})
    call = KernelCall(case.query, case.key, case.value, case.masking, **case.rule)
    sums = native.forward(call)
    asked = (*(bool(part) for part in wanted), False, False, False)
    found = native.backward(case.gradients(sums, torch.float32), sums, call, asked)
    for ours, whole, want in zip(found[:3], case.native()[:3], wanted, strict=True):
        assert (ours is not None) == bool(want)
        if ours is not None and whole is not None:
            assert torch.equal(ours, whole)


@pytest.mark.parametrize("mask", ["none", "causal", "causal window", "allowed"])
def test_keys_shared_out_over_threads(mask: str) -> None:
    """One head's keys are cut into chunks, whose sums add up in the same order every time."""
    for queries, keys in ((300, 700), (5, 900)):
        options = MASKS[mask](1, 1, queries, keys)
        for count in (3, 8):
            torch.set_num_threads(count)
            case = Case(torch.float64, options, sizes=(1, 1, 1, queries, keys, 8, 8))
            case.check(1e-12)
            for first, again in zip(case.native(), case.native(), strict=True):
                assert first is None or (again is not None and torch.equal(first, again))


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("count", [1, 4])
def test_the_earliest_of_the_largest_has_their_gradient(count: int) -> None:
    torch.set_num_threads(count)
    key = torch.zeros(1, 1, 700, 4)
    key[..., 300::200, 0] = 1.0  # keys 300, 500: equal and largest where the query is positive
    query = torch.tensor([1.0, -1.0, 2.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4).contiguous()
    query.requires_grad_()
    key.requires_grad_()
    stats = attend.row_statistics(query, key, scale=1.0, backend="native")
    stats.max_logit.sum().backward()
    assert key.grad is not None
    assert query.grad is not None
    assert key.grad[0, 0].nonzero()[:, 0].unique().tolist() == [0, 300]
    assert torch.equal(key.grad[0, 0, 300], query.detach()[0, 0, [0, 2]].sum(0))
    assert torch.equal(key.grad[0, 0, 0], query.detach()[0, 0, 1])
    assert query.grad[0, 0].sum(-1).tolist() == [1.0, 0.0, 1.0]


# -- what is no number --------------------------------------------------------------------------


def spoilt(options: dict[str, Any], where: str, rows: Any) -> tuple[Gradients, Gradients]:
    """Gradients of a clean call, and of one that holds NaN in some rows of an input."""
    cases = [Case(torch.float32, options, sizes=(1, 1, 2, 150, 260, 20, 12)) for _ in range(2)]
    getattr(cases[1], where)[:, :, rows] = torch.nan
    clean, dirty = (case.native() for case in cases)
    return clean, dirty


def same(left: Tensor | None, right: Tensor | None, rows: Any) -> bool:
    assert left is not None
    assert right is not None
    return torch.equal(left[:, :, rows], right[:, :, rows])


@pytest.mark.usefixtures("cpu")
def test_hidden_keys_may_hold_anything() -> None:
    seen = torch.arange(260) < 200
    seen[[3, 77]] = False
    clean, dirty = spoilt({"key_mask": seen.view(1, -1)}, "key", ~seen)
    assert all(same(*pair, slice(None)) for pair in zip(clean[:3], dirty[:3], strict=True))
    assert dirty.key is not None
    assert dirty.key[:, :, ~seen].eq(0).all()


@pytest.mark.usefixtures("cpu")
def test_queries_that_see_nothing_may_hold_anything() -> None:
    mask = normal(150, 260, seed=4) > 0
    mask[[5, 40]] = False
    clean, dirty = spoilt({"attn_mask": mask}, "query", [5, 40])
    assert all(same(*pair, slice(None)) for pair in zip(clean[:3], dirty[:3], strict=True))
    assert dirty.query is not None
    assert dirty.query[:, :, [5, 40]].eq(0).all()


@pytest.mark.usefixtures("cpu")
def test_nan_reaches_only_what_sees_it() -> None:
    clean, dirty = spoilt({"causal": True}, "key", 100)
    assert same(clean.query, dirty.query, slice(100))
    assert dirty.query is not None
    assert dirty.query[:, :, 100:].isnan().all()
    clean, dirty = spoilt({"causal": True}, "query", 40)
    assert same(clean.key, dirty.key, slice(41, None))
    assert same(clean.value, dirty.value, slice(41, None))
    assert same(clean.query, dirty.query, slice(40))
    assert same(clean.query, dirty.query, slice(41, None))
