"""acutance probe --judge: what statistics suggest, decided by the loss of text left out."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.calibration import Law
from acutance.judging import HeadsOff, LawRemedy, proposed_remedies
from acutance.probing import HeadSummary
from acutance.scaling import Window
from tests.contract import texts
from tests.contract.trained import decoder, directory

STDLIB = Path(sysconfig.get_path("stdlib"))
LOG_N = "clip_log_n:train_length=128"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Source code: 32 windows of 512 bytes."""
    path = tmp_path / "text.py"
    path.write_text((STDLIB / "heapq.py").read_text()[: 32 * 512])
    return path


@pytest.fixture(scope="module")
def windows() -> Tensor:
    return texts.read(texts.files("held out")).long()[: 8 * 512].view(8, 512)


def measured(model: torch.nn.Module, windows: Tensor, **settings: Any) -> HeadSummary:
    with acutance.probe(model, **settings) as probe, torch.no_grad():
        model(windows)
    return probe.summary()


def test_what_helps_is_said_everywhere_and_resumed(
    run: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    """The decoder was trained on 128 bytes: there, local heads do better through a window."""
    out, page, state = (tmp_path / name for name in ("out.json", "page.html", "state"))
    given = (
        "probe", directory(), "--text", text, "--length", 512, "--structure", "--judge",
        "--train-length", 128, "--save", state,
    )  # fmt: skip
    done = run(*given, "--json", out, "--report", page)
    assert done.exit_code == 0, done.err
    record = json.loads(out.read_text())
    log_n, window = record["judged"]
    assert log_n["name"] == LOG_N
    assert all(part["delta"] == 0.0 for part in log_n["by_position"] if part["to"] <= 128)
    assert window["name"].startswith("window:size=")
    assert (window["verdict"], window["delta"] + 2 * window["error"] < 0) == ("helps", True)
    assert set(window) > {"name", "verdict", "delta", "error", "low", "high", "by_position"}
    # 24 windows of 32 are probed, the other 8 judged
    assert {layer["rows"] for layer in record["layers"]} == {24 * 512}
    said = " ".join(done.out.split())
    assert "over 8 windows of 512 tokens" in said
    helping = "; ".join(law["name"] for law in record["judged"] if law["verdict"] == "helps")
    assert f"Lowers the loss, so worth using on such texts: {helping}." in said
    about = acutance.load(state).about["judged"]
    assert about == record["about"]["judged"]
    assert window["name"] in about[-1]
    assert f"--write-law FILE writes this change to a law file: {window['name']}" in done.err
    law = tmp_path / "law.json"
    again = run(*given, "--json", "-", "--resume", "--write-law", law)
    assert again.exit_code == 0, again.err
    assert json.loads(again.out)["judged"] == record["judged"]
    assert f"law written to {law}: {window['name']}. Use it with --law {law}" in again.err
    kept = Law.load(law).judged
    assert kept is not None
    assert kept["by_position"] == window["by_position"]
    used = run("judge", directory(), "--text", text, "--lengths", 512, "--law", law, "--json", "-",
               "--windows", 4)  # fmt: skip
    assert used.exit_code == 0, used.err
    assert json.loads(used.out)["laws"][0]["delta"] < 0
    page.unlink()
    shown = run("report", state, "--html", page)
    assert shown.exit_code == 0, shown.err
    assert all(line in " ".join(shown.out.split()) for line in about)
    without = run(*[part for part in given if part not in ("--judge", "--train-length", 128)],
                  "--resume")  # fmt: skip
    assert without.exit_code == 1
    assert "cannot be resumed with other settings" in without.err


def test_nothing_is_judged_where_nothing_would_change(
    run: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    """The configuration says 4096 positions, so windows of 512 are within the trained length."""
    law = tmp_path / "law.json"
    done = run(
        "probe", directory(), "--text", text, "--length", 512, "--judge", "--json", "-",
        "--write-law", law,
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert f"no law was written to {law}: none of the judged laws lowers the loss" in done.err
    assert not law.exists()
    assert json.loads(done.out)["judged"] == []
    said = " ".join(done.err.split())
    assert "clipped at the trained length 4096 it changes nothing in windows of 512 tokens" in said


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--law", "ssmax"), 2, "cannot be combined with --law"),
        (("--shard", "1/2"), 2, "cannot be combined with --shard"),
        (("--length", "4096"), 1, "need at least 4 windows of 4096 tokens each, and the text has"),
    ],
)
def test_bad_input_is_one_sentence(
    run: Callable[..., Any], text: Path, options: tuple[str, ...], code: int, said: str
) -> None:
    done = run("probe", directory(), "--text", text, "--judge", *options)
    assert done.exit_code == code
    assert said in " ".join(done.err.replace("│", " ").split())
    if code == 1:
        assert done.err.count("\n") == 1


@pytest.mark.parametrize("option", [("--train-length", "128"), ("--write-law", "law.json")])
def test_options_of_judging_need_it(run: Callable[..., Any], option: tuple[str, str]) -> None:
    done = run("probe", directory(), *option)
    assert done.exit_code == 2
    assert f"Invalid value for {option[0]}: needs --judge" in done.err


def test_a_model_without_a_head_is_refused(run: Callable[..., Any]) -> None:
    done = run("probe", "--judge")  # the embedded encoder
    assert done.exit_code == 1
    assert "was saved without a language-model head" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("headless", [False, True])
def test_dead_and_collapsed_heads_are_switched_off(windows: Tensor, headless: bool) -> None:
    """By kind and together, in the model with its head, whichever of both was probed."""
    model = decoder()
    with torch.no_grad():
        for layer, head, factor in ((1, 0, 0.0), (1, 1, 0.0), (2, 3, 1e4)):
            model.model.layers[layer].self_attn.q_proj.weight[head * 24 : head * 24 + 24] *= factor
    summary = measured(model.model if headless else model, windows)
    found = proposed_remedies(model, summary, 512, train_length=128)
    off = {one.name: one for one in found.remedies if isinstance(one, HeadsOff)}
    assert list(off) == ["off:1.0,1.1", "off:2.3", "off:1.0,1.1,2.3"]
    assert [why.split(" heads")[0] for why in found.reasons[:2]] == [
        "switches off 2 of 2", "switches off 1 of 1"
    ]  # fmt: skip
    result = acutance.judge(model, windows[:2], list(found.remedies))
    assert [law.name for law in result.laws] == [one.name for one in found.remedies]
    assert all(law.delta != 0 for law in result.laws)


def test_a_window_holds_what_a_local_head_reads(windows: Tensor) -> None:
    model = decoder()
    summary = measured(model, windows, structure=True)
    found = proposed_remedies(model, summary, 512, train_length=128)
    law = found.remedies[-1]
    assert isinstance(law, LawRemedy)
    sizes = {place: window.size for place, window in law.law.items()}  # type: ignore[union-attr]
    assert law.law == {place: Window(size, sinks=1) for place, size in sizes.items()}
    local = [
        place
        for place, rules in zip(summary.places, summary.judgements, strict=True)
        if "local" in rules
    ]
    assert 0 < len(sizes) <= len(local)
    assert set(sizes) <= set(local)
    first = dict(zip(summary.places, summary.mean("first_weight").flatten().tolist(), strict=True))
    for place, size in sizes.items():
        index = summary.places.index(place)
        held, less = (
            float(summary.distances.within(keys - 1)[0][index]) + first[place]
            for keys in (size, size // 2)
        )
        assert held >= 0.9 > less
    assert not any(
        one.name.startswith("window")
        for one in proposed_remedies(model, summary, 512, causal=False).remedies
    )


def test_an_untrained_model_gets_no_proposal(windows: Tensor) -> None:
    model = decoder()
    summary = measured(model, windows, structure=True)
    found = proposed_remedies(model, replace(summary, about={"untrained": True}), 512)
    assert (found.remedies, len(found.left_out)) == ((), 1)
    assert "untrained" in found.left_out[0]
