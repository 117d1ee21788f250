"""A hundred random calls a backend, and faults that the fuzzer must find."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import fuzz

from acutance.kernels import library


@pytest.mark.parametrize("backend", ["native", "blocked", "dense"])
def test_a_hundred_calls_agree_with_the_oracle(backend: str) -> None:
    if backend == "native" and isinstance(library.load(), str):
        backend = "auto"
    wrong = []
    for seed in range(100):
        spec = fuzz.draw(seed)
        if problem := fuzz.check(spec, backend):
            wrong.append(f"{spec}: {problem}")
    assert not wrong, "\n".join(wrong)


def wider_window(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    window = options.get("window")
    return fuzz.attend(tensors, options | ({"window": window + 1} if window else {}))


def no_sink(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    return fuzz.attend(tensors, {k: v for k, v in options.items() if k != "sinks"})


def late_diagonal(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    off = options.get("query_offset", 0) + int(options.get("is_causal", False))
    return fuzz.attend(tensors, options | {"query_offset": off})


def low_mask_seen(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != torch.bool:
        options = options | {"attn_mask": mask.clamp(min=-1e4)}
    return fuzz.attend(tensors, options)


def no_softcap(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    return fuzz.attend(tensors, {k: v for k, v in options.items() if k != "softcap"})


def last_key_padded(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    mask = options.get("key_mask")
    if mask is not None and mask.shape[1] > 1:
        options = options | {"key_mask": mask.roll(1, 1)}
    return fuzz.attend(tensors, options)


def imprecise_scale(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    scale = options.get("scale", tensors[0].shape[-1] ** -0.5)
    return fuzz.attend(tensors, options | {"scale": scale * (1 + 1e-4)})


FAULTS = (
    wider_window, no_sink, late_diagonal, low_mask_seen, no_softcap, last_key_padded,
    imprecise_scale,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_shrunk(fault: Callable[..., fuzz.Found]) -> None:
    for seed in range(100):
        spec = fuzz.draw(seed)
        if fuzz.check(spec, "blocked", fault):
            break
    else:
        pytest.fail("no call of a hundred shows it")
    least = fuzz.shrink(spec, "blocked", fault)
    assert fuzz.check(least, "blocked", fault)
    assert fuzz.check(least, "blocked") is None
    assert len(least) <= len(spec)
    assert least["batch"] == least["heads"] == 1


def test_a_report_reproduces_its_call() -> None:
    spec = fuzz.draw(3)
    text = fuzz.report(spec, "no such backend", "raises ValueError: backend")
    assert "fuzz.check(" in text
    assert f"'seed': {spec['seed']}" in text
