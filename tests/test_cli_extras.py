"""Extras: what a command cannot do without one is said before any work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acutance.extras import install
from tests.contract.test_cli_extras import ROOT


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("probe", "--figure"),
        ("report missing.safetensors", "--figure"),
        ("merge missing.safetensors", "--figure"),
        ("diff missing.safetensors missing.safetensors", "--figure"),
        ("predict --n 16 --logit-std 1", "--figure"),
        ("temperature --n 16", "--figure"),
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


def test_what_an_extra_installs_works_before_a_release() -> None:
    """Packages of others, by name, those of nested extras too; acutance is in no registry yet."""
    assert install("plots") == 'pip install "matplotlib<4,>=3.9"'
    assert all(name in install("gguf") for name in ('"gguf<', '"accelerate<', '"transformers<'))
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert 'install "acutance[' not in sources + (ROOT / "README.md").read_text()
    assert not re.search(r'install "?acutance\[[a-z,]+\]"?(?! @)', pages)
