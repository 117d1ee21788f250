"""No output of a command destroys what it reads, another output, or a saved state."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file

import acutance
from acutance import testing
from acutance.cli import outputs
from acutance.files import write_text
from tests.contract.test_cli_outputs import BEFORE


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a command that is to be refused; its message on one line."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")

    def run(*arguments: object) -> str:
        result = testing.run([str(one) for one in arguments])
        assert result.exit_code == 2, result.output
        return " ".join(result.output.split())

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(BEFORE)
    return path


def _schemas() -> dict[str, list[str]]:
    """The modules that write each schema in the package, by the schema."""
    package, found = Path(acutance.__file__).parent, dict[str, list[str]]()
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"acutance\.[a-z_-]+/\d+", text):
                found.setdefault(text, []).append(str(path.relative_to(package)))
    return found


def test_no_text_replaces_a_state_of_any_schema(refuse: Callable[..., str], tmp_path: Path) -> None:
    """Each schema is written down once; those of tensors are states, but for one sample."""
    package, tensors = Path(acutance.__file__).parent, []
    for schema, places in _schemas().items():
        assert len(places) == 1, f"{schema} is declared in {places}"
        if "sealed(" in (package / places[0]).read_text():
            tensors.append(schema)
    assert len(tensors) >= 5
    assert "acutance.loss_calibration/1" in tensors
    for number, schema in enumerate(tensors):
        path = tmp_path / str(number)
        save_file({"a": torch.zeros(1)}, path, {"schema": schema})
        before = path.read_bytes()
        if schema.startswith("acutance.queries_keys/"):  # a probe writes it anew
            write_text(path, BEFORE)
            continue
        assert "contains a saved state" in refuse("info", "--json", path), schema
        with pytest.raises(FileExistsError, match="contains a saved state"):
            write_text(path, BEFORE)
        assert path.read_bytes() == before


def test_a_device_may_be_named_twice(tmp_path: Path) -> None:
    null: Any = Path(os.devnull)
    outputs.check_outputs({"--json": null, "--csv": null, "--save": null}, state="--save")
    file = tmp_path / "out"
    with pytest.raises(typer.BadParameter, match="is the same file as that of --json"):
        outputs.check_outputs({"--json": file, "--csv": file, "--save": null}, state="--save")
