"""The contract uses acutance as its users do: by public names and by its command."""

from __future__ import annotations

import ast
import importlib
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import acutance

FOLDER = Path(__file__).parent
#: Test functions, at least.
FEWEST = 1000
#: Helpers outside this folder, which import nothing from acutance.
HELPERS = {"tests.contract", "tests.versions"}
#: Fixtures of all tests that change or watch what is inside the package.
INNER_FIXTURES = {"blocked_only", "limits", "native_calls", "small_tiles", "stop_at", "use_backend"}


def public_names() -> dict[str, set[str]]:
    """Names in ``__all__``, by module: the root and the modules that it names."""
    names = {"acutance": set(acutance.__all__) | {"__version__"}}
    for name in acutance.__all__:
        module = getattr(acutance, name)
        if isinstance(module, types.ModuleType):
            names[module.__name__] = set(module.__all__)
    return names


PUBLIC = public_names()


def is_public(path: str) -> bool:
    """Whether a dotted name is a public module, or one of its names (or a part of that)."""
    if path in PUBLIC:
        return True
    parts = path.split(".")
    if f"{parts[0]}.{parts[1]}" in PUBLIC:
        return parts[2] in PUBLIC[f"{parts[0]}.{parts[1]}"]
    return parts[1] in PUBLIC["acutance"]


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The dotted name of everything that is imported, and what it is called here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.asname or alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", alias.asname or alias.name


def inner_names(source: str) -> list[str]:
    """What a test file uses that is not public, or what it reaches the package's inside with."""
    tree = ast.parse(source)
    found, modules = [], {}
    for name, alias in imports(tree):
        package = name.split(".")[0]
        if package == "acutance":
            if name in PUBLIC:
                modules[alias] = name
            elif not is_public(name):
                found.append(name)
        elif package == "tests" and not any(f"{name}.".startswith(f"{ok}.") for ok in HELPERS):
            found.append(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", path := ast.unparse(node)):
            start, _, rest = path.partition(".")
            name = f"{modules.get(start, '')}.{rest}"
            if start in modules and "__" not in rest and not is_public(name):
                found.append(name)
        elif isinstance(node, ast.arg) and node.arg in INNER_FIXTURES:
            found.append(f"fixture {node.arg}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += inner_code(node.value)
    return sorted(set(found))


def inner_code(text: str) -> list[str]:
    """What the code in a string imports that is not public, or the dotted name that it is."""
    names = [text] if re.fullmatch(r"acutance(\.\w+){2,}", text) else []
    for module, imported in re.findall(r"from (acutance[\w.]*) import ([\w, ]+)", text):
        names += [f"{module}.{name.split()[0]}" for name in imported.split(",")]
    names += re.findall(r"^\s*import (acutance\.[\w.]+)", text, re.MULTILINE)
    return [name for name in names if not is_public(name)]


def files() -> list[Path]:
    """All files of the contract but this one, which has examples of what is not allowed."""
    return sorted(set(FOLDER.rglob("*.py")) - {Path(__file__)})


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(FOLDER)))
def test_only_public_names_are_used(path: Path) -> None:
    assert inner_names(path.read_text(encoding="utf-8")) == []


def test_the_contract_is_large() -> None:
    functions = [
        node
        for path in files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert len(functions) >= FEWEST


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("from acutance import probe, theory\nfrom acutance.theory import predict", []),
        ("import acutance\nacutance.theory.predict\nacutance.METRICS['entropy'].unit", []),
        ("from acutance.rowstats import observe as seen\nseen(x).maximum", []),
        ("from acutance import attend", ["acutance.attend"]),
        ("def test():\n    from acutance.kernels import blocked", ["acutance.kernels.blocked"]),
        ("import acutance.masks", ["acutance.masks"]),
        ("import acutance\nacutance.kernels.blocked.f()", ["acutance.kernels.blocked"]),
        ("from acutance import kernels as k\nk.native", ["acutance.kernels.native"]),
        ("from tests.probing.toy import model", ["tests.probing.toy.model"]),
        ("from tests.versions import older\nfrom tests.contract.names import metric_names", []),
        ("def test_it(limits): ...", ["fixture limits"]),
        ("set('acutance.files._LOCK', 1)", ["acutance.files._LOCK"]),
        ("run('from acutance.cli import app')", ["acutance.cli.app"]),
    ],
)
def test_inner_names_are_found(lines: str, found: list[str]) -> None:
    assert [name for name in inner_names(lines) if name in found or not found] == found


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    assert [each for each in sorted(PUBLIC[name]) if not hasattr(module, each)] == []
