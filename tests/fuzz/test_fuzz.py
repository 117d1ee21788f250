"""A hundred random calls a backend, and faults that the fuzzer must find."""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import fuzz
import pytest
import torch
from guarded import guarded
from torch import Tensor

from acutance.kernels import library


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 100), marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("backend", ["native", "blocked"])
def test_a_hundred_calls_agree_with_the_oracle(backend: str, seeds: range) -> None:
    if backend == "native" and isinstance(library.load(), str):
        backend = "auto"
    wrong = []
    for seed in seeds:
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


def padding_multiplied(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    out, stats = fuzz.attend(tensors, options)
    return out + 0 * tensors[2].sum(), stats


def signs_lost(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    return fuzz.attend([torch._neg_view(x) if x.is_neg() else x for x in tensors], options)


def ones_only(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    mask = options.get("key_mask")
    if mask is not None:
        options = options | {"key_mask": mask.view(torch.uint8) == 1}
    return fuzz.attend(tensors, options)


def always_a_sink(tensors: list[Tensor], options: dict[str, Any]) -> fuzz.Found:
    sinks = options.get("sinks")
    if sinks is not None:
        options = options | {"sinks": torch.where(sinks == -math.inf, 0.0, sinks)}
    return fuzz.attend(tensors, options)


FAULTS = (
    wider_window, no_sink, late_diagonal, low_mask_seen, no_softcap, last_key_padded,
    imprecise_scale, padding_multiplied, signs_lost, ones_only, always_a_sink,
)  # fmt: skip


@pytest.mark.few(4)
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


@pytest.mark.parametrize("side", ["start", "end"])
def test_reading_past_guarded_memory_ends_the_process(side: str) -> None:
    x = guarded(torch.arange(15, dtype=torch.int16).view(3, 5), side)
    at = x.data_ptr() + (-1 if side == "start" else 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads; it only reads
        child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.string_at(at, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) in (signal.SIGSEGV, signal.SIGBUS)
    assert ctypes.string_at(at + (1 if side == "start" else -1), 1) is not None


def test_guarded_memory_holds_the_tensor_as_it_was() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.bfloat16).transpose(0, 2)[::2]
    for case in (x, torch._neg_view(x), x[:1].expand(3, -1, -1), x > 0):
        copy = guarded(case, "end")
        assert copy.stride() == case.stride()
        assert copy.is_neg() == case.is_neg()
        torch.testing.assert_close(copy, case, rtol=0, atol=0)
