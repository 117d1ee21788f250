"""The metrics that native code computes from a row's sums are those of the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance.attend import row_statistics
from acutance.kernels import fast_path, library
from acutance.kernels.library import METRIC_BITS
from acutance.probing import probe
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
    assert isinstance(stats, fast_path.PackedStatistics)
    found = {name: stats[name] for name in METRIC_BITS}
    exact = RowState(*(part.double() if part.is_floating_point() else part for part in stats.state))
    eps = torch.finfo(stats.state.Z.dtype).eps
    for name, values in found.items():
        assert values.shape == (1, 2, 70)
        assert values.dtype == stats.state.Z.dtype
        expected = METRICS[name].compute(exact)
        if name in ("first_gap", "rest_jensen_gap"):  # of what the dtype cannot tell from nothing
            nothing = METRICS["first_weight"].compute(exact) > 1 - 2 * eps
            nothing &= (stats.n_keys > 1) & stats.lse.isfinite()
            assert values[nothing].isfinite().all()
            expected = torch.where(nothing, values.double(), expected)
        # the table in float64 from the same sums: little more than one rounding is left
        torch.testing.assert_close(
            values.double(), expected, rtol=8 * eps, atol=2e-14, equal_nan=True, msg=name
        )
        assert torch.equal(values.isnan(), METRICS[name].compute(stats.state).isnan()), name


def test_what_is_no_metric_and_no_dtype_is_refused() -> None:
    found = library.load()
    assert not isinstance(found, str)
    rows = torch.ones(22, dtype=torch.float64)
    out = torch.empty(len(METRIC_BITS), 2, dtype=torch.float64)
    for bits, dtype in ((-1, 1), (1 << len(METRIC_BITS), 1), (1, 2)):
        assert found.metrics(bits, dtype, 2, rows.data_ptr(), 0, out.data_ptr()) == 2
    assert METRIC_BITS.keys() <= METRICS.keys()


@pytest.fixture
def calls(native_calls: Callable[[str], list[Any]]) -> list[Any]:
    """The metrics that each native reading of metrics asks for."""
    return native_calls("metrics")


def test_all_metrics_are_read_by_one_native_call(calls: list[int]) -> None:
    """All but those that lie among the sums as they are."""
    query, key = scores(torch.float32)
    stats = row_statistics(query, key)
    together = stats.as_dict()
    assert tuple(together) == stats.available
    assert calls == [sum(METRIC_BITS.values())]
    assert METRIC_BITS.keys() == set(stats.available) - {"n_keys", "max_logit"}
    some = stats.as_dict(("lse", "n_keys", "entropy"))
    assert list(some) == ["lse", "n_keys", "entropy"]
    assert calls[1:] == [METRIC_BITS["lse"] | METRIC_BITS["entropy"]]
    for name, values in (together | some).items():
        torch.testing.assert_close(values, stats[name], rtol=0, atol=0, equal_nan=True, msg=name)
    with pytest.raises(ValueError, match="there is no metric named 'entropi'"):
        stats.as_dict(["entropi"])


def test_a_probe_reads_a_batch_by_one_native_call(calls: list[int]) -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    with probe(layer) as opened, torch.no_grad():
        layer(x, x, x, need_weights=False)
    opened.summary()
    assert calls == [sum(METRIC_BITS.values())]


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
