"""Every ``pycon`` example of docs/guide runs: a string in ``__test__`` is one doctest."""

from __future__ import annotations

import re
from pathlib import Path

GUIDES = Path(__file__).parents[2] / "docs" / "guide"
FENCE = re.compile(r"^```pycon\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(text: str) -> str:
    """The page with everything but its examples blanked out, so that lines keep their numbers."""
    kept, end = [], 0
    for fence in FENCE.finditer(text):
        start, stop = fence.span("body")
        kept += ["\n" * text.count("\n", end, start), text[start:stop]]
        end = stop
    return "".join(kept)


TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in sorted(GUIDES.glob("*.md"))}
__test__ = {name: examples(text) for name, text in TEXTS.items() if FENCE.search(text)}


def test_examples_are_found_and_none_outside_a_pycon_block() -> None:
    assert "theory" in __test__
    for name, text in TEXTS.items():
        assert text.count(">>> ") == __test__.get(name, "").count(">>> "), name
    assert __test__["theory"].count(">>> ") >= 25, "fewer than there were"


def test_a_line_of_a_page_keeps_its_number() -> None:
    page = "one\n\n```pycon\n>>> 1\n1\n```\n\n```pycon\n>>> 2\n```\n"
    assert examples(page).splitlines() == ["", "", "", ">>> 1", "1", "", "", "", ">>> 2"]
