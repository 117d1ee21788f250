"""A loss of the user's own, as a subclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from acutance.judging import Loss, NextToken, Scored, judge
from acutance.reproduce import decoder


class Doubled(Loss):
    """Twice the loss of the next token."""

    words = "twice the next token"

    def __init__(self) -> None:
        self.single = NextToken()
        self.checked = 0

    def check(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> None:
        self.checked += 1
        self.single.check(model, batch)

    def score(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Scored:
        scored = self.single.score(model, batch)
        return Scored(2 * scored.loss, scored.n)

    def backward(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Scored:
        raise AssertionError("a comparison needs no gradient")


def test_a_subclass_is_what_laws_are_judged_by() -> None:
    model = decoder()
    windows: Tensor = torch.randint(100, (6, 48), generator=torch.Generator().manual_seed(0))
    own = Doubled()
    found, plain = (
        judge(model, windows, {"law": "ssmax"}, loss=loss) for loss in (own, NextToken())
    )
    assert found.loss == "twice the next token"
    assert own.checked
    assert found.mean_loss == 2 * plain.mean_loss
    assert found.laws[0].delta == 2 * plain.laws[0].delta
