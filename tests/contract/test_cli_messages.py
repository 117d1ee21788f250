"""What a new user is told when something is missing: what it is, and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2Model, ViTConfig, ViTModel

from tests.contract.trained import encoder


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A model saved without a tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path / "gpt2"
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 30522}
    GPT2Model(GPT2Config(**sizes)).save_pretrained(folder)
    return folder


def said(result: Any, status: int = 1) -> str:
    assert result.exit_code == status, result.output
    lines = [line for line in result.err.splitlines() if line.startswith("acutance: ")]
    assert len(lines) == 1
    return str(lines[0])


def test_a_model_without_a_tokenizer_says_so_and_takes_another(
    run: Callable[..., Any], gpt2: Path
) -> None:
    told = said(run("probe", gpt2))
    assert "was saved without a tokenizer" in told
    assert "use --tokenizer to name" in told
    other = run("probe", gpt2, "--tokenizer", encoder())
    assert other.exit_code == 0, other.output


def test_tokens_beyond_the_embedding_are_named(run: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "small"
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 500}
    GPT2Model(GPT2Config(**sizes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(Path(encoder()) / name, folder)
    for command in (["probe"], ["calibrate", "--lengths", "8,16", "--windows", "2"]):
        told = said(run(command[0], folder, *command[1:]))
        assert "has 500 rows, so it belongs to another model" in told


def test_a_model_of_images_is_called_that(run: Callable[..., Any], tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**sizes, intermediate_size=16, image_size=16, patch_size=8)
    ViTModel(config).save_pretrained(tmp_path / "vit")
    told = said(run("probe", tmp_path / "vit"))
    assert "reads images, not text (ViTConfig has no vocabulary)" in told
    assert "sentencepiece" not in told
