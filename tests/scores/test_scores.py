"""Every score is its formula, in float64, for grouped heads, blocks and each kind of mask."""

from __future__ import annotations

import torch
from torch import Tensor

from acutance.scores import (
    Additive,
)
from tests.contract.scores.test_scores import rand


def test_no_scores_of_every_hidden_unit_are_formed() -> None:
    """Forward and backward, no tensor is larger than a tile or the chunk that is allowed."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from acutance.scores import records as module

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for part in result if isinstance(result, tuple | list) else [result]:
                if isinstance(part, Tensor):
                    self.found = max(self.found, part.numel())
            return result

    length, hidden = 400, 8
    assert length * length * hidden > 4 * module.CHUNK_ELEMENTS
    query, key = rand(1, 2, length, 8).requires_grad_(), rand(1, 1, length, 8)
    score = Additive(rand(hidden, 8), rand(hidden, 8), rand(hidden))
    with Largest() as mode:
        score.tile(query, key).sum().backward()
    assert mode.found == 2 * length * length, "the scores themselves, not 8 times as much"
    assert query.grad is not None

    # the same gradients as with the whole tanh at once
    again = query.detach().clone().requires_grad_()
    inside = (again @ score.query_weight.mT).unsqueeze(3) + (key @ score.key_weight.mT).unsqueeze(2)
    (inside.tanh() @ score.vector).sum().backward()
    torch.testing.assert_close(query.grad, again.grad)
