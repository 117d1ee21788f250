"""Every condition a model may run under, against the entropies of its own eager weights."""

from __future__ import annotations

import io
from typing import Any

import torch

import acutance

# -- what cannot be read --------------------------------------------------------------------------


def test_what_cannot_be_read_is_told_everywhere(
    gpt2_models: Any, random_tokens: Any, read_by: Any, tmp_path: Any
) -> None:
    from rich.console import Console

    from acutance.report.terminal import console_table

    model = gpt2_models["sdpa"]

    def reading(read: Any, function: Any, implementation: str, name: str, *rest: Any) -> Any:
        if "h.1." in name:
            raise ValueError("a cache nobody knows")
        return read(function, implementation, name, *rest)

    read_by(reading)
    with acutance.probe(model) as probe, torch.no_grad():
        model(random_tokens(2, 6))
    summary, reason = probe.summary(), "transformer.h.1.attn: a cache nobody knows"
    assert summary.unread == (reason,)
    assert summary.to_dict()["unread"] == [reason]
    summary.save(tmp_path / "state")
    assert acutance.load(tmp_path / "state").unread == (reason,)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(console_table(summary))
    assert reason in console.export_text()
