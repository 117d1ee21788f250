"""No output of a command destroys what it reads, another output, or a saved state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import acutance
from acutance import testing
from acutance.probing import Run, State

BEFORE = "what was there"


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


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state, as probe --save writes it."""
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with acutance.probe(layer) as probe:
        layer(*[torch.zeros(1, 4, 8)] * 3)
    path = tmp_path / "state"
    State(probe.summary(), Run({}, 1, ((0, 1),), 4)).save(path)
    return path


def _model(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(BEFORE)
    return folder


def test_no_output_is_an_input_under_any_name(
    refuse: Callable[..., str], text: Path, state: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    soft, hard, model = tmp_path / "soft", tmp_path / "hard", _model(tmp_path / "model")
    soft.symlink_to(text)
    os.link(text, hard)
    monkeypatch.chdir(tmp_path)
    for name in (text, soft, hard, Path("text.txt"), Path("./model/../text.txt")):
        for option in ("--save", "--json", "--report", "--keep-qk"):
            said = refuse("probe", "--text", text, option, name)
            assert "is the same file as that of --text" in said
            assert option in said
    law = tmp_path / "law.json"
    law.write_text("{}")
    assert "that of --law" in refuse("probe", "--law", law, "--json", law)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert "of MODEL" in refuse("probe", model, "--json", model / name)
        assert "of MODEL" in refuse("calibrate", model, "-o", model / name)
    assert "that of --text" in refuse("calibrate", "--text", text, "--save", text, "--resume")
    assert "that of STATE" in refuse("report", state, "--json", state)
    assert "that of SHARD" in refuse("merge", state, "-o", state, "--overwrite")
    assert "that of B" in refuse("diff", text, state, "--csv", state)
    assert "that of --from" in refuse("compare", "--from", text, "--json", text)
    assert {path.read_text() for path in (text, soft, hard, *model.iterdir())} == {BEFORE}
    assert acutance.load(state).layers


def test_no_two_outputs_are_one_file(refuse: Callable[..., str], tmp_path: Path) -> None:
    new, link = tmp_path / "new", tmp_path / "link"
    link.symlink_to(new)
    for other in (new, link, tmp_path / "." / "new"):
        assert "same file as that of --out" in refuse("calibrate", "-o", new, "--json", other)
        assert "same file as that of" in refuse("probe", "--save", new, "--csv", other)
    figure = tmp_path / "a.svg"
    assert "same file" in refuse("predict", "--n", 8, "--json", figure, "--plot", figure)
    out = tmp_path / "out"
    out.mkdir()
    said = refuse("reproduce", "noise", "--out", out, "--json", out / "noise.json", "--no-figures")
    assert "the record of noise" in said
    assert not any(path.exists() for path in (new, figure))


def test_a_state_is_replaced_on_demand_only(
    refuse: Callable[..., str], text: Path, state: Path, tmp_path: Path
) -> None:
    before = state.read_bytes()
    said = "already exists: --resume continues from it, --overwrite replaces it"
    assert said in refuse("probe", "--save", state)
    assert said in refuse("calibrate", "--save", state)
    assert "contains a saved state" in refuse("probe", "--text", text, "--keep-qk", state)
    assert "contains a saved state" in refuse("report", tmp_path / "x", "--json", state)
    assert "these options exclude each other" in refuse(
        "probe", "--save", state, "--resume", "--overwrite"
    )
    copy = tmp_path / "copy"
    copy.write_bytes(before)
    assert "already exists: --overwrite replaces it" in refuse("merge", copy, "-o", state)
    assert state.read_bytes() == before
    merged = testing.run(["merge", str(copy), "-o", str(state), "--overwrite"])
    assert merged.exit_code == 0, merged.output
    state.write_bytes(b"")  # as mktemp leaves it
    merged = testing.run(["merge", str(copy), "-o", str(state)])
    assert merged.exit_code == 0, merged.output


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (("budget", "model"), ".costs"),
        (("budget", "model"), ".reach"),
        (("calibrate", "model"), ".judging"),
        (("probe", "model", "--judge"), ".judging"),
    ],
)
def test_every_file_of_a_state_is_replaced_on_demand_only(
    refuse: Callable[..., str], tmp_path: Path, command: tuple[str, ...], part: str
) -> None:
    """A search killed early leaves one file of a state without the others."""
    state = tmp_path / "state"
    file = tmp_path / f"state{part}"
    file.write_text(BEFORE)
    said = f"{file} already exists: --resume continues from it, --overwrite replaces it"
    assert said in refuse(*command, "--save", state)
    assert "same file as that of --" in refuse(*command, "--save", state, "--json", file)
    assert file.read_text() == BEFORE
