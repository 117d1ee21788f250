"""The metrics that native code computes from a row's sums are those of the table."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acutance.attend import row_statistics
from acutance.kernels import direct, library
from acutance.kernels.library import METRIC_CODES
from acutance.rowstats import METRICS, RowState, RowStatistics

pytestmark = pytest.mark.skipif(isinstance(library.load(), str), reason=str(library.load()))


def scores(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A query and a key (1, 2, 70, 3): ordinary rows, then rows of every hard kind."""
    generator = torch.Generator().manual_seed(0)
    query = 2.0 * torch.randn(1, 2, 70, 3, generator=generator, dtype=torch.float64)
    key = torch.randn(1, 2, 70, 3, generator=generator, dtype=torch.float64)
    query[..., 10, :] = 0.0  # all equal
    query[..., 11, :] *= 1e4  # one-hot
    query[..., 12, 0] = torch.nan
    query[..., 13, 0] = torch.inf
    query[..., 14, :] = -1e30
    return query.to(dtype), key.to(dtype)


@pytest.mark.parametrize("offset", [0, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_native_metrics_are_those_of_the_table(dtype: torch.dtype, offset: int) -> None:
    query, key = scores(dtype)
    stats = row_statistics(query, key, is_causal=True, query_offset=offset, backend="native")
    assert isinstance(stats, direct.PackedStatistics)
    found = {name: stats[name] for name in METRIC_CODES}
    exact = RowState(*(part.double() if part.is_floating_point() else part for part in stats.state))
    eps = torch.finfo(stats.state.Z.dtype).eps
    for name, values in found.items():
        assert values.shape == (1, 2, 70)
        assert values.dtype == stats.state.Z.dtype
        expected = METRICS[name].compute(exact)
        # the table in float64 from the same sums: little more than one rounding is left
        torch.testing.assert_close(
            values.double(), expected, rtol=8 * eps, atol=2e-14, equal_nan=True, msg=name
        )
        assert torch.equal(values.isnan(), METRICS[name].compute(stats.state).isnan()), name


def test_every_number_of_a_metric_is_computed_and_no_other() -> None:
    found = library.load()
    assert not isinstance(found, str)
    rows, out = torch.ones(22, dtype=torch.float64), torch.empty(2, dtype=torch.float64)
    for code in range(-1, len(METRIC_CODES) + 1):
        known = code in METRIC_CODES.values()
        assert found.metric(code, 1, 2, rows.data_ptr(), out.data_ptr()) == (0 if known else 2)
    assert found.metric(0, 2, 2, rows.data_ptr(), out.data_ptr()) == 2
    assert METRIC_CODES.keys() <= METRICS.keys()


def test_a_metric_read_where_something_watches_is_the_tables() -> None:
    """A mode that watches operations must see them."""
    query, key = scores(torch.float32)
    stats = row_statistics(query, key)
    assert isinstance(stats, RowStatistics)
    seen: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    with Watch():
        watched = stats.entropy
    assert "log" in seen
    torch.testing.assert_close(watched, stats.entropy, rtol=1e-5, atol=1e-6, equal_nan=True)
