"""Extras: what a command cannot do without one is said before any work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acutance.comparison import compare
from acutance.extras import install

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
        f"acutance: {option} needs matplotlib; install it with: {install('plots')}\n"
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


def test_what_an_extra_installs_works_before_a_release() -> None:
    """Packages of others, by name, those of nested extras too; acutance is in no registry yet."""
    assert install("plots") == 'pip install "matplotlib<4,>=3.9"'
    assert all(name in install("gguf") for name in ('"gguf<', '"accelerate<', '"transformers<'))
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert 'install "acutance[' not in sources + (ROOT / "README.md").read_text()
    assert not re.search(r'install "?acutance\[[a-z,]+\]"?(?! @)', pages)


def test_the_demo_draws() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (demo,) = re.findall(r"^demo = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert '"acutance[hf,plots]"' in demo
    assert '"pandas' in demo  # to_frame() is the first line of Python of the README
    assert "--figure heads.svg" in (ROOT / "Makefile").read_text()
