"""What ``acutance diff`` does once its options are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from acutance.cli.report_actions import TABLE, say_written
from acutance.files import write_each
from acutance.report.diff_console import print_diff
from acutance.report.exports import Targets, put_csv, put_json, to_output
from acutance.report.terminal import headline
from acutance.summary import files
from acutance.summary.diff.diff import diff as diff_summaries
from acutance.summary.diff.records import Diff
from acutance.summary.head_summary import SCHEMA, HeadSummary, load
from acutance.summary.state import State, load_state

__all__ = ["diff", "read"]


def diff(
    before: Path,
    after: Path,
    *,
    metrics: Sequence[str],
    top: int,
    equal_n: bool,
    targets: Targets,
    dark: bool,
    console: Callable[..., Any],
) -> Diff:
    """Compare two states, show what moved and write what was asked for.

    Args:
        before: a saved state.
        after: another.
        metrics: whose heads and layers to list; none is normalized entropy, or the next best.
        top: heads listed for each.
        equal_n: compare only rows that see as many keys.
        targets: paths by option: ``--json``, ``--csv``, ``--figure``.
        dark: whether the figure has a dark page.
        console: makes a rich console on standard error, or output with ``stderr=False``.

    Raises:
        ImportError: if a figure is wanted without matplotlib.
        OSError: if a file cannot be read or written.
        ValueError: if a file is no state, or the two share no head, no n or none of ``metrics``.
    """
    found = diff_summaries(read(before), read(after), equal_n=equal_n)
    shown = list(dict.fromkeys(metrics)) or [headline(found.metrics)]
    for name in shown:
        found.of(name)
    kinds: dict[str, Callable[[Path], object]] = {
        "--json": lambda path: put_json(found.to_dict(), path),
        "--csv": lambda path: put_csv(found.to_arrow(), path),
        "--figure": lambda path: _draw(found, path, shown[0], dark),
    }
    steps: dict[str, Callable[[], object]] = {
        option: partial(step, path)
        for option, step in kinds.items()
        if (path := targets.get(option)) is not None
    }
    if not to_output(targets):
        steps[TABLE] = lambda: print_diff(found, console(stderr=False), shown, top)
    write_each(steps, lambda option: say_written(option, targets, console))
    return found


def _draw(found: Diff, path: Path, metric: str, dark: bool) -> None:
    from acutance.report.diff_figures import draw_diff
    from acutance.report.plot_style import DARK, LIGHT

    draw_diff(found, path, metric, theme=DARK if dark else LIGHT)


def read(path: Path) -> HeadSummary | State:
    """A state with the run it is of, or the summary alone where the file does not say.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no state.
    """
    header, _ = files.read(path, SCHEMA)
    return load_state(path) if "run" in header else load(path)
