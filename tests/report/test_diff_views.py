"""The terminal view and the figure of a diff."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from acutance.probing import Diff, HeadSummary, diff
from acutance.report.diff_console import diff_view
from acutance.report.diff_figures import draw_diff
from acutance.report.plot_style import DARK

Make = Callable[..., HeadSummary]
WHERE = {(1, 3): 0.2, (2, 5): 0.9}


def printed(
    found: Diff, width: int, metrics: tuple[str, ...] = (), top: int = 5, **options: object
) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, **options)
    console.print(diff_view(found, metrics or ("normalized_entropy",), top))
    return file.getvalue()


@pytest.fixture
def found(summary_of: Make) -> Diff:
    about = {"model": "one", "text": ["a.txt"], "windows": 9, "window_length": 64}
    return diff(
        summary_of((12,) * 6, about=about),
        summary_of((12,) * 6, about=about | {"text": ["b.txt"]}, normalized_entropy=WHERE),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_fits_and_the_largest_changes_are_named(found: Diff, width: int) -> None:
    text = printed(found, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "before: one · a.txt · 9 windows of 64 tokens" in lines
    assert any(line.startswith("! They read different texts, a.txt and b.txt") for line in lines)
    start = lines.index("Heads whose normalized entropy changed most; heads that moved come first")
    head = found.of("normalized_entropy")[15]
    numbers = [f"{head.before:.3f}", "0.200", f"{head.change:.3f}".replace("-", "−")]
    assert re.split(r"\s+", lines[start + 3].strip())[:5] == ["1", "h3", *numbers]
    assert re.split(r"\s+", lines[start + 4].strip())[:2] == ["2", "h5"]
    assert " to " not in lines[start + 3]  # without errors there is no interval
    for metric in found.metrics:
        assert any(line.startswith(f"{metric} ") for line in lines)
    assert sum("encoder" in line or "model.layers" in line for line in lines) == 6 * (width >= 100)


def test_a_large_model_takes_a_line_for_each_layer(summary_of: Make) -> None:
    one = summary_of((64,) * 80, rows=2, metrics=("entropy",))
    other = summary_of((64,) * 80, rows=2, metrics=("entropy",), entropy={(5, 9): 1.0})
    text = printed(diff(one, other), 80, ("entropy",), top=10)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 80 + 40
    assert "and 5,110 more" in text


def test_without_colour_nothing_but_text_is_written(found: Diff) -> None:
    assert "\x1b" not in printed(found, 80)
    assert "\x1b" not in printed(found, 80, no_color=True)


def test_a_terminal_of_few_characters_gets_those(found: Diff) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=80, legacy_windows=False).print(diff_view(found, ("entropy",), 3))
    file.flush()
    assert b"+-:" in file.buffer.getvalue() or file.buffer.getvalue().isascii()


def test_hostile_names_are_shown_and_drive_nothing(summary_of: Make, tmp_path: Path) -> None:
    name = "a[bold]b[/bold][/red]\x1b[31mred\n$\\frac{$"
    wild = summary_of((1, 2), about={"model": name}, layer={1: {"module": name}})
    found = diff(wild, summary_of((1, 1), about={"model": name}, layer={1: {"module": name}}))
    text = printed(found, 120)
    assert "\x1b" not in text
    assert r"a[bold]b[/bold][/red]\x1b[31mred\n" in text
    assert "Only in the first: head 1 of layer 1" in text
    draw_diff(found, tmp_path / "x.png")


def test_all_equal_lists_no_head(summary_of: Make) -> None:
    one = summary_of((2, 2))
    text = printed(diff(one, one), 80)
    assert "None: no change, or no head has rows" in text
    assert "Layer by layer" not in text


def test_metrics_with_units_are_named_with_them(found: Diff) -> None:
    text = printed(found, 80, ("entropy", "max_logit"))
    assert "Heads whose entropy (nat) changed most" in text
    assert "Heads whose max logit" in text


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["light.png", "dark.svg"])
def test_the_figure_is_drawn_light_and_dark(found: Diff, tmp_path: Path, name: str) -> None:
    themes = {"theme": DARK} if name.startswith("dark") else {}
    for copy in ("one", "two"):
        draw_diff(found, tmp_path / f"{copy}-{name}", **themes)
    data = (tmp_path / f"one-{name}").read_bytes()
    assert data == (tmp_path / f"two-{name}").read_bytes()
    assert data[:4] == b"\x89PNG" if name.endswith("png") else b"<svg" in data
    if name.endswith("svg"):
        assert DARK.page.encode() in data


def test_what_cannot_be_drawn_is_said(found: Diff, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'lse_' is not in both states"):
        draw_diff(found, tmp_path / "x.png", "lse_")
    nothing = replace(found, verdicts=found.verdicts * 0 - 1)
    with pytest.raises(ValueError, match="no head has rows in both states"):
        draw_diff(nothing, tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []
