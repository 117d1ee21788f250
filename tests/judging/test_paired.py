"""Paired differences: means, errors, intervals that hold together, verdicts."""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any

import pytest
import torch

from acutance.judging.paired import (
    LawComparison,
    LossComparison,
    Part,
    compare_losses,
    octaves,
    sentences,
    verdict_sentence,
)
from acutance.report.screen import Screen

COUNTS = torch.tensor([10.0, 20.0, 40.0, 80.0])
RANGES = ((1, 8), (9, 16), (17, 32), (33, 64))


def simulated(
    effects: list[float], windows: int, generator: torch.Generator, *, noise: float = 0.05
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of losses: hard and easy windows, and effects that differ from window to window."""
    counts = COUNTS.expand(windows, 4)
    base = counts * (3 + torch.randn(windows, 1, generator=generator))
    shared = torch.randn(windows, 1, generator=generator)  # octaves of a window go together
    own = torch.randn(windows, 4, generator=generator)
    delta = torch.tensor(effects) + noise * (shared + own) / math.sqrt(2)
    return torch.stack([base, base + counts * delta]).double(), counts.double()


@pytest.mark.parametrize("windows", [3, 6, 24])
def test_intervals_hold_together(windows: int) -> None:
    """All five intervals cover the true differences in 95 % of repeats, hardly more or less."""
    effects, repeats = [0.3, 0.0, -0.1, 0.02], 1000
    true = [*effects, float((torch.tensor(effects) * COUNTS).sum() / COUNTS.sum())]
    generator, held, alone = torch.Generator().manual_seed(windows), 0, 0
    for _ in range(repeats):
        sums, counts = simulated(effects, windows, generator)
        (law,) = compare_losses(["law"], sums, counts, torch.arange(windows), RANGES)
        inside = [
            part.low <= value <= part.high
            for part, value in zip((*law.by_position, law.overall), true, strict=True)
        ]
        held += all(inside)
        alone += inside[-1]
    assert 0.945 <= held / repeats <= 0.99  # Bonferroni's correction is a little wide
    assert 0.965 <= alone / repeats <= 0.985  # the mean of all predictions has 2.5 % of the 5 %


def test_errors_are_those_of_the_mean() -> None:
    """The standard error is the spread of the difference over repeats."""
    generator, found, told = torch.Generator().manual_seed(0), [], []
    for _ in range(500):
        sums, counts = simulated([0.1] * 4, 12, generator)
        (law,) = compare_losses(["law"], sums, counts, torch.arange(12), RANGES)
        found.append(law.delta)
        told.append(law.error)
    spread = float(torch.tensor(found).std())
    assert sum(told) / len(told) == pytest.approx(spread, rel=0.06)
    assert sum(found) / len(found) == pytest.approx(0.1, abs=4 * spread / math.sqrt(500))


def test_verdicts_are_right_and_rarely_wrong() -> None:
    generator = torch.Generator().manual_seed(1)
    verdicts: dict[float, list[str]] = {}
    for effect in (-0.2, 0.0, 0.2):
        for _ in range(200):
            sums, counts = simulated([effect] * 4, 8, generator)
            (law,) = compare_losses(["law"], sums, counts, torch.arange(8), RANGES)
            verdicts.setdefault(effect, []).append(law.verdict)
    assert verdicts[-0.2].count("helps") > 193
    assert verdicts[0.2].count("hurts") > 193
    assert verdicts[0.0].count("no difference found") > 187  # wrong in at most 5 %


def test_windows_of_one_text_are_one_sample() -> None:
    """Four windows of each text that share its effect say no more than one of them."""
    generator = torch.Generator().manual_seed(2)
    effect = 0.1 * torch.randn(8, 1, generator=generator)
    counts = torch.full((32, 1), 10.0)
    base = torch.full((32, 1), 30.0)
    sums = torch.stack([base, base + 10 * effect.repeat_interleave(4, 0)])
    texts = torch.arange(8).repeat_interleave(4)
    (by_window,) = compare_losses(["law"], sums, counts, torch.arange(32), [(1, 10)])
    (by_text,) = compare_losses(["law"], sums, counts, texts, [(1, 10)])
    assert by_text.delta == pytest.approx(by_window.delta)
    assert by_text.error == pytest.approx(by_window.error * math.sqrt(4 * 31 / (32 * 7 / 8)))
    assert by_text.error == pytest.approx(float(effect.std()) / math.sqrt(8))


def test_more_laws_need_more_evidence() -> None:
    sums, counts = simulated([0.1] * 4, 6, torch.Generator().manual_seed(3))
    (one,) = compare_losses(["a"], sums, counts, torch.arange(6), RANGES)
    both = torch.cat([sums, sums[1:]])
    first, second = compare_losses(["a", "b"], both, counts, torch.arange(6), RANGES)
    assert first.overall == LawComparison("b", second.overall, ()).overall
    assert first.overall.low < one.overall.low < one.delta < one.overall.high < first.overall.high


def test_rounding_is_no_difference() -> None:
    sums, counts = simulated([3e-6] * 4, 6, torch.Generator().manual_seed(4), noise=1e-9)
    (law,) = compare_losses(["law"], sums, counts, torch.arange(6), RANGES)
    assert law.verdict == "no difference found"


def test_octaves_without_predictions_are_left_out() -> None:
    sums, counts = simulated([0.1] * 4, 6, torch.Generator().manual_seed(5))
    counts = counts.clone()
    counts[:, 1] = 0.0
    (law,) = compare_losses(["law"], sums, counts, torch.arange(6), RANGES)
    assert [part.first for part in law.by_position] == [1, 17, 33]
    assert (law.overall.first, law.overall.last) == (1, 64)


@pytest.mark.parametrize("longest", [1, 2, 3, 31, 32, 33, 1000, 1024, 16384])
def test_octaves_cover_every_n_once(longest: int) -> None:
    found = octaves(longest)
    assert [n for first, last in found for n in range(first, last + 1)] == [*range(1, longest + 1)]
    assert len(found) <= 6


def part(delta: float, half: float, first: int = 1, last: int = 64) -> Part:
    return Part(first, last, delta, half / 4, delta - half, delta + half, 2.0)


@pytest.mark.parametrize(
    ("overall", "octave", "verdict", "said"),
    [
        ((-0.1, 0.05), (0.2, 0.1), "helps", "but hurts at n = 1–64"),
        ((0.1, 0.05), (0.2, 0.1), "hurts", "loss changes by +0.10"),
        ((0.0, 0.05), (0.2, 0.1), "hurts", "hurts at n = 1–64"),
        (
            (0.0, 0.05),
            (-0.2, 0.1),
            "helps",
            "in all: no difference found (at most 0.05 nat): loss changes by +0.00",
        ),
        (
            (0.0, 0.05),
            (0.01, 0.1),
            "no difference found",
            "law: no difference found (at most 0.05 nat): loss changes by",
        ),
    ],
)
def test_verdict(overall: Any, octave: Any, verdict: str, said: str) -> None:
    law = LawComparison("law", part(*overall), (part(*octave), part(0.0, 0.3, 65, 128)))
    assert law.verdict == verdict
    assert said in verdict_sentence(law)


def test_a_gain_here_and_a_loss_there_is_mixed() -> None:
    parts = (part(0.2, 0.1), part(-0.2, 0.1, 65, 128))
    law = LawComparison("law", part(0.0, 0.05, 1, 128), parts)
    assert law.verdict == "mixed"
    assert "helps at n = 65–128" in verdict_sentence(law)
    assert "hurts at n = 1–64" in verdict_sentence(law)


def test_json_has_the_documented_keys() -> None:
    law = LawComparison("log_n", part(0.1, 0.05), (part(0.2, math.inf), part(0.0, 0.1, 65, 128)))
    comparison = LossComparison((law,), "next token", 2.0, 6, 768, (128,), 6, "window")
    record = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert (record["windows"], record["tokens"]) == (6, 768)
    (shown,) = record["laws"]
    assert (shown["name"], shown["verdict"]) == ("log_n", "hurts")
    assert (shown["delta"], shown["error"]) == (0.1, 0.0125)
    assert [(one["from"], one["to"]) for one in shown["by_position"]] == [(1, 64), (65, 128)]
    assert all({"from", "to", "delta", "error"} <= set(one) for one in shown["by_position"])
    assert any("from window to window (6 of them)" in line for line in sentences(comparison))


def test_a_comparison_is_one_line() -> None:
    law = LawComparison("log_n", part(0.1, 0.05), (part(0.2, 0.1),) * 6)
    comparison = LossComparison((law,), "next token", 2.0, 6, 768, (128,), 6, "window")
    assert repr(law) == "<log_n: hurts, +0.1000 ± 0.0125 nat>"
    assert repr(comparison) == f"<LossComparison on 6 windows, 768 tokens: {law!r}>"


NAMES = (
    "clip_log_n:train_length=128",
    "window:size=2048,far=group,group=3,beyond=8192",
    "log_n:train_length=64+window:size=64,sinks=4",
    "rope:yarn,factor=2,original_max_position_embeddings=8192",
    "off:3.1,3.2,4.0,10.11,12.3,14.2,15.7,16.8",
)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_names_of_laws_and_numbers_stay_whole(width: int) -> None:
    parts = (part(-0.0214, 0.03), part(0.1234, 0.05, 65, 128), part(0.0, 0.1, 129, 8192))
    laws = tuple(LawComparison(name, parts[0], parts) for name in NAMES)
    comparison = LossComparison(laws, "next token", 2.0, 30, 8192, (128, 512), 5, "window")
    stream = io.StringIO()
    screen = Screen(file=stream, width=width)
    screen.print(comparison.table())
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert "over 30 windows of 128 and 512 tokens" in " ".join(text.split())
    assert "With only 5 windows the intervals are wide" in " ".join(text.split())
    pieces = {piece for name in NAMES for piece in re.findall(r"[^,:+]+[,:+]?", name)}
    for piece in pieces:  # a longer one than a line has is broken, but not its number
        whole = piece if len(piece) < 24 else piece.partition("=")[2]
        assert whole in text, piece
    if width >= 80:
        listed = [line for line in lines if line.startswith(NAMES[1])]
        assert listed, "the name has a line of the table to itself"
    assert len(re.findall(r"-0\.021 ± 0\.00[78]", text)) >= 2 * len(NAMES)
    assert "n = 129–8192" in text
