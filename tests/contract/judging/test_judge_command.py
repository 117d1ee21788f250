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

from tests.contract.trained import directory, encoder

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
    assert done.exit_code == 0, done.err
    record = json.loads(out.read_text())
    assert (record["windows"], record["tokens"], record["unit"]) == (6, 3072, "window")
    assert [law["name"] for law in record["laws"]] == [laws[1], laws[3]]
    assert [law["verdict"] for law in record["laws"]] == ["helps", "hurts"]
    places = [(one["from"], one["to"]) for one in record["laws"][0]["by_position"]]
    assert places[0][0] == 1
    assert places[-1] == (257, 512)
    for law in record["laws"]:
        assert re.search(rf"{law['name']} .*{law['verdict']}", done.out)
    assert "simultaneous 95 % intervals" in " ".join(done.out.split())
    again = run(*given, *laws, "--windows", 6, "--json", "-", "--resume")
    assert again.exit_code == 0, again.err
    assert json.loads(again.out)["laws"] == record["laws"]


def test_a_window_is_judged_beside_a_scaling(run: Callable[..., Any], text: Path) -> None:
    """The decoder was trained on 128 bytes: read through a window of that, it goes on as there."""
    pair = "clip_log_n:train_length=128+window:size=128,beyond=128"
    given = ("judge", directory(), "--text", text, "--lengths", "512", "--windows", 6)
    done = run(*given, "--law", pair, "--json", "-")
    assert done.exit_code == 0, done.err
    (law,) = json.loads(done.out)["laws"]
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
    assert done.exit_code == 0, done.err
    record = json.loads(done.out)
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
    assert said in " ".join(done.err.replace("│", " ").split())
    if code == 1:
        assert done.err.count("\n") == 1


def test_a_model_without_a_head_is_refused(run: Callable[..., Any]) -> None:
    done = run("judge", encoder(), "--law", "ssmax")
    assert done.exit_code == 1
    assert "was saved without a language-model head" in done.err
    assert done.err.count("\n") == 1


def test_learned_positions_are_a_limit(run: Callable[..., Any], tmp_path: Path, text: Path) -> None:
    import transformers as hf

    sizes = {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1)).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(directory() / name, tmp_path / "model")
    given = ("judge", tmp_path / "model", "--text", text, "--law", "ssmax")
    done = run(*given, "--lengths", "128")
    assert done.exit_code == 1
    assert "lengths reach 128, but the model has 64 positions" in done.err
    done = run(*given, "--lengths", "64", "--windows", "2")
    assert done.exit_code == 0, done.err
