"""The acutance command as a shell user meets it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer.main

import acutance
from acutance.cli import INTERRUPTED, app
from acutance.corpus import load_model
from acutance.corpus import texts as corpus
from tests.contract.test_cli import TEXT, _tiny_gpt2
from tests.contract.trained import encoder


@pytest.fixture(scope="session")
def tokenizer_files() -> list[Path]:
    folder = Path(encoder())
    return [folder / name for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")]


@pytest.fixture
def save_model(tmp_path: Path, tokenizer_files: list[Path]) -> Callable[[Any, str], Path]:
    """Save a model with a tokenizer of the embedded model's vocabulary."""

    def save(model: Any, name: str = "model") -> Path:
        folder = tmp_path / name
        model.save_pretrained(folder)
        for file in tokenizer_files:
            shutil.copy(file, folder)
        return folder

    return save


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_windows_cover_every_token_of_every_text_once(
    run: Callable[..., Any],
    save_model: Callable[..., Path],
    text: Path,
    tmp_path: Path,
) -> None:
    folder, out = save_model(_tiny_gpt2()), tmp_path / "o.json"
    other = tmp_path / "other.txt"
    other.write_text("A second, shorter text.", encoding="utf-8")
    texts = ("--text", text, "--text", other)
    result = run("probe", folder, *texts, "--length", 32, "--batch-size", 3, "--json", out)
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    tokenizer = load_model.load_model(str(folder)).tokenizer
    bare = [
        len(tokenizer(file.read_text(), add_special_tokens=False)["input_ids"])
        for file in (text, other)
    ]
    room = 32 - tokenizer.num_special_tokens_to_add(pair=False)
    windows = sum(-(-count // room) for count in bare)
    extra = tokenizer.num_special_tokens_to_add(pair=False)
    assert record["about"]["windows"] == windows
    assert record["about"]["tokens"] == sum(bare) + extra * windows
    assert {layer["rows"] for layer in record["layers"]} == {sum(bare) + extra * windows}


def test_an_interrupt_keeps_what_was_read(
    run: Callable[..., Any],
    save_model: Callable[..., Path],
    text: Path,
    tmp_path: Path,
    stop_at: Callable[..., None],
) -> None:
    folder, out = save_model(_tiny_gpt2()), tmp_path / "o.json"

    def stop() -> None:
        raise KeyboardInterrupt

    stop_at(load_model.TextModel, "run", 2, stop)
    result = run("probe", folder, "--text", text, "--length", 32, "--batch-size", 2, "--json", out)
    assert result.exit_code == INTERRUPTED
    assert "! Incomplete: 4 of " in result.stdout
    record = json.loads(out.read_text())
    assert record["notices"][0].startswith("Incomplete: 4 of ")
    about = record["about"]
    assert about["complete"] is False
    assert about["windows"] == 4 < about["windows_in_all"]
    stop_at(load_model.TextModel, "run", 0, stop)
    first = tmp_path / "none.json"
    result = run("probe", folder, "--text", text, "--json", first)
    assert result.exit_code == INTERRUPTED
    assert not first.exists()


def test_special_tokens_are_put_as_the_tokenizer_puts_them() -> None:
    loaded = load_model.load_model(None)
    tokenizer = loaded.tokenizer
    sentence = corpus.Text("one", "Look at the picture again.")
    (piece,) = corpus.windows([sentence], tokenizer, 64)
    assert list(piece) == tokenizer(sentence.content)["input_ids"]


def test_help_is_grouped_and_switches_have_no_type(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for command in ((), *((name,) for name in typer.main.get_command(app).commands)):
        assert "<bool>" not in run(*command, "--help").output
    text = run("probe", "--help").output
    for heading in (
        "What to read",
        "What to write",
        "Time and cost",
        "Long runs",
        "How to load the model",
    ):
        assert heading in text
    (rest,) = re.findall(r"╭─ Options ─.*?╰─", text, re.DOTALL)
    assert re.findall(r"--[a-z-]+", rest) == ["--help"]


def test_paragraphs_of_help_are_wrapped_by_the_terminal_alone() -> None:
    for command in typer.main.get_command(app).commands.values():
        assert all("\n" not in paragraph for paragraph in (command.help or "").split("\n\n"))


def test_every_command_is_one_file_and_one_record() -> None:
    folder = Path(acutance.__file__).parent / "cli"
    shared = {"__init__", "held_out", "inputs", "options", "outputs", "shared"}
    commands = typer.main.get_command(app).commands
    shown = {name for name, command in commands.items() if not command.hidden}
    own = {path.stem for path in folder.glob("*.py")} - shared
    added = {entry.name: entry.module for entry in entry_points(group="acutance.commands")}
    assert shown == own | added.keys()
    assert added["reproduce"] == "acutance_lab.command"
    for name in shown:
        module = importlib.import_module(added.get(name, f"acutance.cli.{name}"))
        record = getattr(module, f"{name.capitalize()}Options")
        options = {parameter.name for parameter in commands[name].params} - {"help"}
        assert options == {field.name for field in fields(record)}


def test_a_command_of_a_broken_package_fails_alone(tmp_path: Path) -> None:
    about = tmp_path / "broken_toy-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-toy\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[acutance.commands]\nbroken = no_such_package:run\n")
    where = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "acutance", *argv]
        return subprocess.run(command, env=where, capture_output=True, text=True, check=False)

    called, listed, other = run("broken"), run("--help"), run("reproduce", "--help")
    assert called.returncode == 1
    assert called.stderr == (
        "acutance: the command broken of no_such_package:run cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_package'\n"
    )
    assert (listed.returncode, other.returncode) == (0, 0)
    assert "Broken: no_such_package:run cannot be loaded" in " ".join(listed.stdout.split())


def test_a_command_of_another_package_loads_when_it_is_asked_for() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from acutance.cli import app\n"
        "assert CliRunner().invoke(app, ['probe', '--help']).exit_code == 0\n"
        "assert 'acutance_lab' not in sys.modules\n"
        "assert 'reproduce' in CliRunner().invoke(app, ['--help']).output\n"
        "assert 'acutance_lab.command' in sys.modules and 'acutance_lab.run' not in sys.modules\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
