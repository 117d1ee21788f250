"""What the HTML report shows beside measured heads: judged changes, and a cache plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from acutance.escapes import visible
from acutance.report.html_page.packing import SOFT, Level, Packer, encode, rounded
from acutance.summary.head_summary import HeadSummary

__all__ = ["GROUP", "judged_data", "plan_data", "plan_metrics"]

#: Name of the metrics' group in the page's menu.
GROUP = "Cache plan"


def judged_data(
    judged: Mapping[str, Any] | None, sentences: Sequence[str]
) -> dict[str, Any] | None:
    """Table of changes to the model, such as laws, with what each does to the loss.

    Args:
        judged: the JSON record that ``probe --judge`` writes, or None.
        sentences: those of a saved state, for a page without the record.

    Returns:
        ``rows``, each with name, reason, difference of the loss and verdict of a change, and
        ``sentences``; None if there are none.
    """
    if judged is None or not judged["laws"]:
        found = [visible(line) for line in sentences]
        return {"rows": [], "sentences": found} if found else None
    rows = []
    for law in judged["laws"]:
        error = "" if law["error"] is None else f" ± {law['error']:.4f}"
        cells = law["name"], law.get("reason", ""), f"{law['delta']:+.4f}{error}", law["verdict"]
        rows.append([visible(cell) for cell in cells])
    return {"rows": rows, "sentences": [visible(line) for line in judged["sentences"]]}


def plan_metrics(
    summary: HeadSummary, plan: Mapping[str, Any] | None, level: Level, packer: Packer
) -> list[dict[str, Any]]:
    """Pack the share of its cache that every head keeps, and what that costs, for the map.

    Query heads that share a key head have the same numbers.

    Args:
        summary: of the heads that the page shows.
        plan: record of :func:`acutance.caching.exchange.plan_record.plan_record`, or None.
        level: the precision level.
        packer: receives the numbers.

    Returns:
        Descriptions of the metrics; [] without a plan. The cost is left out if no head's is known.
    """
    if plan is None:
        return []
    key_heads = [None if at is None else plan["key_heads"][at] for at in plan["heads"]]
    share = [None if one is None else one["share"] for one in key_heads]
    described = {
        "name": "kept_share",
        "unit": "1",
        "range": "[0, 1]",
        "meaning": "share of the bytes of its key head's cache that the plan keeps, after "
        f"{plan['n']:,} tokens",
        "ends": ["keeps nothing", "keeps everything"],
        "kind": "unit",
        "soft": SOFT["unit"],
        "low": 0.0,
        "high": 1.0,
    }
    metrics = [_metric(summary, share, described, level, packer)]
    least = _smallest(plan)
    cost = [None if one is None else _costs(one).get(least) for one in key_heads]
    known = [value for value in cost if value is not None]
    if known:
        described = {
            "name": "cost_to_shrink",
            "unit": "nat",
            "range": "any",
            "meaning": f"expected rise of the loss, a token, if its key head kept only {least}, "
            f"from derivatives to second order at {plan['costs_at']:,} tokens",
            "ends": ["can be taken away", "is needed"],
            "kind": "nats",
            "soft": 1e-6,
            "low": min(0.0, *known),
            "high": max(1e-9, *known),
        }
        metrics.append(_metric(summary, cost, described, level, packer))
    return metrics


def _smallest(plan: Mapping[str, Any]) -> str:
    """What the alternative with the fewest bytes keeps; empty if there are none."""
    options = [one for head in plan["key_heads"] for one in head["options"]]
    least = min(options, key=lambda one: float(one["share"]), default=None)
    return "" if least is None else str(least["keeps"])


def _costs(key_head: Mapping[str, Any]) -> dict[str, float]:
    """The expected costs of a key head, by what it would keep."""
    return {one["keeps"]: one["first"] + one["second"] for one in key_head["options"]}


def _metric(
    summary: HeadSummary,
    values: Sequence[float | None],
    described: Mapping[str, Any],
    level: Level,
    packer: Packer,
) -> dict[str, Any]:
    """Add one number for each head to the packer; return the description of the metric."""
    mean = np.array([math.nan if value is None else value for value in values])
    codes = {}
    for part, numbers in (("mean", mean), ("std", np.full(len(mean), math.nan))):
        coded = encode(numbers, max(2, level.mean), described["soft"])
        packer.add(f"{described['name']}.{part}", coded.values)
        codes[part] = [coded.low, coded.high]
    layers, first = [], 0
    for layer in summary.layers:
        within = mean[first : first + layer.heads]
        known = within[np.isfinite(within)]
        layers.append(rounded(float(known.mean()) if len(known) else None, 5))
        first += layer.heads
    return {
        **described,
        "group": GROUP,
        "source": "",
        "codes": codes,
        "log": False,
        "first": None,
        "rows": None,
        "layer": layers,
    }


def plan_data(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The words and numbers of a plan for the page, rounded and made visible; None without one."""
    if plan is None:
        return None
    return {
        "name": visible(plan["name"]),
        "n": plan["n"],
        "share": rounded(plan["share"], 4),
        "bytes": plan["bytes"],
        "costs_at": plan["costs_at"],
        "heads": plan["heads"],
        "key_heads": [
            {
                "head": one["head"],
                "queries": one["queries"],
                "keeps": visible(one["keeps"]),
                "share": rounded(one["share"], 4),
                "cost": None if one["cost"] is None else [rounded(part, 4) for part in one["cost"]],
                "options": [
                    [
                        visible(some["keeps"]),
                        rounded(some["share"], 4),
                        rounded(some["first"], 4),
                        rounded(some["second"], 4),
                        some["chosen"],
                    ]
                    for some in one["options"]
                ],
            }
            for one in plan["key_heads"]
        ],
    }
