"""Laws of the row state: any split, in any order, is the whole row."""

from __future__ import annotations

import itertools
import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acutance import row_statistics
from acutance.rowstats import (
    METRICS,
    RowState,
    RowStatistics,
    WeightStatistics,
    dense_statistics,
    empty,
    merge,
    merge_weights,
    observe,
    observe_weights,
)
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

FINITE = st.floats(-1e4, 1e4, allow_subnormal=False)
SCORES = st.lists(st.one_of(FINITE, st.just(-math.inf)), min_size=1, max_size=12)
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def values(keys: int, width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(keys)
    return torch.randn(keys, width, generator=generator, dtype=torch.float64)


def blocks(scores: Tensor, value: Tensor, cuts: list[int], sink: Tensor | None) -> list[RowState]:
    """A row cut at places, each block observed on its own."""
    edges = [0, *sorted(min(cut, scores.shape[-1]) for cut in cuts), scores.shape[-1]]
    return [
        observe(scores[..., a:b], None, value[a:b], sink=sink, first_key=a)
        for a, b in itertools.pairwise(edges)
        if a < b
    ]


def oracle(scores: Tensor, value: Tensor, sink: Tensor | None = None) -> dict[str, Tensor]:
    """The dense statistics of given scores, −inf hiding a key."""
    rows = scores.reshape(-1, scores.shape[-1])
    query = torch.ones(rows.shape[0], 1, 1, 1, dtype=torch.float64)
    key = rows.masked_fill(rows == -torch.inf, 0.0)[:, None, :, None]
    found = dense_statistics(
        query,
        key,
        value.expand(rows.shape[0], 1, *value.shape),
        scale=1.0,
        key_mask=rows != -torch.inf,
        sinks=None if sink is None else sink.reshape(1),
    )
    return {
        name: part.reshape((*scores.shape[:-1], *part.shape[3:]))
        for name, part in found.items()
        if name != "output"
    }


def well_posed(name: str, metrics: dict[str, Tensor], wanted: dict[str, Tensor]) -> Tensor:
    """A metric as a number that rounding moves little: what the first key leaves, times the gap."""
    value = metrics[name].double()
    if name == "first_gap":
        return torch.sigmoid(-value)
    if name == "rest_jensen_gap":
        return value * torch.sigmoid(-wanted["first_gap"])
    return value.square() if name == "rest_logit_std" else value


def assert_same(measured: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float) -> None:
    """Equal up to a tolerance, relative to the larger of the value and the row's own scores.

    What is made by subtracting (H from log n, a mean from a maximum) is as exact as its parts.
    """
    assert set(measured) == set(EXACT)
    size = 1.0 + wanted["max_logit"].abs().nan_to_num(0.0, neginf=0.0)
    size = size + wanted["logit_mean"].abs().nan_to_num(0.0) + wanted["logit_std"].nan_to_num(0.0)
    for name in EXACT:
        entry = METRICS[name]
        floor = size if entry.unit in ("logit", "nat", "nat²", "value²") else 1.0
        floor = size.square() if name == "rest_logit_std" else floor
        want, found = (well_posed(name, metrics, wanted) for metrics in (wanted, measured))
        assert torch.equal(found.isnan(), want.isnan()), name
        error = torch.where(found == want, 0.0, (found - want).abs()).nan_to_num(0.0)
        bound = rtol * torch.maximum(want.abs(), torch.as_tensor(floor).expand_as(want))
        assert (error <= bound.nan_to_num(0.0, posinf=0.0)).all(), (name, found, want)


def statistics(state: RowState) -> dict[str, Tensor]:
    return RowStatistics(state).as_dict()


@QUICK
@given(SCORES, st.lists(st.integers(0, 12), max_size=5), st.randoms(use_true_random=False))
def test_any_split_in_any_order_is_the_oracle(scores: list[float], cuts: list[int], random) -> None:
    row, value = torch.tensor(scores, dtype=torch.float64), values(len(scores))
    parts = blocks(row, value, cuts, None)
    random.shuffle(parts)
    assert_same(statistics(reduce(merge, parts)), oracle(row, value), 1e-12)


@QUICK
@given(SCORES, st.integers(0, 12), FINITE)
def test_a_sink_survives_the_split(scores: list[float], cut: int, sink: float) -> None:
    row, value = torch.tensor(scores, dtype=torch.float64), values(len(scores))
    logit = torch.tensor(sink, dtype=torch.float64)
    whole = reduce(merge, reversed(blocks(row, value, [cut], logit)))
    found, want = statistics(whole), oracle(row, value, logit)
    shift = abs(sink) + 1  # the sink's logit is as large as the row's
    for name in EXACT:
        size = shift + want["logit_std"].nan_to_num(0.0).item()
        torch.testing.assert_close(
            well_posed(name, found, want),
            well_posed(name, want, want),
            rtol=1e-12,
            atol=1e-12 * (size * size if name == "rest_logit_std" else size),
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@QUICK
@given(SCORES, SCORES, SCORES)
def test_merge_is_associative_and_commutative(
    a: list[float], b: list[float], c: list[float]
) -> None:
    rows = [torch.tensor(part, dtype=torch.float64) for part in (a, b, c)]
    starts = [0, len(a), len(a) + len(b)]
    x, y, z = (
        observe(row, None, values(len(row)), first_key=start)
        for row, start in zip(rows, starts, strict=True)
    )
    assert_same(statistics(merge(merge(x, y), z)), statistics(merge(x, merge(y, z))), 1e-13)
    assert_same(statistics(merge(x, y)), statistics(merge(y, x)), 1e-13)
    left, right = merge(x, y), merge(y, x)
    for name in ("n", "m", "first", "first_index", "sink"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name


@QUICK
@given(SCORES)
def test_the_empty_row_is_the_identity(scores: list[float]) -> None:
    row = torch.tensor(scores, dtype=torch.float64)
    state = observe(row, None, values(len(scores)))
    none = empty((), 3, dtype=torch.float64)
    for merged in (merge(none, state), merge(state, none)):
        for name, part, want in zip(RowState._fields, merged, state, strict=True):
            assert torch.equal(part, want), name
    for part, want in zip(merge(none, none), none, strict=True):
        assert torch.equal(part, want)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    clean = RowStatistics(merge(observe(rows[:, :4]), observe(rows[:, 4:], first_key=4)))
    rows[1, 6] = bad
    state = merge(observe(rows[:, :4]), observe(rows[:, 4:], first_key=4))
    dirty = RowStatistics(state)
    for name in dirty.available:
        assert torch.equal(dirty[name][[0, 2]], clean[name][[0, 2]]), name
    assert dirty.entropy[1].isnan()
    assert dirty.lse[1].isnan()
    assert dirty.n_keys.tolist() == [10, 10, 10]


def test_a_constant_shift_changes_only_where_the_scores_lie() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-20, 20, (5, 9), generator=generator).double()
    here, there = RowStatistics(observe(rows)), RowStatistics(observe(rows + 512.0))
    for name in here.available:
        moved = 512.0 if name in ("max_logit", "lse", "logit_mean") else 0.0
        torch.testing.assert_close(
            there[name].double(), here[name].double() + moved, rtol=1e-12, atol=1e-12, msg=name
        )
    assert torch.equal(there.entropy, here.entropy)


def test_a_masked_row_is_the_shorter_row() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    kept = torch.tensor([True, False, True, True, False, False, True, False])
    value = values(8)
    whole = observe(rows, kept, value)
    short = observe(rows[:, kept], None, value[kept])
    hidden = observe(rows.masked_fill(~kept, -torch.inf), None, value)
    for name in RowState._fields:
        torch.testing.assert_close(getattr(whole, name), getattr(short, name), rtol=0, atol=1e-15)
        assert torch.equal(getattr(whole, name), getattr(hidden, name)), name
    late = observe(rows, torch.tensor([False, True] * 4), value, first_key=0)
    assert late.first_index.eq(1).all()
    assert torch.equal(late.first, rows[:, 1])


def test_first_key_places_the_first_key() -> None:
    row = torch.tensor([3.0, 1.0, 2.0])
    left, right = observe(row[:1]), observe(row[1:], first_key=1)
    for state in (merge(left, right), merge(right, left)):
        assert state.first.item() == 3.0
        assert state.first_index.item() == 0
    assert merge(observe(row[1:]), observe(row[:1])).first.item() == 1.0, "a tie is the left's"


@pytest.mark.parametrize("with_values", [False, True])
def test_states_and_metrics_pass_through_vmap(with_values: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(4, 2, 10, generator=generator, dtype=torch.float64)
    rows[1, 0] = -torch.inf
    value = torch.randn(4, 1, 10, 3, generator=generator, dtype=torch.float64)

    def see(scores: Tensor, value: Tensor, first_key: int) -> RowState:
        return observe(scores, None, value if with_values else None, first_key=first_key)

    def of_one(scores: Tensor, value: Tensor) -> dict[str, Tensor]:
        left, right = (
            see(scores[..., :4], value[..., :4, :], 0),
            see(scores[..., 4:], value[..., 4:, :], 4),
        )
        return statistics(merge(left, right))

    mapped, plain = torch.vmap(of_one)(rows, value), of_one(rows, value)
    assert set(mapped) == set(plain)
    assert ("noise_gain" in mapped) is with_values
    for name, part in plain.items():
        torch.testing.assert_close(mapped[name], part, equal_nan=True, rtol=1e-14, atol=1e-14)

    # and one after the other: states are what goes in and what comes out
    left = torch.vmap(lambda s, v: see(s, v, 0))(rows[..., :4], value[..., :4, :])
    right = torch.vmap(lambda s, v: see(s, v, 4))(rows[..., 4:], value[..., 4:, :])
    whole = torch.vmap(merge)(left, right)
    assert isinstance(whole, RowState)
    for name in plain:
        metric = torch.vmap(METRICS[name].compute)(whole)
        torch.testing.assert_close(metric, plain[name], equal_nan=True, rtol=1e-14, atol=1e-14)


SMOOTH = [name for name in EXACT if name not in ("n_keys", "noise_gain", "sink_mass")]


@pytest.mark.parametrize("sink", [None, 0.3])
def test_gradients_of_merged_metrics(sink: float | None) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(3, 7, generator=generator, dtype=torch.float64).requires_grad_()
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[0, 2], mask[1] = False, False
    logit = None if sink is None else torch.tensor(sink, dtype=torch.float64)

    def merged(scores: Tensor) -> Tensor:
        parts = [
            observe(scores[:, a:b], mask[:, a:b], sink=logit, first_key=a)
            for a, b in ((5, 7), (0, 1), (1, 5))
        ]
        found = statistics(reduce(merge, parts))
        return torch.stack([found[name] for name in SMOOTH]).nan_to_num(0.0, neginf=0.0)

    assert torch.autograd.gradcheck(merged, (scores,))


@pytest.mark.parametrize("name", SMOOTH)
def test_a_row_without_keys_has_a_gradient_of_zero(name: str) -> None:
    scores = torch.tensor([[1.0, 2.0, 0.5], [-1.0, 3.0, 2.0], [0.1, 0.2, 0.4]]).requires_grad_()
    mask = torch.tensor([[True, True, True], [False, False, False], [False, True, False]])
    whole = merge(observe(scores[:, :2], mask[:, :2]), observe(scores[:, 2:], mask[:, 2:]))
    METRICS[name].compute(whole).nan_to_num(neginf=0.0).nansum().backward()
    assert scores.grad is not None
    assert torch.equal(scores.grad[1], torch.zeros(3))
    assert scores.grad.isfinite().all()
    assert scores.grad[2, [0, 2]].eq(0).all(), "hidden keys"


def test_noise_gain_carries_no_gradient() -> None:
    scores = torch.zeros(1, 4, requires_grad=True)
    assert not RowStatistics(observe(scores, None, torch.randn(4, 2))).noise_gain.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_summed_in_float32_at_least(dtype: torch.dtype) -> None:
    state = observe(torch.linspace(-4, 4, 9, dtype=dtype))
    assert state.Z.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert empty((2,), dtype=torch.float64).Z.dtype == torch.float64
    merged = merge(state, empty((), dtype=state.Z.dtype))
    assert merged.mean.dtype == state.mean.dtype


@pytest.mark.parametrize("value", [None, torch.zeros(2, 0, 3)])
def test_no_keys_at_all_are_the_empty_rows(value: Tensor | None) -> None:
    got = observe(torch.zeros(2, 0), value=value, sink=torch.ones(2))
    want = empty((2,), None if value is None else 3)
    assert got.sink.tolist() == [1.0, 1.0]
    for name in set(got._fields) - {"sink"}:
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_first_weight_follows_the_order_of_parts_whose_first_keys_are_hidden() -> None:
    """Three parts merged left to right, in either grouping, and out of order with first_key."""
    scores = torch.tensor([[-torch.inf, 0.3, -1.0, 2.0], [0.1, 0.3, -1.0, 2.0], [-torch.inf] * 4])
    scores[2, 3] = 1.0
    whole = RowStatistics(observe(scores)).first_weight
    cuts = [(0, 2), (2, 3), (3, 4)]
    a, b, c = (observe(scores[:, i:j]) for i, j in cuts)
    placed = [observe(scores[:, i:j], first_key=i) for i, j in cuts]
    joints = (
        merge(merge(a, b), c),
        merge(a, merge(b, c)),
        merge(merge(empty((3,)), a), merge(b, c)),
        merge(placed[2], merge(placed[1], placed[0])),
    )
    for joint in joints:
        torch.testing.assert_close(RowStatistics(joint).first_weight, whole)
    assert joints[-1].first_index.tolist() == [1, 0, 3]
    parts = [observe_weights(scores[:, i:j].exp(), scores[:, i:j] > -torch.inf) for i, j in cuts]
    sums = merge_weights(merge_weights(parts[0], parts[1]), parts[2])
    assert sums.first.tolist() == pytest.approx([math.exp(0.3), math.exp(0.1), math.exp(1.0)])


@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_statistics_of_two_blocks_of_keys_merge_left_to_right(backend: str) -> None:
    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 6, 4)
    mask = torch.ones(1, 1, 3, 6, dtype=torch.bool)
    mask[..., 0] = False
    mask[:, :, 2, :3] = False
    whole = row_statistics(query, key, attn_mask=mask, backend=backend)
    left, right = (
        row_statistics(query, key[:, :, part], attn_mask=mask[..., part], backend=backend)
        for part in (slice(3), slice(3, 6))
    )
    joint = left.merge(right)
    for name in ("first_weight", "entropy", "n_keys", "lse"):
        torch.testing.assert_close(joint[name], whole[name], msg=name)


def test_what_is_no_tensor_or_state_is_named() -> None:
    stats = RowStatistics(observe(torch.zeros(2, 3)))
    with pytest.raises(TypeError, match=r"^scores must be a Tensor, got list$"):
        observe([0.0, 1.0])  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"^scores must be a dense Tensor, got layout torch.sparse_coo"
    ):
        observe(torch.ones(3).to_sparse())
    with pytest.raises(TypeError, match=r"^mask must be a Tensor, got list$"):
        observe(torch.zeros(2), [True, False])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^weights must be a Tensor, got list$"):
        observe_weights([0.0, 1.0])  # type: ignore[arg-type]
    message = "^merge needs two RowState, got RowStatistics: pass its .state$"
    with pytest.raises(TypeError, match=message):
        merge(stats, stats)  # type: ignore[arg-type]
    sums = WeightStatistics(observe_weights(torch.ones(2, 3)))
    message = "^merge_weights needs two WeightSums, got WeightStatistics: pass its .sums$"
    with pytest.raises(TypeError, match=message):
        merge_weights(sums, sums)  # type: ignore[arg-type]
    for mine, other in ((stats, stats.state), (sums, sums.sums)):
        with pytest.raises(
            TypeError, match=r"Statistics can be merged only with .*Statistics, got "
        ):
            mine.merge(other)  # type: ignore[arg-type]
