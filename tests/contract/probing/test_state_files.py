"""State files that are cut short, foreign, or made to do harm: refused with one sentence."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import acutance
from acutance.probing import SCHEMA, Run, State, load_state, merge_states


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good state of two layers."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)
    with acutance.probe(model, metrics=["entropy", "top_weight"]) as probe:
        model(torch.randn(2, 5, 8))
    run = Run({"model": "a", "length": 5}, 4, ((0, 2),), 10)
    State(probe.summary({"text": "x"}), run).save(tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


def assert_refused(path: Path, match: str) -> None:
    """Both readers refuse the file, in one line that names it."""
    for reader in (load_state, lambda where: merge_states([where])):
        with pytest.raises(ValueError, match=match) as caught:
            reader(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


def test_a_good_state_is_read_by_both_readers(path: Path) -> None:
    state, summary = load_state(path), acutance.load(path)
    assert state.run == Run({"model": "a", "length": 5}, 4, ((0, 2),), 10)
    assert state.summary.layers == summary.layers
    assert torch.equal(state.summary.moments.mean, summary.moments.mean)


def test_every_truncation_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in sorted({*range(12), *range(12, len(whole), 997), len(whole) - 1}):
        path.write_bytes(whole[:length])
        assert_refused(path, "is not a complete safetensors file")
    path.write_bytes(whole + b"more")
    assert_refused(path, "is not a complete safetensors file")


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63 - 1) + b"{}",  # a header of exabytes
        struct.pack("<Q", 10**8) + b"{" * 64,
        struct.pack("<Q", 5000) + b"[" * 5000,  # nested too deep
        struct.pack("<Q", 2) + b"{}",
        b"PK\x03\x04" + bytes(200),
        b"\x80\x04\x95" + bytes(64),
    ],
)
def test_what_is_no_safetensors_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert_refused(path, r"is not a complete safetensors file|its schema is None")


def test_arrays_larger_than_the_file(path: Path) -> None:
    header = {"mean": {"dtype": "F64", "shape": [1 << 40, 2], "data_offsets": [0, 1 << 44]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    assert_refused(path, "is not a complete safetensors file")


def test_every_bit_that_flips_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    chance = random.Random(2)
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    seal = whole.index(b"sha256")  # without its name there is no seal
    places = [chance.randrange(8, start) for _ in range(40)]
    places += [chance.randrange(start, len(whole)) for _ in range(40)]
    for place in places:
        if seal <= place < seal + 6:
            continue
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        assert_refused(path, "is damaged|is not a complete safetensors file|its schema is|its run")


def test_files_of_no_size_that_a_state_has(path: Path) -> None:
    with open(path, "ab") as file:
        file.truncate((1 << 34) + 1)  # sparse: nothing is written
    assert_refused(path, "has 17179869185 bytes, which is too large for a state")


def test_other_schemas(path: Path) -> None:
    for schema in ("acutance.head_summary/0", "acutance.queries_keys/1", "x" * 10_000):
        save_file({"a": torch.zeros(1)}, path, metadata={"schema": schema})
        assert_refused(path, "is not a head summary that this version can read: its schema is")


def test_a_summary_saved_from_python_says_nothing_of_windows(path: Path) -> None:
    acutance.load(path).save(path)
    assert acutance.load(path).metrics == ("entropy", "top_weight")
    assert_refused(path, "does not record which windows it contains")


def test_a_header_that_is_no_json(path: Path) -> None:
    for text in ("{", "[" * 100_000, '{"layers": ' + "9" * 5000 + "}"):
        save_file(load_file(path), path, metadata={"schema": SCHEMA, "summary": text, "run": "{}"})
        assert_refused(path, "'summary' is not JSON")


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a directory, not a file"):
        load_state(tmp_path)
    with pytest.raises(FileNotFoundError, match="no file at"):
        load_state(tmp_path / "nowhere.safetensors")
