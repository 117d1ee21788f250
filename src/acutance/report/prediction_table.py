"""A prediction as a table of metrics, and remarks.

The limit formula shown with a value is ``Prediction.population``. It is said to hold if it is
within 1 % of the exact value; the remarks explain why it does not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from acutance.files import finite
from acutance.report.table import Cell, Column, Table, figures
from acutance.rowstats.descriptions import DESCRIPTIONS
from acutance.theory import Prediction, effective_keys_decay, expected_max_gauss, frozen_entropy
from acutance.theory.prediction import gaussian_break_points

SCHEMA = "acutance.prediction/1"
HOLDS, NEAR = 0.01, 0.1  # relative difference up to which a formula holds, or nearly does
_WIDE = 110  # columns from which the meanings fit beside the numbers
_MINUS = re.compile(r"(?<!\w)-(?=\d)|(?<=\de)-(?=\d)")
_GAUSSIAN = ("softmax", "dot", "scaled_dot")


def prediction_table(
    prediction: Prediction, measured: Mapping[str, tuple[float, float]] | None = None
) -> Table:
    """A line for each metric that theory predicts, and remarks.

    Args:
        prediction: result of :func:`acutance.theory.predict`.
        measured: means and standard errors by metric name, shown in further columns.

    Example:
        >>> from acutance import theory
        >>> from rich.console import Console
        >>> row = theory.predict("decay", 64, lam=0.5, metrics=["entropy", "effective_keys"])
        >>> Console(width=80, no_color=True).print(prediction_table(row))
        decay, 64 keys: lam 0.5
        <BLANKLINE>
        metric            exact  formula    n → ∞  unit
        entropy         1.38629                 –  nat
        effective_keys  3.00000  holds    3.00000  keys
        ...
    """
    kinds = prediction.kinds
    columns = [
        Column("metric", "name"),
        Column("exact" if all(kind == "fixed" for kind in kinds.values()) else "expected"),
        Column("formula", "name"),
        Column("n → ∞", format=_number),
        Column("unit", "name"),
        Column("meaning", "words", from_width=_WIDE),
    ]
    if measured:
        columns[2:2] = [Column("measured", format=_number), Column("off by")]
    rows = []
    for name, entry in DESCRIPTIONS.items():
        if name not in kinds:
            continue
        exact, limit = prediction[name], prediction.population[name]
        verdict = _verdict(exact, limit)
        row = [
            name,
            _number(exact) + ("≈" if kinds[name] == "plug-in" else ""),
            Cell(verdict, "bold" if verdict.startswith("off") else ""),
            limit,
            "" if entry.unit == "1" else entry.unit,
            Cell(entry.meaning, "dim"),
        ]
        if measured:
            mean, error = measured.get(name, (math.nan, math.nan))
            row[2:2] = [mean, _distance(mean, error, exact)]
        rows.append(row)
    return Table(_heading(prediction), columns, rows, remarks(prediction), heading="What it means")


def remarks(prediction: Prediction) -> list[str]:
    r"""Sentences on a prediction: which formulas hold, and why others do not.

    Example:
        >>> from acutance import theory
        >>> print("\n".join(remarks(theory.predict("softmax", 4096, logit_std=2.0))[:2]))
        Entropy: log n − γ²/2 = 6.318 is 0.033 nat below the exact 6.351. It holds while the
        standard deviation of the logits γ is well below √(2 log n) = 4.08, and γ is 2.
        Sparsity: exp(−γ²/2) = 0.1353 does not hold at this n, where the exact mean is 0.1892 (40 %
        more): it fails above about γ = √(log n / 2) = 2.04, half of the limit for the entropy.
    """
    return [_MINUS.sub("−", sentence) for sentence in _remarks(prediction)]


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON values; NaN and infinities become None."""
    return {
        "schema": SCHEMA,
        "mechanism": prediction.mechanism,
        "parameters": {
            name: finite(value.tolist() if hasattr(value, "tolist") else value)
            for name, value in prediction.parameters.items()
        },
        "metrics": {
            name: {
                "value": finite(prediction[name]),
                "kind": prediction.kinds.get(name),
                "why": prediction.why.get(name),
                "population": finite(prediction.population[name]),
                "unit": entry.unit,
            }
            for name, entry in DESCRIPTIONS.items()
            if not entry.needs_gaps
        },
        "remarks": remarks(prediction),
    }


def logit_deviation(prediction: Prediction) -> float | None:
    """Standard deviation of the logits of a Gaussian softmax row; None for other rows."""
    parameters = prediction.parameters
    if prediction.mechanism not in _GAUSSIAN or parameters.get("family", "gaussian") != "gaussian":
        return None
    if prediction.mechanism == "softmax":
        return float(parameters["logit_std"])
    return float(parameters["scale"] * parameters["query_norm"])


def _remarks(row: Prediction) -> Iterator[str]:
    """Sentences on where the limit formulas hold for this row."""
    n = float(row.parameters["n"])
    gamma = logit_deviation(row)
    if gamma is not None and n >= 2:
        yield from _gaussian_remarks(row, n, gamma)
    elif row.mechanism in (*_GAUSSIAN, "cosine") and n < 2:
        yield "One key has all the weight."
    elif row.mechanism in (*_GAUSSIAN, "cosine"):
        yield from _family_remarks(row)
    elif row.mechanism == "relu2":
        yield from _relu2_remarks(row, n)
    elif row.mechanism == "decay":
        yield from _decay_remarks(row, n)
    elif row.mechanism == "identity":
        yield (
            "For many normal scores, the sparsity of signed weights is never below √(2/π) = "
            f"0.798, whatever their scale; here it is {_number(row.sparsity)}."
        )
    elif row.mechanism == "linear":
        yield (
            "The values hold for many keys with this mean and covariance; with the mean and "
            "covariance of the n keys themselves they are exact."
        )
    if "mean_field_entropy" in row.kinds and "entropy" in row.kinds:
        bound = row.mean_field_entropy
        verdict = f"guarantees {bound:.2f} nat" if bound > 0 else "is negative and says nothing"
        yield (
            f"The mean-field bound log n − (max − mean) {verdict}, compared with the exact "
            f"{row.entropy:.2f}: it loses {row.jensen_gap:.2f} to the logsumexp and "
            f"{row.max_gap:.2f} to the maximum."
        )
    yield from _reasons_for_missing(row)


def _gaussian_remarks(row: Prediction, n: float, gamma: float) -> Iterator[str]:
    """Sentences for Gaussian logits: entropy, sparsity and effective keys."""
    sparse_to, entropy_to = gaussian_break_points(n)
    limit = row.population
    if "entropy" in row.kinds:
        gap = limit.entropy - row.entropy
        where = f"γ is {gamma:.4g}"
        if gamma < entropy_to:
            side = f"is {_small(gap)} nat {'below' if gap < 0 else 'above'}"
            side = "agrees with" if abs(gap) < 1e-6 else side
            yield (
                f"Entropy: log n − γ²/2 = {limit.entropy:.3f} {side} the exact "
                f"{row.entropy:.3f}. It holds while the standard deviation of the logits γ is "
                f"well below √(2 log n) = {entropy_to:.2f}, and {where}."
            )
        else:
            frozen = float(expected_max_gauss(n)) / gamma
            near = ""
            if frozen < 1:
                near = " (the formula for frozen weights, ψ(1) − ψ(1 − M/γ), gives"
                near += f" {float(frozen_entropy(frozen)):.3g})"
            yield (
                f"Entropy: log n − γ²/2 = {limit.entropy:.3g} does not hold: {where}, above "
                f"√(2 log n) = {entropy_to:.2f}, where a few keys receive all the weight. The "
                f"exact mean is {row.entropy:.4g}{near}."
            )
    if "sparsity" in row.kinds:
        ratio = row.sparsity / limit.sparsity if limit.sparsity else math.inf
        if abs(ratio - 1) <= HOLDS:
            yield (
                f"Sparsity: exp(−γ²/2) = {_number(limit.sparsity)} holds within 1 %; it fails "
                f"above about γ = √(log n / 2) = {sparse_to:.2f}."
            )
        else:
            away = f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'}".replace("%", " %")
            more = away if ratio < 3 else f"{ratio:.3g} times"
            yield (
                f"Sparsity: exp(−γ²/2) = {limit.sparsity:.4g} does not hold at this n, where "
                f"the exact mean is {row.sparsity:.4g} ({more}): it fails above about γ = "
                f"√(log n / 2) = {sparse_to:.2f}, half of the limit for the entropy."
            )
    if "effective_keys" in row.kinds and "collision" in row.kinds:
        pooled = 1 / row.collision
        if row.effective_keys > 1.05 * pooled:
            yield (
                "Rows differ: their mean number of effective keys is "
                f"{row.effective_keys:.4g}, but the reciprocal of their mean collision "
                f"probability only {pooled:.4g}, and the formula n exp(−γ²) gives "
                f"{limit.effective_keys:.4g}."
            )


def _family_remarks(row: Prediction) -> Iterator[str]:
    """Sentences for logits from other families."""
    limit = row.population
    if "entropy" not in row.kinds:
        return
    if math.isnan(limit.entropy):
        yield (
            "There is no formula for many keys: the mean of exp(logit) is infinite, so a few "
            "keys dominate every sum at any n. The expected values are still exact."
        )
        return
    gap = abs(limit.entropy - row.entropy)
    holds = gap <= HOLDS * abs(row.entropy)
    yield (
        f"Entropy: the formula for many keys, {limit.entropy:.4g}, "
        + ("holds" if holds else "does not hold at this n")
        + f": it is {_small(gap)} nat off the exact {row.entropy:.4g}."
    )
    if "sparsity" in row.kinds and abs(limit.sparsity / row.sparsity - 1) > HOLDS:
        yield (
            f"Sparsity: the formula for many keys gives {_number(limit.sparsity)}, but the "
            f"exact mean is {_number(row.sparsity)}: formulas based on Σp² fail at half the "
            "scale."
        )


def _relu2_remarks(row: Prediction, n: float) -> Iterator[str]:
    """Sentences for squared ReLU weights."""
    from scipy.special import ndtr

    parameters = row.parameters
    ratio = parameters["logit_mean"] / parameters["logit_std"]
    active, floor = n * float(ndtr(ratio)), n**-0.5
    yield (
        f"Only the ratio of mean to standard deviation matters, {ratio:.3g}: {active:.3g} of "
        f"{n:,.0f} keys are active on average. Multiplying all scores by a factor has no "
        "effect."
    )
    if "sparsity" in row.kinds and abs(row.population.sparsity / row.sparsity - 1) > HOLDS:
        yield (
            f"Sparsity: the formula for many keys, {row.population.sparsity:.4g}, does not "
            f"hold at this n: the exact mean is {row.sparsity:.4g}, and no row is below 1/√n = "
            f"{floor:.4g}."
        )


def _decay_remarks(row: Prediction, n: float) -> Iterator[str]:
    """A sentence on the limit of a decay's effective keys."""
    lam = row.parameters["lam"]
    if lam < 1:
        limit = (1 + lam) / (1 - lam)
        yield (
            f"Effective keys approach (1 + λ)/(1 − λ) = {limit:.4g} as n grows, here "
            f"{float(effective_keys_decay(lam, n)):.4g}. Sparsity falls to 0 only because keys "
            "without weight are added."
        )


def _reasons_for_missing(row: Prediction) -> Iterator[str]:
    """Sentences on the metrics without a value, grouped by reason."""
    grouped: dict[str, list[str]] = {}
    for name, reason in row.why.items():
        grouped.setdefault(reason, []).append(name)
    for reason, names in grouped.items():
        yield f"Not predicted: {', '.join(names)}. {reason}"
    if any(kind == "plug-in" for kind in row.kinds.values()):
        yield (
            "≈ marks a formula evaluated at expected values; it is not the expectation of the "
            "metric."
        )


def _heading(row: Prediction) -> str:
    """Title of the table: mechanism and parameters."""
    parameters = {name: value for name, value in row.parameters.items() if name != "n"}
    if parameters.get("value_variance") == 1.0:
        del parameters["value_variance"]
    parts = [f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
             for name, value in parameters.items()]  # fmt: skip
    return f"{row.mechanism}, {row.parameters['n']:,.0f} keys: {', '.join(parts)}"


def _verdict(exact: float, limit: float) -> str:
    """One of holds, near or off, with the relative difference; empty if there is no formula."""
    if math.isnan(limit) or not math.isfinite(exact):
        return ""
    if exact == limit:
        return "holds"
    away = abs(limit - exact) / max(abs(exact), 1e-12)
    if away <= HOLDS:
        return "holds"
    sign = "+" if limit > exact else "−"
    amount = f"{sign}{away:.0%}".replace("%", " %") if away < 10 else "over 10 ×"
    return f"near, {amount}" if away <= NEAR else f"off, {amount}"


def _distance(mean: float, error: float, exact: float) -> str:
    """Distance of a sampled mean from the exact value, in standard errors."""
    if math.isnan(mean) or not error > 0:
        return "–"
    return f"{round((mean - exact) / error, 1) + 0.0:+.1f} se".replace("-", "−")


def _number(value: float) -> str:
    """A number with six significant digits, or four below 0.1."""
    return figures(value, 4) if abs(value) < 0.1 else figures(value, 6, places=5)


def _small(value: float) -> str:
    """A small number with three decimals, or in exponent form."""
    size = abs(value)
    return f"{size:.3f}" if size >= 0.001 else f"{size:.0e}" if size else "0"
