"""The acutance command as a shell user meets it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

import acutance
from acutance import testing
from tests.contract.trained import encoder

TEXT = (
    "The lens turned until the far tree stood clear of its leaves. "
    "Nobody spoke while the tide came in, and the boats lifted one after another.\n"
) * 12


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


def _tiny_gpt2() -> Any:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    return GPT2Model(GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=64, vocab_size=30522))


def test_the_default_run_reads_every_head(run: Callable[..., Any], tmp_path: Path) -> None:
    out, table, state, page = (
        tmp_path / name for name in ("o.json", "o.parquet", "o.safetensors", "o.html")
    )
    result = run("probe", "--json", out, "--parquet", table, "--save", state, "--report", page)
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert len(record["heads"]) == 72
    assert {layer["status"] for layer in record["layers"]} == {"verified"}
    assert record["about"]["complete"] is True
    assert record["about"]["windows"] == record["about"]["windows_in_all"] > 3
    frame = pyarrow.parquet.read_table(table)
    assert frame.num_rows == 72
    assert frame.column_names[:2] == ["layer", "head"]
    summary = acutance.load(state)
    entropy = [head["metrics"]["entropy"]["mean"] for head in record["heads"]]
    assert summary.mean("entropy").tolist() == pytest.approx(entropy, rel=1e-12)
    assert "<html" in page.read_text(encoding="utf-8")
    assert all(f"{layer}" in result.output for layer in range(6))


def test_text_comes_from_standard_input(save_model: Callable[..., Path]) -> None:
    arguments = ["probe", str(save_model(_tiny_gpt2())), "--text", "-", "--json", "-"]
    done = testing.run(arguments, stdin=TEXT)
    assert done.exit_code == 0, done.output
    record = json.loads(done.out)
    assert record["about"]["text"] == ["standard input"]
    assert len(record["heads"]) == 8


def test_failures_are_one_sentence_and_exit_1(
    run: Callable[..., Any], save_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    from transformers import MambaConfig, MambaModel

    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xfe\x00abc")
    bare = tmp_path / "bare"
    bare.mkdir()
    gpt2 = save_model(_tiny_gpt2())
    mamba = save_model(
        MambaModel(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=30522)), "mamba"
    )
    cases = [
        ([tmp_path / "nowhere" / "model"], "there is no model directory at"),
        ([bare], "has no config.json"),
        ([text], "is a file; MODEL must be the directory"),
        ([gpt2, "--text", tmp_path / "missing.txt"], "there is no text file at"),
        ([gpt2, "--text", tmp_path], "is a directory"),
        ([gpt2, "--text", empty], "contains no text"),
        ([gpt2, "--text", binary], "is not UTF-8 text"),
        ([mamba, "--text", text], "the probe captured no attention call in MambaModel"),
    ]
    for arguments, sentence in cases:
        result = run("probe", *arguments)
        assert result.exit_code == 1, (arguments, result.output)
        assert sentence in result.err.replace("\n", " "), (arguments, result.err)
        lines = [line for line in result.err.splitlines() if line.startswith("acutance: ")]
        assert len(lines) == 1
        assert "Traceback" not in result.output


def test_misuse_is_exit_2_before_anything_runs(run: Callable[..., Any], tmp_path: Path) -> None:
    for arguments in (
        ["probe", "--lenght", "3"],
        ["probe", "--length", "1"],
        ["probe", "--json", tmp_path / "no" / "where.json"],
        ["probe", "--report", tmp_path],
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
    assert "length" in run("probe", "--lenght", "3").output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--length", 65], "--length 65 exceeds the 64 positions"),
        (["--heads", "0-9"], "includes head 9, but the layers of"),
        (["--shard", "3/2"], "shard"),
        (["--law", "sssmax"], "did you mean"),
        (["--law", "log_n"], "--law: log_n needs parameters"),
    ],
)
def test_options_that_do_not_fit_are_misuse(
    run: Callable[..., Any], save_model: Callable[..., Path], options: list[Any], sentence: str
) -> None:
    result = run("probe", save_model(_tiny_gpt2()), *options)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.err.split())
    assert len([line for line in result.err.splitlines() if line.startswith("acutance:")]) == 1


def test_a_law_or_target_that_does_not_exist_is_misuse(run: Callable[..., Any]) -> None:
    assert run("calibrate", "--law", "sssmax").exit_code == 2
    assert run("calibrate", "--target", "entropi").exit_code == 2


def test_help_of_judge_names_every_law_with_parameters_that_are_numbers(
    run: Callable[..., Any],
) -> None:
    named = set(re.findall(r"\w+", run("judge", "--help").output))
    assert set(acutance.scaling.SCALINGS) - {"none", "head_table", "entropy_target"} <= named


def test_an_encoder_decoder_is_read_on_both_sides(
    run: Callable[..., Any], save_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    from transformers import T5Config, T5Model

    if not T5Model._supports_sdpa:
        pytest.skip("this release of transformers computes T5's attention by hand")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=30522, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    folder, out = save_model(T5Model(config)), tmp_path / "o.json"
    result = run("probe", folder, "--text", text, "--length", 32, "--json", out)
    assert result.exit_code == 0, result.output
    layers = json.loads(out.read_text())["layers"]
    assert [layer["module"].split(".")[0] for layer in layers] == ["encoder", "decoder", "decoder"]
    assert {layer["status"] for layer in layers} == {"verified"}


def test_info_says_which_kernels_run(run: Callable[..., Any], tmp_path: Path) -> None:
    shown = run("info")
    assert shown.exit_code == 0
    assert shown.out == f"{acutance.kernels.info()}\n"
    written = run("info", "--json", "-")
    assert written.exit_code == 0
    record = json.loads(written.out)
    assert record["auto"] == acutance.kernels.info().auto
    assert record["threads"] == torch.get_num_threads()
    run("info", "--json", tmp_path / "info.json")
    assert json.loads((tmp_path / "info.json").read_text()) == record


@pytest.mark.parametrize("given", ["bench", "bench --quick causal-4096", "bench --info"])
def test_bench_says_where_it_went(run: Callable[..., Any], given: str) -> None:
    done = run(*given.split())
    assert done.exit_code == 2
    assert done.err.count("\n") == 1
    assert "run 'python -m benchmarks' in a checkout" in done.err
    assert " bench" not in run("--help").out
