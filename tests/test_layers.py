"""A module imports only from stages to its left."""

from __future__ import annotations

import ast
import importlib
import os
import re
from pathlib import Path

import pytest

import acutance

PACKAGE = Path(__file__).parents[1] / "src" / "acutance"
STAGES = [
    "data", "lazy", "escapes", "extras", "files", "from_json", "compiling", "shapes", "masks",
    "scores", "scaling", "weights", "theory", "rowstats", "kernels", "attend",
    "structure", "mechanisms", "nn", "capture", "diagnose", "summary", "report",
    "probing", "corpus", "serving", "calibration", "caching", "judging", "extending",
    "training", "verification", "reproduce", "comparison", "cli", "plugins", "testing",
]  # fmt: skip
MODULE = re.compile(rf"acutance\.({'|'.join(STAGES)})(\.[a-z_0-9]+)*")
FACADES = {
    "acutance",
    "acutance.probing",
    "acutance.reproduce",
}  # gather names for users; no module imports them
ALONE = {"theory"}  # imports nothing of ours: it must owe nothing to what it is compared with
EXEMPT = {"__init__", "__main__"}
FLOOR = 20


def imported(module: str, source: str, *, is_package: bool) -> set[str]:
    """The dotted names that `source` imports from acutance, inside functions and as text too.

    Relative imports are resolved; a name imported from a module counts as ``module.name``.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) + is_package - node.level]
            base = parents if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            names.add(node.value)  # the argument of import_module, or a table of homes
    return {name for name in names if name.split(".")[0] == "acutance"}


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What `module` (dotted, below acutance) imports from its right, the root or a facade."""
    own = module.split(".")[1]
    if own not in STAGES:
        return [f"{module} belongs to no stage: add {own} to STAGES, in its place"]
    allowed = {own} if own in ALONE else set(STAGES[: STAGES.index(own) + 1])
    return [
        f"{module} imports {name}"
        for name in sorted(imported(module, source, is_package=is_package))
        if [*name.split("."), ""][1] not in allowed or is_facade(name)
    ]


def is_facade(name: str) -> bool:
    """Whether an imported name is gathered by a facade, not written in a module of its package."""
    parts = name.split(".")
    if ".".join(parts[:2]) not in FACADES:
        return False
    return len(parts) == 2 or not (PACKAGE / parts[1] / f"{parts[2]}.py").exists()


def modules() -> dict[str, tuple[Path, bool]]:
    """Every module by its dotted name: its file, and whether it is a package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        found[".".join(("acutance", *parts[: len(parts) - is_package]))] = (path, is_package)
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others; each circle once."""
    reached = {module: _reachable(module, imports) for module in imports}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imports
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


def _reachable(module: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    rest = list(imports[module])
    while rest:
        if (name := rest.pop()) not in seen:
            seen.add(name)
            rest.extend(imports[name])
    return seen


def graph(sources: dict[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Which modules each module imports, names traced to the module that holds them."""
    edges: dict[str, set[str]] = {}
    for module, (source, is_package) in sources.items():
        names = imported(module, source, is_package=is_package)
        homes = {name if name in sources else name.rpartition(".")[0] for name in names}
        edges[module] = (homes & sources.keys()) - {module}
    return edges


def test_every_module_imports_only_from_its_left() -> None:
    found = []
    visited = modules()
    for module, (path, is_package) in visited.items():
        if module.count(".") == 0 or module.rpartition(".")[2] in EXEMPT or module in FACADES:
            continue
        found += violations(module, path.read_text(encoding="utf-8"), is_package=is_package)
    assert not found, "\n".join(found)

    files = sum(name.endswith(".py") for _, _, names in os.walk(PACKAGE) for name in names)
    assert len(visited) == files
    assert files >= FLOOR, f"visited {files} modules: is {PACKAGE} the package?"


def right_of(module: str, source: str) -> set[str]:
    """What a package imports from its right as soon as it is loaded, not on first use."""
    at_once = [
        node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    names = imported(module, ast.unparse(ast.Module(at_once, [])), is_package=True)
    allowed = STAGES[: STAGES.index(module.split(".")[1]) + 1]
    return {name for name in names if name.split(".")[1] not in allowed}


def test_a_facade_loads_its_right_on_first_use() -> None:
    """A module of a package runs the package first; what is to its right may need that module."""
    for module in FACADES - {"acutance"}:
        assert right_of(module, modules()[module][0].read_text(encoding="utf-8")) == set()
    late = "def name():\n    from acutance.corpus.ranks import name"
    assert right_of("acutance.probing", late) == set()
    assert right_of("acutance.probing", "from acutance.corpus.ranks import name") != set()


def test_no_modules_import_each_other() -> None:
    sources = {
        module: (path.read_text(encoding="utf-8"), is_package)
        for module, (path, is_package) in modules().items()
        if module not in FACADES  # nothing imports these
    }
    assert circles(graph(sources)) == []


@pytest.mark.parametrize(
    "late",
    [
        "from acutance.scores import b",
        "def late():\n    from acutance.scores.b import name",
        "if TYPE_CHECKING:\n    from acutance.scores.b import name",
        "import importlib\nimportlib.import_module('acutance.scores.b').name",
        "_HOMES = {'name': 'acutance.scores.b'}",
    ],
)
def test_a_planted_circle_is_found(late: str) -> None:
    sources = {
        "acutance.scores.a": (late, False),
        "acutance.scores.b": ("from acutance.scores.c import name", False),
        "acutance.scores.c": ("from acutance.scores.a import name", False),
        "acutance.scores.d": ("from acutance.scores.a import name", False),
    }
    names = [f"acutance.scores.{letter}" for letter in "abc"]
    assert circles(graph(sources)) == [names]


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
        ("acutance.theory.sparsity", "from acutance.shapes import validate"),  # its left, even so
        ("acutance.helpers", "import os"),  # no stage
        ("acutance.scores.dot", "x = import_module('acutance.report')"),
        ("acutance.cli.probe", "from acutance.probing import Probe"),  # a facade
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
        ("acutance.theory.sparsity", "import scipy.special\nfrom .moments import M2"),
        ("acutance.cli", "from acutance.comparison import compare\nimport acutancelike"),
    ],
)
def test_the_left_and_other_packages_are_allowed(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert violations("acutance.scores", "from .dot import dot", is_package=True) == []
    assert len(violations("acutance.scores", "from ..cli import main", is_package=True)) == 1


def private_imports(source: str) -> list[str]:
    """What a module of another package imports from acutance that is no public name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] == "acutance"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "acutance":
            assert node.module is not None
            parts = node.module.split(".")
            public = len(parts) == 1 or (len(parts) == 2 and parts[1] in acutance.__all__)
            offered = importlib.import_module(node.module).__all__ if public else ()
            found += [
                f"{node.module}.{alias.name}" for alias in node.names if alias.name not in offered
            ]
    return found


def test_the_lab_imports_public_names_only() -> None:
    paths = sorted((PACKAGE.parent / "acutance_lab").rglob("*.py"))
    assert len(paths) > FLOOR // 2
    assert {path.name: private_imports(path.read_text("utf-8")) for path in paths} == {
        path.name: [] for path in paths
    }


@pytest.mark.parametrize(
    "line",
    [
        "import acutance.files",
        "from acutance.files import write_whole",
        "from acutance import files",
        "from acutance.plugins import Console",
        "from acutance.report.plot_style import save",
    ],
)
def test_an_import_of_a_private_name_is_found(line: str) -> None:
    assert private_imports(f"def inside():\n    {line}") != []
