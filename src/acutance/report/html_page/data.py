"""The data of the HTML report: the numbers and sentences of a summary, packed into one text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from acutance.diagnose.classes import CLASSES, classify
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
    rounded,
)
from acutance.report.terminal import module_sentences
from acutance.structure import describe
from acutance.summary.head_summary import PREDICTED_FROM, HeadSummary
from acutance.summary.layer import STATUSES, judged_sentences, notices, what_was_read
from acutance.summary.readouts.by_octave import Profile
from acutance.summary.readouts.moments import BINS, SCALES, edges
from acutance.summary.readouts.spans import ALL_ROWS, OTHER

#: What the page shows of a recommendation.
_ADVICE = ("kind", "layer", "heads", "place", "reason", "advice", "certainty")
#: Name of a plan's metrics in the page's menu.
GROUP = "Cache plan"
MOST_CURVES = 512  # heads of which every octave is predicted, at some 2 ms each
#: Heads whose rows of text are kept in a report of very many heads, and rows of each.
MOST_WITH_TEXT, MOST_ROWS = 512, 3
#: Rows of a head's weights that the page shows, and keys of each.
MOST_MAP_ROWS, MOST_MAP_KEYS = 8, 1024


def packed(
    summary: HeadSummary,
    key_norms: Mapping[str, Any] | None = None,
    judged: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
) -> str:
    """The data of the HTML page as base64 text, as precise as its size budget allows."""
    record = _record(summary)
    record |= {
        "judged": _judged(judged, judged_sentences(summary.about)),
        "plan": None if plan is None else _plan(plan),
        "groups": [*([] if plan is None else [GROUP]), *GROUPS],
    }
    if key_norms is not None:
        about = {"kind": "key_norms", "label": KEY_NORMS, "layer": None, "head": None}
        record["findings"].append(about | {"sentence": visible(describe_key_norms(key_norms))})
    text, most = "", budget(len(summary.places))
    for level in LEVELS:
        if level is LEVELS[-1] or _least(summary, level) <= most:
            text = _Numbers(summary, level).text(record, plan)
            if len(text) <= most:
                break
    return text


def _least(summary: HeadSummary, level: Level) -> float:
    """Lower bound of the page's size at a precision level, to skip levels that are too large."""
    heads, metrics = summary.moments.count.shape
    histograms = metrics if level.bars is None else len(level.bars)
    extremes = metrics if level.extremes is None else len(level.extremes)
    numbers = metrics * (level.mean + level.rest) + 2 * extremes * level.rest
    return heads * (0.6 * numbers + 0.06 * histograms * BINS / level.join)


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


def _record(summary: HeadSummary) -> dict[str, Any]:
    """Everything except per-head numbers, as JSON values."""
    about = {name: value for name, value in summary.about.items() if name != "judged"}
    words: dict[str, Any] = {
        "about": [[str(name), _text(value)] for name, value in about.items()],
        "layers": [
            shown(asdict(layer), 3) | {"numbers": layer.numbers, "crossing": crossing(layer.module)}
            for layer in summary.layers
        ],
        "modules": module_sentences(summary.layers),
        "statuses": STATUSES,
        "colours": [as_hex(anchor) for anchor in ANCHORS],
        "overview": overview(summary),
        "findings": [
            {"label": LABELS[finding.kind], **asdict(finding)} for finding in findings(summary)
        ],
        "kinds": KINDS,
        "nothing": no_recommendation(summary),
        "recommendations": [
            {part: getattr(recommended, part) for part in _ADVICE}
            for recommended in recommendations(summary)
        ],
        "reasons": head_reasons(summary) if len(summary.places) <= MOST_CURVES else [],
        "read": what_was_read(summary.about),
        "notices": notices(summary.about),
        "unread": summary.unread,
        "not_provided": summary.not_provided,
    }
    scales = {SCALES.get(name, "unit"): name for name in summary.metrics}
    words = shown(words)
    return words | {
        "edges": {
            kind: [float(f"{edge:.6g}") for edge in edges(name)] for kind, name in scales.items()
        },
        "theory": _theory(summary),
    }


def _text(value: Any) -> str:
    """A value of ``about`` as text."""
    plain = isinstance(value, list | tuple) and all(isinstance(x, str | int | float) for x in value)
    return ", ".join(map(str, value)) if plain else str(value)


def _theory(summary: HeadSummary) -> dict[str, Any] | None:
    """Predicted and measured entropy of every head; None with fewer than two predicted heads."""
    if summary.profile is None or not {"entropy", *PREDICTED_FROM} <= set(summary.metrics):
        return None
    heads = summary.predict()
    if not math.isfinite(heads.r_squared()):
        return None
    octaves = range(summary.profile.octaves) if len(summary.places) <= MOST_CURVES else ()
    curves = summary.predict([2.0**octave for octave in octaves]) if octaves else None
    numbers: dict[str, Any] = {
        "keys": heads.n.tolist(),
        "predicted": heads.predicted["entropy"].tolist(),
        "measured": heads.measured["entropy"].tolist(),
        "curves": [] if curves is None else curves.predicted["entropy"].tolist(),
    }
    numbers = shown(numbers)
    return numbers | {
        "n": rounded(float(heads.n.nanmedian()), 3),
        "r2": rounded(heads.r_squared(), 3),
        "impossible": heads.impossible.nonzero()[:, 0].tolist(),
    }


def _judged(judged: Mapping[str, Any] | None, sentences: Sequence[str]) -> Any:
    """Changes to the model, such as laws, with what each does to the loss.

    Args:
        judged: the JSON record that ``probe --judge`` writes, or None.
        sentences: those of a saved state, for a page without the record.

    Returns:
        ``rows``, each with name, reason, difference of the loss and verdict of a change, and
        ``sentences``; None if there are none.
    """
    if judged is None or not judged["laws"]:
        return shown({"rows": [], "sentences": sentences}) if sentences else None
    rows = []
    for law in judged["laws"]:
        error = "" if law["error"] is None else f" ± {law['error']:.4f}"
        change = f"{law['delta']:+.4f}{error}"
        rows.append((law["name"], law.get("reason", ""), change, law["verdict"]))
    return shown({"rows": rows, "sentences": judged["sentences"]})


def _plan(plan: Mapping[str, Any]) -> Any:
    """The words and numbers of a plan for the page, rounded and made visible."""
    parts = ("keeps", "share", "first", "second", "chosen")
    key_heads = [
        {**head, "options": [[option[part] for part in parts] for option in head["options"]]}
        for head in plan["key_heads"]
    ]
    return shown({**plan, "key_heads": key_heads})


class _Numbers:
    """The numbers of every head, packed at one level of precision."""

    def __init__(self, summary: HeadSummary, level: Level) -> None:
        self.summary, self.level, self.packer = summary, level, Packer()

    def text(self, record: dict[str, Any], plan: Mapping[str, Any] | None) -> str:
        """The record and the numbers as base64 text."""
        metrics = [*map(self._metric, self.summary.metrics), *self._spans()]
        metrics += [] if plan is None else self._plan(plan)
        more = self._structure() | self._classes() | self._span_tables() | self._maps()
        return self.packer.text({**record, **more, "metrics": metrics, "level": asdict(self.level)})

    def _pack(
        self,
        name: str,
        parts: Mapping[str, Tensor],
        soft: float,
        weight: Tensor,
        least: int = 1,
        **described: Any,
    ) -> dict[str, Any]:
        """Pack numbers of every head; return their description for the page's map and panel.

        Args:
            name: what the map calls them.
            parts: tensors (heads,), the one to show as ``mean``.
            soft: where their scale turns from even to logarithmic steps.
            weight: of each head in the mean of its layer.
            least: bytes of a number at least.
            described: what else the page says of them.
        """
        codes = {}
        for part, values in parts.items():
            width = max(least, self.level.mean if part == "mean" else self.level.rest)
            codes[part] = self.packer.add_coded(f"{name}.{part}", values.numpy(), width, soft)
        sizes = [layer.heads for layer in self.summary.layers]
        total = torch.where(weight > 0, parts["mean"] * weight, 0.0)
        layers = zip(total.split(sizes), weight.split(sizes), strict=True) if sizes else ()
        means = [float(part.sum() / rows.sum()) if rows.sum() else None for part, rows in layers]
        usual = {"source": "", "log": False, "first": None, "rows": None}
        usual |= {"layer": [rounded(mean, 5) for mean in means]}
        return {"name": name, **usual, "soft": soft, "codes": codes, **described}

    def _metric(self, name: str) -> dict[str, Any]:
        """A metric's numbers: moments, extremes and histogram."""
        level, moments, column = self.level, self.summary.moments, self.summary.metrics.index(name)
        described, plain = describe(name), metric_words(name)
        kind = SCALES.get(name, "unit")
        count, weight = moments.count[:, column], moments.weight[:, column]
        mean = moments.mean[:, column].masked_fill(count == 0, math.nan)
        parts = {"mean": mean, "std": moments.std[:, column]}
        if level.extremes is None or name in level.extremes:
            parts |= {"min": moments.low[:, column], "max": moments.high[:, column]}
        if self.summary.sampled:
            parts["off"] = moments.sampling_error[:, column]
        first = None
        if level.bars is None or name in level.bars:
            counts = moments.histogram[:, column].numpy()
            heights, first = bars(counts, level)
            self.packer.add(f"{name}.bars", heights)
            joined = counts.reshape(-1, BINS // level.join, level.join).sum(-1)
            most = joined.max(-1, initial=0) / np.maximum(joined.sum(-1), 1)
            self.packer.add(f"{name}.peak", np.rint(most * 65535).astype(np.uint16))
        scale = colour_scale(name, mean.tolist())
        rows = [layer.rows for layer in self.summary.layers for _ in range(layer.heads)]
        return self._pack(
            name, parts, SOFT[kind], weight,
            group=plain.group, ends=[plain.low, plain.high],
            unit=described.unit, range=described.range, meaning=described.meaning,
            source=described.source, kind=kind,
            low=rounded(scale.low, 5), high=rounded(scale.high, 5), log=scale.log,
            first=first, rows=None if count.tolist() == rows else count.tolist(),
        )  # fmt: skip

    def _spans(self) -> list[dict[str, Any]]:
        """The mean weight on each span."""
        spans = self.summary.spans
        return [] if spans is None else [
            self._pack(
                f"weight_on_{visible(span)}",
                {"mean": (mean := spans.weight(span)), "std": torch.full_like(mean, math.nan)},
                SOFT["unit"], spans.rows[:, -1],
                group="Where it looks", ends=["looks elsewhere", "looks there only"],
                unit="1", range="[0, 1]", kind="unit", low=0, high=1,
                meaning=f"weight that rows put on the tokens of the span {visible(span)}",
                span=True, rows=spans.rows[:, -1].tolist(),
            )
            for span in spans.names
        ]  # fmt: skip

    def _plan(self, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The share of its cache that every head keeps, and what less would cost, where known.

        Query heads that share a key head have the same numbers.
        """
        key_heads = [None if at is None else plan["key_heads"][at] for at in plan["heads"]]
        options = [option for head in plan["key_heads"] for option in head["options"]]
        smallest = min(options, key=lambda option: float(option["share"]), default=None)
        least = "" if smallest is None else str(smallest["keeps"])
        share, cost = torch.full((2, len(key_heads)), math.nan, dtype=torch.float64)
        for at, head in enumerate(key_heads):
            if head is None:
                continue
            share[at] = head["share"]
            for option in head["options"]:
                if option["keeps"] == least:
                    cost[at] = option["first"] + option["second"]

        def pack(name: str, mean: Tensor, soft: float, **described: Any) -> dict[str, Any]:
            parts, weight = {"mean": mean, "std": mean * math.nan}, mean.isfinite().double()
            return self._pack(name, parts, soft, weight, least=2, group=GROUP, **described)

        metrics = [
            pack(
                "kept_share", share, SOFT["unit"],
                unit="1", range="[0, 1]", kind="unit", low=0.0, high=1.0,
                meaning="share of the bytes of its key head's cache that the plan keeps, after "
                f"{plan['n']:,} tokens",
                ends=["keeps nothing", "keeps everything"],
            )
        ]  # fmt: skip
        if known := cost[cost.isfinite()].tolist():
            metrics.append(
                pack(
                    "cost_to_shrink", cost, 1e-6,
                    unit="nat", range="any", kind="nats",
                    low=min(0.0, *known), high=max(1e-9, *known),
                    meaning=f"expected rise of the loss, a token, if its key head kept only "
                    f"{least}, from derivatives to second order at {plan['costs_at']:,} tokens",
                    ends=["can be taken away", "is needed"],
                )
            )  # fmt: skip
        return metrics

    def _structure(self) -> dict[str, Any]:
        """Profiles, shares of the weight by octave of distance, and examples."""
        summary = self.summary
        parts: dict[str, Any] = {}
        for part, profile in (("profile", summary.profile), ("positions", summary.positions)):
            if profile is not None and profile.octaves:
                parts[part] = self._profile(profile, part)
        distances, steps = summary.distances, self.level.distances
        if steps and distances is not None and distances.mass.shape[-1]:
            for name, mass in (("mass", distances.mass), ("even", distances.even)):
                shares = np.rint(mass.flatten(1).numpy().clip(0, 1) * steps)
                self.packer.add(f"distances.{name}", shares.astype(np.uint8))
            rows = distances.rows.split([layer.heads for layer in summary.layers])
            most = [int(part.max()) if len(part) else 0 for part in rows]
            parts["distances"] = {"octaves": distances.mass.shape[-1], "rows": most}
        if (examples := summary.examples) is not None:
            parts["examples"] = [
                [
                    {
                        "query": shown(row.query),
                        "position": row.position,
                        "n_keys": row.n_keys,
                        "entropy": rounded(row.entropy, 4),
                        "here": row.position - start if start >= 0 else -1,
                        "attended": shown(row.attended),
                        "context": shown(row.context, 3),
                    }
                    for row, start in zip(
                        examples.rows(head)[:MOST_ROWS], examples.start[head].tolist(), strict=False
                    )
                ]
                for head in range(min(len(summary.places), MOST_WITH_TEXT))
            ]
        return parts

    def _profile(self, profile: Profile, part: str) -> dict[str, Any]:
        """Means by octave of a count, with errors at finer levels."""
        level, metrics = self.level, {}
        for column, name in enumerate(self.summary.metrics):
            if level.profiles is not None and name not in level.profiles:
                continue
            soft, width = SOFT[SCALES.get(name, "unit")], 1 if level.profiles is not None else 2
            none = profile.count[:, column] == 0
            parts = {name: profile.mean[:, column].masked_fill(none, math.nan)}
            if level.profiles is None:
                parts[f"{name}.error"] = profile.error[:, column]
            for key, values in parts.items():
                codes = self.packer.add_coded(f"{part}.{key}", values.numpy(), width, soft)
                metrics[key] = {"codes": codes, "soft": soft}
        rows: list[list[int]] = []
        log_n: list[list[Any]] = []
        sizes = [layer.heads for layer in self.summary.layers]
        layers = zip(profile.rows.split(sizes), profile.log_n.split(sizes), strict=True)
        for counts, middle in layers:
            if not len(counts):
                rows.append([0] * profile.octaves)
                log_n.append([])
                continue
            most = counts.max(0)
            rows.append(most.values.tolist())
            log_n.append(shown(middle.gather(0, most.indices[None])[0].tolist(), 5))
        return {"octaves": profile.octaves, "metrics": metrics, "rows": rows, "log_n": log_n}

    def _classes(self) -> dict[str, Any]:
        """Classes of every head as indices, with their sentences in a small report."""
        order, small = list(CLASSES), self.level.profiles is None
        return {
            "classes": [
                {"label": kind.name, "rule": kind.rule, "source": kind.source}
                for kind in CLASSES.values()
            ],
            "heads": [
                [[order.index(kind.name), visible(kind.sentence) if small else ""] for kind in own]
                for own in classify(self.summary)
            ],
        }

    def _span_tables(self) -> dict[str, Any]:
        """Each head's weight by span of query and key, with uniform shares; {} if coarse."""
        spans = self.summary.spans
        if spans is None or not self.level.distances:
            return {}
        for part, values in (("mean", spans.mean), ("even", spans.even)):
            none = (spans.rows == 0).unsqueeze(-1)
            shares = values.masked_fill(none, math.nan).flatten(1).clamp(0, 1) * 65534
            codes = shares.round().nan_to_num(65535).numpy()
            self.packer.add(f"spans.{part}", codes.astype(np.uint16))
        names = [visible(name) for name in spans.names]
        return {"spans": {"rows": [*names, OTHER, ALL_ROWS], "keys": [*names, OTHER]}}

    def _maps(self) -> dict[str, Any]:
        """The recorded rows of named heads, by index of the head; {} if none were requested.

        Weights are in thousandths. At most 8 rows of a head and 1024 keys of each are included.
        """
        modules = [layer.module for layer in self.summary.layers]
        heads: dict[str, list[dict[str, Any]]] = {}
        for head_map in self.summary.maps:
            if head_map.module not in modules:
                continue
            place = modules.index(head_map.module), head_map.head
            if place not in self.summary.places:
                continue
            rows = heads.setdefault(str(self.summary.places.index(place)), [])
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
                        "tokens": shown(head_map.tokens[:keys]),
                    }
                )
        return {"maps": heads} if heads else {}
