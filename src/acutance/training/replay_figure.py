"""The figure of a replayed training: loss, logits and their growth, with the alarms.

Needs matplotlib (the extra ``plots``).
"""

from __future__ import annotations

import os

import numpy as np

from acutance.report.plot_style import LIGHT, Theme, curves, label, new_figure, reference, save
from acutance.training.replay import Replay

#: Layers that are drawn: those with alarms first, then those that grew most.
_DRAWN = 6
_BEFORE = 0.5  # share of the training that is drawn before the first alarm


def draw_replay(replayed: Replay, path: str | os.PathLike[str], *, theme: Theme = LIGHT) -> None:
    """Draw loss and gradient norm, logits and their growth, from before the first alarm to the end.

    Without an alarm the whole training is drawn. Of many layers, those with alarms and those that
    grew most are drawn.

    Args:
        replayed: a replayed log.
        path: a .png or .svg file.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
    """
    other = {"loss": replayed.loss, "gradient norm": replayed.grad_norm}
    other = {name: values for name, values in other.items() if values}
    figure, panels = new_figure(
        "Logits of a training",
        "Vertical lines: first alarm of each layer. Dashed: growth in the last quarter of the "
        "training beyond which there is an alarm.",
        panels=2 + len(other),
        theme=theme,
    )
    steps = np.array(replayed.steps)
    first, last = int(steps[0]), max(map(max, (replayed.steps, *other.values())))
    if replayed.alarms:
        first = max(first, int(replayed.alarms[0].step - _BEFORE * (last - first)))
    for axes, (name, by_step) in zip(panels, other.items(), strict=False):
        at = [step for step in by_step if step >= first]
        axes.plot(at, [by_step[step] for step in at], color=theme.ink, linewidth=1.4)
        label(axes, x="step", y=name, title=name)
    logits, growths = panels[-2:]
    shown = steps >= first
    names = _drawn(replayed)
    for name, curve in zip(names, curves(len(names), theme), strict=True):
        for axes, values in ((logits, replayed.logit_std), (growths, replayed.growth)):
            axes.plot(
                steps[shown], np.array(values[name])[shown], color=curve.colour, linewidth=1.5,
                linestyle=curve.dash, label=name,
            )  # fmt: skip
    growths.axhline(replayed.limit, color=theme.ink, linewidth=1.0, linestyle="dashed")
    label(logits, x="step", y="standard deviation", title="logits of each layer")
    label(growths, x="step", y="factor", title="growth in the last quarter")
    for axes in panels:
        for alarm in replayed.alarms:
            reference(axes, theme, x=alarm.step)
        axes.set_xlim(first, max(last, first + 1))
    logits.legend(
        fontsize=8, frameon=False, labelcolor=theme.muted, loc="upper left", handlelength=2.5
    )
    save(figure, path)


def _drawn(replayed: Replay) -> list[str]:
    """The layers that are drawn."""
    alarmed = dict.fromkeys(
        alarm.layer for alarm in replayed.alarms if alarm.layer in replayed.growth
    )
    most = {
        name: max((value for value in values if value == value), default=-np.inf)
        for name, values in replayed.growth.items()
    }
    rest = sorted((name for name in most if name not in alarmed), key=lambda name: -most[name])
    return [*alarmed, *rest][:_DRAWN]
