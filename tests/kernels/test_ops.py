"""The kernel as an operator: compiled, fake, under autocast and in inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance.kernels.call import SumGradients, Sums
from acutance.kernels.dispatch import row_sums, row_sums_backward
from tests.contract.kernels.test_ops import arguments, normal


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


CALLS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "noise": ({}, True),
    "no values": ({"value": None}, False),
    "causal window": ({"causal": True, "window": 4, "offset": 1}, True),
    "masks": (
        {
            "attn_mask": normal(9, 2 * 11)[:, ::2].requires_grad_(),
            "bias": normal(4, 11, 9).transpose(1, 2).requires_grad_(),
            "key_mask": torch.ones(2, 11, dtype=torch.bool),
            "sinks": normal(4).requires_grad_(),
            "softcap": 4.0,
            "alibi_slopes": torch.ones(4),
        },
        True,
    ),
    "expanded mask": ({"bias": normal(9, 1).expand(2, 4, 9, 11).requires_grad_()}, False),
    "documents": (
        {
            "query_documents": torch.zeros(1, 9, dtype=torch.int64),
            "key_documents": torch.zeros(2, 11, dtype=torch.int64),
        },
        False,
    ),
    "dropout": ({"dropout_p": 0.5, "seed": torch.tensor(3)}, True),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        *((call, torch.float32) for call in CALLS),
        ("noise", torch.bfloat16),
        ("masks", torch.bfloat16),
    ],
)
def test_the_operator_keeps_its_promises(call: str, dtype: torch.dtype) -> None:
    changed, noise = CALLS[call]
    torch.library.opcheck(row_sums, (*arguments(dtype, **changed), noise, False))


@pytest.mark.few(2)
@pytest.mark.parametrize("call", CALLS)
def test_the_backward_operator_keeps_its_promises(call: str) -> None:
    changed, noise = CALLS[call]
    given = [part.detach() if isinstance(part, Tensor) else part for part in arguments(**changed)]
    sums = Sums(*row_sums(*given, noise, False))
    grads = [
        torch.ones_like(sums.out),
        *[torch.ones_like(sums.Z)] * (len(SumGradients._fields) - 1),
    ]
    places = (0, 1, 2, 3, 4, 9)
    wanted = [
        isinstance(given[place], Tensor) and given[place].is_floating_point() for place in places
    ]
    torch.library.opcheck(row_sums_backward, (grads, list(sums), wanted, *given))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("noise", [False, True])
def test_meta_tensors_have_the_shapes_of_real_ones(dtype: torch.dtype, noise: bool) -> None:
    real = row_sums(*arguments(dtype), noise, noise)
    meta = row_sums(
        *[part.to("meta") if isinstance(part, Tensor) else part for part in arguments(dtype)],
        noise,
        noise,
    )
    for name, ours, theirs in zip(Sums._fields, real, meta, strict=True):
        assert theirs.is_meta
        assert (ours.shape, ours.dtype, ours.stride()) == (
            theirs.shape,
            theirs.dtype,
            theirs.stride(),
        ), name
