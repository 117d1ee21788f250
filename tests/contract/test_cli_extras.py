"""Extras: what a command cannot do without one is said before any work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acutance.comparison import compare

ROOT = Path(__file__).parents[2]


def test_reproduce_without_matplotlib_runs_nothing(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("reproduce", "simplex", "--quick", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "or skip figures with --no-figures" in result.err
    assert "predicted" not in result.err
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
    assert '"pandas' in demo  # to_frame() is the first line of Python of the README
    assert "--figure heads.svg" in (ROOT / "Makefile").read_text()
