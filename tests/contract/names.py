"""Names of the statistics, as the tests select them."""

from __future__ import annotations

from acutance import METRICS


def metric_names(*, noise: bool = False, gaps: bool = False) -> tuple[str, ...]:
    """Names of the metrics that statistics have, with those of ``noise=True`` and ``gaps=True``."""
    return tuple(
        name
        for name, metric in METRICS.items()
        if (noise or not metric.needs_values) and (gaps or not metric.needs_gaps)
    )
