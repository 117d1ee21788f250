"""What the page on cosines says of MiniLM, measured again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from acutance.corpus import load_model, texts
from acutance.probing import QueryKeySample

PAGE = Path(__file__).parents[2] / "docs" / "mathematics" / "cosine.md"
SIX = re.compile(r"((?:\d+, ){4}\d+\s+and\s+\d+) %")


@pytest.fixture(scope="module")
def measured() -> list[list[float]]:
    """Per cent by layer: rows whose top key moves, spread of lengths, other nearest tokens."""
    encoder = load_model.load_model(None)
    pieces = texts.windows([texts.bundled()], encoder.tokenizer, 256)
    ids, mask = texts.padded(pieces[:2], encoder.pad)
    seen: dict[str, list[Tensor]] = {"input": [], "query": [], "key": []}

    def keep(module: torch.nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        seen["input"].append(given[0])
        seen["query"].append(module.query(given[0]))
        seen["key"].append(module.key(given[0]))

    for layer in encoder.model.encoder.layer:
        layer.attention.self.register_forward_hook(keep, prepend=True)
    heads = encoder.model.config.num_attention_heads
    with torch.no_grad():
        encoder.model(input_ids=ids, attention_mask=mask)
        split = {
            which: [part.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1) for part in parts]
            for which, parts in seen.items()
        }
        moved = []
        for query, key in zip(split["query"], split["key"], strict=True):
            names = tuple(map(str, range(len(query))))
            sample = QueryKeySample(query, key, key, names, is_causal=False)
            moved.append(100 * float(sample.key_norm_effect().mean()))
        spread, other = [], []
        for x in seen["input"]:
            length = x.norm(dim=-1)
            spread.append(100 * float(length.std() / length.mean()))
            dots = x @ x.mT
            cosines = dots / length[:, :, None] / length[:, None]
            near = [
                part.masked_fill(torch.eye(256, dtype=torch.bool), -torch.inf).argmax(-1)
                for part in (dots, cosines)
            ]
            other.append(100 * float((near[0] != near[1]).float().mean()))
    return [moved, spread, other]


def test_the_page_says_what_the_lengths_of_keys_and_inputs_do(measured: list[list[float]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    said = [[float(number) for number in re.findall(r"\d+", part)] for part in SIX.findall(text)]
    assert len(said) == len(measured) == 3
    for page, layers in zip(said, measured, strict=True):
        assert layers == pytest.approx(page, abs=0.75)
