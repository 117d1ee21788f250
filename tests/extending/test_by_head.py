"""Laws by head: one backward pass for all heads, decided by the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.calibration.losses import NextToken
from acutance.capture.find_layers import attention_layers
from acutance.experiments.models.trained import decoder
from acutance.extending.by_head import head_slopes, mixed, with_temperature
from acutance.judging import LawRemedy
from acutance.scaling import HeadTable, Window

TRAINED = 128
SMALL = "window:size=64,far=group,group=4,beyond=128"
LARGE = "window:size=64,far=group,group=3,beyond=128"


def extend(windows: Tensor, laws: Any, **options: Any) -> acutance.Extension:
    given: dict[str, Any] = {"train_length": TRAINED, "laws": laws, "entropy": False} | options
    return acutance.extend(decoder(), windows.shape[1], windows, **given)


def test_a_slope_is_the_derivative_of_the_loss(windows: Tensor) -> None:
    """Against two changes of one head, so small that the loss is nearly linear in them."""
    model, loss = decoder().double(), NextToken()
    best, batch = Window(64, far="group", group=4, beyond=TRAINED), {"input_ids": windows[:1, :256]}
    two = [(HeadTable([factor]), best) for factor in (1.01, 0.99)]
    slopes = head_slopes(model, loss, batch, best, two)
    for name, head in (next(iter(slopes)), 1), (list(slopes)[-1], 3):
        change = []
        for other in two:
            law: dict[Any, Any] = {(one, each): best for one in slopes for each in range(4)}
            with acutance.apply(model, law | {(name, head): other}):
                change.append(float(loss.score(model, batch).loss[0, 1:].mean()))
        found = slopes[name][:, head].sum(-1)
        assert float(found[0] - found[1]) == pytest.approx(change[0] - change[1], rel=0.01)


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


def test_only_heads_that_read_all_keys_get_a_temperature() -> None:
    """Where some heads drop keys, and the derivative promises a gain in all."""
    model, best, drops = decoder(), Window(64, far="group", beyond=TRAINED), Window(64)
    warm = with_temperature(best, TRAINED, 512)
    assert warm is not None
    assert with_temperature(drops, TRAINED, 512) is None
    slopes = {name: torch.full((2, 4, 16), -1.0) for name in attention_layers(model)}
    for part in slopes.values():
        part[0, 2:] = 1.0  # heads 0 and 1 gain by dropping keys, 2 and 3 by reading them all
    laws = mixed(model, best, [drops, warm], slopes, [0.0], TRAINED, 512)
    assert laws[-1].name.endswith("; sharper in 6, softer in 0")
    assert isinstance(laws[-1].law, acutance.Law)
    for _, heads in laws[-1].law.layers:
        assert {head: window.far for head, window in heads.windows} == {
            0: "drop", 1: "drop", 2: "group", 3: "group",
        }  # fmt: skip
        assert {head for head, _ in heads.heads} == {2, 3}


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
