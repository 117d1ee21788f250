"""Count what the package consists of.

    python tools/count_lines.py            lines of code by package, and the other numbers
    python tools/count_lines.py --json     the same as JSON

A line of code holds something else than a comment, a docstring or nothing.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import json
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a source tree consists of.

    Attributes:
        lines: lines of Python code by package, which is a folder of an import package or a module
            at its root.
        docstrings: lines of docstrings.
        cpp: lines of C++ code.
        files: Python files.
        functions: functions and methods.
        records: dataclasses and named tuples.
        schemas: names of file formats.
        public_names: names in ``__all__`` of the root and of the modules that users import.
        commands: subcommands of the command.
        options: their options and arguments.
    """

    lines: dict[str, int]
    docstrings: int
    cpp: int
    files: int
    functions: int
    records: int
    schemas: int
    public_names: int
    commands: int
    options: int

    @property
    def total(self) -> int:
        """Lines of Python code."""
        return sum(self.lines.values())


def _docstring_lines(tree: ast.AST) -> set[int]:
    """The numbers of the lines that docstrings take."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            numbers |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return numbers


def code_lines(source: str) -> tuple[int, int]:
    r"""Lines of code and lines of docstrings of a Python file.

    Example:
        >>> code_lines('"A module."\n\nx = 1  # one\n# a comment\ny = [\n    2,\n]\n')
        (4, 1)
    """
    docstrings = _docstring_lines(ast.parse(source))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings), len(docstrings)


def cpp_lines(source: str) -> int:
    r"""Lines of C++ that hold something else than a comment or nothing.

    Example:
        >>> cpp_lines("// a\nint x; // b\n/* c\n d */\n\nint y;\n")
        2
    """
    without = re.sub(r"/\*.*?\*/", "", source, flags=re.DOTALL)
    return sum(bool(re.sub(r"//.*", "", line).strip()) for line in without.splitlines())


def package_of(path: Path) -> str:
    """The name that a file counts under: ``acutance/theory``, ``acutance/files.py``."""
    parts = path.relative_to(SOURCES).parts
    return "/".join(parts[:2])


def _is_record(node: ast.AST) -> bool:
    """Whether a class is a dataclass or a named tuple."""
    if not isinstance(node, ast.ClassDef):
        return False
    named = [ast.unparse(part).split("(")[0] for part in (*node.decorator_list, *node.bases)]
    return any(name.split(".")[-1] in ("dataclass", "NamedTuple") for name in named)


def _commands() -> tuple[int, int]:
    """Numbers of subcommands and of their options and arguments."""
    import typer.main

    from acutance.cli import app

    group = typer.main.get_command(app)
    commands = list(getattr(group, "commands", {}).values())
    options = sum(len([part for part in one.params if part.name != "help"]) for one in commands)
    return len(commands), options


def _public_names() -> int:
    """How many distinct objects the root and its public modules offer in ``__all__``."""
    import importlib
    import types

    import acutance

    names = {f"acutance.{name}" for name in acutance.__all__}
    for name in acutance.__all__:
        module = getattr(acutance, name)
        if isinstance(module, types.ModuleType):
            module = importlib.import_module(module.__name__)
            names |= {f"{module.__name__}.{each}" for each in getattr(module, "__all__", ())}
    return len(names)


def count() -> Counts:
    """Count the source tree of this checkout."""
    lines: Counter[str] = Counter()
    docstrings = functions = records = files = 0
    schemas: set[str] = set()
    for path in sorted(SOURCES.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        code, docs = code_lines(source)
        lines[package_of(path)] += code
        docstrings += docs
        files += 1
        for node in ast.walk(ast.parse(source)):
            functions += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            records += _is_record(node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                schemas |= set(re.findall(r"^acutance\.[a-z_-]+(?=/\d+$)", node.value))
    cpp = sum(
        cpp_lines(path.read_text(encoding="utf-8"))
        for suffix in ("*.cpp", "*.h", "*.inc")
        for path in SOURCES.rglob(suffix)
    )
    commands, options = _commands()
    return Counts(
        dict(lines), docstrings, cpp, files, functions, records, len(schemas), _public_names(),
        commands, options,
    )  # fmt: skip


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    counts = count()
    if given.json:
        json.dump(dataclasses.asdict(counts) | {"total": counts.total}, sys.stdout, indent=1)
        print()
        return
    for package, lines in sorted(counts.lines.items(), key=lambda pair: -pair[1]):
        print(f"{lines:7,}  {package}")
    print(f"{counts.total:7,}  lines of Python code in {counts.files} files")
    for field in dataclasses.fields(counts)[1:]:
        if field.name != "files":
            print(f"{getattr(counts, field.name):7,}  {field.name.replace('_', ' ')}")


if __name__ == "__main__":
    main()
