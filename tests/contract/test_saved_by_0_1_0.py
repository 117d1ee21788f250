"""Files that version 0.1.0 wrote still load, and say what they said.

They are of the decoder that comes with the package: two heads on eight windows of 16 tokens for the
state, its table and the queries and keys; lengths 8 to 32 for the law and its calibration.
"""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch

from acutance import Law
from acutance.probing import load_queries_keys
from acutance.reproduce import load as load_record

SAVED = Path(__file__).parent / "saved_by_0_1_0"


def test_queries_and_keys(tmp_path: Path) -> None:
    sample = load_queries_keys(SAVED / "queries_keys.safetensors")
    sample.save(tmp_path / "again.safetensors")
    assert tensors(tmp_path / "again.safetensors") == tensors(SAVED / "queries_keys.safetensors")


def tensors(path: Path) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in safetensors.torch.load_file(path).items()}


def test_a_law(tmp_path: Path) -> None:
    Law.load(SAVED / "law.json").save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (SAVED / "law.json").read_bytes()


def test_a_record() -> None:
    loaded = load_record(SAVED / "record.json")
    written = json.loads((SAVED / "record.json").read_text(encoding="utf-8"))
    assert loaded.name == written["name"]
    assert len(loaded.rows) == len(written["rows"]) > 0
