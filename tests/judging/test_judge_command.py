"""acutance judge, as a shell user meets it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import acutance
from acutance.corpus.texts import Text
from acutance.judging.judge_model import hold_out, loss_of, text_windows
from acutance_lab.trained import directory
from tests.contract.judging.test_judge_command import HELD_OUT
from tests.contract.trained import encoder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Source code of a few thousand bytes."""
    path = tmp_path / "text.py"
    path.write_text(HELD_OUT[0].read_text()[:4096])
    return path


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
        shutil.copy(Path(encoder()) / name, where)
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
    loaded = acutance.load_model(str(masked), head=True)
    special = set(loaded.tokenizer.all_special_ids)
    windows = text_windows(loaded, [Text("a", text.read_text())], (64,), 2, 0)
    for turn in windows.turns:
        scored = loss_of(loaded).score(loaded.model, turn.batch)
        chosen = turn.batch["input_ids"][~scored.loss.isnan()]
        assert not special & set(chosen.tolist())


@pytest.mark.parametrize("sizes", [(700,), (100, 900, 40), (130,) * 8])
def test_held_out_windows_are_not_fitted_to(sizes: tuple[int, ...]) -> None:
    """A quarter of the windows, at the ends of texts; no token is on both sides."""
    loaded = acutance.load_model(str(directory()), head=True)
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
