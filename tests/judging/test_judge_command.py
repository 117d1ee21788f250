"""acutance judge, as a shell user meets it."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.corpus import load_model
from acutance.corpus.texts import Text
from acutance.experiments.models.trained import directory
from acutance.judging.text_windows import hold_out, loss_of, text_windows

STDLIB = Path(sysconfig.get_path("stdlib"))
HELD_OUT = [STDLIB / name for name in ("copy.py", "queue.py", "heapq.py", "sched.py", "types.py")]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Source code of a few thousand bytes."""
    path = tmp_path / "text.py"
    path.write_text(HELD_OUT[0].read_text()[:4096])
    return path


def test_a_law_is_judged_and_resumed(run: Callable[..., Any], text: Path, tmp_path: Path) -> None:
    out, state = tmp_path / "out.json", tmp_path / "state"
    given = ("judge", directory(), "--text", text, "--lengths", "512", "--save", state)
    laws = ("--law", "clip_log_n:train_length=128", "--law", "log_n:base=4")
    done = run(*given, *laws, "--windows", 6, "--json", out)
    assert done.exit_code == 0, done.stderr
    record = json.loads(out.read_text())
    assert (record["windows"], record["tokens"], record["unit"]) == (6, 3072, "window")
    assert [law["name"] for law in record["laws"]] == [laws[1], laws[3]]
    assert [law["verdict"] for law in record["laws"]] == ["helps", "hurts"]
    places = [(one["from"], one["to"]) for one in record["laws"][0]["by_position"]]
    assert places[0][0] == 1
    assert places[-1] == (257, 512)
    for law in record["laws"]:
        assert re.search(rf"{law['name']} .*{law['verdict']}", done.stdout)
    assert "simultaneous 95 % intervals" in " ".join(done.stdout.split())
    again = run(*given, *laws, "--windows", 6, "--json", "-", "--resume")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["laws"] == record["laws"]


def test_a_window_is_judged_beside_a_scaling(run: Callable[..., Any], text: Path) -> None:
    """The decoder was trained on 128 bytes: read through a window of that, it goes on as there."""
    pair = "clip_log_n:train_length=128+window:size=128,beyond=128"
    given = ("judge", directory(), "--text", text, "--lengths", "512", "--windows", 6)
    done = run(*given, "--law", pair, "--json", "-")
    assert done.exit_code == 0, done.stderr
    (law,) = json.loads(done.stdout)["laws"]
    assert (law["name"], law["verdict"]) == (pair, "helps")
    deltas = {part["to"]: part["delta"] for part in law["by_position"]}
    assert all(delta == 0.0 for to, delta in deltas.items() if to <= 128)
    assert deltas[512] < -0.3


def test_several_texts_are_the_samples(run: Callable[..., Any], tmp_path: Path) -> None:
    files = []
    for number, path in enumerate(HELD_OUT):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_text(path.read_text()[:700])
    done = run(
        "judge", directory(), *(part for path in files for part in ("--text", path)), "--lengths",
        "128,256", "--law", "clip_log_n:train_length=128", "--json", "-",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["unit"], record["groups"], record["lengths"]) == ("text", 5, [128, 256])


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "name at least one law to judge"),
        (("--law", "ssmax", "--law", "ssmax"), 2, "ssmax is given twice"),
        (("--law", "nothing"), 2, "--law: 'nothing' is neither a file nor a law. A law is a file"),
        (("--law", "none.json"), 2, "--law: there is no file none.json"),
        (("--law", "rope:yarm,factor=2"), 2, "has no RoPE type 'yarm'; did you mean 'yarn'?"),
        (("--law", "rope+window:size=9"), 2, "rope cannot be joined to another law by +"),
        (("--law", "off:7.0"), 1, "it has 3 blocks, 0 to 2"),
        (("--law", "off:0.7"), 1, "model.layers.0.self_attn has heads 0 to 3"),
        (("--law", "off:x"), 2, "heads must be LAYER.HEAD"),
        (("--law", "window:size=2.5"), 2, "window: size must be an integer, got 2.5"),
        (("--law", "ssmax", "--lengths", "4096"), 1, "at least 2 windows of 4096 tokens, and the"),
        (("--law", "ssmax", "--lengths", "64,32"), 2, "lengths must be at least 2 and ascending"),
        (("--law", "ssmax", "--resume"), 2, "needs --save, the file to continue from"),
        (("--law", "ssmax", "--text", "none.txt"), 1, "there is no text file at none.txt"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Callable[..., Any], text: Path, options: tuple[str, ...], code: int, said: str
) -> None:
    given = options if "--text" in options else ("--text", text, *options)
    done = run("judge", directory(), *given)
    assert done.exit_code == code
    assert said in " ".join(done.stderr.replace("│", " ").split())
    if code == 1:
        assert done.stderr.count("\n") == 1


def test_a_model_without_a_head_is_refused(run: Callable[..., Any]) -> None:
    done = run("judge", load_model._embedded(), "--law", "ssmax")
    assert done.exit_code == 1
    assert "was saved without a language-model head" in done.stderr
    assert done.stderr.count("\n") == 1


def test_learned_positions_are_a_limit(run: Callable[..., Any], tmp_path: Path, text: Path) -> None:
    import transformers as hf

    sizes = {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1)).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory() / name, tmp_path / "model")
    given = ("judge", tmp_path / "model", "--text", text, "--law", "ssmax")
    done = run(*given, "--lengths", "128")
    assert done.exit_code == 1
    assert "lengths reach 128, but the model has 64 positions" in done.stderr
    done = run(*given, "--lengths", "64", "--windows", "2")
    assert done.exit_code == 0, done.stderr


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small masked language model with the embedded model's vocabulary."""
    import transformers as hf

    where = tmp_path_factory.mktemp("masked")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = hf.BertConfig(**sizes, num_hidden_layers=1, max_position_embeddings=128)
    hf.BertForMaskedLM(config).save_pretrained(where)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(Path(load_model._embedded()) / name, where)
    return where


def test_masked_models_are_judged_by_masked_tokens(
    run: Callable[..., Any], masked: Path, text: Path
) -> None:
    done = run(
        "judge", masked, "--text", text, "--lengths", "32,64", "--windows", "3", "--law", "ssmax",
        "--json", "-",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["loss"] == "15 % of the tokens masked, seed 0"
    places = [(one["from"], one["to"]) for one in record["laws"][0]["by_position"]]
    assert places == [(17, 32), (33, 64)]  # every prediction reads its whole window
    loaded = load_model.load(str(masked), head=True)
    special = set(loaded.tokenizer.all_special_ids)
    windows = text_windows(loaded, [Text("a", text.read_text())], (64,), 2, 0)
    for turn in windows.turns:
        scored = loss_of(loaded).score(loaded.model, turn.batch)
        chosen = turn.batch["input_ids"][~scored.loss.isnan()]
        assert not special & set(chosen.tolist())


@pytest.mark.parametrize("sizes", [(700,), (100, 900, 40), (130,) * 8])
def test_held_out_windows_are_not_fitted_to(sizes: tuple[int, ...]) -> None:
    """A quarter of the windows, at the ends of texts; no token is on both sides."""
    loaded = load_model.load(str(directory()), head=True)
    texts = [Text(str(n), chr(97 + n) + chr(65 + n) * (size - 1)) for n, size in enumerate(sizes)]
    held = hold_out(loaded, texts, 32)
    whole = sum(size // 32 for size in sizes)
    fit = {text.name: text.tokenised(loaded.tokenizer) for text in held.fit}
    ends = {text.name: text.tokenised(loaded.tokenizer) for text in held.judged}
    judged = sum(len(ids) // 32 for ids in ends.values())
    assert judged == max(2, min(16, whole // 4))
    assert sum(len(ids) // 32 for ids in fit.values()) == whole - judged
    for text in texts:
        joined = [*fit.get(text.name, []), *ends.get(text.name, [])]
        assert joined == list(text.content.encode())
    with pytest.raises(ValueError, match="at least 2 windows of 512 tokens each"):
        hold_out(loaded, texts, 512)
