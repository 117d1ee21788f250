"""Laws by head: one backward pass for all heads, decided by the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import acutance
from acutance.judging import LawRemedy, NextToken
from acutance.scaling import Window
from tests.contract.trained import decoder

TRAINED = 128
SMALL = "window:size=64,far=group,group=4,beyond=128"
LARGE = "window:size=64,far=group,group=3,beyond=128"


def extend(windows: Tensor, laws: Any, **options: Any) -> acutance.Extension:
    given: dict[str, Any] = {"train_length": TRAINED, "laws": laws, "entropy": False} | options
    return acutance.extend(decoder(), windows.shape[1], windows, **given)


def test_heads_get_windows_of_their_own(windows: Tensor, tmp_path: Path) -> None:
    """A law by head is tried after the best window, decided by the loss, and can be loaded."""
    laws = [SMALL, LARGE]
    found = extend(windows, laws)
    extra = {x.name: x for x in found.tried if x.name not in laws}
    assert extra
    assert all(name.startswith("by head: size=64,far=group") for name in extra)
    assert all(x.within == 0 for x in extra.values())
    assert isinstance(found.chosen, LawRemedy)
    assert isinstance(found.chosen.law, acutance.Law)
    found.chosen.law.save(tmp_path / "law.json")
    law = acutance.Law.load(tmp_path / "law.json")
    assert {head for _, laws in law.layers for head, _ in laws.windows} == {0, 1, 2, 3}
    model, batch, losses = decoder(), {"input_ids": windows[4:]}, []
    for one in (law, Window(64, far="group", group=4, beyond=TRAINED)):
        with acutance.apply(model, one):
            losses.append(float(NextToken().score(model, batch).loss[:, TRAINED + 1 :].mean()))
    part = found[found.chosen.name].beyond
    assert part.loss + part.delta == pytest.approx(losses[0], abs=1e-5)
    assert losses[0] < losses[1] - 0.005  # on windows that no choice was made on


def test_what_is_unchanged_is_read_once(windows: Tensor) -> None:
    """From kept keys of the first tokens, a change has the losses of a whole run."""
    model, lengths = decoder(), []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        given: dict[str, Any] = {"train_length": TRAINED, "by_head": False, "entropy": False}
        found = acutance.extend(model, 256, windows[:4, :256], laws=SMALL, **given)
    finally:
        handle.remove()
    assert (lengths.count(256), lengths.count(128)) == (3, 3)  # as it is; from 128 tokens on
    with acutance.apply(model, Window(64, far="group", group=4, beyond=TRAINED)):
        loss = NextToken().score(model, {"input_ids": windows[2:4, :256]}).loss[:, TRAINED + 1 :]
    part = found[SMALL].beyond
    assert part.loss + part.delta == pytest.approx(float(loss.mean()), abs=1e-5)
    assert found[SMALL].within.delta == 0


def test_a_backward_pass_is_not_repeated(windows: Tensor, tmp_path: Path) -> None:
    state = tmp_path / "state"
    whole = extend(windows[:5, :256], [SMALL, LARGE], save=state)
    before = state.read_bytes()

    again = extend(windows[:5, :256], [SMALL, LARGE], save=state, resume=True)
    assert again.finals == whole.finals
    assert again.seconds == whole.seconds  # nothing ran again
    assert state.read_bytes() == before


def test_a_budget_leaves_the_best_window(windows: Tensor) -> None:
    """Where there is no time for a backward pass, the window for all heads is the answer."""
    found = extend(windows[:5], [SMALL, LARGE], budget=1e-6)
    assert not found.complete
    assert not any(x.name.startswith("by head") for x in found.tried)


def test_a_window_for_all_heads_stays_unless_heads_gain_beyond_noise(windows: Tensor) -> None:
    """Windows that drop keys get no temperature, whose factors beyond 128 keys would all be 1."""
    laws = ["window:size=128,beyond=128", "window:size=64,beyond=128"]
    found = extend(windows[:, :256], laws)
    (by_head,) = [x for x in found.tried if x.name.startswith("by head")]
    assert "sharper" not in by_head.name
    (best,) = [x for x in found.tried if x.name == laws[1]]
    assert by_head.windows == best.windows == 3  # of four, as the derivatives are of the last
    assert by_head.beyond < best.beyond  # by 0.002, within noise
    assert found.chosen is not None
    assert found.chosen.name == laws[1]


def test_a_single_window_that_drops_keys_leaves_nothing_to_choose(windows: Tensor) -> None:
    """No other window, and no temperature."""
    found = extend(windows[:, :256], ["window:size=128,beyond=128"])
    assert [one.name for one in found.tried] == ["window:size=128,beyond=128"]
    assert found.complete


def test_two_windows_of_the_search_are_too_few_to_choose_by_head(windows: Tensor) -> None:
    """One of them gives the derivatives, and the other alone has no error."""
    found = extend(windows[:4, :256], [SMALL, LARGE])
    assert found.complete
    assert not any(x.name.startswith("by head") for x in found.tried)
