"""A summary as text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from acutance.rowstats.metrics import metric
from acutance.summary.head_summary import HeadSummary

#: The metrics that are exposed unless others are named: a series for each head is not cheap.
SERVED_METRICS = ("entropy", "effective_keys", "first_weight", "max_logit", "top_weight")


def prometheus_text(
    summary: HeadSummary,
    metrics: Sequence[str] = SERVED_METRICS,
    labels: Iterable[tuple[str, str]] = (),
) -> str:
    r"""The sums, counts and largest values of each head, in Prometheus' text format.

    Sums and counts only grow, so ``rate(acutance_entropy_sum[5m]) /
    rate(acutance_entropy_count[5m])`` is the mean over the rows of the last five minutes. The
    largest value is that of all rows so far.

    Args:
        summary: any summary.
        metrics: names of recorded metrics; those that the summary lacks are left out.
        labels: further labels of every series, as pairs of name and value.

    Raises:
        ValueError: if a metric does not exist.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> print(prometheus_text(probe.summary(), ["effective_keys"]))
        # HELP acutance_effective_keys Attention rows: effective_keys of each head.
        # TYPE acutance_effective_keys summary
        acutance_effective_keys_sum{layer="0",module="...",head="0"} 16
        acutance_effective_keys_count{layer="0",module="...",head="0"} 4
        acutance_effective_keys_sum{layer="0",module="...",head="1"} 16
        acutance_effective_keys_count{layer="0",module="...",head="1"} 4
        # HELP acutance_effective_keys_max Largest effective_keys of a row so far.
        # TYPE acutance_effective_keys_max gauge
        acutance_effective_keys_max{layer="0",module="...",head="0"} 4
        acutance_effective_keys_max{layer="0",module="...",head="1"} 4
        <BLANKLINE>
    """
    more = "".join(f",{name}={_quoted(value)}" for name, value in labels)
    places = [
        f'{{layer="{layer}",module={_quoted(summary.layers[layer].module)},head="{head}"{more}}}'
        for layer, head in summary.places
    ]
    lines = []
    for name in metrics:
        metric(name)  # an unknown name says what is near it
        if name not in summary.metrics:
            continue
        column, series = summary.column(name), f"acutance_{name}"
        moments = summary.moments
        count = moments.count[:, column]
        sums = (moments.mean[:, column] * count).tolist()
        rows = list(
            zip(places, sums, count.tolist(), moments.high[:, column].tolist(), strict=True)
        )
        lines += [
            f"# HELP {series} Attention rows: {name} of each head.",
            f"# TYPE {series} summary",
        ]
        for place, total, number, _ in rows:
            lines.append(f"{series}_sum{place} {total if number else 0.0:.10g}")
            lines.append(f"{series}_count{place} {number}")
        lines += [
            f"# HELP {series}_max Largest {name} of a row so far.",
            f"# TYPE {series}_max gauge",
        ]
        lines += [f"{series}_max{place} {high:.10g}" for place, _, number, high in rows if number]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """A label's value in quotes."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
