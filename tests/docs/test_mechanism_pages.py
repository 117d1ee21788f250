"""docs/mechanisms: every entry of ``MECHANISMS`` has its page, which says what the table says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from acutance import MECHANISMS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "mechanisms"
spec = importlib.util.spec_from_file_location(
    "make_mechanism_pages", ROOT / "tools" / "make_mechanism_pages.py"
)
assert spec is not None
assert spec.loader is not None
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)

RECORD = json.loads(maker.RECORD.read_text(encoding="utf-8"))
TEXTS = {name: (PAGES / f"{name}.md").read_text(encoding="utf-8") for name in MECHANISMS}


def fence(text: str) -> list[str]:
    """Lines of a page's example."""
    start = text.index("```pycon\n") + len("```pycon\n")
    return text[start : text.index("\n```", start)].splitlines()


# doctest runs each page's example
__test__ = {name: "\n".join(fence(text)) + "\n" for name, text in TEXTS.items()}


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_page_is_what_the_table_and_the_record_make_it(name: str) -> None:
    text = TEXTS[name]
    assert text == maker.page(MECHANISMS[name], RECORD, fence(text))
    assert MECHANISMS[name].can_concentrate in text
    assert f'MECHANISMS["{name}"].run(query, key, value)' in text


def test_a_page_says_what_was_read_and_not_how_its_own_scores_deviate() -> None:
    """Scores of ``dot`` deviate by 8 there, and of ``cosine`` by 1/8."""
    assert all("of deviation 1" not in text for text in TEXTS.values())
    read = "For standard normal queries and keys of width 64, 2.408 of 4,096 keys are effective."
    assert read in TEXTS["dot"]


def test_the_index_lists_every_mechanism() -> None:
    assert (PAGES / "index.md").read_text(encoding="utf-8") == maker.index(RECORD)
    assert {path.stem for path in PAGES.glob("*.md")} == {"index", *MECHANISMS}


@pytest.mark.parametrize("name", MECHANISMS)
def test_figures_are_there_and_their_record_is_complete(name: str) -> None:
    for file in (f"{name}.svg", f"{name}-dark.svg"):
        assert "effective keys" in (PAGES / "figures" / file).read_text(encoding="utf-8")
    assert len(RECORD["by_n"][name]) == len(RECORD["lengths"]) >= 4
    assert len(RECORD["by_deviation"][name]) == len(RECORD["deviations"]) >= 5


@pytest.mark.parametrize("name", [name for name, entry in MECHANISMS.items() if entry.theory.law])
def test_what_is_drawn_agrees_with_theory(name: str) -> None:
    """Marks lie on their lines: within 4 standard errors, and the record's six digits."""
    readings = RECORD["by_n"][name]
    assert len(readings) >= 4
    for reading in readings:
        assert None not in (reading["measured"], reading["predicted"])
        apart = abs(reading["measured"] - reading["predicted"])
        assert apart <= 4 * (reading["error"] or 0.0) + 1e-5 * reading["predicted"], reading
