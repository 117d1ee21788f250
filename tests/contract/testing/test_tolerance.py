"""The comparison accepts what rounding explains and nothing else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from acutance import row_statistics
from acutance.rowstats import RowState, RowStatistics, dense_statistics
from acutance.testing import assert_close_to_oracle, attention_case, compare, score_error
from acutance.testing import dense_statistics as oracle_of
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)


def measured(dtype: torch.dtype = torch.float32) -> tuple[RowStatistics, dict[str, Tensor], float]:
    case = attention_case(11, mask="sinks", dtype=dtype, queries=6, keys=24)
    tensors, options = case.tensors, case.options
    stats = row_statistics(*tensors, **options, noise=True)
    delta = score_error(case.query, case.key, options.get("scale"))
    return stats, dense_statistics(*tensors, **options), delta


def test_the_oracle_is_offered_beside_the_rule() -> None:
    assert oracle_of is dense_statistics


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_correct_measurement_is_close(dtype: torch.dtype) -> None:
    stats, oracle, delta = measured(dtype)
    found = assert_close_to_oracle(stats, oracle, score_error=delta, value_norm=4.0)
    assert found.close
    assert set(found.ratios) == set(EXACT)
    assert max(found.ratios.values()) <= 1.0
    assert found.ratios["n_keys"] == 0.0


@pytest.mark.parametrize("name", [name for name in EXACT if name != "n_keys"])
def test_a_thousandth_too_much_in_one_metric_of_one_row_is_found(name: str) -> None:
    stats, oracle, delta = measured()
    place = (0, 1, 3)
    oracle = oracle | {name: oracle[name].clone()}
    oracle[name][place] *= 1.001
    found = compare(stats, oracle, score_error=delta)
    assert found.ratios[name] > 1
    assert found.metric == name
    assert found.index == place
    assert found.error == pytest.approx(abs(found.expected) / 1001, rel=0.02)
    assert not found.close
    with pytest.raises(AssertionError, match=rf"the case: {name} at row \(0, 1, 3\) is .* beyond"):
        assert_close_to_oracle(stats, oracle, score_error=delta, name="the case")


def test_one_key_too_many_is_found() -> None:
    stats, oracle, delta = measured()
    found = compare(stats, oracle | {"n_keys": oracle["n_keys"] + 1}, score_error=delta)
    assert found.metric == "n_keys"
    assert not found.close


@pytest.mark.parametrize("field", ["Z", "U", "W", "Q", "mean", "M2", "first", "m"])
def test_a_wrong_sum_is_found(field: str) -> None:
    stats, oracle, delta = measured()
    part = getattr(stats.state, field)
    wrong = RowStatistics(stats.state._replace(**{field: part * 1.001 + 1e-3}))
    assert not compare(wrong, oracle, score_error=delta).close


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_where_a_number_belongs_is_found_and_the_reverse(value: float) -> None:
    stats, oracle, delta = measured()
    spoilt = stats.state.Z.clone()
    spoilt[0, 0, 2] = value
    found = compare(RowStatistics(stats.state._replace(Z=spoilt)), oracle, score_error=delta)
    assert found.ratios["entropy"] == float("inf")
    assert not found.close
    hidden = {name: part.clone() for name, part in oracle.items()}
    hidden["entropy"][0, 0, 2] = torch.nan
    assert compare(stats, hidden, score_error=delta).ratios["entropy"] == float("inf")


def test_rows_that_see_nothing_agree() -> None:
    query = torch.zeros(1, 1, 2, 4)
    mask = torch.tensor([[True], [False]])
    stats, oracle = (
        measure(query, query, attn_mask=mask) for measure in (row_statistics, dense_statistics)
    )
    assert isinstance(stats, RowStatistics)
    assert compare(stats, oracle).close
    one = {name: part.clone() for name, part in oracle.items()}
    one["lse"][0, 0, 1] = 0.0  # what a flash kernel returns there
    assert compare(stats, one).metric == "lse"


def test_what_raw_moments_lose_is_found() -> None:
    """E[s²] − E[s]² in float32, of scores around 1e4 that are exact: a wrong varentropy."""
    scores = 1e4 + torch.randn(1000, generator=torch.Generator().manual_seed(0))
    query, key = torch.ones(1, 1, 1, 1), scores.view(1, 1, -1, 1)
    stats, oracle = row_statistics(query, key), dense_statistics(query, key)
    assert compare(stats, oracle).close
    p = torch.softmax(scores, -1)
    naive = (p * scores.square()).sum() - (p * scores).sum().square()
    found = compare(RowStatistics(stats.state._replace(W=naive * stats.state.Z)), oracle)
    assert found.metric in ("varentropy", "entropy_slope")
    assert not found.close


def test_different_rows_are_refused() -> None:
    stats, oracle, _ = measured()
    short = {name: part[:, :, 1:] for name, part in oracle.items()}
    with pytest.raises(ValueError, match="measured and oracle must have the same rows: n_keys is"):
        compare(stats, short)


def test_no_rows_are_close() -> None:
    query = torch.zeros(1, 1, 0, 4)
    found = compare(row_statistics(query, query), dense_statistics(query, query))
    assert found.close
    assert found.error == 0.0
    assert dataclasses.is_dataclass(found)


def test_the_score_error_bounds_the_scores_and_not_by_much() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 4, 200, 64, generator=generator) for _ in range(2))
    exact = query.double() @ key.double().mT * 0.125
    error = float(((query * 0.125) @ key.mT - exact).abs().max())
    bound = score_error(query, key)
    assert error < bound < 30 * error
    assert score_error(query, key, -0.25) == pytest.approx(2 * bound)
    assert score_error(query.double(), key.double()) == pytest.approx(bound * 2.0**-29)
    assert score_error(query, key, added=1.0) == pytest.approx(bound + 2.0**-23)
    assert score_error(query[:, :, :0], key) == 0.0


def test_tolerances_are_tighter_than_the_promised_accuracy() -> None:
    """A case that passes is well within 2e-5 in float32 and 1e-9 in float64."""
    for dtype, promised in ((torch.float32, 2e-5), (torch.float64, 1e-9)):
        stats, oracle, delta = measured(dtype)
        for name in EXACT:
            changed = {key: part.clone() for key, part in oracle.items()}
            if name == "n_keys":
                continue
            changed[name] += 2 * promised * changed[name].abs().clamp(min=1.0)
            assert compare(stats, changed, score_error=delta).ratios[name] > 1, name
    assert isinstance(stats.state, RowState)
