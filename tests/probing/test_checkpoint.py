"""A model whose weights did not load is refused, or said in every output."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import acutance
from acutance import testing
from acutance.corpus import load_model
from acutance.probing import load_state
from tests.contract.probing.test_checkpoint import TEXT, Edit, _config, _one_layer
from tests.contract.trained import encoder


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


def _prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def _flipped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = "encoder.layer.0.attention.self.query.weight"
    return {name.replace("query", "qtery"): tensors.pop(name), **tensors}


def _a_layer_more(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    more = {name.replace(".1.", ".2."): part.clone() for name, part in tensors.items()}
    return {**more, **tensors}


def _narrower(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part[:8].clone() if "query" in name else part for name, part in tensors.items()}


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("BertModel", _prefixed, r"37 tensors missing .*begin with 'module\.' \(Distributed"),
        ("BertForMaskedLM", _prefixed, r"begin with 'module\.bert\.' \(Distributed"),
        ("BertModel", _one_layer, r"16 tensors missing .*\(encoder\.layer\.1\.attention"),
        ("BertModel", _flipped, r"query\.weight\) and 1 that fits nowhere .*qtery\.weight"),
        ("BertModel", _a_layer_more, r"16 tensors in its files that the model does not have"),
        ("BertModel", _narrower, r"4 tensors of the wrong shape .*\(8,\) in the files, \(16,\) in"),
    ],
)
def test_weights_that_do_not_load_are_named(
    saved: Callable[..., Path], name: str, edit: Edit, said: str
) -> None:
    folder = saved(name, edit)
    with pytest.raises(load_model.ModelError, match=said) as caught:
        load_model.load_model(str(folder))
    assert "\n" not in str(caught.value)
    assert "--allow-missing" in str(caught.value)


def test_what_no_attention_depends_on_may_be_missing_or_left_over(
    saved: Callable[..., Path],
) -> None:
    def old(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, "bert.embeddings.position_ids": torch.arange(64)[None]}

    assert (
        load_model.load_model(str(saved("BertForMaskedLM", old))).not_loaded is None
    )  # no pooler, a head
    assert load_model.load_model(str(saved("LlamaForCausalLM"))).not_loaded is None  # a head
    assert load_model.load_model(None).not_loaded is None


def test_random_weights_are_the_same_in_each_run(saved: Callable[..., Path]) -> None:
    from acutance.corpus.texts import model_digest

    folder = str(saved("BertForMaskedLM"))  # its pooler is random
    assert len({model_digest(load_model.load_model(folder).model) for _ in range(2)}) == 1


def test_every_output_says_what_did_not_load(saved: Callable[..., Path], tmp_path: Path) -> None:
    folder, text = saved("BertModel", _one_layer), tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    given = ["probe", str(folder), "--text", str(text), "--length", "16"]
    refused = testing.run(given)
    assert refused.exit_code == 1
    assert "encoder.layer.1.attention" in refused.output
    out, page, state = (tmp_path / name for name in ("o.json", "o.html", "o.state"))
    given += ["--json", str(out), "--report", str(page), "--save", str(state), "--allow-missing"]
    allowed = testing.run(given)
    assert allowed.exit_code == 0, allowed.output
    said = "16 tensors missing from its files"
    assert f"The model did not load: {said}" in " ".join(allowed.output.split())
    assert said in json.loads(out.read_text())["about"]["weights_not_loaded"]
    assert said in load_state(state).summary.about["weights_not_loaded"]
    shown = testing.run(["diff", str(state), str(state)])
    assert said in " ".join(shown.output.split())
    from acutance.report.html_page.data import _record

    assert said in _record(acutance.load(state))["notices"][0]
