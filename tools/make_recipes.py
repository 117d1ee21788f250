"""Run the recipes: fill in their outputs, draw their figures, write them as notebooks.

    python tools/make_recipes.py [NAME]...                  outputs and figures of docs/recipes
    python tools/make_recipes.py --notebooks FOLDER         run, and write a notebook for each page

A page's ``pycon`` blocks are one session. The site's build runs them too and offers each page as a
notebook, so notebooks have no source of their own; tests/docs compares the outputs.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[1] / "docs" / "recipes"
FENCE = re.compile(r"^```pycon\n(?P<body>.*?)^```\n", re.MULTILINE | re.DOTALL)


def pages(names: list[str] | None = None) -> list[Path]:
    """The recipes, without the index."""
    found = [page for page in sorted(RECIPES.glob("*.md")) if page.stem != "index"]
    unknown = set(names or ()) - {page.stem for page in found}
    if unknown:
        raise SystemExit(f"no recipe is named {', '.join(sorted(unknown))}")
    return [page for page in found if not names or page.stem in names]


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    """Context in a temporary folder, where recipes write their files."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


class Session:
    """The blocks of one page, run one after another."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, body: str) -> tuple[str, list[tuple[str, str]]]:
        """Run a block; return it with its outputs, and each statement with its output.

        Raises:
            Exception: whatever a statement raises.
        """
        lines, parts = [], []
        for example in doctest.DocTestParser().get_examples(body):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(example.source, "<recipe>", "single"), self.names)
            first, *rest = example.source.rstrip("\n").split("\n")
            lines += [f">>> {first}", *(f"... {line}".rstrip() for line in rest)]
            if out.getvalue():
                lines += [line.rstrip() for line in out.getvalue().rstrip("\n").split("\n")]
            parts.append((example.source.rstrip("\n"), out.getvalue()))
        return "\n".join(lines) + "\n", parts


def refill(text: str) -> str:
    """A page with the outputs of its blocks as they are now."""
    session = Session()
    return FENCE.sub(lambda found: f"```pycon\n{session.run(found['body'])[0]}```\n", text)


def notebook(text: str) -> dict[str, Any]:
    """A page as a notebook, with the outputs of its blocks as they are now.

    Statements up to one with an output are one cell.
    """
    session, cells, end = Session(), [], 0

    def prose(markdown: str) -> None:
        markdown = re.sub(r"^---\n.*?^---\n", "", markdown, flags=re.MULTILINE | re.DOTALL)
        markdown = re.sub(
            r"\{(?:doc|func|class|ref)\}`([^`<]*?)(?:\s*<[^`]*>)?`", r"`\1`", markdown
        )
        if markdown.strip():
            cells.append({"cell_type": "markdown", "metadata": {}, "source": markdown.strip()})

    def code(source: list[str], output: str) -> None:
        shown = [{"output_type": "stream", "name": "stdout", "text": output}] if output else []
        cells.append(
            {
                "cell_type": "code", "metadata": {}, "execution_count": None,
                "source": "\n".join(source), "outputs": shown,
            }
        )  # fmt: skip

    for found in FENCE.finditer(text):
        prose(text[end : found.start()])
        end, waiting = found.end(), []
        for source, output in session.run(found["body"])[1]:
            waiting.append(source)
            if output:
                code(waiting, output)
                waiting = []
        if waiting:
            code(waiting, "")
    prose(text[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def write_notebooks(folder: Path, recipes: list[Path]) -> list[str]:
    """Run recipes and write each as a notebook; return what failed, a sentence each."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for page in recipes:
        if not FENCE.search(page.read_text(encoding="utf-8")):  # commands, for a model of one's own
            continue
        try:
            with working_folder():
                written = notebook(page.read_text(encoding="utf-8"))
        except Exception:
            failed.append(f"{page.name} failed:\n{traceback.format_exc(limit=-2)}")
            continue
        (folder / f"{page.stem}.ipynb").write_text(json.dumps(written, indent=1), encoding="utf-8")
    return failed


def main() -> None:
    """Read the options and run."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("names", nargs="*")
    options.add_argument("--notebooks", type=Path)
    chosen = options.parse_args()
    if chosen.notebooks is not None:
        sys.exit("\n".join(write_notebooks(chosen.notebooks.resolve(), pages(chosen.names))) or 0)
    for page in pages(chosen.names):
        text = page.read_text(encoding="utf-8")
        if not FENCE.search(text):
            continue
        with working_folder() as folder:
            filled = refill(text)
            figure = folder / f"{page.stem}.svg"
            if not figure.exists():
                raise SystemExit(f"{page.name} draws no {figure.name}")
            shutil.copy(figure, RECIPES / "figures" / figure.name)
        page.write_text(filled, encoding="utf-8")
        print(page.stem)


if __name__ == "__main__":
    main()
