"""Ctrl-C at any line of opening and closing a probe leaves nothing of it behind."""

from __future__ import annotations

import linecache
import sys
import threading
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch._dynamo  # or there is no stance to set
import transformers as hf
from torch.overrides import _get_current_function_mode_stack

import acutance

SOURCE = str(Path(acutance.__file__).parent)


class Interrupt:
    """A line tracer that raises KeyboardInterrupt at one line that the package runs.

    Left out are lines at which Python answers no signal: the end of a ``with`` block, which runs
    its context's exit at once, and the start of ``Probe.__exit__``, where nothing can guard yet.
    """

    def __init__(self, number: int) -> None:
        self.left, self.came, self._entered = number, "", set[tuple[int, int]]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            place = id(frame), frame.f_lineno
            line = linecache.getline(code.co_filename, frame.f_lineno).lstrip()
            first = place not in self._entered
            self._entered.add(place)
            guarded = first or not line.startswith("with ")
            if code.co_qualname == "Probe.__exit__" and line.startswith("try"):
                guarded = False
            self.left -= guarded
            if guarded and self.left == 0:
                self.came = f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
                raise KeyboardInterrupt
        return self


def state() -> dict[str, Any]:
    """All that a probe changes in the process."""
    import transformers.modeling_utils as modeling
    from torch._dynamo import eval_frame
    from torch.nn.modules import module

    return {
        "stance": eval_frame._stance.stance,
        "modes": list(_get_current_function_mode_stack()),
        "hooks": [len(getattr(module, name)) for name in dir(module) if name.startswith("_global")
                  and hasattr(getattr(module, name), "__len__")],
        "interface": modeling.AttentionInterface.get_interface,
        "importers": list(sys.meta_path),
        "filters": list(warnings.filters),
        "code": [one.__code__ for one in kernels()],
    }  # fmt: skip


def kernels() -> list[Any]:
    from acutance.capture.kernel_functions.calls import loaded_kernels

    return [found for found, _ in loaded_kernels()]


@pytest.fixture
def model() -> torch.nn.Module:
    sizes = {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8} | {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return hf.GPT2Model(hf.GPT2Config(**sizes)).eval()


def _open_and_close(model: torch.nn.Module, number: int, tokens: torch.Tensor) -> str:
    """Open and close a probe with an interrupt at the given line; where it came."""
    tracer = Interrupt(number)
    probe = acutance.probe(model, structure=True)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        probe.__enter__()
        sys.settrace(None)
        model(tokens)
        sys.settrace(tracer)
        probe.__exit__(None, None, None)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return tracer.came


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_leaves_nothing_behind(model: torch.nn.Module, step: int) -> None:
    pytest.importorskip("torch.nn.attention.varlen")  # a kernel function to exchange
    tokens = torch.tensor([[1, 2, 3]])
    _open_and_close(model, 0, tokens)
    before, number = state(), 0
    assert before["code"], "no kernel function to exchange"
    while True:
        number += step
        came = _open_and_close(model, number, tokens)
        after = state()
        assert after == before, f"{came} left {[n for n in after if after[n] != before[n]]}"
        if not came:
            break
    assert number > 100
    done = threading.Thread(target=_open_and_close, args=(model, 0, tokens), daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive(), "a lock is still held"
