"""The figure of a search for a cache plan."""

from __future__ import annotations

import os

from acutance.caching.frontier import Budget
from acutance.report.plot_style import (
    LIGHT,
    Theme,
    curves,
    draw_line,
    draw_marks,
    label,
    legend,
    new_figure,
    reference,
    save,
)


def draw(found: Budget, path: str | os.PathLike[str], *, theme: Theme = LIGHT) -> None:
    """Draw loss against bytes: every measured plan by its rule, and a line along the frontier.

    Args:
        found: a search.
        path: a .png or .svg file.
        theme: the page, light or dark.

    Raises:
        ImportError: without matplotlib.
        ValueError: for another ending.
    """
    rules = list(dict.fromkeys(one.rule for one in found.points))
    figure, [axes] = new_figure(
        "Loss against bytes of the key-value cache",
        f"Each mark is a plan, with its standard error over {found.windows} windows of {found.n:,} "
        f"tokens. Mean loss with the full cache: {found.mean_loss:.3f} nat.",
        theme=theme,
    )
    styles = curves(len(rules) + 1, theme)
    front = [(100.0, 0.0)] + [(100 * one.share, one.delta) for one in found.frontier]
    draw_line(axes, [x for x, _ in front], [y for _, y in front], styles[-1], "frontier")
    for rule, style in zip(rules, styles, strict=False):
        some = [one for one in found.points if one.rule == rule]
        draw_marks(
            axes, [100 * one.share for one in some], [one.delta for one in some], style, rule,
            error=[one.error for one in some],
        )  # fmt: skip
    if (chosen := found.chosen) is not None:
        axes.annotate(
            "chosen", (100 * chosen.share, chosen.delta), xytext=(-10, 0), ha="right", va="center",
            textcoords="offset points", color=theme.ink, fontsize=9,
        )  # fmt: skip
    reference(axes, theme, y=0.0)
    axes.set_xlim(0, 103)
    label(axes, x="bytes, % of the full 16-bit cache", y="rise of the loss, nat a token")
    legend(axes, theme, where="upper right")
    save(figure, path)
