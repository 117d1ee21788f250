"""A module imports only from stages to its left."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "acutance"
STAGES = [
    "data", "escapes", "files", "from_json", "compiling", "masks", "shapes", "scores", "scaling",
    "weights", "theory", "rowstats", "kernels", "attend", "structure", "mechanisms", "nn",
    "testing", "probing", "report", "calibration", "training", "reproduce", "bench",
    "comparison", "cli",
]  # fmt: skip
ALONE = {"theory"}  # imports nothing of ours: it must owe nothing to what it is compared with
EXEMPT = {"__init__", "__main__"}
FLOOR = 20


def imported(module: str, source: str, *, is_package: bool) -> set[str]:
    """The dotted names that `source` imports from acutance; relative ones are resolved."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) + is_package - node.level]
            base = parents if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names.update(
                f"{origin}.{alias.name}" if origin == "acutance" else origin for alias in node.names
            )
    return {name for name in names if name.split(".")[0] == "acutance"}


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What `module` (dotted, below acutance) imports from its own right or from the root."""
    own = module.split(".")[1]
    if own not in STAGES:
        return [f"{module} belongs to no stage: add {own} to STAGES, in its place"]
    allowed = {own} if own in ALONE else set(STAGES[: STAGES.index(own) + 1])
    return [
        f"{module} imports {name}"
        for name in sorted(imported(module, source, is_package=is_package))
        if [*name.split("."), ""][1] not in allowed
    ]


def test_every_module_imports_only_from_its_left() -> None:
    visited, found = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        visited += 1
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) == 1 and parts[0] in EXEMPT:
            continue
        is_package = parts[-1] == "__init__"
        module = ".".join(("acutance", *parts[: len(parts) - is_package]))
        found += violations(module, path.read_text(encoding="utf-8"), is_package=is_package)
    assert not found, "\n".join(found)

    files = sum(name.endswith(".py") for _, _, names in os.walk(PACKAGE) for name in names)
    assert visited == files
    assert visited >= FLOOR, f"visited {visited} modules: is {PACKAGE} the package?"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("acutance.scores.dot", "from acutance.probing import probe"),
        ("acutance.scores.dot", "import acutance.cli"),
        ("acutance.scores.dot", "from acutance import cli"),
        ("acutance.scores.dot", "from acutance import attention"),  # through the root
        ("acutance.scores.dot", "import acutance"),
        ("acutance.scores.dot", "from ..rowstats import merge"),
        ("acutance.scores.dot", "from .. import rowstats"),
        ("acutance.masks", "from . import rowstats"),
        ("acutance.masks", "def late():\n    from acutance.attend import attention"),
        ("acutance.theory.gaussian", "from acutance.shapes import validate"),  # its left, even so
        ("acutance.helpers", "import os"),  # no stage
    ],
)
def test_a_violation_is_found(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("acutance.rowstats.merge", "from acutance.shapes import validate\nimport torch"),
        ("acutance.rowstats.merge", "from .state import RowState"),
        ("acutance.rowstats.merge", "from . import state"),
        ("acutance.rowstats.merge", "from ..masks import causal"),
        ("acutance.rowstats.merge", "from acutance import shapes"),
        ("acutance.theory.gaussian", "import scipy.special\nfrom .moments import M2"),
        ("acutance.cli", "from acutance.bench import run\nimport acutancelike"),
    ],
)
def test_the_left_and_other_packages_are_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert violations("acutance.scores", "from .dot import dot", is_package=True) == []
    assert len(violations("acutance.scores", "from ..cli import main", is_package=True)) == 1
