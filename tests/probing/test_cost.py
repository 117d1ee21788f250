"""Spending less: parts of a model, parts of its calls, drawn rows, provided attention."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.capture import attention_call as calls
from acutance.capture.find_layers import HeadChoice, LayerChoice
from acutance.probing.settings import ProbeSettings
from acutance.probing.tokens import draw
from acutance.summary.state import from_parts
from tests.contract.probing.test_cost import Attend, probed, qkv

TOLERANCE = 1e-5


# -- values are not touched -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"verify": False}, False),
        ({}, True),
        ({"verify": True}, True),
        ({"verify": False, "noise": True}, True),
    ],
)
def test_values_are_read_only_where_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], read: bool
) -> None:
    given: list[Tensor | None] = []
    for name in ("attention", "row_statistics"):
        plain = getattr(calls, name)

        def seen(
            query: Tensor, key: Tensor, value: Any, *rest: Any, _plain: Any = plain, **kw: Any
        ):
            given.append(value)
            return _plain(query, key, value, *rest, **kw)

        monkeypatch.setattr(calls, name, seen)
    probed(Attend(), *qkv(), options=options)
    assert [value is not None for value in given] == [read]


NAMES = ["", "embed", "encoder", *(f"encoder.{i}.attn" for i in range(4)), "decoder.0.cross_attn"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (0, ["encoder.0.attn", "decoder.0.cross_attn"]),
        (-1, ["encoder.3.attn", "decoder.0.cross_attn"]),
        ("1-2", ["encoder.1.attn", "encoder.2.attn"]),
        (range(2, 4), ["encoder.2.attn", "encoder.3.attn"]),
        (["*.cross_attn", 3], ["encoder.3.attn", "decoder.0.cross_attn"]),
        ("decoder", ["decoder.0.cross_attn"]),
        ("encoder.?.attn,", [f"encoder.{i}.attn" for i in range(4)]),
    ],
)
def test_layers_are_chosen_by_block_and_name(given: Any, found: list[str]) -> None:
    choice = LayerChoice(given, NAMES)
    assert [name for name in NAMES if name.endswith("attn") and name in choice] == found
    assert all(f"{name}#2" in choice for name in found)


def test_heads_are_chosen_by_number() -> None:
    assert HeadChoice([range(2), 5, "-1"]).of(8) == [0, 1, 5, 7]
    assert HeadChoice("-3--2").of(4) == [1, 2]


MASKS = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": (torch.arange(12)[:, None] + torch.arange(12)) % 3 > 0},
    "additive": {"attn_mask": torch.linspace(-3, 3, 144).view(12, 12)},
}


@pytest.mark.parametrize("provide", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_rows_drawn_are_rows_of_the_whole(name: str, provide: bool) -> None:
    model, parts = Attend(), qkv()
    stats = acutance.row_statistics(*parts[:2], None, **MASKS[name])
    sample = draw(torch.ones(2, 12, dtype=torch.bool), 5, (0, "Attend", 0, 0))
    assert sample is not None
    expected = sample.select(stats.entropy)[sample.real[:, None].expand(-1, 4, -1)]
    options = {"max_rows": 5, "verify": True, "provide": provide}
    summary = probed(model, *parts, options=options, **MASKS[name])
    column = summary.metrics.index("entropy")
    assert float((summary.moments.high[:, column].max() - expected.max()).abs()) < TOLERANCE
    assert float((summary.moments.low[:, column].min() - expected.min()).abs()) < TOLERANCE
    (layer,) = summary.layers
    assert (layer.rows, layer.skipped, layer.status) == (5, 19, "verified")
    assert bool((summary.moments.weight[:, column] == 24).all())


def test_states_from_before_rows_were_drawn_are_read() -> None:
    summary = probed(Attend(), *qkv(), options={})
    header, tensors = summary.parts()
    record = json.loads(header["summary"])
    del record["not_provided"]
    for layer in record["layers"]:
        for name in ("chosen", "skipped", "provided"):
            del layer[name]
    old = {name: part for name, part in tensors.items() if name not in ("weight", "sampling")}
    loaded = from_parts({**header, "summary": json.dumps(record)}, old)
    assert loaded.layers == summary.layers
    assert torch.equal(loaded.moments.weight, summary.moments.weight)
    assert not bool(loaded.sampling_error("entropy").any())
    with pytest.raises(ValueError, match="the array 'sampling' is missing"):
        from_parts(header, {name: part for name, part in tensors.items() if name != "sampling"})


def test_a_wrong_capture_is_not_provided(
    llama_models: Any, random_tokens: Any, read_by: Any
) -> None:
    model, ids = llama_models["sdpa"], random_tokens(2, 8)

    def wrong(
        read: Any, function: Any, implementation: str, name: str, args: Any, kwargs: Any
    ) -> Any:
        scale = {"scaling": 0.1} if "layers.1" in name else {}
        return read(function, implementation, name, args, {**kwargs, **scale})

    read_by(wrong)
    with torch.no_grad():
        plain = model(ids).logits
        with acutance.probe(model, provide=True) as probe:
            outputs = [model(ids).logits for _ in range(2)]
    for output in outputs:
        assert float((output - plain).abs().max()) < 1e-4
    assert [(layer.status, layer.provided) for layer in probe.summary().layers] == [
        ("checked", 2),
        ("mismatch", 0),
    ]
    told = [text.partition(": ")[2] for text in probe.not_provided]
    assert told[0].startswith("its output differs from the model's by a relative error of 0.")
    summary = probe.summary()
    assert summary.not_provided == tuple(probe.not_provided)
    assert summary.to_dict()["not_provided"] == probe.not_provided


def test_the_options_of_a_probe_are_written_alike_twice() -> None:
    """The signature is what users read, the record what is checked and handed on."""
    options = list(inspect.signature(acutance.probe).parameters.values())[1:]
    settings = [(each.name, each.default) for each in fields(ProbeSettings)]
    assert [(option.name, option.default) for option in options] == settings
