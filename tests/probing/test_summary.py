"""HeadSummary: merging, frames, files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import acutance
from acutance.probing import HeadSummary
from acutance.summary import head_summary as summary
from tests.contract.probing.test_summary import PADDED, Model, read


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def found(model: Model) -> HeadSummary:
    return read(model, torch.randn(3, 6, 8), PADDED, text="a page", seed=3)


def test_a_metric_without_a_row_is_nan_in_every_column(model: Model) -> None:
    with acutance.probe(model, metrics=["normalized_entropy", "entropy"]) as probe:
        model(torch.randn(2, 1, 8), None)  # a single key: 0 / log 1
    summary = probe.summary()
    assert summary.columns()["entropy_mean"] == [0.0] * 6
    for part in ("mean", "std", "min", "max"):
        assert all(math.isnan(value) for value in summary.columns()[f"normalized_entropy_{part}"])
    heads = summary.to_dict()["heads"]
    assert heads[0]["metrics"]["normalized_entropy"]["mean"] is None
    assert heads[0]["metrics"]["normalized_entropy"]["max"] is None


@pytest.mark.parametrize("what", ["save", "to_json", "to_parquet"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    found: HeadSummary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path = tmp_path / "result"
    getattr(found, what)(path)
    old = path.read_bytes()
    written: list[str] = []

    def fail(name: str, target: Any) -> None:
        written.append(name)
        assert Path(name).stat().st_size > 0  # it was being written
        raise OSError("no space left on device")

    monkeypatch.setattr(summary.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        getattr(found, what)(path)
    assert len(written) == 1
    assert Path(written[0]).parent == tmp_path
    assert path.read_bytes() == old
    assert [entry.name for entry in tmp_path.iterdir()] == ["result"]
