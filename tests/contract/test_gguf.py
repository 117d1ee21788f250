"""GGUF files as models: what loads is the model that was written, what does not is said why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import acutance
from acutance import load_model, testing
from tests.contract.tiny_gguf import llama, tensors, write_gguf

TEXT = "The lens turned until the far tree stood clear of its leaves.\n" * 4
Q8_0, Q4_1 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def run(*arguments: object) -> Any:
    return testing.run([str(argument) for argument in arguments])


def test_the_model_that_was_written_is_loaded(path: Path) -> None:
    ids = torch.arange(40)[None]
    loaded = load_model(str(write_gguf(path)), head=False)
    with torch.no_grad():
        expected = llama()(input_ids=ids).last_hidden_state
        assert torch.equal(loaded.model(input_ids=ids).last_hidden_state, expected)
    words = loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer("the a")["input_ids"])
    assert words == ["th", "e", "Ġ", "a"]
    assert loaded.positions == 128
    assert loaded.about == {"weights": "GGUF, all F32"}


@pytest.mark.parametrize(("kind", "share"), [(Q8_0, 0.01), (Q4_1, 0.1)])
def test_quantised_weights_are_those_of_the_formats_own_reader(
    path: Path, kind: gguf.GGMLQuantizationType, share: float
) -> None:
    model = load_model(str(write_gguf(path, kind=kind)), head=False).model
    written, plain = tensors(model), tensors(llama())
    for tensor in gguf.GGUFReader(path).tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert (written[tensor.name] == expected).all(), tensor.name
        assert abs(expected - plain[tensor.name]).max() <= share * abs(plain[tensor.name]).max()


def test_probe_and_calibrate_take_a_file(path: Path, tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    out, law = tmp_path / "out.json", tmp_path / "law.json"
    done = run("probe", write_gguf(path), "--text", text, "--length", 32, "--json", out)
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text(encoding="utf-8"))
    assert record["about"]["weights"] == "GGUF, all F32"
    assert [layer["status"] for layer in record["layers"]] == ["verified"] * 2
    assert "Converting" not in done.err  # the loader's own bars
    ids = torch.tensor(load_model(str(path), head=False).tokenizer(TEXT)["input_ids"][:32])[None]
    with acutance.probe(model := llama()) as probe:
        model(input_ids=ids)
    again = run("probe", path, "--text", text, "--length", 32, "--every", 99, "--json", "-")
    measured = [head["metrics"]["entropy"]["mean"] for head in json.loads(again.out)["heads"]]
    assert measured == pytest.approx(probe.summary().mean("entropy").tolist(), rel=1e-6)
    fitted = run("calibrate", path, "--text", text, "--lengths", "16,32", "-o", law, "--passes", 2)
    assert fitted.exit_code == 0, fitted.output
    assert law.exists()


def test_a_head_is_loaded_where_a_model_has_one(tmp_path: Path) -> None:
    """The embedded encoder has none, so it keeps its class and loads once."""
    from transformers import AutoModel, AutoTokenizer

    from tests.contract.trained import directory

    assert type(load_model(directory()).model).__name__.endswith("ForCausalLM")
    assert type(load_model(directory(), head=False).model).__name__.endswith("Model")
    assert type(load_model().model).__name__ == "BertModel"
    bare = load_model(directory(), head=False).model
    bare.config.architectures = None  # as in a file that states no class
    bare.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(directory()).save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path), allow_missing=False).model) is type(bare)
    assert isinstance(bare, type(AutoModel.from_config(bare.config)))
