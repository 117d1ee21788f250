"""What goes wrong after the work: numbers that are not finite, and files that cannot be written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import acutance
from acutance.corpus import load_model
from acutance.files import write_each
from acutance.probing import load_queries_keys

TEXT = "The lens turned until the far tree stood clear of its leaves.\n" * 8


@pytest.fixture(params=[float("nan"), 3e38])
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> list[object]:
    """Arguments of a run whose second layer has logits that are not finite."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=64, vocab_size=30522)
    model = GPT2Model(config)
    with torch.no_grad():
        model.h[1].attn.c_attn.weight.fill_(request.param)
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(Path(load_model._resolve(None)[1]) / file, folder)
    text.write_text(TEXT, encoding="utf-8")
    return [folder, "--text", text]


def test_a_model_of_nan_loses_no_output(
    run: Callable[..., Any], broken: list[object], tmp_path: Path
) -> None:
    kinds = ("json", "csv", "parquet", "report", "save", "keep-qk")
    out = {kind: tmp_path / f"out.{kind}" for kind in kinds}
    given = [part for kind, path in out.items() for part in (f"--{kind}", path)]
    done = run("probe", *broken, "--length", 16, "--structure", "--examples", 2, "--noise", *given)
    assert done.exit_code == 0, done.output
    record = json.loads(out["json"].read_text(), parse_constant=pytest.fail)
    assert record["layers"][1]["error"] is None
    assert record["heads"][2]["metrics"]["entropy"]["mean"] is None
    assert record["heads"][0]["metrics"]["entropy"]["mean"] > 0
    assert all(path.stat().st_size for path in out.values())
    again = tmp_path / "again.json"
    shown = run("report", out["save"], "--json", again)
    assert shown.exit_code == 0, shown.output
    assert record.pop("key_norms") == load_queries_keys(out["keep-qk"]).key_norms()
    assert json.loads(again.read_text()) == record
    assert "Key lengths" in done.stdout
    assert "of the rows would have another top key" in " ".join(done.stdout.split())
    assert "Key lengths" not in shown.stdout
    state = acutance.load(out["save"])
    state.to_json(again)
    assert json.loads(again.read_text())["heads"] == record["heads"]
    assert run("diff", out["save"], out["save"], "--json", tmp_path / "diff.json").exit_code == 0


def test_a_file_that_cannot_be_written_loses_no_other(
    run: Callable[..., Any], broken: list[object], tmp_path: Path, stop_at: Callable[..., None]
) -> None:
    from acutance.probing import HeadSummary
    from acutance.report.html_page import write

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    for place, name in ((HeadSummary, "to_parquet"), (write, "write_html")):
        stop_at(place, name, 0, full)
    out = {kind: tmp_path / f"out.{kind}" for kind in ("parquet", "report", "json", "keep-qk")}
    given = [part for kind, path in out.items() for part in (f"--{kind}", path)]
    done = run("probe", *broken, "--length", 16, *given)
    assert done.exit_code == 1
    assert "parquet: no space left on device; report: no space" in done.stderr
    assert "json written to" in done.stderr
    assert "report written to" not in done.stderr
    assert "Heads" in done.stdout or "layer" in done.stdout
    assert json.loads(out["json"].read_text())["heads"]
    assert out["keep-qk"].stat().st_size


def test_one_failure_is_raised_as_it_is() -> None:
    done: list[str] = []
    with pytest.raises(KeyError, match="b"):
        write_each({"a": lambda: 1, "b": lambda: {}["b"], "c": lambda: 2}, done.append)
    assert done == ["a", "c"]
