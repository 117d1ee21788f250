"""Every recipe runs with the output that it shows, and draws the picture that it shows."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "docs" / "recipes"
FENCE = re.compile(r"^```pycon\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TEXTS = {
    page.stem: page.read_text(encoding="utf-8")
    for page in sorted(RECIPES.glob("*.md"))
    if page.stem != "index"
}
#: Recipes of commands for a model that tests do not have; tests/test_gguf.py runs a small one.
COMMANDS = {"gguf"}


def examples(text: str) -> str:
    """The page with everything but its examples blanked out, so that lines keep their numbers."""
    kept, end = [">>> import os as _os; _os.chdir(getfixture('tmp_path'))"], 0
    for fence in FENCE.finditer(text):
        start, stop = fence.span("body")
        kept += ["\n" * text.count("\n", end, start), text[start:stop]]
        end = stop
    return "".join(kept)


__test__ = {name: examples(text) for name, text in TEXTS.items() if name not in COMMANDS}


@pytest.fixture(autouse=True)
def back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return to the folder after a recipe has worked in one of its own."""
    monkeypatch.chdir(ROOT)


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipes", ROOT / "tools" / "make_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_enough_recipes() -> None:
    assert len(TEXTS) >= 15


@pytest.mark.parametrize("name", TEXTS)
def test_a_recipe_has_its_parts(name: str) -> None:
    text = TEXTS[name]
    lines = text.splitlines()
    assert len(lines) <= 60
    assert re.fullmatch(r"# .+\?", lines[0])
    assert re.search(
        r"\d|one head", text.split("\n\n")[1], re.IGNORECASE
    )  # the answer has a number
    assert "## What to do" in text
    assert "{doc}`" in text.split("## What to do")[1]
    figure = RECIPES / "figures" / f"{name}.svg"
    assert f"](figures/{name}.svg)" in text
    assert 1000 < figure.stat().st_size < 250_000
    assert name in COMMANDS or f'"{name}.svg"' in text  # the run draws it
    index = (RECIPES / "index.md").read_text(encoding="utf-8")
    assert index.count(f"{{doc}}`{name}`") == 1
    assert f"\n{name}\n" in index


def test_figures_are_those_of_recipes() -> None:
    assert {figure.stem for figure in (RECIPES / "figures").iterdir()} == set(TEXTS)


def test_a_page_becomes_a_notebook(tmp_path: Path) -> None:
    recipes = tool()
    assert recipes.write_notebooks(tmp_path, recipes.pages(["exploding-gradients"])) == []
    written = json.loads((tmp_path / "exploding-gradients.ipynb").read_text(encoding="utf-8"))
    assert written["nbformat"] == 4
    code = [cell for cell in written["cells"] if cell["cell_type"] == "code"]
    assert any("jacobian_trace" in cell["outputs"][0]["text"] for cell in code if cell["outputs"])
    compile("\n".join(cell["source"] for cell in code), "notebook", "exec")


def test_a_recipe_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.md"
    broken.write_text("# Why?\n\n```pycon\n>>> 1 / 0\n```\n")
    [failure] = tool().write_notebooks(tmp_path, [broken])
    assert failure.startswith("broken.md failed:")
    assert "ZeroDivisionError" in failure


def test_refilling_a_page_changes_only_outputs() -> None:
    page = "# Q?\n\n```pycon\n>>> x = 1\n>>> x + 1\n3\n```\n\nend\n"
    assert tool().refill(page) == page.replace("\n3\n", "\n2\n")
