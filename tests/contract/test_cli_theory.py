"""``acutance predict`` and ``acutance temperature`` as a shell user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acutance import testing


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: testing.run([str(argument) for argument in arguments])


def flat(text: str) -> str:
    """Sentences without the line breaks that the width put in."""
    return " ".join(text.split())


def test_predict_says_which_formulas_hold(run: Callable[..., Any]) -> None:
    result = run("predict", "--n", 4096, "--logit-std", 2)
    assert result.exit_code == 0, result.output
    said = flat(result.output)
    assert "log n − γ²/2 = 6.318 is 0.033 nat below the exact 6.351" in said
    assert "exp(−γ²/2) = 0.1353 does not hold at this n" in said
    assert "the exact mean is 0.1892 (40 % more)" in said
    assert "√(log n / 2) = 2.04" in said
    assert "guarantees 1.07 nat, compared with the exact 6.35" in said

    frozen = flat(run("predict", "--n", 4096, "--logit-std", 6).output)
    assert "log n − γ²/2 = −9.68 does not hold: γ is 6, above √(2 log n) = 4.08" in frozen
    assert "The exact mean is 1.604" in frozen
    calm = flat(run("predict", "--n", 100000, "--logit-std", 0.5).output)
    assert "Sparsity: exp(−γ²/2) = 0.88250 holds" in calm


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--mechanism relu2 --logit-mean -2 --logit-std 1", "5.82 of 256 keys are active"),
        ("--mechanism decay --lam 0.9", "(1 + λ)/(1 − λ) = 19 as n grows, here 19"),
        ("--mechanism identity --logit-std 3", "never below √(2/π) = 0.798"),
        ("--mechanism linear --q 1,2 --mu 1 --sigma 1", "many keys with this mean and covariance"),
        ("--scale 1.5 --family laplace", "the mean of exp(logit) is infinite"),
        ("--mechanism cosine --tau 0.5 --d 32", "Entropy: the formula for many keys"),
        (
            "--mechanism trained_head --first-gap 1 --rest-logit-std 1 --rest-jensen-gap 0.5",
            "noise_gain. The four numbers of a trained head do not determine it.",
        ),
        (
            "--mechanism trained_head --first-gap 1 --rest-logit-std 1 --rest-jensen-gap 5",
            "Not predicted: entropy, normalized_entropy, information, effective_keys, top_weight. "
            "No independent logits with a skewness within ±1.62",
        ),
        pytest.param(
            *("--scale 1 --family pareto --a 0.5", "Not predicted: max_logit, lse, logit_mean"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_predict_speaks_of_each_mechanism(
    run: Callable[..., Any], arguments: str, sentence: str
) -> None:
    result = run("predict", "--n", 256, *arguments.split())
    assert result.exit_code == 0, result.output
    assert sentence in flat(result.output)


def test_sampled_rows_agree_with_the_prediction(run: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "row.json"
    given = ("--mechanism", "cosine", "--n", 128, "--d", 8, "--tau", 0.2, "--value-variance", 4)
    result = run("predict", *given, "--sample", 4000, "--json", out)
    assert result.exit_code == 0, result.output
    assert "measured" in result.output
    record = json.loads(out.read_text())
    assert record["measured"]["rows"] == 4000
    for name, entry in record["metrics"].items():
        found = record["measured"]["metrics"][name]
        if entry["kind"] == "mean":
            assert abs(found["mean"] - entry["value"]) < 4 * found["error"] + 1e-9, name


def test_temperature_recommends_and_explains(run: Callable[..., Any], tmp_path: Path) -> None:
    out, picture = tmp_path / "advice.json", tmp_path / "advice.svg"
    result = run(
        "temperature", "--n", 256, "--fraction", 0.9, "--d", 128, "--json", out, "--plot", picture
    )
    assert result.exit_code == 0, result.output
    said = flat(result.output)
    for sentence in (
        "Use τ = 0.1169",
        "no τ above 0.2409 reaches 4.991 nat (90 % of log 256) in a row, even with",
        "1 key at +1, 255 at −1",
        "every row reaches it at τ = 0.1209, with weight 0.941 on its key",
        "it needs d ≥ 255",
        "2 log(n − 1) = 11.1",
        "never above 0.4745 for any number of keys",
    ):
        assert sentence in said
    assert max(len(line) for line in result.output.splitlines()) <= 80
    record = json.loads(out.read_text())
    assert record["tau"] == pytest.approx(0.116941, rel=1e-5)
    taus = {setting["key"]: setting["tau"] for setting in record["settings"]}
    assert taus["free"] == pytest.approx(0.240865987607, rel=1e-10)
    assert taus["simplex"] == pytest.approx(0.120905280, rel=1e-8)
    assert picture.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("predict --n 8", "--logit-std, --scale: "),
        ("predict --n 8 --mechanism softmin", "--mechanism: must be one of"),
        ("predict --n 8 --logit-std -1", "--logit-std: the deviation of the logits"),
        ("predict --n 8 --logit-std 1 --tau 2", '--tau: "softmax" takes'),
        ("predict --n 8 --scale 1 --family cosine", "--d: "),
        ("predict --n 8 --mechanism linear --q 1,x --mu 1 --sigma 1", "--q: must be numbers"),
        ("predict --n 8 --mechanism linear --q 1,2 --mu 1", "--q, --mu, --sigma: the mechanism"),
        (
            "temperature --n 256 --fraction 1.5",
            "--fraction: the fraction must be above 0 and below 1",
        ),
        ("temperature --n 256 --negatives random", '--d: "random" negatives need'),
        (
            "temperature --n 256 --negatives cube",
            "--negatives: must be one of box, simplex, random",
        ),
        ("temperature --n 256 --d 1", "--d: must be finite and at least 2"),
    ],
)
def test_misuse_is_one_sentence_and_exit_2(
    run: Callable[..., Any], arguments: str, sentence: str
) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2, result.output
    (line,) = result.err.splitlines()
    assert line.startswith(f"acutance: {sentence}")
    assert result.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        "predict --logit-std 1",
        "predict --n 0 --logit-std 1",
        "predict --n 8 --logit-std 1 --plot row.pdf",
        "predict --n 8 --logit-std 1 --json nowhere/row.json",
        "predict --n 8 --logit-std 1 --sample 1",
        "temperature --n 1",
        "temperature --n 8 --plot .",
    ],
)
def test_misused_options_are_exit_2(run: Callable[..., Any], arguments: str) -> None:
    assert run(*arguments.split()).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--mechanism linear --q 1 --mu 1 --sigma 1 --plot {}", "linear has no scale"),
        ("--mechanism decay --lam 0.5 --sample 5", "sampling is available for softmax"),
    ],
)
def test_failures_are_one_sentence_and_exit_1(
    run: Callable[..., Any], tmp_path: Path, arguments: str, sentence: str
) -> None:
    result = run("predict", "--n", 8, *arguments.format(tmp_path / "row.png").split())
    assert result.exit_code == 1
    assert result.err.startswith(f"acutance: {sentence}")


def test_a_terminal_without_unicode_gets_letters() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "acutance", "temperature", "--n", "16"],
        capture_output=True, check=True, env=environment,
    )  # fmt: skip
    assert b"free cosines" in done.stdout


def test_the_mean_of_features_is_one_number(run: Callable[..., Any]) -> None:
    given = ("predict", "--n", 8, "--mechanism", "linear", "--q", "1,2", "--sigma", 1, "--mu")
    assert run(*given, "1,1").exit_code == 2
    assert run(*given, 1).exit_code == 0
