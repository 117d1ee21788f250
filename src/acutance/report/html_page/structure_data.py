"""What the HTML report shows of structure: profiles, distances, rows of text, classes, advice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from acutance.diagnose.classes import CLASSES, HeadClass
from acutance.diagnose.recommendations import KINDS, Recommendation
from acutance.escapes import visible
from acutance.report.html_page.packing import SOFT, Level, Packer, encode, rounded
from acutance.summary.by_octave import Profile
from acutance.summary.distances import Distances
from acutance.summary.examples import Examples
from acutance.summary.head_summary import HeadSummary
from acutance.summary.moments import SCALES

#: Heads whose rows of text are kept in a report of very many heads, and rows of each.
MOST_WITH_TEXT, MOST_ROWS = 512, 3


def structure(summary: HeadSummary, level: Level, packer: Packer) -> dict[str, Any]:
    """The record of all there is beyond moments; arrays go to the packer."""
    found: dict[str, Any] = {}
    for part, profile in (("profile", summary.profile), ("positions", summary.positions)):
        if profile is not None and profile.octaves:
            found[part] = _profile(summary, profile, part, level, packer)
    if level.distances and summary.distances is not None and summary.distances.mass.shape[-1]:
        found["distances"] = _distances(summary, summary.distances, level.distances, packer)
    if summary.examples is not None:
        found["examples"] = _examples(summary.examples, len(summary.places))
    return found


def _profile(
    summary: HeadSummary, profile: Profile, part: str, level: Level, packer: Packer
) -> dict[str, Any]:
    """Means by octave of a count, and errors where numbers are kept finely."""
    metrics: dict[str, Any] = {}
    for column, name in enumerate(summary.metrics):
        if level.profiles is not None and name not in level.profiles:
            continue
        soft, width = SOFT[SCALES.get(name, "unit")], 1 if level.profiles is not None else 2
        parts: dict[str, Tensor] = {
            name: profile.mean[:, column].masked_fill(profile.count[:, column] == 0, math.nan)
        }
        if level.profiles is None:
            parts[f"{name}.error"] = profile.error[:, column]
        for key, values in parts.items():
            coded = encode(values.numpy(), width, soft)
            packer.add(f"{part}.{key}", coded.values)
            metrics[key] = {"codes": [coded.low, coded.high], "soft": soft}
    rows, log_n, first = [], [], 0
    every, middle = profile.rows.numpy(), profile.log_n.numpy()
    for layer in summary.layers:
        own = slice(first, first + layer.heads)
        most = every[own].argmax(0) if layer.heads else np.zeros(profile.octaves, dtype=np.int64)
        rows.append(every[own].max(0, initial=0).tolist())
        at = np.arange(profile.octaves) if layer.heads else np.arange(0)
        log_n.append([rounded(float(value), 5) for value in middle[own][most[at], at]])
        first += layer.heads
    return {"octaves": profile.octaves, "metrics": metrics, "rows": rows, "log_n": log_n}


def _distances(
    summary: HeadSummary, distances: Distances, steps: int, packer: Packer
) -> dict[str, Any]:
    """Shares of the weight by octave of distance, in that many steps."""
    for part in ("mass", "even"):
        shares = getattr(distances, part).flatten(1).numpy()
        packer.add(f"distances.{part}", np.rint(shares.clip(0, 1) * steps).astype(np.uint8))
    sizes = [layer.heads for layer in summary.layers]
    rows = [int(part.max()) if len(part) else 0 for part in distances.rows.split(sizes)]
    return {"octaves": distances.mass.shape[-1], "rows": rows}


def _examples(examples: Examples, heads: int) -> list[list[dict[str, Any]]]:
    """The sharpest rows of each head as words; in a large report of the first heads only."""
    found = []
    for head in range(min(heads, MOST_WITH_TEXT)):
        rows = []
        for place, row in enumerate(examples.rows(head)[:MOST_ROWS]):
            start = int(examples.start[head, place])
            rows.append(
                {
                    "query": visible(row.query),
                    "position": row.position,
                    "n_keys": row.n_keys,
                    "entropy": rounded(row.entropy, 4),
                    "here": row.position - start if start >= 0 else -1,
                    "attended": [
                        [visible(token), position, rounded(weight, 4)]
                        for token, position, weight in row.attended
                    ],
                    "context": [
                        [visible(token), rounded(weight, 3)] for token, weight in row.context
                    ],
                }
            )
        found.append(rows)
    return found


def classes(found: Sequence[Sequence[HeadClass]], level: Level) -> dict[str, Any]:
    """Classes of every head: indices, with the sentence that says why in a report of few heads."""
    order = list(CLASSES)
    return {
        "classes": [
            {"label": one.name, "rule": one.rule, "source": one.source} for one in CLASSES.values()
        ],
        "heads": [
            [
                [order.index(one.name), visible(one.sentence) if level.profiles is None else ""]
                for one in each
            ]
            for each in found
        ],
    }


def advice(found: Sequence[Recommendation], nothing: str) -> dict[str, Any]:
    """Recommendations, most urgent first, and the sentence to show where there are none."""
    return {
        "kinds": KINDS,
        "nothing": nothing,
        "recommendations": [
            {
                "kind": one.kind,
                "layer": one.layer,
                "heads": one.heads,
                "place": one.place,
                "reason": visible(one.reason),
                "advice": visible(one.advice),
                "certainty": one.certainty,
            }
            for one in found
        ],
    }
