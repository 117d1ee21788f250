"""The search for a cache plan: least sums of costs, losses as judged, resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.caching import Budget, HeadPlan, budget
from tests.contract import texts
from tests.contract.trained import decoder

SHORT = HeadPlan("streaming", first=2, recent=14)
LONG = HeadPlan("streaming", first=2, recent=46)


#: Code of this package, the same with every Python, whose own library the decoder was trained on.
CODE = Path(__file__).parents[2] / "data" / "code.txt"


def windows(count: int, length: int = 128) -> Tensor:
    text = texts.read([CODE])
    generator = torch.Generator().manual_seed(2)
    return texts.sample_windows(text, length, count, generator).long()


@pytest.fixture(scope="module")
def found() -> Budget:
    return budget(decoder(), windows(8), keep=0.6, plans=[SHORT, LONG], shares=[0.75, 0.3])


def test_losses_are_those_of_judge_and_the_plan_fits(found: Budget, tmp_path: Path) -> None:
    assert found.windows == 4
    assert found.n == 128
    assert found.plan.share(128) <= 0.6
    chosen = found.chosen
    assert chosen is not None
    judged = acutance.judge(decoder(), windows(8)[1::2], found.plan.law()).laws[0]
    assert judged.delta == pytest.approx(chosen.delta, abs=1e-6)
    assert judged.error == pytest.approx(chosen.error, abs=1e-6)
    assert chosen.delta == min(one.delta for one in found.points if one.share <= 0.6)
    shares = [one.share for one in found.frontier]
    assert shares == sorted(shares, reverse=True)
    losses = [one.delta for one in found.frontier]
    assert losses == sorted(losses)
    found.to_json(tmp_path / "budget.json")
    found.plan.save(tmp_path / "plan.json")
    assert acutance.CachePlan.load(tmp_path / "plan.json") == found.plan


def test_rules_and_derivatives_compete(found: Budget) -> None:
    assert {one.rule for one in found.points} == {"gradient", "distant weight", "keys_95"}
    assert len(found.points) == len({(one.rule, one.plan.words) for one in found.points})


def test_a_plan_of_a_given_loss() -> None:
    """A rise that no plan exceeds gives the smallest plan; one that none has, the full cache."""
    given: dict[str, Any] = {"plans": [SHORT], "shares": [0.75, 0.4]}
    loose = budget(decoder(), windows(4), max_loss=5.0, **given)
    assert loose.chosen is not None
    assert loose.chosen.bytes == min(one.bytes for one in loose.points)
    blind = HeadPlan("streaming", recent=1)
    strict = budget(decoder(), windows(4), max_loss=1e-9, **given | {"plans": [blind]})
    assert strict.plan.share(128) == 1.0
    assert strict.chosen is None


def test_a_search_resumes_where_it_was_interrupted(found: Budget, tmp_path: Path) -> None:
    given: dict[str, Any] = {"keep": 0.6, "plans": [SHORT, LONG], "shares": [0.75, 0.3]}
    state, seen = tmp_path / "state", []

    def stop(*numbers: int) -> None:
        seen.append(numbers)
        if len(seen) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        budget(decoder(), windows(8), save=state, advance=stop, **given)
    assert seen[0] == (128, 1, 3)
    assert seen[4] == (128, 2, 3)
    assert seen[-1] == (128, 3, 3)
    model, ran = decoder(), []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *_: ran.append(1))
    resumed = budget(model, windows(8), save=state, resume=True, **given)
    handle.remove()
    assert resumed == found
    runs = 4 * (1 + len({one.plan.words for one in found.points}))
    # one loss is in the file; shapes and layers are read once, the loss is checked twice
    assert len(ran) == runs - 1 + 4
    with pytest.raises(FileExistsError, match="state"):
        budget(decoder(), windows(8), save=state, **given)
    for change, match in (
        ({"keep": 0.5}, "state cannot be resumed: --keep was 0.6 and is now 0.5$"),
        ({"plans": [SHORT]}, r"--streaming\) was size=.*, size=.* and is now size=\d+,sinks=\d+$"),
    ):
        with pytest.raises(ValueError, match=match):
            budget(decoder(), windows(8), save=state, resume=True, **given | change)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"keep": 0.5, "max_loss": 0.1}, ValueError, "give keep or max_loss, got keep=0.5 and"),
        ({"keep": 1.5}, ValueError, "keep must be at most 1, got 1.5"),
        ({"shares": [2]}, ValueError, "shares must be at most 1, got 2"),
        ({"keep": 0.0}, ValueError, "keep"),
        ({"keep": 0.05}, ValueError, r"keep=0.05 is not reached: the smallest plan .* takes 0.125"),
        ({"plans": []}, TypeError, r"plans must be a sequence of HeadPlan, got \[\]"),
        (
            {"plans": [HeadPlan("streaming", first=4, recent=124)]},
            ValueError,
            "keep fewer keys than a window has, got first=4 and recent=124 for windows of 128",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"plans": [SHORT], "shares": [], **given}
    with pytest.raises(error, match=message):
        budget(decoder(), windows(4), **arguments)


def test_too_few_windows_and_no_cache() -> None:
    with pytest.raises(ValueError, match="windows must be at least 4, half for derivatives"):
        budget(decoder(), windows(3), plans=[SHORT])
    with pytest.raises(ValueError, match="has no key-value cache"):
        budget(torch.nn.TransformerEncoderLayer(8, 2), windows(4), plans=[SHORT])
