"""acutance.extend on the package's decoder, which was trained on windows of 128 bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import acutance
from acutance.extending import proposals
from acutance.judging import HeadsOff
from tests.contract.trained import decoder

TRAINED = 128
LAWS = ["clip_log_n:train_length=128", "log_n:base=4.0", "rope:linear,factor=4"]


def extend(windows: Tensor, laws: Any = LAWS, **options: Any) -> acutance.Extension:
    off = {"entropy": False, "by_head": False}
    given: dict[str, Any] = {"train_length": TRAINED, "laws": laws, **off} | options
    return acutance.extend(decoder(), 512, windows, **given)


def loss(tokens: Tensor, law: Any = None) -> Tensor:
    """Loss of every next byte, (B, L − 1), by the model's own logits."""
    model = decoder()
    with torch.no_grad():
        if law is None:
            logits = model(input_ids=tokens).logits
        else:
            with acutance.apply(model, law):
                logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").double()


def test_the_numbers_are_those_of_the_final_windows(windows: Tensor) -> None:
    """What is reported is measured on windows that the search did not see, by position."""
    found = extend(windows)
    assert found.chosen is not None
    assert found.chosen.name == LAWS[0]
    assert found.helps
    assert found.complete
    assert (found.search_windows, found.final_windows) == (4, 4)
    before, after = loss(windows[4:]), loss(windows[4:], acutance.scaling.ClipLogN(TRAINED))
    change = after - before
    final = found[LAWS[0]]
    assert final.beyond.delta == pytest.approx(float(change[:, TRAINED:].mean()), abs=1e-5)
    assert final.within.delta == pytest.approx(0.0, abs=1e-6)
    error = float(change[:, TRAINED:].mean(1).std() / 2)
    assert final.beyond.error == pytest.approx(error, rel=1e-4)
    assert (final.beyond.first, final.beyond.last) == (TRAINED + 1, 512)
    assert found.ranges[0] == (1, 16)
    assert (113, TRAINED) in found.ranges
    assert found.ranges[-1] == (497, 512)
    # place i of a window is predicted from i + 1 bytes, so from n = 1 on
    for (first, last), one in zip(found.ranges, final.loss, strict=True):
        assert one == pytest.approx(float(after[:, first - 1 : last].mean()), abs=1e-5)
    assert [one.name for one in found.finals] == ["as it is", LAWS[0], LAWS[2]]
    assert found.gain is not None
    assert found.gain.delta == pytest.approx(
        final.beyond.delta - found[LAWS[2]].beyond.delta, abs=1e-9
    )


def test_a_cost_within_the_context_decides(windows: Tensor) -> None:
    """RoPE settings help more beyond the context than log n, and cost within it."""
    laws = [LAWS[0], "rope:yarn,factor=4,original_max_position_embeddings=128"]
    cheap, dear = extend(windows, laws), extend(windows, laws, max_cost=1.0)
    assert cheap.chosen is not None
    assert dear.chosen is not None
    assert (cheap.chosen.name, dear.chosen.name) == tuple(laws)
    assert dear[laws[1]].beyond.delta < cheap[laws[0]].beyond.delta
    (rope,) = (one for one in cheap.tried if one.name == laws[1])
    assert not rope.allowed
    assert rope.within > 0.005


@torch.no_grad()
def test_what_is_written_is_what_was_measured(windows: Tensor, tmp_path: Path) -> None:
    """A law file that apply takes; a configuration that plain transformers loads."""
    import transformers as hf

    model = decoder()
    found = extend(windows, LAWS[:1])
    assert found.save(tmp_path, model) == "law.json"
    law = acutance.Law.load(tmp_path / "law.json")
    torch.testing.assert_close(
        loss(windows[4:], law).mean(), loss(windows[4:], acutance.scaling.ClipLogN(TRAINED)).mean()
    )
    moved = "window:size=64,sinks=4,sink_positions=window,beyond=128"
    found = extend(windows, moved, entropy=True)
    before, after = found.finals[0].entropy, found[moved].entropy
    assert after[5] == pytest.approx(before[5], rel=1e-5)  # short rows do not change
    assert (len(before), len(after)) == (9, 7)  # rows beyond 128 keys read 68
    assert 1 < after[-1][1] < math.log(128)
    assert found.save(tmp_path, model) == "law.json"
    with acutance.apply(model, acutance.Law.load(tmp_path / "law.json")):
        logits = model(input_ids=windows[4:]).logits[:, TRAINED:-1]
    after = F.cross_entropy(logits.transpose(1, 2), windows[4:, TRAINED + 1 :])
    part = found[moved].beyond
    assert part.loss + part.delta == pytest.approx(float(after), abs=1e-5)
    rope = "rope:yarn,factor=4,original_max_position_embeddings=128"
    found = extend(windows, [rope], max_cost=1.0)
    assert found.save(tmp_path, model) == "config.json"
    plain = hf.LlamaForCausalLM(hf.AutoConfig.from_pretrained(tmp_path)).eval()
    plain.load_state_dict(model.state_dict())
    logits = plain(input_ids=windows[4:]).logits[:, :-1]
    after = F.cross_entropy(logits.transpose(1, 2), windows[4:, 1:], reduction="none")
    change = after.double()[:, TRAINED:].mean() - loss(windows[4:])[:, TRAINED:].mean()
    assert found[rope].beyond.delta == pytest.approx(float(change), abs=1e-5)


def test_heads_that_are_off_need_no_file(windows: Tensor, tmp_path: Path) -> None:
    """As if switching a head off had helped, which no head of this decoder does."""
    found = extend(windows, LAWS[:1])
    assert found.helps
    finals = tuple(replace(one, name=one.name.replace(LAWS[0], "off:0.0")) for one in found.finals)
    off = replace(found, chosen=HeadsOff({0: [0]}), finals=finals)
    assert off.helps
    assert off.save(tmp_path, decoder()) is None
    assert list(tmp_path.iterdir()) == []


def test_a_budget_ends_the_search_and_not_the_final_windows(windows: Tensor) -> None:
    found = extend(windows, None, budget=1e-6)
    assert not found.complete
    assert len(found.tried) < len(proposals(decoder(), TRAINED, 512))
    assert min(found["as it is"].errors) > 0  # from window to window


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing is written any more."""


def test_a_stopped_search_goes_on_where_it_was(windows: Tensor, tmp_path: Path) -> None:
    """The result is the same, and no run is repeated."""
    windows, laws = windows[:5], [*LAWS, "window:size=64,beyond=128"]
    state, whole, ran = tmp_path / "state", extend(windows, laws), []

    def stop_after(most: int) -> Any:
        def advance(tokens: int, ready: int, now: bool) -> None:
            ran.append(now)
            if sum(ran) == most:
                raise Killed("stopped")

        return advance

    for most in (2, 5):
        with pytest.raises(Killed, match="stopped"):
            extend(windows, laws, save=state, resume=True, advance=stop_after(most))
    found = extend(windows, laws, save=state, resume=True, advance=stop_after(0))
    again = extend(windows, laws, save=state, resume=True, advance=stop_after(0))
    for one in (found, again):
        assert one.finals == whole.finals
        assert [(x.name, x.windows, x.beyond) for x in one.tried] == [
            (x.name, x.windows, x.beyond) for x in whole.tried
        ]
    runs = sum(x.windows for x in whole.tried) + whole.search_windows
    assert sum(ran) == runs + len(whole.finals) * whole.final_windows
    with pytest.raises(FileExistsError, match="resume=True continues it"):
        extend(windows, laws, save=state)
    with pytest.raises(ValueError, match="state cannot be resumed: it was written for another tex"):
        extend(windows.flip(0), laws, save=state, resume=True)
    for given, match in (
        ({"train_length": 64}, "--train-length was 128 and is now 64"),
        ({"laws": laws[:1]}, f"--law was {laws[0]}, .* and is now {laws[0]}$"),
        ({"max_cost": 0.1}, "--max-cost was .* and is now 0.1$"),
        ({"by_head": True}, "--by-head was off and is now on$"),
        ({"final": 3}, "--final was 2 and is now 3$"),
    ):
        with pytest.raises(ValueError, match=match):
            extend(windows, **({"laws": laws, "save": state, "resume": True} | given))
    state.write_bytes(state.read_bytes()[:-3] + b"abc")
    with pytest.raises(ValueError, match="contains no search to resume"):
        extend(windows, laws, save=state, resume=True)


@pytest.mark.parametrize(
    ("given", "kind", "match"),
    [
        ({"to": 128}, ValueError, "to must be above the trained length, got to=128"),
        ({"to": 1024}, ValueError, "at least 4 of at least 1024 tokens"),
        ({"windows": torch.zeros(3, 512).long()}, ValueError, "at least 4 of at least 512"),
        ({"windows": torch.zeros(4, 512)}, TypeError, "windows must be token IDs of shape"),
        ({"final": 8}, ValueError, "leave one for the search, got 8 and final=8"),
        ({"max_cost": -1.0}, ValueError, "max_cost must be a finite number at least 0"),
        ({"budget": 0.0}, ValueError, "budget must be a finite number above 0"),
        ({"laws": "nothing"}, ValueError, "'nothing' is neither a file nor"),
        ({"resume": True}, ValueError, "got save=None"),
        ({"train_length": 1}, ValueError, "train_length must be at least 2"),
    ],
)
def test_bad_input_is_one_sentence(
    given: dict[str, Any], kind: Any, match: str, windows: Tensor
) -> None:
    base: dict[str, Any] = {"to": 512, "windows": windows, "train_length": TRAINED, "laws": LAWS}
    given = base | given
    with pytest.raises(kind, match=match):
        acutance.extend(decoder(), given.pop("to"), given.pop("windows"), **given)


def test_a_plan_for_the_cache_is_refused(windows: Tensor) -> None:
    plan = acutance.CachePlan.of(decoder(), acutance.HeadPlan("streaming", first=2, recent=30))
    with pytest.raises(ValueError, match=r"\(6 streaming\) is a plan for the cache, which extends"):
        extend(windows, [plan])


def test_learned_positions_are_refused() -> None:
    import transformers as hf

    sizes = {"vocab_size": 97, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None))
    with pytest.raises(ValueError, match="the model has 64 learned positions"):
        acutance.extend(model, 128, torch.zeros(4, 128).long())
