"""A model whose weights did not load is refused, or said in every output."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from acutance import testing
from acutance.calibration import Law
from tests.contract.trained import encoder

Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]
TEXT = "The lens turned until the far tree stood clear of its leaves.\n" * 8
SIZES = {"vocab_size": 30522, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


def _config(kind: str) -> Any:
    import transformers

    rope = {"max_position_embeddings": 64, "num_attention_heads": 2}
    return getattr(transformers, f"{kind}Config")(**SIZES, **rope)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Save a tiny model with the embedded tokenizer, its tensors edited."""

    def save(name: str = "BertModel", edit: Edit | None = None) -> Path:
        import transformers

        torch.manual_seed(0)
        kind = re.match("Bert|Llama|GPT2", name)
        assert kind is not None
        folder = tmp_path / "model"
        getattr(transformers, name)(_config(kind[0])).save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
            shutil.copy(Path(encoder()) / file, folder)
        if edit is not None:
            path = folder / "model.safetensors"
            save_file(edit(load_file(path)), path, metadata={"format": "pt"})
        return folder

    return save


def _one_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".layer.1." not in name}


def test_a_law_says_that_its_model_did_not_load(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder, text = saved("BertModel", _one_layer), tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    law, out = tmp_path / "law.json", tmp_path / "o.json"
    given = ["calibrate", str(folder), "--text", str(text), "--lengths", "16,32", "--passes", "2"]
    refused = testing.run(given)
    assert refused.exit_code == 1
    assert "16 tensors missing" in refused.output
    given += ["--allow-missing", "-o", str(law), "--json", str(out)]
    allowed = testing.run(given)
    assert allowed.exit_code == 0, allowed.output
    assert "The model did not load: 16 tensors" in " ".join(allowed.output.split())
    assert "16 tensors" in str(Law.load(law).weights_not_loaded)
    assert "16 tensors" in json.loads(out.read_text())["law"]["weights_not_loaded"]
