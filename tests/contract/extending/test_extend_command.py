"""acutance extend, as a shell user meets it."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.trained import directory

HELD_OUT = Path(sysconfig.get_path("stdlib")) / "copy.py"
YARN = "rope:yarn,factor=4,original_max_position_embeddings=128"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text(HELD_OUT.read_text()[:5000])
    return path


def test_a_directory_is_written_and_a_search_resumed(
    run: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    out, state = tmp_path / "out", tmp_path / "state"
    given = (
        "extend", directory(), "--text", text, "--to", 512, "--train-length", 128, "--law", YARN,
        "--law", "clip_log_n:train_length=128", "--max-cost", 1, "-o", out, "--save", state,
    )  # fmt: skip
    done = run(*given)
    assert done.exit_code == 0, done.err
    assert {path.name for path in out.iterdir()} == {"config.json", "extend.json", "page.html"}
    record = json.loads((out / "extend.json").read_text())
    assert record["chosen"] == YARN
    assert record["helps"]
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == 512
    assert "AutoConfig.from_pretrained" in done.err
    assert YARN in done.out
    again = run(*given, "--resume", "--json", "-")
    assert again.exit_code == 0, again.err
    assert json.loads(again.out)["finals"] == record["finals"]


def test_nothing_to_apply_is_said(run: Callable[..., Any], text: Path, tmp_path: Path) -> None:
    """A file of an earlier search does not stay."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("law.json", "extend.json"):
        (out / name).write_text("{}")
    done = run(
        "extend", directory(), "--text", text, "--to", 512, "--train-length", 128, "--law",
        "rope:linear,factor=4", "-o", out, "--no-entropy",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert {path.name for path in out.iterdir()} == {"extend.json", "page.html"}
    assert "nothing to apply" in done.err
    assert "Nothing that was tried lowers the loss" in done.out


def test_files_of_something_else_stay(run: Callable[..., Any], text: Path, tmp_path: Path) -> None:
    """A directory with other files, such as a saved model, is refused before the run."""
    (tmp_path / "config.json").write_text("{}")
    done = run("extend", directory(), "--to", 512, "--text", text, "-o", tmp_path)
    assert done.exit_code == 2
    assert "has other files than those of an earlier" in " ".join(done.err.split())
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "name the number of tokens that the model should read"),
        (("--to", 512), 1, "above train_length, the length that the model reads already"),
        (("--to", 512, "--train-length", 128, "--windows", 3), 1, "windows must be at least 4"),
        (("--to", 4096, "--train-length", 128), 1, "at least 2 windows of 4096 tokens"),
        (("--to", 512, "--dtype", "half"), 2, "must be one of float32, bfloat16, float16"),
        (("--to", 512, "-o", "nowhere/out"), 2, "cannot be a directory"),
        (("--to", 512, "-o", directory()), 2, "is the model's directory"),
        (("--to", 512, "--resume"), 2, "needs --save, the file to continue from"),
        (("--to", 512, "--law", "rope:yran,factor=2"), 2, "RoPE type 'yran'; did you mean 'yarn'"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Callable[..., Any], text: Path, options: tuple[Any, ...], code: int, said: str
) -> None:
    done = run("extend", directory(), "--text", text, *options)
    assert done.exit_code == code
    assert said in " ".join(done.err.replace("│", " ").split())
    if code == 1:
        assert done.err.count("\n") == 1
