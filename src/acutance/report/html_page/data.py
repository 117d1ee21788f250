"""The data of the HTML report: the numbers and sentences of a summary, packed into one text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acutance.diagnose.classes import CLASSES, HeadClass, classify
from acutance.diagnose.findings import KEY_NORMS, LABELS, describe_key_norms, findings
from acutance.diagnose.overview import overview
from acutance.diagnose.recommendations import (
    KINDS,
    head_reasons,
    no_recommendation,
    recommendations,
)
from acutance.diagnose.sentences import GROUPS, crossing, metric_words
from acutance.escapes import visible
from acutance.report.colours import ANCHORS, as_hex, colour_scale
from acutance.report.html_page.packing import (
    LEVELS,
    SOFT,
    Level,
    Packer,
    bars,
    budget,
    encode,
    layer_means,
    pack_metric,
    rounded,
)
from acutance.report.terminal import module_sentences
from acutance.structure import describe
from acutance.summary.head_summary import HeadSummary
from acutance.summary.layer import STATUSES, judged_sentences, notices, what_was_read
from acutance.summary.predicted import PREDICTED_FROM
from acutance.summary.readouts.by_octave import Profile
from acutance.summary.readouts.distances import Distances
from acutance.summary.readouts.examples import Examples
from acutance.summary.readouts.moments import BINS, SCALES, edges
from acutance.summary.readouts.spans import ALL_ROWS, OTHER, Spans

#: What the page shows of a recommendation.
_ADVICE = ("kind", "layer", "heads", "place", "reason", "advice", "certainty")
_MOST_CURVES = 512  # heads of which every octave is predicted, at some 2 ms each


def packed(
    summary: HeadSummary,
    key_norms: Mapping[str, Any] | None = None,
    judged: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
) -> str:
    """The data of the HTML page as base64 text, as precise as its size budget allows."""
    record, head_classes = _record(summary), classify(summary)
    record |= {
        "judged": judged_data(judged, judged_sentences(summary.about)),
        "plan": plan_data(plan),
    }
    record["groups"] = [*([] if plan is None else [GROUP]), *GROUPS]
    if key_norms is not None:
        sentence = describe_key_norms(key_norms)
        record["findings"].append(_finding("key_norms", KEY_NORMS, None, None, sentence))
    text, most = "", budget(len(summary.places))
    for level in LEVELS:
        if _least(summary, level) > most:
            continue
        text = _packed(summary, record, head_classes, level, plan)
        if len(text) <= most:
            return text
    return text or _packed(summary, record, head_classes, LEVELS[-1], plan)


def _least(summary: HeadSummary, level: Level) -> float:
    """Lower bound of the page's size at a precision level, to skip levels that are too large."""
    heads, metrics = summary.moments.count.shape
    histograms = metrics if level.bars is None else len(level.bars)
    extremes = metrics if level.extremes is None else len(level.extremes)
    numbers = metrics * (level.mean + level.rest) + 2 * extremes * level.rest
    return heads * (0.6 * numbers + 0.06 * histograms * BINS / level.join)


def _packed(
    summary: HeadSummary,
    record: dict[str, Any],
    head_classes: list[tuple[HeadClass, ...]],
    level: Level,
    plan: Mapping[str, Any] | None,
) -> str:
    """The page's data as base64 text at a precision level."""
    packer = Packer()
    parts = {
        "mean": summary.moments.mean.masked_fill(summary.moments.count == 0, math.nan),
        "std": summary.moments.std,
        "min": summary.moments.low,
        "max": summary.moments.high,
    }
    if summary.sampled:
        parts["off"] = summary.moments.sampling_error
    metrics = [
        _metric(
            summary,
            index,
            {part: values[:, index] for part, values in parts.items()},
            level,
            packer,
        )
        for index in range(len(summary.metrics))
    ]
    metrics += span_metrics(summary, level, packer) + plan_metrics(summary, plan, level, packer)
    more = structure(summary, level, packer) | classes(head_classes, level)
    more |= span_tables(summary.spans, level, packer) | head_rows(summary)
    return packer.text({**record, **more, "metrics": metrics, "level": asdict(level)})


def shown(value: Any, digits: int = 4) -> Any:
    r"""Plain values for the page: texts made visible, numbers rounded or None if not finite.

    Example:
        >>> shown({"head": 3, "names": ("a\x1b", "b"), "share": 1 / 3, "cost": math.nan})
        {'head': 3, 'names': ['a\\x1b', 'b'], 'share': 0.3333, 'cost': None}
    """
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return rounded(value, digits)
    if isinstance(value, Mapping):
        return {name: shown(part, digits) for name, part in value.items()}
    return [shown(part, digits) for part in value] if isinstance(value, list | tuple) else value


def _finding(
    kind: str, label: str, layer: int | None, head: int | None, sentence: str
) -> dict[str, Any]:
    """A line of the page's findings; of no head, it concerns the whole model."""
    numbers = {"layer": layer, "head": head}
    return {"kind": kind, "label": label, **numbers, "sentence": visible(sentence)}


def _record(summary: HeadSummary) -> dict[str, Any]:
    """Everything except per-head numbers, as JSON values."""
    return {
        "about": [
            [visible(str(name)), _text(value)]
            for name, value in summary.about.items()
            if name != "judged"
        ],
        "layers": [
            shown(asdict(layer), 3) | {"numbers": layer.numbers, "crossing": crossing(layer.module)}
            for layer in summary.layers
        ],
        "modules": [visible(sentence) for sentence in module_sentences(summary.layers)],
        "statuses": STATUSES,
        "edges": {
            kind: [float(f"{edge:.6g}") for edge in edges(name)]
            for kind, name in {SCALES.get(name, "unit"): name for name in summary.metrics}.items()
        },
        "colours": [as_hex(anchor) for anchor in ANCHORS],
        "overview": [visible(line) for line in overview(summary)],
        "findings": [
            _finding(
                finding.kind, LABELS[finding.kind], finding.layer, finding.head, finding.sentence
            )
            for finding in findings(summary)
        ],
        "theory": _theory(summary),
        "kinds": KINDS,
        "nothing": no_recommendation(summary),
        "recommendations": [
            {part: shown(getattr(recommended, part)) for part in _ADVICE}
            for recommended in recommendations(summary)
        ],
        "reasons": head_reasons(summary) if len(summary.places) <= _MOST_CURVES else [],
        "read": visible(what_was_read(summary.about)),
        "notices": [visible(notice) for notice in notices(summary.about)],
        "unread": [visible(reason) for reason in summary.unread],
        "not_provided": [visible(reason) for reason in summary.not_provided],
    }


def _theory(summary: HeadSummary) -> dict[str, Any] | None:
    """Predicted and measured entropy of every head; None with fewer than two predicted heads."""
    if summary.profile is None or not {"entropy", *PREDICTED_FROM} <= set(summary.metrics):
        return None
    heads = summary.predict()
    if not math.isfinite(heads.r_squared()):
        return None
    return {
        "n": rounded(float(heads.n.nanmedian()), 3),
        "keys": [rounded(value, 4) for value in heads.n.tolist()],
        "r2": rounded(heads.r_squared(), 3),
        "impossible": heads.impossible.nonzero()[:, 0].tolist(),
        "predicted": [rounded(value, 4) for value in heads.predicted["entropy"].tolist()],
        "measured": [rounded(value, 4) for value in heads.measured["entropy"].tolist()],
        "curves": _predicted_curves(summary),
    }


def _predicted_curves(summary: HeadSummary) -> list[list[Any]]:
    """Predicted entropy of every head for each octave of n; empty if there are too many heads."""
    if summary.profile is None or len(summary.places) > _MOST_CURVES:
        return []
    return [
        [rounded(value, 4) for value in summary.predict(2.0**octave).predicted["entropy"].tolist()]
        for octave in range(summary.profile.octaves)
    ]


def _metric(
    summary: HeadSummary, column: int, parts: dict[str, Tensor], level: Level, packer: Packer
) -> dict[str, Any]:
    """Add a metric's numbers to the packer; return its description."""
    name, moments = summary.metrics[column], summary.moments
    described, plain = describe(name), metric_words(name)
    kind = SCALES.get(name, "unit")
    count = moments.count[:, column]
    scale = colour_scale(name, parts["mean"].tolist())
    if level.extremes is not None and name not in level.extremes:
        parts = {part: values for part, values in parts.items() if part not in ("min", "max")}
    first = None
    if level.bars is None or name in level.bars:
        counts = moments.histogram[:, column].numpy()
        heights, first = bars(counts, level)
        packer.add(f"{name}.bars", heights)
        joined = counts.reshape(-1, BINS // level.join, level.join).sum(-1)
        most = joined.max(-1, initial=0) / np.maximum(joined.sum(-1), 1)
        packer.add(f"{name}.peak", np.rint(most * 65535).astype(np.uint16))
    rows = torch.tensor([layer.rows for layer in summary.layers for _ in range(layer.heads)])
    return pack_metric(
        packer,
        level,
        name,
        {part: values.numpy() for part, values in parts.items()},
        SOFT[kind],
        group=plain.group,
        unit=described.unit,
        range=described.range,
        meaning=described.meaning,
        source=described.source,
        ends=[plain.low, plain.high],
        kind=kind,
        low=rounded(scale.low, 5),
        high=rounded(scale.high, 5),
        log=scale.log,
        first=first,
        rows=None if bool((count == rows).all()) else count.tolist(),
        layer=layer_means(summary, moments.mean[:, column], moments.weight[:, column]),
    )


def _text(value: Any) -> str:
    """Format a value of ``about``."""
    if isinstance(value, (list, tuple)) and all(
        isinstance(part, (str, int, float)) for part in value
    ):
        return ", ".join(visible(str(part)) for part in value)
    return visible(str(value))


#: Heads whose rows of text are kept in a report of very many heads, and rows of each.
MOST_WITH_TEXT, MOST_ROWS = 512, 3


def structure(summary: HeadSummary, level: Level, packer: Packer) -> dict[str, Any]:
    """Add profiles, distances and examples to the packer; return their description."""
    parts: dict[str, Any] = {}
    for part, profile in (("profile", summary.profile), ("positions", summary.positions)):
        if profile is not None and profile.octaves:
            parts[part] = _profile(summary, profile, part, level, packer)
    if level.distances and summary.distances is not None and summary.distances.mass.shape[-1]:
        parts["distances"] = _distances(summary, summary.distances, level.distances, packer)
    if summary.examples is not None:
        parts["examples"] = _examples(summary.examples, len(summary.places))
    return parts


def _profile(
    summary: HeadSummary, profile: Profile, part: str, level: Level, packer: Packer
) -> dict[str, Any]:
    """Means by octave of a count, with errors at finer levels."""
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
        heads = slice(first, first + layer.heads)
        most = every[heads].argmax(0) if layer.heads else np.zeros(profile.octaves, dtype=np.int64)
        rows.append(every[heads].max(0, initial=0).tolist())
        at = np.arange(profile.octaves) if layer.heads else np.arange(0)
        log_n.append([rounded(float(value), 5) for value in middle[heads][most[at], at]])
        first += layer.heads
    return {"octaves": profile.octaves, "metrics": metrics, "rows": rows, "log_n": log_n}


def _distances(
    summary: HeadSummary, distances: Distances, steps: int, packer: Packer
) -> dict[str, Any]:
    """Shares of the weight by octave of distance, quantised."""
    for part in ("mass", "even"):
        shares = getattr(distances, part).flatten(1).numpy()
        packer.add(f"distances.{part}", np.rint(shares.clip(0, 1) * steps).astype(np.uint8))
    sizes = [layer.heads for layer in summary.layers]
    rows = [int(part.max()) if len(part) else 0 for part in distances.rows.split(sizes)]
    return {"octaves": distances.mass.shape[-1], "rows": rows}


def _examples(examples: Examples, heads: int) -> list[list[dict[str, Any]]]:
    """The sharpest rows of each head as text; in a large report only the first heads'."""
    rows_by_head = []
    for head in range(min(heads, MOST_WITH_TEXT)):
        rows = []
        for place, row in enumerate(examples.rows(head)[:MOST_ROWS]):
            start = int(examples.start[head, place])
            rows.append(
                {
                    "query": shown(row.query),
                    "position": row.position,
                    "n_keys": row.n_keys,
                    "entropy": rounded(row.entropy, 4),
                    "here": row.position - start if start >= 0 else -1,
                    "attended": shown(row.attended),
                    "context": shown(row.context, 3),
                }
            )
        rows_by_head.append(rows)
    return rows_by_head


def classes(head_classes: Sequence[Sequence[HeadClass]], level: Level) -> dict[str, Any]:
    """Classes of every head as indices, with their sentences in a small report."""
    order = list(CLASSES)
    return {
        "classes": [
            {"label": head_class.name, "rule": head_class.rule, "source": head_class.source}
            for head_class in CLASSES.values()
        ],
        "heads": [
            [
                [
                    order.index(head_class.name),
                    visible(head_class.sentence) if level.profiles is None else "",
                ]
                for head_class in each
            ]
            for each in head_classes
        ],
    }


#: Rows of a head's weights that the page shows, and keys of each.
MOST_MAP_ROWS, MOST_MAP_KEYS = 8, 1024


def span_metrics(summary: HeadSummary, level: Level, packer: Packer) -> list[dict[str, Any]]:
    """Pack the mean weight on each span, and return descriptions for the page's map."""
    spans, metrics = summary.spans, []
    if spans is None:
        return []
    for span in spans.names:
        weight, rows = spans.weight(span), spans.rows[:, -1]
        parts = {"mean": weight, "std": torch.full_like(weight, math.nan)}  # of rows: not known
        metrics.append(
            pack_metric(
                packer,
                level,
                f"weight_on_{visible(span)}",
                {part: values.numpy() for part, values in parts.items()},
                SOFT["unit"],
                group="Where it looks",
                unit="1",
                range="[0, 1]",
                meaning=f"weight that rows put on the tokens of the span {visible(span)}",
                ends=["looks elsewhere", "looks there only"],
                kind="unit",
                low=0,
                high=1,
                span=True,
                rows=rows.tolist(),
                layer=layer_means(summary, weight, rows),
            )
        )
    return metrics


def span_tables(spans: Spans | None, level: Level, packer: Packer) -> dict[str, Any]:
    """Each head's weight by span of query and key, with uniform shares; {} in a coarse report."""
    if spans is None or not level.distances:
        return {}
    for part, values in (("mean", spans.mean), ("even", spans.even)):
        shares = values.masked_fill((spans.rows == 0).unsqueeze(-1), math.nan).flatten(1).numpy()
        known = np.isfinite(shares)
        codes = np.where(known, np.rint(np.where(known, shares, 0.0).clip(0, 1) * 65534), 65535)
        packer.add(f"spans.{part}", codes.astype(np.uint16))
    names = [visible(name) for name in spans.names]
    return {"spans": {"rows": [*names, OTHER, ALL_ROWS], "keys": [*names, OTHER]}}


def head_rows(summary: HeadSummary) -> dict[str, Any]:
    """The recorded rows of named heads, by index of the head; {} if none were requested.

    Weights are in thousandths. At most 8 rows of a head and 1024 keys of each are included.
    """
    modules = {layer.module: index for index, layer in enumerate(summary.layers)}
    places = {place: index for index, place in enumerate(summary.places)}
    shown: dict[int, list[dict[str, Any]]] = {}
    for head_map in summary.maps:
        head = places.get((modules.get(head_map.module, -1), head_map.head))
        if head is None:
            continue
        rows = shown.setdefault(head, [])
        for position, weights in zip(head_map.positions, head_map.weights, strict=True):
            if len(rows) >= MOST_MAP_ROWS:
                break
            used = int(weights.nonzero()[-1]) + 1 if bool(weights.any()) else 0
            keys = min(used, MOST_MAP_KEYS)
            rows.append(
                {
                    "sequence": head_map.sequence,
                    "position": position,
                    "keys": used,
                    "weights": (weights[:keys] * 1000).round().int().tolist(),
                    "tokens": [visible(token) for token in head_map.tokens[:keys]],
                }
            )
    return {"maps": {str(head): rows for head, rows in shown.items()}} if shown else {}


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
        plan: record of :func:`acutance.caching.plan_record.plan_record`, or None.
        level: the precision level.
        packer: receives the numbers.

    Returns:
        Descriptions of the metrics; [] without a plan. The cost is left out if no head's is known.
    """
    if plan is None:
        return []
    key_heads = [None if at is None else plan["key_heads"][at] for at in plan["heads"]]
    share = [None if head is None else head["share"] for head in key_heads]
    metrics = [
        _plan_metric(
            summary, level, packer, "kept_share", share, SOFT["unit"],
            unit="1",
            range="[0, 1]",
            meaning="share of the bytes of its key head's cache that the plan keeps, after "
            f"{plan['n']:,} tokens",
            ends=["keeps nothing", "keeps everything"],
            kind="unit",
            low=0.0,
            high=1.0,
        )
    ]  # fmt: skip
    least = _smallest(plan)
    cost = [None if head is None else _costs(head).get(least) for head in key_heads]
    known = [value for value in cost if value is not None]
    if known:
        metrics.append(
            _plan_metric(
                summary, level, packer, "cost_to_shrink", cost, 1e-6,
                unit="nat",
                range="any",
                meaning=f"expected rise of the loss, a token, if its key head kept only {least}, "
                f"from derivatives to second order at {plan['costs_at']:,} tokens",
                ends=["can be taken away", "is needed"],
                kind="nats",
                low=min(0.0, *known),
                high=max(1e-9, *known),
            )
        )  # fmt: skip
    return metrics


def _plan_metric(
    summary: HeadSummary,
    level: Level,
    packer: Packer,
    name: str,
    values: Sequence[float | None],
    soft: float,
    **described: Any,
) -> dict[str, Any]:
    """Pack one number of a plan for each head; heads without one count in no mean."""
    mean = np.array([math.nan if value is None else value for value in values])
    parts = {"mean": mean, "std": np.full(len(mean), math.nan)}
    numbers = torch.from_numpy(mean)
    layer = layer_means(summary, numbers, numbers.isfinite().double())
    return pack_metric(
        packer, level, name, parts, soft, least=2, group=GROUP, layer=layer, **described
    )


def _smallest(plan: Mapping[str, Any]) -> str:
    """What the alternative with the fewest bytes keeps; empty if there are none."""
    options = [one for head in plan["key_heads"] for one in head["options"]]
    least = min(options, key=lambda one: float(one["share"]), default=None)
    return "" if least is None else str(least["keeps"])


def _costs(key_head: Mapping[str, Any]) -> dict[str, float]:
    """The expected costs of a key head, by what it would keep."""
    return {one["keeps"]: one["first"] + one["second"] for one in key_head["options"]}


def plan_data(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The words and numbers of a plan for the page, rounded and made visible; None without one."""
    if plan is None:
        return None
    parts = ("keeps", "share", "first", "second", "chosen")
    key_heads = [
        {**head, "options": [[option[part] for part in parts] for option in head["options"]]}
        for head in plan["key_heads"]
    ]
    return {name: shown(value) for name, value in {**plan, "key_heads": key_heads}.items()}
