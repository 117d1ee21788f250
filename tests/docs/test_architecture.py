"""The architecture page: its picture shows the imports as they are, and its paths exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location(
    "make_architecture_figure", ROOT / "tools" / "make_architecture_figure.py"
)
assert SPEC is not None
assert SPEC.loader is not None
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)


@pytest.mark.parametrize("theme", tool.THEMES)
def test_the_figure_is_up_to_date(theme: str) -> None:
    path = tool.FIGURE.with_stem(tool.FIGURE.stem + theme)
    assert path.read_text(encoding="utf-8") == tool.draw(theme), (
        "run python tools/make_architecture_figure.py"
    )


def test_every_package_stands_above_what_it_imports() -> None:
    graph = tool.imports()
    at = tool.places(graph)
    assert {"kernels", "capture", "cli"} <= graph.keys()
    for name, below in graph.items():
        assert all(at[name][1] < at[other][1] for other in below)


def test_the_files_of_the_page_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([a-z_]+/[a-z_*/]*(?:\.py)?)`", page)
    assert len(paths) > 10
    for path in paths:
        assert list((ROOT / "src" / "acutance").glob(path.rstrip("/"))) or (ROOT / path).exists(), (
            path
        )
