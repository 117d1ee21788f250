"""Every public name has an entry in the reference, and every entry is of a public name."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
import typer

import acutance
from acutance import cli

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")}
MODULES = [name for name in acutance.__all__ if inspect.ismodule(getattr(acutance, name))]
MODULES += ["attend", "kernels.gpu"]


def entries(text: str) -> tuple[dict[str, set[str] | None], set[str]]:
    """The modules that a page describes, each with the members named or None, and single names."""
    modules: dict[str, set[str] | None] = {}
    for found in re.finditer(r"\.\. automodule:: (\S+)\n((?:   :.*\n)*)", text):
        members = re.search(r":members:(.*)", found[2])
        named = [name.strip() for name in members[1].split(",")] if members else []
        modules[found[1]] = {name for name in named if name} or None
    return modules, set(re.findall(r"\.\. (?:py:)?(?:auto)?data:: (\S+)", text))


def missing(module: ModuleType, text: str) -> list[str]:
    """The public names of a module that pages with this text have no entry for."""
    modules, singles = entries(text)
    described = modules.get(module.__name__, set())
    out = []
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            continue
        if inspect.isroutine(value) or inspect.isclass(value):
            found = described is None or name in described
        else:
            found = f"{module.__name__}.{name}" in singles or (
                getattr(acutance, name, None) is value and f"acutance.{name}" in singles
            )
            # Type aliases and tables with a comment of their own in the module that exports them.
            source = inspect.getsource(module)
            found |= re.search(rf"^#:.*\n(?:#.*\n)*{name}\b", source, re.MULTILINE) is not None
        if not found:
            out.append(name)
    return out


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_an_entry(name: str) -> None:
    module = importlib.import_module(f"acutance.{name}")
    assert len(module.__all__) >= 2
    assert missing(module, "\n".join(PAGES.values())) == []


def test_the_modules_are_those_that_users_reach() -> None:
    assert len(MODULES) >= 19
    for name in ("probing", "report", "reproduce", "testing"):
        assert getattr(acutance, name) is importlib.import_module(f"acutance.{name}")


def test_a_name_without_an_entry_is_found() -> None:
    text = PAGES["structure"]
    assert missing(acutance.structure, text) == []
    data = "data:: acutance.structure.STRUCTURE"
    assert missing(acutance.structure, text.replace(data, "")) == ["STRUCTURE"]
    named = text.replace("   :members:", "   :members: nothing", 1)
    assert len(missing(acutance.structure, named)) > 1


def test_every_reference_page_stands_in_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^reference/(\S+)$", index, re.MULTILINE))
    assert listed == set(PAGES)
    assert len(listed) >= 20


def test_every_command_has_its_options_on_the_page() -> None:
    shown = re.findall(r"^```\{command-options\} (\S+)$", PAGES["command"], re.MULTILINE)
    commands = typer.main.get_command(cli.app).commands
    assert shown == [name for name, command in commands.items() if not command.hidden]
    assert shown == re.findall(r"^## acutance (\S+)$", PAGES["command"], re.MULTILINE)


def test_the_install_page_lists_every_extra() -> None:
    project = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    section = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    page = (DOCS / "install.md").read_text(encoding="utf-8")
    assert len(extras) >= 10
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == extras


def test_every_option_that_the_pages_name_is_one() -> None:
    commands = typer.main.get_command(cli.app).commands
    lines = [
        (path, line.split("#")[0].split())
        for path in (DOCS.parent / "README.md", *DOCS.rglob("*.md"))
        for line in re.findall(
            r"^(?:\.venv/bin/)?acutance (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    used = [(path, words) for path, words in lines if words[0] in commands]
    assert len(used) >= 40
    for path, (name, *words) in used:
        options = {
            option
            for parameter in commands[name].params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
        assert given <= options, (path.name, name, words)
