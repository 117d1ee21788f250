"""The terminal table: every number at every width, with colour and without."""

from __future__ import annotations

from acutance.escapes import ranges
from acutance.report.terminal import module_sentences
from tests.contract.report.test_console import Make


def test_layers_named_alike_are_told_together(summary_of: Make) -> None:
    names = ["dec.0.self", "dec.0.cross", "dec.1.self", "dec.1.cross", "pool"]
    summary = summary_of((1,) * 5, layer={i: {"module": name} for i, name in enumerate(names)})
    assert module_sentences(summary.layers) == [
        "layers 0, 2: dec.*.self",
        "layers 1, 3: dec.*.cross (cross-attention)",
        "layer 4: pool",
    ]
    assert ranges([1, 2, 3, 7, 8], "layer") == "layers 1–3, 7–8"
