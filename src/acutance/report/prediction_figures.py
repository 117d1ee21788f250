"""Figures of theory: entropy and effective keys against scale, information against temperature.

A solid line is exact at this n, a dashed one the limit for many keys, and a mark the requested row.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from acutance.report import plot_style
from acutance.report.plot_style import LIGHT, Theme
from acutance.theory import Prediction, predict, scale_for_entropy, tau_for_information
from acutance.theory.prediction import gaussian_break_points

_POINTS = 33
_HOTTEST = 8.0
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
#: Each mechanism in words, the parameter along the horizontal axis, and what to call it.
_AXES = {
    "softmax": (
        "Softmax of independent logits", "logit_std", "standard deviation of the logits γ"
    ),
    "scaled_dot": ("Softmax of scaled dot products", "scale", "scale of the dot products"),
    "dot": ("Softmax of dot products", "scale", "scale of the dot products"),
    "cosine": ("Softmax of cosines", "tau", "scale of the cosines 1/τ"),
    "relu2": ("relu² weights", "logit_std", "standard deviation of the scores γ"),
    "identity": (
        "Signed weights, absolute values", "logit_std", "standard deviation of the scores γ"
    ),
    "decay": ("Geometric decay", "lam", "decay per key λ"),
}  # fmt: skip


def draw_prediction(
    prediction: Prediction, path: str | os.PathLike[str], *, theme: Theme = LIGHT
) -> None:
    """Draw entropy and effective keys against the scale of the scores, at the prediction's n.

    Args:
        prediction: of any mechanism but ``linear``, which has no scale.
        path: a .png or .svg file.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: for ``linear``, or another ending.
    """
    if prediction.mechanism not in _AXES:
        raise ValueError(
            f"{prediction.mechanism} has no scale to plot against: omit --figure, or choose "
            f"from {', '.join(_AXES)}"
        )
    parameters = {name: value for name, value in prediction.parameters.items() if value is not None}
    n = parameters.pop("n")
    words, name, title = _AXES[prediction.mechanism]
    if name not in parameters:  # softmax scores of another family
        name, title = "scale", "scale of the logits γ"
    scale_here = parameters.pop(name)
    places = _curve_scales(prediction, name, scale_here)
    metrics = ["entropy", "effective_keys"]
    rows = [predict(prediction.mechanism, n, **{name: at}, **parameters, metrics=metrics)
            for at in places]  # fmt: skip
    inverse = name == "tau"
    across = np.array([1 / at if inverse else at for at in places])
    panels = [metric for metric in metrics if metric in prediction.kinds]
    figure, grid = plot_style.new_figure(
        f"{words}: n = {n:,.0f} keys",
        f"Exact at this n, and the formula for many keys.{_rest(prediction, name)}",
        panels=len(panels),
        theme=theme,
    )
    exact_curve, limit_curve = plot_style.curves(2, theme)
    for axes, metric in zip(grid, panels, strict=True):
        exact = np.array([row[metric] for row in rows])
        limit = np.array([row.population[metric] for row in rows])
        plot_style.draw_line(axes, across, exact, exact_curve, f"exact, n = {n:,.0f}")
        limits = _within(limit, exact, metric, n)
        if np.isfinite(limits).any():
            plot_style.draw_line(axes, across, limits, limit_curve, "formula for n → ∞")
        where = 1 / scale_here if inverse else scale_here
        text = f"{metric.replace('_', ' ')} {prediction[metric]:.4g}"
        plot_style.draw_marks(axes, [where], [prediction[metric]], exact_curve, text)
        _critical(axes, theme, prediction, metric, name, across[-1])
        if metric == "effective_keys":
            axes.set_yscale("log")
            axes.set_ylim(min(0.8, 0.8 * float(exact.min())), 1.3 * n)
            plot_style.label(axes, x=title, y="effective keys 1/Σp²")
        else:
            top = math.log(n)
            axes.set_ylim(-0.04 * top, 1.06 * top)
            plot_style.label(axes, x=title, y="entropy H, nat")
        plot_style.legend(axes, theme)
    plot_style.save(figure, path)


def draw_temperatures(advice: Any, path: str | os.PathLike[str], *, theme: Theme = LIGHT) -> None:
    """Draw the information a row of cosines can carry against its temperature.

    Args:
        advice: from :func:`acutance.report.temperature.advise`.
        path: a .png or .svg file.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: for another ending.
    """
    fractions = np.concatenate(
        [np.geomspace(1e-3, 0.1, 16), np.linspace(0.12, 0.95, 44), 1 - np.geomspace(0.04, 2e-3, 16)]
    )
    figure, [axes] = plot_style.new_figure(
        f"Information of a row of {advice.n:,} cosines against temperature",
        f"Information log n − H as a fraction of log {advice.n:,} = {math.log(advice.n):.2f} "
        "nat, for the lowest entropy of each arrangement of keys.",
        theme=theme,
    )
    settings = advice.settings
    for setting, curve in zip(settings, plot_style.curves(len(settings), theme), strict=True):
        extra = {"d": advice.d} if setting.key == "random_keys" else {}
        tau = tau_for_information(advice.n, fractions, setting=setting.key, **extra)
        plot_style.draw_line(axes, tau, 100 * fractions, curve, setting.name)
        chosen = setting is advice.chosen
        name = f"τ = {setting.tau:.4g}" if chosen else "_nolegend_"
        plot_style.draw_marks(
            axes, [setting.tau], [100 * advice.fraction], curve, name, hollow=not chosen
        )
    plot_style.reference(axes, theme, x=1.0, name="τ = 1")
    lowest = 0.6 * min(setting.tau for setting in settings)
    ticks = [tau for tau in _TICKS if lowest <= tau <= _HOTTEST]
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tau:g}" for tau in ticks])
    axes.minorticks_off()
    axes.set_xlim(lowest, _HOTTEST)
    axes.set_ylim(0, 103)
    plot_style.label(axes, x="temperature τ", y="information, % of log n")
    plot_style.legend(axes, theme)
    plot_style.save(figure, path)


def _rest(prediction: Prediction, name: str) -> str:
    """The parameters other than the scale, as text."""
    parameters = prediction.parameters
    bars = [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in parameters.items()
        if key not in (name, "n", "value_variance") and value is not None
    ]
    return f" Fixed: {', '.join(bars)}." if bars else ""


def _curve_scales(prediction: Prediction, name: str, scale_here: float) -> list[float]:
    """Scales at which the curves are computed, including the prediction's own, ``scale_here``."""
    n = float(prediction.parameters["n"])
    if name == "lam":
        return sorted({*np.linspace(0.02, 1.0, _POINTS - 1).tolist(), scale_here})
    if prediction.mechanism in ("relu2", "identity"):
        far = 4 * max(scale_here, abs(prediction.parameters["logit_mean"]))
        return sorted({*np.geomspace(far / 40, far, _POINTS - 1).tolist(), scale_here})
    if name == "logit_std":
        far = max(1.3 * scale_here, 1.5 * gaussian_break_points(max(n, 2))[1])
    elif name == "tau":
        d = prediction.parameters["d"]
        sharp = float(scale_for_entropy(n, 0.15 * math.log(n), "cosine", d=d)) if n > 1 else 1.0
        far = max(1.3 / scale_here, sharp)
        return [
            1 / at for at in sorted({*np.linspace(far / 200, far, _POINTS - 1), 1 / scale_here})
        ]
    else:
        far = 3 * scale_here if scale_here else 1.0
    return sorted({*np.linspace(0.0, far, _POINTS - 1).tolist(), scale_here})


def _within(limit: Any, exact: Any, metric: str, n: float) -> Any:
    """The limit formula's values within the range of the exact curve, and one point beyond."""
    lowest = 0.3 if metric == "effective_keys" else -0.2 * math.log(n)
    return np.where(np.isfinite(limit) & (limit > lowest), limit, np.nan)


def _critical(
    axes: Any, theme: Theme, prediction: Prediction, metric: str, name: str, far: float
) -> None:
    """Mark the scale at which the formulas for Gaussian logits break down."""
    parameters = prediction.parameters
    if name != "logit_std" or parameters.get("family") != "gaussian" or parameters["n"] < 2:
        return
    sparse_to, entropy_to = gaussian_break_points(parameters["n"])
    at, text = (
        (sparse_to, f"√(log n / 2) = {sparse_to:.2f}")
        if metric == "effective_keys"
        else (entropy_to, f"√(2 log n) = {entropy_to:.2f}")
    )
    if at < far:
        plot_style.reference(axes, theme, x=at, name=text)
