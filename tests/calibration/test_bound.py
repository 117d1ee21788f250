"""The target max_logit: an upper bound, which lowers as little as it must."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance.calibration import measure
from acutance.calibration.fit.collect import TARGETS
from acutance.calibration.fit.estimates import LayerValues
from acutance.calibration.fit.next_factors import Aim, LayerState, decide, status_of
from acutance.calibration.render import sentences

Built = Callable[..., nn.Module]
KNOTS = (16, 32, 64, 128)


def state(top: list[float], factors: list[float]) -> LayerState:
    """One head that had these largest logits under these factors."""
    logits = torch.tensor(top, dtype=torch.float64).unsqueeze(1)
    none = torch.zeros_like(logits)
    values = LayerValues(
        KNOTS, (0, 1, 2, 3), none, none, none[None], torch.ones(1, 4).bool(), logits
    )
    return LayerState(torch.tensor(factors, dtype=torch.float64).unsqueeze(1), values)


@pytest.fixture
def aim() -> Aim:
    """No logit above 10."""
    wanted = torch.full((4, 1), 10.0, dtype=torch.float64)
    return Aim(TARGETS["max_logit"], wanted, torch.ones(4, 1).bool(), None, 16.0)


def test_a_factor_lowers_its_own_length_and_the_rows_up_to_it(aim: Aim) -> None:
    """Rows between 64 and 128 keys have a factor between those of the two, so both are lowered."""
    first = state([10.0, 9.0, 9.0, 20.0], [1.0, 1.0, 1.0, 1.0])
    factors, expected = decide([first], aim)
    assert factors.squeeze(1).tolist() == pytest.approx([1.0, 1.0, 0.5, 0.5], rel=1e-3)
    assert expected.squeeze(1).tolist() == pytest.approx([10.0, 9.0, 4.5, 10.0], rel=1e-3)
    assert float(expected.max()) <= 10.0


def test_what_is_under_the_bound_is_not_lowered_by_further_passes(aim: Aim) -> None:
    """Each pass once took over the next length's factor, so in the end all had the lowest."""
    states = [state([10.0, 9.0, 9.0, 20.0], [1.0, 1.0, 1.0, 1.0])]
    for _ in range(4):
        factors, expected = decide(states, aim)
        states.append(state(expected.squeeze(1).tolist(), factors.squeeze(1).tolist()))
    assert states[-1].factors.tolist() == states[1].factors.tolist()
    assert factors[:2].squeeze(1).tolist() == [1.0, 1.0]
    assert status_of(states[0], states[-1], aim) == [["held"]] * 4


def test_an_excess_of_rounding_is_left_alone(aim: Aim) -> None:
    """The same logit, in batches of other shapes, differs in its last digits."""
    first = state([10.0, 10.0, 10.0 * (1 + 2e-6), 10.0 * (1 - 2e-6)], [1.0] * 4)
    factors, _ = decide([first], aim)
    assert factors.squeeze(1).tolist() == [1.0] * 4
    assert status_of(first, first, aim) == [["kept"]] * 4
    assert float(decide([state([10.0, 10.001, 10.0, 10.0], [1.0] * 4)], aim)[0].min()) < 0.9999


def largest(model: nn.Module, windows: list[Tensor]) -> list[float]:
    """Largest logit of any row, by head."""
    with acutance.probe(model, metrics=["max_logit"]) as probe, torch.no_grad():
        for ids in windows:
            model(ids)
    return list(probe.summary().columns()["max_logit_max"])


@pytest.mark.parametrize("value", [None, 3.0])
def test_the_bound_holds_for_rows_shorter_than_the_first_length(
    built: Built, value: float | None
) -> None:
    """Rows of few keys have the first length's factor, and some heads' largest logits."""
    model = built("llama")
    ids = torch.randint(3, 97, (8, 64), generator=torch.Generator().manual_seed(4))
    lengths = [32, 64]
    windows = [ids.view(16, 32), ids]
    whole, short = largest(model, windows), largest(model, [part[:, :16] for part in windows])
    assert whole == pytest.approx(
        measure(model, [ids], target="max_logit", lengths=lengths).flat().amax(1).tolist()
    )
    early = [head for head, pair in enumerate(zip(whole, short, strict=True)) if pair[0] == pair[1]]
    assert early  # some heads have it where a mean over rows of 32 keys would not look
    law = acutance.calibrate(model, [ids], target="max_logit", value=value, lengths=lengths)
    bounds = [head.target[0] for head in law.heads]
    assert max(a / b for a, b in zip(whole, bounds, strict=True)) > 1.01
    with acutance.apply(model, law):
        under = largest(model, windows)
    for after, bound in zip(under, bounds, strict=True):
        assert after <= bound * (1 + 1e-5)
    assert {status for head in law.heads for status in head.status} <= {"held", "kept"}


@pytest.mark.parametrize("passes", [2, 6])
def test_one_factor_for_all_lengths_keeps_the_bound_at_all(built: Built, passes: int) -> None:
    """A mean of the factors by length would leave the length that needs the lowest above it."""
    model = built("llama")
    ids = torch.randint(3, 97, (8, 64), generator=torch.Generator().manual_seed(4))
    law = acutance.calibrate(
        model, [ids], target="max_logit", lengths=[16, 32, 64], law="constant", passes=passes
    )
    first = [head for head in law.heads if head.layer == 0]  # nothing before it changes its input
    assert max(max(head.before) / head.target[0] for head in first) > 1.05
    for head in law.heads if passes > 2 else first:
        assert len(set(head.factors)) == 1
        assert max(head.after) <= head.target[0] * (1 + 1e-5)


def test_a_maximum_has_no_standard_error(built: Built) -> None:
    """The jackknife is of the mean over rows, which says nothing of the largest."""
    ids = torch.randint(3, 97, (8, 64), generator=torch.Generator().manual_seed(4))
    law = acutance.calibrate(built("llama"), [ids], target="max_logit", lengths=[16, 32, 64])
    for head in law.heads:
        for numbers in (head.before_error, head.after_error, head.factor_errors):
            assert all(map(math.isnan, numbers))
    told = json.loads(json.dumps(law.to_dict(), allow_nan=False))
    assert set(told["heads"][0]["before_error"]) == {None}
    said = list(sentences(law))
    assert not any("±" in line for line in said)
    assert any(line.startswith("Other text may exceed the bound") for line in said)


def test_the_limit_that_is_told_is_the_one_that_was_met(built: Built) -> None:
    """The largest factor of a head is no limit where the smallest was met, or a higher one is."""
    ids = torch.randint(3, 97, (8, 64), generator=torch.Generator().manual_seed(4))
    law = acutance.calibrate(
        built("llama"), [ids], target="max_logit", lengths=[32, 64], value=3.0, passes=2
    )
    one = dataclasses.replace(law.heads[0], factors=(1.0, 0.25, 0.0625), lengths=(32, 45, 64))
    for status, told in (
        (("kept", "held", "limited"), "factors, 0.0625."),
        (("limited", "held", "limited"), "factors, 0.0625 and 1."),
    ):
        many = dataclasses.replace(law, heads=(dataclasses.replace(one, status=status),))
        (said,) = (line for line in sentences(many) if "limit of the factors" in line)
        assert said.endswith(told)
