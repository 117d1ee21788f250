"""Law files: what is written is read, and another model's or a hostile one is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance import scaling
from acutance.calibration import Identity, Law, LawError, attention_layers

Built = Callable[..., nn.Module]
TABLE = scaling.HeadTable([[1.0, 1.2], [1.0, 1.1], [0.9, 1.0], [1.0, 1.5]], lengths=[8, 32])


def written(model: nn.Module, path: Path) -> dict[str, Any]:
    law = Law.of(model, {0: TABLE, (1, 2): scaling.SSMax(s=0.5), (1, 3): "none"}, lengths=[8, 32])
    law.save(path)
    record: dict[str, Any] = json.loads(path.read_text())
    del record["sha256"]  # as whoever changes it by hand does
    return record


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_law_is_read_as_it_was_written(
    built: Built, ids: Tensor, tmp_path: Path, name: str
) -> None:
    model, path = built(name), tmp_path / "law.json"
    given: Any = {0: TABLE, (1, 2): scaling.SSMax(s=0.5), (1, 3): "none"}
    law = Law.of(model, given, lengths=[8, 32], target="entropy")
    law.save(path)
    read = Law.load(path)
    assert read == law
    assert [path] == list(tmp_path.iterdir())  # nothing of the writing is left
    out = []
    for one in (given, law, read):
        with acutance.apply(model, one) as applied, torch.no_grad():
            out.append(model(input_ids=ids)[0])
        assert applied.law.layers == law.layers
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])


def test_one_scaling_for_all(built: Built, tmp_path: Path) -> None:
    path = tmp_path / "law.json"
    Law.of(built("llama"), scaling.LogN(train_length=32)).save(path)
    assert Law.load(path).everywhere == scaling.LogN(train_length=32)
    assert Law.load(path).layers == ()


def test_another_models_law_is_refused(built: Built, tmp_path: Path) -> None:
    path = tmp_path / "law.json"
    written(built("llama"), path)
    law = Law.load(path)
    with pytest.raises(LawError, match="architecture 'LlamaForCausalLM', but the model has 'GPT2"):
        acutance.apply(built("gpt2"), law)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = built("llama").config.to_dict()
    assert Identity.of(LlamaForCausalLM(LlamaConfig(**config))) == law.model
    for change, word in (
        ({"num_hidden_layers": 3}, "layers 2, but the model has 3"),
        ({"num_attention_heads": 8}, "heads 4, but the model has 8"),
        ({"vocab_size": 98}, "vocabulary 97, but the model has 98"),
        ({"rms_norm_eps": 1e-3}, "configuration digest"),
    ):
        other = LlamaForCausalLM(LlamaConfig(**{**config, **change}))
        with pytest.raises(LawError, match=word):
            acutance.apply(other, law)


def test_identity_of_plain_modules() -> None:
    one = nn.TransformerEncoderLayer(16, 4)
    assert Identity.of(one) == Identity.of(nn.TransformerEncoderLayer(16, 4, batch_first=True))
    assert Identity.of(one).difference(Identity.of(nn.TransformerEncoderLayer(16, 4, 32)))
    assert Identity.of(one) == Identity.of(torch.compile(one, backend="eager"))


def test_attention_layers_are_known_by_class_or_heads(built: Built) -> None:
    assert list(attention_layers(built("bert"))) == [
        "encoder.layer.0.attention.self",
        "encoder.layer.1.attention.self",
    ]
    assert list(attention_layers(nn.Linear(2, 2))) == []
    mixer = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    mixer[1].num_heads = 2  # says that it has heads
    assert list(attention_layers(mixer)) == ["1"]


class Mix(nn.Module):
    """Attention by a name that does not say so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


def test_a_law_by_number_where_no_layer_is_known_before() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Mix()) for _ in range(3)))
    assert list(attention_layers(model)) == []
    law = Law.of(model, {-1: "ssmax", "0": "ssmax"})
    assert [name for name, _ in law.layers] == ["2", "0"]
    with torch.no_grad(), acutance.apply(model, law) as applied:
        model(torch.randn(1, 5, 4))
    assert applied.calls == {"0.1": 1, "2.1": 1}


def test_a_law_of_the_same_configuration_fits_however_many_layers_are_known() -> None:
    one = Identity.of(nn.TransformerEncoderLayer(16, 4))
    assert dataclasses.replace(one, layers=7).difference(one) is None
    assert "layers 7" in str(dataclasses.replace(one, layers=7, digest="x").difference(one))


def test_lengths_beyond_the_positions(built: Built) -> None:
    with pytest.raises(ValueError, match="lengths reach 128, but the model has 64 positions"):
        Law.of(built("gpt2"), "ssmax", lengths=[32, 128])
    with pytest.warns(UserWarning, match="lengths reach 128, but the model has 64 positions"):
        Law.of(built("llama"), "ssmax", lengths=[32, 128])


def _without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


HOSTILE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda r: [r], "it must be a JSON object, got list"),
    (lambda r: r | {"schema": "acutance.law/9"}, "got 'acutance.law/9'"),
    (lambda r: _without(r, "layers"), "missing or unknown: layers"),
    (lambda r: r | {"more": 1}, "missing or unknown: more"),
    (lambda r: r | {"layers": []}, "'layers' must be a JSON object"),
    (lambda r: r | {"lengths": [0]}, "lengths"),
    (lambda r: r | {"lengths": ["8"]}, "lengths"),
    (lambda r: r | {"target": 3}, "'target' must be a string or null"),
    (lambda r: r | {"model": {}}, "'model' must have the fields architecture"),
    (
        lambda r: r | {"model": r["model"] | {"heads": -1}},
        r"'heads' of 'model' must be a non-negative whole number",
    ),
    (
        lambda r: r | {"model": r["model"] | {"heads": True}},
        r"'heads' of 'model' must be a non-negative whole number",
    ),
    (lambda r: r | {"everywhere": "ssmax"}, "scaling of 'everywhere' must be a JSON object"),
    (lambda r: r | {"everywhere": {"name": "ssmx"}}, "did you mean 'ssmax'"),
    (lambda r: r | {"everywhere": {"name": "ssmax", "s": "__import__"}}, "s must be a number"),
    (lambda r: r | {"everywhere": {"name": "ssmax", "t": 1}}, "ssmax has no 't'"),
    (lambda r: r | {"layers": {"a": {"heads": {}}}}, "'heads' of layer 'a' must be a JSON object"),
    (
        lambda r: r | {"layers": {"a": {"heads": {"-1": {"name": "ssmax"}}}}},
        "must be head indices",
    ),
    (lambda r: r | {"layers": {"a": 5}}, "layer 'a' must be a JSON object with 'whole'"),
]


@pytest.mark.parametrize(("change", "match"), HOSTILE)
def test_hostile_files(built: Built, tmp_path: Path, change: Any, match: str) -> None:
    path = tmp_path / "law.json"
    path.write_text(json.dumps(change(written(built("llama"), path))))
    with pytest.raises(LawError, match=f"law.json contains no law: .*{match}"):
        Law.load(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "Expecting value"),
        ("\x80", "not UTF-8 text"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema": NaN}', "numbers must be finite, got NaN"),
        ('{"schema": 1e999}', "numbers must be finite, got 1e999"),
        ('{"schema": ' + "9" * 5000 + "}", "numbers must be finite, got 9999"),
    ],
)
def test_what_is_no_json(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "law.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LawError, match=match):
        Law.load(path)


def test_a_law_that_was_changed_is_refused_unless_its_digest_is_gone(
    built: Built, tmp_path: Path
) -> None:
    path = tmp_path / "law.json"
    Law.of(built("llama"), "ssmax").save(path)
    text = path.read_text()
    path.write_text(text.replace("0.43", "0.53"))
    with pytest.raises(LawError, match=r"damaged or was edited: its sha256 does not"):
        Law.load(path)
    record = json.loads(text.replace("0.43", "0.53"))
    del record["sha256"]
    path.write_text(json.dumps(record))
    assert Law.load(path).record() == record


def test_an_infinite_parameter_is_refused(built: Built, tmp_path: Path) -> None:
    path = tmp_path / "law.json"
    Law.of(built("llama"), "ssmax").save(path)
    path.write_text(path.read_text().replace("0.43", "1e999"))
    with pytest.raises(LawError, match="numbers must be finite, got 1e999"):
        Law.load(path)


def test_a_layer_of_the_file_that_the_model_lacks(built: Built, tmp_path: Path) -> None:
    path = tmp_path / "law.json"
    record = written(built("llama"), path)
    record["layers"] = {"model.layers.7.self_attn": {"whole": {"name": "ssmax"}}}
    path.write_text(json.dumps(record))
    with pytest.raises(LawError, match=r"model\.layers\.7\.self_attn"):
        acutance.apply(built("llama"), Law.load(path))
