"""Each form costs O(n): what is computed and the largest tensor formed, at 16384 and 65536 keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from acutance.mechanisms import (
    decay_attention,
    diagonal_recurrence,
    linear_attention,
    linear_recurrent_unit,
    lru_parameters,
)

SHORT, LONG = 16384, 65536
WIDTH = 32
FORMS = ["full", "causal", "decay", "recurrence", "unit"]


class Watch(TorchDispatchMode):
    """Notes the largest tensor that any operator makes, and how much all of them make."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, Tensor):  # an expanded tensor occupies its storage alone
                stored = part.untyped_storage().nbytes() // part.element_size()
                self.elements = max(self.elements, stored)
                self.made += part.numel()
        return out


def run(form: str, n: int, x: Tensor | None = None) -> Callable[[], Any]:
    x = torch.randn(1, 1, n, WIDTH) if x is None else x
    if form == "recurrence":
        ring = torch.polar(torch.full((WIDTH,), 0.99), torch.linspace(0, 3, WIDTH))
        return lambda: diagonal_recurrence(x, ring)
    if form == "unit":
        unit = lru_parameters(WIDTH, WIDTH, r_min=0.9, r_max=0.99)
        return lambda: linear_recurrent_unit(x[0, 0], unit)
    if form == "decay":
        return lambda: decay_attention(x, x, x, decay=0.99, feature_map="elu1", return_stats=True)
    causal, maps = form == "causal", "elu1" if form == "full" else "relu"
    return lambda: linear_attention(x, x, x, feature_map=maps, is_causal=causal, return_stats=True)


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
def test_work_grows_with_the_length(form: str) -> None:
    """Counted, not timed, so that every machine gives the same: a quadratic form would give 16."""
    made, multiplied = [], []
    for n in (SHORT, LONG):
        call = run(form, n)
        with FlopCounterMode(display=False) as products, Watch() as watch:
            call()
        made.append(watch.made)
        multiplied.append(products.get_total_flops())
    assert made[0] > SHORT * WIDTH
    assert made[1] / made[0] < 4.3
    assert multiplied[1] <= 4.3 * multiplied[0]


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
def test_the_backward_pass_grows_with_the_length(form: str) -> None:
    """Gradients of slices, each of full size, would give 16 here too."""
    made = []
    for n in (SHORT // 4, SHORT):
        x = torch.randn(1, 2, n, WIDTH, requires_grad=True)
        call = run(form, n, x)
        found = call()
        out = found if isinstance(found, Tensor) else found[0]
        with Watch() as watch:
            torch.autograd.grad((out.real if out.is_complex() else out).sum(), x)
        made.append(watch.made)
    assert made[0] > 2 * SHORT // 4 * WIDTH
    assert made[1] / made[0] < 4.3


@pytest.mark.few(2)
@pytest.mark.parametrize("form", FORMS)
def test_no_tensor_is_larger_than_the_inputs_with_the_states(form: str) -> None:
    sizes = []
    for n in (SHORT, LONG):
        call = run(form, n)
        with Watch() as largest:
            call()
        sizes.append(largest.elements)
    assert sizes[1] <= max(4 * sizes[0], 4 * LONG * WIDTH)
    assert sizes[1] <= 8 * LONG * WIDTH


def test_the_watch_sees_a_matrix_of_scores() -> None:
    x = torch.randn(1, 1, 2048, WIDTH)
    with Watch() as largest:
        x @ x.mT
    assert largest.elements >= 2048**2
