"""acutance calibrate and acutance probe --law, as a shell user meets them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import acutance
from acutance.calibration.law import named_law
from acutance.calibration.windows import draw, spread
from acutance.corpus import load_model
from acutance.corpus.texts import Text, windows
from acutance.scaling import LogN, SSMax

SENTENCES = "The lens turned until the far tree stood clear of its leaves, and nobody spoke.\n" * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama of random weights with the embedded model's vocabulary."""
    from transformers import LlamaConfig, LlamaModel

    where = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = LlamaModel(
        LlamaConfig(
            vocab_size=30522,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    model.save_pretrained(where)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(Path(load_model._resolve(None)[1]) / name, where)
    (where / "text.txt").write_text(SENTENCES)
    return where


def test_a_law_is_fitted_written_and_probed(
    run: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    law, record = tmp_path / "law.json", tmp_path / "record.json"
    text = ("--text", folder / "text.txt")
    done = run(
        "calibrate", folder, *text, "--lengths", "16,32,64", "-o", law, "--json", record,
        "--passes", 3,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "entropy, kept at its value for n = 16" in done.stdout
    assert "before" in done.stdout
    assert "after" in done.stdout
    assert "Untrained: every norm" in done.stdout  # as a probe of this model says
    assert json.loads(record.read_text())["law"]["untrained"] is True
    assert acutance.Law.load(law).untrained
    heads = json.loads(record.read_text())["heads"]
    assert len(heads) == 2
    means = {}
    for name, extra in {"plain": (), "law": ("--law", law)}.items():
        out = tmp_path / f"probed-{name}.json"
        done = run("probe", folder, *text, "--length", 64, "--json", out, *extra)
        assert done.exit_code == 0, done.stderr
        shown = json.loads(out.read_text())
        means[name] = [head["metrics"]["entropy"]["mean"] for head in shown["heads"]]
        assert ("law" in shown["about"]) == (name == "law")
    for head, plain, under in zip(heads, means["plain"], means["law"], strict=True):
        assert (under < plain) == (head["factors"][-1] > 1)
    other = run("probe", "--law", law)  # the embedded model
    assert other.exit_code == 1
    assert "this law is for another model" in other.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (
            ("--lengths", "16,512", "--passes", "2"),
            0,
            "note: lengths reach 512, but the model has 256 positions",
        ),
        (("--lengths", "64,16"), 2, "lengths must be at least 2 and ascending"),
        (("--lengths", "a"), 2, "must be whole numbers separated by commas"),
        (("--lengths", "16,256", "--text", "SHORT"), 1, "at least 2 windows of 256 tokens"),
        (("--text", "EMPTY"), 1, "contains no text"),
        (("--text", "none.txt"), 1, "there is no text file at none.txt"),
        (("--target", "entropi"), 2, "did you mean 'entropy'"),
        (("--target", "entropy=many"), 2, "the value after '=' must be a number"),
        (("--target", "entropy=99", "--lengths", "16,64"), 1, "must be between 0 and 4.159"),
        (("--target", "loss=3"), 2, "loss is lowered, not brought to a value: remove =3"),
        (("--law", "ssmax"), 2, "must be one of table, constant, none, got ss"),
        (("--target", "loss", "--law", "none"), 2, "needs --window"),
        (("--target", "loss", "--reference", "64"), 2, "cannot be combined with --target loss"),
        (("--window", "64"), 2, "it needs --target loss"),
        (("--target", "loss", "--window", "2.5"), 2, "it must be SIZE or SIZE,SINKS, as in 1024"),
        (("--target", "loss", "--window", "-4"), 2, "it must be SIZE or SIZE,SINKS, as in 1024,4"),
        (("--law", "constants"), 2, "did you mean 'constant'"),
        (("--target", "max_logit=8"), 2, "must be one of entropy, normalized_entropy, eff"),
        (("--save", "state"), 2, "it needs --target loss; every other target is fitted in one run"),
        (("--resume",), 2, "needs --save, the file to continue from"),
        (("-o", "nowhere/law.json"), 2, "directory"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Callable[..., Any],
    folder: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "SHORT").write_text("A tree.")
    given = [tmp_path / part if part in ("EMPTY", "SHORT") else part for part in options]
    done = run("calibrate", folder, *given)
    assert done.exit_code == code
    assert said in " ".join(done.stderr.replace("│", " ").split())
    if code == 1:
        assert done.stderr.count("\n") == 1


def test_windows_are_spread_over_a_long_text(
    run: Callable[..., Any], folder: Path, tmp_path: Path
) -> None:
    """So many of each length, said before and kept in the record; 0 reads everything."""
    long = tmp_path / "long.txt"
    long.write_text("".join(f"The {n}th lens stood clear of its leaves.\n" for n in range(400)))
    record = tmp_path / "record.json"
    given = ("calibrate", folder, "--text", long, "--lengths", "16,32", "--passes", 2)
    for count, said in ((5, "reads windows spread over"), (0, "reads every whole window")):
        done = run(*given, "--windows", count, "--json", record)
        assert done.exit_code == 0, done.stderr
        assert said in done.stderr
        found = json.loads(record.read_text())["windows"]
        assert found == {"16": 5, "32": 5} if count else min(found.values()) > 100


def test_one_window_of_each_part() -> None:
    assert spread(7, 9, 0) == list(range(7))
    for seed in range(20):
        places = spread(1003, 10, seed)
        for part, place in enumerate(places):
            assert part * 1003 // 10 <= place < (part + 1) * 1003 // 10
    assert spread(1003, 10, 1) != spread(1003, 10, 2)


def test_a_text_is_tokenised_once_for_all_lengths(folder: Path) -> None:
    loaded, seen = load_model.load_model(str(folder)), []

    class Counting:
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(text)
            return loaded.tokenizer(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(loaded.tokenizer, name)

    text = Text("sentences", SENTENCES)
    found = draw([text], Counting(), [16, 32, 64], 3, 0)
    assert seen.count(SENTENCES) == 1
    for length, sample in found.items():
        every = [w for w in windows([text], loaded.tokenizer, length) if len(w) == length]
        assert len(sample.pieces) == 3
        assert sample.whole == len(every)
        assert all(piece in every for piece in sample.pieces)
        assert sample.share == pytest.approx(3 * length / sample.tokens)


def test_laws_by_name(tmp_path: Path) -> None:
    assert named_law("ssmax") == SSMax()
    assert named_law("log_n:train_length=64, n_min=8") == LogN(train_length=64, n_min=8)
    for text, match in (
        (
            "ssmaxx",
            "neither a file nor a law; did you mean 'ssmax'.*window:size.*rope:yarn.*off:3",
        ),
        ("log_n", "log_n needs parameters, for example log_n:train_length=512"),
        ("head_table", r"for example head_table:factors=\[1.0,1.2\], one factor for each head"),
        ("law.json", "there is no file law.json"),
        ("log_n:train_length", "parameters must be name=number"),
        ("log_n:train_length=long", "train_length must be a number"),
        (str(tmp_path), "is a directory"),
    ):
        with pytest.raises(ValueError, match=match):
            named_law(text)


def test_the_command_and_the_function_agree(folder: Path) -> None:
    """The function is what the documentation names."""
    assert acutance.calibrate.__module__ == "acutance.calibration.fit"
    assert issubclass(acutance.Calibration, acutance.Law)
