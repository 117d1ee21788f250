"""Extras: what a command cannot do without one is said before any work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acutance.comparison import compare

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("probe", "--figure"),
        ("report missing.safetensors", "--figure"),
        ("merge missing.safetensors", "--figure"),
        ("diff missing.safetensors missing.safetensors", "--figure"),
        ("predict --n 16 --logit-std 1", "--plot"),
        ("predict --n 16 --logit-std 1", "--figure"),
        ("temperature --n 16", "--plot"),
        ("compare", "--figure"),
    ],
)
def test_a_figure_without_matplotlib_is_refused_before_any_work(
    run: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    option: str,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*command.split(), option, tmp_path / "a.png")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        f'acutance: {option} needs matplotlib; install it with: pip install "acutance[plots]"\n'
    )


def test_reproduce_without_matplotlib_runs_nothing(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("reproduce", "simplex", "--quick", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "or skip figures with --no-figures" in result.stderr
    assert "predicted" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_mechanism_without_its_library_stops_a_comparison_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "entmax", None)
    steps: list[Any] = []
    with pytest.raises(ImportError, match="entmax library; install it"):
        compare(["identity", "entmax15"], n=8, d=16, progress=steps.append)
    assert steps == []


def test_the_demo_draws() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (demo,) = re.findall(r"^demo = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert '"acutance[hf,plots]"' in demo
    assert "--figure heads.svg" in (ROOT / "Makefile").read_text()
