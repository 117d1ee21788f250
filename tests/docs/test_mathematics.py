"""Every equation of docs/mathematics has a number and a check, and every check runs.

The examples run as this module's doctests, one test per page: a string in ``__test__`` is one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "mathematics"
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
EQUATION = re.compile(r"^\$\$\n.*?^\$\$(?P<label>[^\n]*)$", re.MULTILINE | re.DOTALL)


def examples(text: str) -> str:
    """The page with everything but its examples blanked out, so that lines keep their numbers."""
    kept, end = [], 0
    for fence in FENCE.finditer(text):
        info = fence["info"].strip()
        if info != "pycon" and not info.startswith("{check}"):
            continue
        start, stop = fence.span("body")
        kept += ["\n" * text.count("\n", end, start), text[start:stop]]
        end = stop
    return "".join(kept)


def equations(text: str) -> list[str]:
    """The labels of the displayed equations, in order; an empty one where there is none."""
    prose = FENCE.sub("", text)
    return [match["label"].strip().removeprefix("(").removesuffix(")")
            for match in EQUATION.finditer(prose)]  # fmt: skip


def checks(text: str) -> dict[str, str]:
    """The labels that a check names, each with the body of the last block that names it."""
    found = {}
    for fence in FENCE.finditer(text):
        if fence["info"].startswith("{check}"):
            for label in fence["info"].removeprefix("{check}").split():
                found[label] = fence["body"]
    return found


def complaints(text: str) -> list[str]:
    """What a page lacks: labels, checks, results in the checks."""
    labels, checked = equations(text), checks(text)
    found = [f"equation {i} has no label" for i, label in enumerate(labels, 1) if not label]
    found += [f"{label} is the label of two" for label in set(labels) if labels.count(label) > 1]
    found += [f"{label} has no check" for label in labels if label and label not in checked]
    found += [f"a check names {label}, which is no equation" for label in set(checked) - {*labels}]
    for label, body in checked.items():
        if not re.search(r"^(?:>>>|\.\.\.) .*\n(?!>>>|\.\.\.)\S", body, re.MULTILINE):
            found.append(f"the check of {label} expects no result")
    if len(re.findall(r"^\$\$", FENCE.sub("", text), re.MULTILINE)) != 2 * len(labels):
        found.append("a $$ stands alone")
    return found


TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))}
PAGE_COUNT, EQUATION_COUNT, EXAMPLE_COUNT = 18, 230, 800  # at least
__test__ = {name: examples(text) for name, text in TEXTS.items()}


@pytest.mark.parametrize("name", TEXTS)
def test_every_equation_has_its_check(name: str) -> None:
    assert complaints(TEXTS[name]) == []


def test_labels_are_unique_in_the_whole_site() -> None:
    labels = [label for text in TEXTS.values() for label in equations(text)]
    assert sorted(labels) == sorted(set(labels))


def test_as_many_pages_and_equations_as_there_were() -> None:
    assert len(TEXTS) >= PAGE_COUNT
    assert sum(len(equations(text)) for text in TEXTS.values()) >= EQUATION_COUNT
    assert sum(text.count(">>> ") for text in __test__.values()) >= EXAMPLE_COUNT


def test_every_article_that_a_page_cites_is_listed_with_its_equations() -> None:
    cited = set(re.findall(r"kexue\.fm/archives/(\d+)", " ".join(TEXTS.values())))
    listed = set(re.findall(r"^\| \[(\d+)\]", TEXTS["sources"], re.MULTILINE))
    assert cited == listed == {"8620", "8823", "9034", "9588", "9593", "9812", "9889"}


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (PAGES.parent / "index.md").read_text(encoding="utf-8")
    assert [name for name in TEXTS if f"\nmathematics/{name}\n" not in contents] == []


GOOD = """\
$$
a = b
$$ (one)

```{check} one
>>> 1 + 1
2
```
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (" (one)", "", "equation 1 has no label"),
        ("{check} one", "{check} two", "one has no check"),
        ("{check} one", "{check} one two", "a check names two, which is no equation"),
        (">>> 1 + 1\n2\n", ">>> x = 1\n", "the check of one expects no result"),
        ("```{check}", "$$\nc\n$$ (one)\n\n```{check}", "one is the label of two"),
        ("```{check}", "$$ c $$\n\n```{check}", "a $$ stands alone"),
    ],
)
def test_a_page_that_lacks_something_is_found(old: str, new: str, complaint: str) -> None:
    assert complaints(GOOD) == []
    assert complaint in complaints(GOOD.replace(old, new))


def test_only_examples_are_kept_each_on_its_line() -> None:
    assert examples(f"# Title\n\n{GOOD}") == "\n" * 7 + ">>> 1 + 1\n2\n"
    assert examples("```python\n>>> 1 + 1\n3\n```\n") == ""
