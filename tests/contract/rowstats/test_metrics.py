"""Each metric is what its definition says, and the table lists them all."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acutance import rowstats
from acutance.rowstats import (
    METRICS,
    Metric,
    NamedMetrics,
    RowStatistics,
    dense_statistics,
    merge,
    metric,
    observe,
)
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

ROWS = {
    "normal": [0.3, -1.2, 2.0, 0.7, -0.4, 1.1, 0.0, -2.2],
    "spread": [9.0, -14.0, 3.0, 8.5, -2.0, 0.0, 5.0, -30.0],
    "equal": [0.25] * 8,
    "two": [5.0, 5.0] + [-900.0] * 6,
    "one of many": [80.0] + [0.0] * 7,
    "far from 0": [1e4, 1e4 + 1, 1e4 - 2, 1e4 + 0.5, 1e4, 1e4, 1e4 - 3, 1e4 + 2],
}
SINKS = {"no sink": None, "low sink": -3.0, "sink": 0.5, "high sink": 12.0}


def both(row: list[float], sink: float | None) -> tuple[RowStatistics, dict[str, Tensor]]:
    """A row through the sums (in two blocks) and through the oracle."""
    scores = torch.tensor(row, dtype=torch.float64)
    value = torch.randn(
        len(row), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    logit = None if sink is None else torch.tensor(sink, dtype=torch.float64)
    parts = [
        observe(scores[a:b], None, value[a:b], sink=logit, first_key=a)
        for a, b in ((0, 3), (3, len(row)))
        if a < min(b, len(row))
    ]
    state = parts[0] if len(parts) == 1 else merge(*parts)
    oracle = dense_statistics(
        torch.ones(1, 1, 1, 1, dtype=torch.float64),
        scores.view(1, 1, -1, 1),
        value[None, None],
        scale=1.0,
        sinks=None if logit is None else logit.view(1),
    )
    return RowStatistics(state), {name: part.reshape(-1)[0] for name, part in oracle.items()}


@pytest.mark.grid(2)
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", EXACT)
def test_each_metric_is_its_definition(name: str, row: str, sink: str) -> None:
    stats, oracle = both(ROWS[row], SINKS[sink])
    if (name, row) in (("first_gap", "one of many"), ("rest_jensen_gap", "one of many")):
        lost = oracle["first_gap"] - stats.first_gap  # of the others' sum, below rounding
        oracle[name] += {"first_gap": -lost, "rest_jensen_gap": lost}[name]
    size = max(1.0, abs(oracle["max_logit"].item()))
    torch.testing.assert_close(
        stats[name].double(), oracle[name].double(), rtol=1e-12, atol=2e-15 * size
    )


def test_the_first_gap_ends_where_rounding_leaves_nothing_of_the_others() -> None:
    stats = RowStatistics(observe(torch.tensor([80.0] + [0.0] * 7)))
    assert stats.first_gap.item() == pytest.approx(-math.log(torch.finfo(torch.float32).eps))
    assert stats.first_weight.item() == 1.0


@pytest.mark.parametrize("name", EXACT)
def test_one_key(name: str) -> None:
    """The only key holds everything; a normalised entropy of log 1 is undefined."""
    stats, oracle = both([0.7], None)
    torch.testing.assert_close(
        stats[name].double(), oracle[name].double(), rtol=0, atol=1e-15, equal_nan=True
    )
    known = {
        "n_keys": 1.0,
        "entropy": 0.0,
        "normalized_entropy": math.nan,
        "information": 0.0,
        "effective_keys": 1.0,
        "sparsity": 1.0,
        "collision": 1.0,
        "top_weight": 1.0,
        "first_weight": 1.0,
        "sink_mass": 0.0,
        "max_logit": 0.7,
        "lse": 0.7,
        "logit_mean": 0.7,
        "logit_std": 0.0,
        "varentropy": 0.0,
        "entropy_slope": 0.0,
        "mean_field_entropy": 0.0,
        "jensen_gap": 0.0,
        "max_gap": 0.0,
        "gaussian_entropy": 0.0,
        "first_gap": math.nan,
        "rest_logit_std": math.nan,
        "rest_jensen_gap": math.nan,
        "jacobian_trace": 0.0,
        "noise_gain": 0.0,
    }
    assert set(known) == set(EXACT)
    assert stats[name].item() == pytest.approx(known[name], abs=1e-15, nan_ok=True)


def test_a_row_worked_by_hand() -> None:
    """Scores log 1, log 2, log 5: weights 1/8, 2/8, 5/8."""
    value = torch.tensor([[8.0], [0.0], [0.0]], dtype=torch.float64)
    stats = RowStatistics(observe(torch.tensor([1.0, 2.0, 5.0]).double().log(), None, value))
    p = [1 / 8, 2 / 8, 5 / 8]
    entropy = -sum(x * math.log(x) for x in p)
    mean = sum(x * math.log(8 * x) for x in p)
    known = {
        "entropy": entropy,
        "normalized_entropy": entropy / math.log(3),
        "information": math.log(3) - entropy,
        "effective_keys": 64 / 30,
        "sparsity": 8 / math.sqrt(90),
        "collision": 30 / 64,
        "top_weight": 5 / 8,
        "first_weight": 1 / 8,
        "sink_mass": 0.0,
        "max_logit": math.log(5),
        "lse": math.log(8),
        "logit_mean": math.log(10) / 3,
        "varentropy": sum(x * (math.log(8 * x) - mean) ** 2 for x in p),
        "mean_field_entropy": math.log(3) - math.log(5) + math.log(10) / 3,
        "jensen_gap": math.log(8 / 3) - math.log(10) / 3,
        "max_gap": math.log(5) - mean,
        "jacobian_trace": 34 / 64,
        # o = 1: 1/64 · 49 + 4/64 · 1 + 25/64 · 1
        "noise_gain": (49 + 4 + 25) / 64,
    }
    for name, value_ in known.items():
        assert stats[name].item() == pytest.approx(value_, rel=1e-14, abs=1e-15), name


@pytest.mark.parametrize("sink", SINKS)
def test_the_mean_field_identity(sink: str) -> None:
    for row in ROWS.values():
        stats, _ = both(row, SINKS[sink])
        parts = stats.mean_field_entropy + stats.jensen_gap + stats.max_gap
        size = max(1.0, max(abs(score) for score in row))
        torch.testing.assert_close(parts, stats.entropy, rtol=1e-12, atol=2e-15 * size)


def test_the_entropy_slope_is_the_derivative_by_the_log_scale() -> None:
    scores = torch.tensor([list(ROWS["normal"]), list(ROWS["spread"])], dtype=torch.float64)
    log_scale = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
    entropy = RowStatistics(observe(scores * log_scale.exp())).entropy
    (slope,) = torch.autograd.grad(entropy.sum(), log_scale)
    stated = RowStatistics(observe(scores)).entropy_slope
    torch.testing.assert_close(slope.squeeze(-1), stated, rtol=1e-12, atol=1e-14)


def test_noise_gain_is_how_far_noise_moves_the_output() -> None:
    """E‖õ − o‖² for iid noise of variance ν on the logits, against its first order, ν · gain."""
    generator = torch.Generator().manual_seed(6)
    scores = torch.randn(12, generator=generator, dtype=torch.float64)
    value = torch.randn(12, 4, generator=generator, dtype=torch.float64) + 3.0
    output = torch.softmax(scores, -1) @ value
    noise = 0.01 * torch.randn(40_000, 12, generator=generator, dtype=torch.float64)
    moved = (torch.softmax(scores + noise, -1) @ value - output).square().sum(-1)
    gain = RowStatistics(observe(scores, None, value)).noise_gain
    error = moved.std() / math.sqrt(len(moved))
    assert error < 0.01 * moved.mean()
    assert abs(moved.mean() - 1e-4 * gain) < 4 * error


# -- the table --------------------------------------------------------------------------------


def test_the_table_is_complete() -> None:
    assert len(METRICS) == 29
    for name, entry in METRICS.items():
        assert entry.name == name
        assert all((entry.symbol, entry.unit, entry.range, entry.meaning, entry.source))
        assert metric(name) is entry
    assert [name for name, entry in METRICS.items() if entry.needs_values] == ["noise_gain"]
    assert [name for name, entry in METRICS.items() if entry.needs_gaps] == [
        *("keys_50", "keys_90", "keys_95", "keys_99")
    ]


def test_every_metric_is_a_property_and_a_function() -> None:
    properties = {
        name
        for name, member in vars(NamedMetrics).items()
        if isinstance(member, property) and name != "available"
    }
    assert properties == set(METRICS)
    for name, entry in METRICS.items():
        assert name in rowstats.__all__
        assert getattr(rowstats, name) is entry.compute
        assert entry.meaning in (getattr(NamedMetrics, name).__doc__ or "")


def test_the_package_exports_what_it_lists() -> None:
    assert len(set(rowstats.__all__)) == len(rowstats.__all__)
    for name in rowstats.__all__:
        assert getattr(rowstats, name) is not None


def test_properties_items_and_dictionaries_agree() -> None:
    stats = RowStatistics(observe(torch.randn(3, 5), None, torch.randn(5, 2), gaps=True))
    assert tuple(stats.as_dict()) == stats.available == tuple(METRICS)
    for name, part in stats.as_dict().items():
        torch.testing.assert_close(getattr(stats, name), part, rtol=0, atol=0)
        torch.testing.assert_close(stats[name], part, rtol=0, atol=0)


#: For n keys, with entropy H: the interval that the table's range means.
RANGES = {
    "0, 1, 2, …": lambda n, H: (0.0, math.inf),
    "real": lambda n, H: (-math.inf, math.inf),
    "[0, log n]": lambda n, H: (0.0, math.log(n)),
    "[0, 1]": lambda n, H: (0.0, 1.0),
    "[1, n]": lambda n, H: (1.0, n),
    "[1/√n, 1]": lambda n, H: (n**-0.5, 1.0),
    "[1/n, 1]": lambda n, H: (1 / n, 1.0),
    "[0, ∞)": lambda n, H: (0.0, math.inf),
    "(−∞, 0]": lambda n, H: (-math.inf, 0.0),
    "(−∞, H]": lambda n, H: (-math.inf, H),
    "[0, 1 − 1/n]": lambda n, H: (0.0, 1 - 1 / n),
}


#: undefined for a single key
OF_SEVERAL = ("normalized_entropy", "first_gap", "rest_logit_std", "rest_jensen_gap")


def range_of(entry: Metric, n: float, H: float) -> tuple[float, float]:
    return RANGES[entry.range](n, H)


@pytest.mark.parametrize("name", EXACT)
def test_values_lie_in_the_range_the_table_gives(name: str) -> None:
    entry, reached = METRICS[name], []
    for row in ROWS.values():
        for length in (1, 2, 8):
            stats, _ = both(row[:length], None)
            low, high = range_of(entry, length, stats.entropy.item())
            value = stats[name].item()
            if name in OF_SEVERAL and length == 1:
                assert math.isnan(value)
                continue
            slack = 2e-15 * max(1.0, abs(stats.max_logit.item()))
            assert low - slack <= value <= high + slack, (row, length)
            reached.append((value - low < 1e-9, high - value < 1e-9))
    if math.isfinite(sum(range_of(entry, 8, 1.0))) and "weight" not in name:
        ends = [any(end) for end in zip(*reached, strict=True)]
        assert ends == [True, name != "sink_mass"], "the range is as narrow as it can be"


def test_a_row_without_keys() -> None:
    stats = RowStatistics(
        observe(torch.full((1, 3), -torch.inf), None, torch.ones(3, 2), gaps=True)
    )
    known = {"n_keys": 0.0, "lse": -math.inf, "max_logit": -math.inf}
    for name in METRICS:
        value = stats[name].item()
        assert value == known[name] if name in known else math.isnan(value), name
    with_sink = RowStatistics(observe(torch.full((1, 3), -torch.inf), sink=torch.tensor(1.0)))
    for name in with_sink.available:
        value = with_sink[name].item()
        assert value == known[name] if name in known else math.isnan(value), name


@pytest.mark.parametrize("seed", range(3))
def test_one_metric_off_by_a_percent_is_found(seed: int) -> None:
    """The comparison used above fails where it should."""
    stats, oracle = both(ROWS["normal"], 0.5)
    name = ("entropy", "collision", "noise_gain")[seed]
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(1.01 * stats[name], oracle[name], rtol=1e-12, atol=1e-15)
