"""A kind of change is a class and a line in the registry; a change is the same in a file."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import acutance
from acutance import testing
from acutance.capture.readers import huggingface
from acutance.judging import Change, HeadsOff, LawChange, changes, load_change, save_change
from acutance.reproduce import decoder
from tests.contract.trained import directory

IDS = torch.arange(64)[None]


@dataclass(frozen=True)
class Damped(Change):
    """Every head's output times a factor."""

    factor: float

    @property
    def name(self) -> str:
        return f"damped:{self.factor}"

    @classmethod
    def named(cls, text: str) -> Damped:
        return cls(float(text))

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        def damp(call: Any, run: Any) -> Any:
            output, *rest = run()
            return (self.factor * output, *rest)

        with huggingface.intercept(damp):
            yield


def test_a_new_kind_is_applied_judged_saved_and_named_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(changes.KINDS, "damped", Damped.named)
    model, file = decoder(), tmp_path / "change.json"
    save_change(Damped(0.5), file)
    assert load_change(file) == Damped(0.5)
    with torch.no_grad():
        plain = model(IDS).logits
        for given in (Damped(0.5), "damped:0.5", file):
            with acutance.apply(model, given):
                damped = model(IDS).logits
            assert not torch.equal(damped, plain)
        with acutance.apply(model, "damped:1.0"):
            assert torch.equal(model(IDS).logits, plain)
    windows = torch.randint(100, (4, 64), generator=torch.Generator().manual_seed(0))
    delta = acutance.judge(model, windows, Damped(0.5)).laws[0].delta
    assert delta != 0
    found = acutance.judge(model, windows, ["damped:0.5", "damped:1.0"])
    assert [law.name for law in found.laws] == ["damped:0.5", "damped:1.0"]
    assert [law.delta for law in found.laws] == [delta, 0.0]

    text = Path(sysconfig.get_path("stdlib")) / "copy.py"
    done = testing.run(
        ["judge", str(directory()), "--text", str(text), "--lengths", "64", "--windows", "4",
         "--law", str(file), "--json", "-"]
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert [law["name"] for law in json.loads(done.out)["laws"]] == ["damped:0.5"]


@pytest.mark.parametrize(
    "name", ["off:0.1,2", "rope:linear,factor=2", "ssmax+window:size=64", "log_n:train_length=16"]
)
def test_a_named_change_is_the_same_in_a_file(name: str, tmp_path: Path) -> None:
    change = changes.named_change(name)
    for given in (change, name):
        save_change(given, tmp_path / "change.json")
        assert load_change(tmp_path / "change.json") == change


def test_laws_and_plans_keep_their_formats(tmp_path: Path) -> None:
    law, plan = tmp_path / "law.json", tmp_path / "plan.json"
    fitted = acutance.Law.of(decoder(), "ssmax")
    kept = acutance.CachePlan.of(decoder(), acutance.HeadPlan("streaming", first=4, recent=60))
    save_change(LawChange("mine", fitted), law)
    save_change(kept, plan)
    assert acutance.Law.load(law) == fitted
    assert acutance.CachePlan.load(plan) == kept
    assert load_change(plan).name == str(plan)  # in tables, what was asked for
    assert load_change(plan).words == kept.words


def test_a_change_that_its_name_does_not_say_has_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'mine' is neither a file nor a law"):
        save_change(LawChange("mine", "ssmax"), tmp_path / "change.json")
    with pytest.raises(ValueError, match="its name does not say all of it"):
        save_change(LawChange("log_n:train_length=16", "ssmax"), tmp_path / "change.json")
    assert not list(tmp_path.iterdir())


def test_a_law_that_scales_windowed_layers_has_no_file(tmp_path: Path) -> None:
    law = acutance.Law.of(decoder(), "ssmax")
    with pytest.raises(ValueError, match="mine has no file: the file of a law has no windowed"):
        save_change(LawChange("mine", law, windowed=True), tmp_path / "law.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", [None, "its own path"])
def test_a_file_that_names_no_change_is_refused(named: str | None, tmp_path: Path) -> None:
    file = tmp_path / "change.json"
    change = named and str(file)
    file.write_text(json.dumps({"schema": changes.SCHEMA, "change": change}), encoding="utf-8")
    with pytest.raises(ValueError, match="names no change"):
        load_change(file)


def test_the_name_of_a_foreign_plan_alone_is_no_change() -> None:
    with pytest.raises(ValueError, match="'duo_attention' is neither a file nor a law"):
        changes.named_change("duo_attention")


def test_an_empty_list_of_heads_switches_nothing_off() -> None:
    with (
        pytest.raises(ValueError, match="must be numbers, or None for all"),
        HeadsOff({0: []}).applied(decoder()),
    ):
        pass
