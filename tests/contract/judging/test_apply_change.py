"""acutance.apply with laws by name and from files, and what it refuses at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance import scaling
from acutance.judging import AppliedChange, HeadsOff, RopeRemedy
from tests.contract import texts
from tests.contract.trained import decoder

TOKENS = texts.read(texts.files("held out")).long()[:200].view(1, 200)


@torch.no_grad()
def logits(law: Any = None) -> Tensor:
    """Logits of the package's decoder under a law, which then is removed again."""
    model = decoder()
    before = model(input_ids=TOKENS).logits
    if law is None:
        return before
    with acutance.apply(model, law):
        found: Tensor = model(input_ids=TOKENS).logits
    assert torch.equal(model(input_ids=TOKENS).logits, before)
    return found


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("log_n:train_length=64", scaling.LogN(train_length=64)),
        ("window:size=40,sinks=2", scaling.Window(40, sinks=2)),
        ("ssmax+window:size=40", (scaling.SSMax(), scaling.Window(40))),
        ("rope:linear,factor=2", RopeRemedy("linear", {"factor": 2})),
        ("off:0.1,2.3", HeadsOff({0: [1], 2: [3]})),
        ({0: "window:size=40", (1, 2): "ssmax"}, {0: scaling.Window(40), (1, 2): scaling.SSMax()}),
    ],
)
def test_a_name_is_the_law_that_it_names(text: Any, law: Any) -> None:
    assert torch.equal(logits(text), logits(law))
    assert not torch.equal(logits(text), logits())


def test_files_of_laws_and_plans_are_read(tmp_path: Path) -> None:
    law, plan = tmp_path / "law.json", tmp_path / "plan.json"
    acutance.Law.of(decoder(), scaling.Window(40)).save(law)
    short = acutance.HeadPlan("streaming", first=0, recent=40)
    acutance.CachePlan.of(decoder(), dict.fromkeys([0, 1, 2], short)).save(plan)
    for given in (law, str(law), str(plan)):
        torch.testing.assert_close(logits(given), logits(scaling.Window(40)))


@torch.no_grad()
def test_changes_last_until_restored() -> None:
    model = decoder()
    before = model(input_ids=TOKENS).logits
    for name in ("off:0.1", "rope:linear,factor=2"):
        applied = acutance.apply(model, name)
        assert isinstance(applied, AppliedChange)
        assert repr(applied) == f"<{name}, applied>"
        assert not torch.equal(model(input_ids=TOKENS).logits, before)
        applied.restore()
        applied.restore()
        assert torch.equal(model(input_ids=TOKENS).logits, before)
        assert repr(applied) == f"<{name}, removed>"
        with pytest.raises(acutance.ApplyError, match="was removed from its model"), applied:
            pass
    with pytest.warns(UserWarning, match="it did not run"):
        acutance.apply(model, "off:0.1").restore()


@pytest.mark.parametrize(
    ("law", "kind", "match"),
    [
        ({(0, 9): "ssmax"}, ValueError, "no head 9: model.layers.0.self_attn has heads 0 to 3"),
        ({9: "ssmax"}, ValueError, "it has 3 blocks, 0 to 2"),
        ("off:0.9", ValueError, "no head 9: model.layers.0.self_attn has heads 0 to 3"),
        ("off:9.0", ValueError, "it has 3 blocks, 0 to 2"),
        ("rope:nothing,factor=2", ValueError, "transformers has no RoPE type 'nothing'"),
        ("rope+window:size=4", ValueError, "rope cannot be joined to another law by +"),
        ("nothing", ValueError, "'nothing' is neither a file nor a law. A law is a file"),
        ({0: "nothing"}, ValueError, "'nothing' is neither a file nor a law. A law is a file"),
        ("none.json", ValueError, "there is no file none.json"),
    ],
)
def test_bad_laws_are_refused_at_once(law: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        acutance.apply(decoder(), law)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got str"):
        acutance.apply("gpt2", "off:0.1")  # type: ignore[call-overload]
