"""``acutance predict`` and ``acutance temperature`` as a shell user meets them."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from acutance import METRICS, theory
from acutance.cli import app
from acutance.report import prediction_figures
from acutance.report.prediction_sample import sample_rows
from acutance.report.prediction_table import prediction_table, remarks
from acutance.report.temperature import advise
from acutance.rowstats import RowStatistics, observe
from acutance.rowstats.metrics import metric_names


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "80")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def few_points(limits: Callable[..., None]) -> None:
    """Curves of 6 points; each takes up to 0.1 s."""
    limits(prediction_figures, _POINTS=6)


def flat(text: str) -> str:
    """Sentences without the line breaks that the width put in."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [80, 120])
def test_predict_prints_every_metric_within_the_width(width: int) -> None:
    row = theory.predict("softmax", 4096, logit_std=2.0)
    for measured in (None, sample_rows(row, 20)):
        console = Console(width=width, record=True, no_color=True, file=io.StringIO())
        console.print(prediction_table(row, measured))
        lines = console.export_text().splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width
        for name in metric_names(noise=True):
            metric = METRICS[name]
            (line,) = [line for line in lines if line.startswith(f"{name} ")]
            assert "…" not in line, line
            assert metric.unit == "1" or metric.unit in line
        assert sum(" 6.35088 " in line for line in lines) == 1


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


@pytest.mark.parametrize(
    "given",
    [
        {"scale": 0.7, "family": "laplace", "logit_mean": 3.0},
        {"scale": 2.0, "family": "cosine", "d": 5},
        {"logit_std": 2.0, "logit_mean": -1.0},
    ],
)
def test_rows_are_drawn_from_the_law_of_the_prediction(given: dict[str, Any]) -> None:
    row = theory.predict("softmax", 64, **given)
    found = sample_rows(row, 3000)
    for name in ("logit_mean", "entropy", "lse", "top_weight"):
        mean, error = found[name]
        assert abs(mean - row[name]) < 4 * error, name
        assert 0 < error < 0.05 * abs(row[name]) + 0.1
    assert (
        sample_rows(row, 10, seed=1) == sample_rows(row, 10, seed=1) != sample_rows(row, 10, seed=2)
    )


def test_the_json_record_is_the_prediction(run: Callable[..., Any]) -> None:
    result = run("predict", "--n", 64, "--mechanism", "relu2", "--logit-std", 1, "--json", "-")
    record = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(text))
    row = theory.predict("relu2", 64, logit_std=1.0)
    assert record["schema"] == "acutance.prediction/1"
    assert tuple(record["metrics"]) == metric_names(noise=True)
    for name, entry in record["metrics"].items():
        if name in row.why:
            assert entry["value"] is None
            assert entry["why"] == row.why[name]
        else:
            assert entry["value"] == row[name]
            assert entry["kind"] == row.kinds[name]
    assert record["remarks"] == remarks(row)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["row.png", "row.SVG"])
def test_predict_draws(
    run: Callable[..., Any], tmp_path: Path, name: str, few_points: None
) -> None:
    written = {}
    for page in ("light", "dark"):
        path = tmp_path / f"{page}-{name}"
        dark = ["--dark"] if page == "dark" else []
        result = run("predict", "--n", 256, "--logit-std", 2, "--plot", path, *dark)
        assert result.exit_code == 0, result.output
        written[page] = path.read_bytes()
        start = b"\x89PNG" if name.endswith("png") else b"<?xml"
        assert written[page].startswith(start)
    assert written["light"] != written["dark"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "arguments",
    [
        "--mechanism relu2 --logit-mean -1 --logit-std 1",
        "--mechanism identity --logit-std 1",
        "--mechanism decay --lam 0.9",
        "--mechanism cosine --tau 0.2 --d 16",
        "--mechanism dot --d 4",
        "--scale 0.5 --family laplace",
    ],
)
def test_every_mechanism_with_a_scale_has_a_figure(
    run: Callable[..., Any], tmp_path: Path, arguments: str, few_points: None
) -> None:
    path = tmp_path / "row.png"
    result = run("predict", "--n", 32, *arguments.split(), "--plot", path)
    assert result.exit_code == 0, result.output
    assert path.stat().st_size > 10_000


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


def test_which_arrangement_is_recommended() -> None:
    assert advise(64, 0.5).chosen.key == "simplex"
    assert advise(64, 0.5, d=8).chosen.key == "random_keys"
    assert advise(64, 0.5, d=8, negatives="box").chosen.key == "free"
    assert [setting.feasible for setting in advise(64, 0.5, d=63).settings] == [True, True, True]
    assert [setting.feasible for setting in advise(64, 0.5, d=8).settings] == [True, False, True]
    assert "a rough estimate" in " ".join(advise(16, 0.5, d=64).sentences)
    several = " ".join(advise(4096, 0.5).sentences)
    assert "20 keys at +1, 4,076 at −1" in several
    assert "That optimum is not attention to a single key." in several
    assert "below 2 log(n − 1) = 8.29: if cosines were normal" in " ".join(
        advise(64, 0.5, 8).sentences
    )


@pytest.mark.parametrize(("n", "d"), [(1024, 64), (64, 8)])
@pytest.mark.parametrize("fraction", [0.5, 0.9])
def test_the_even_arrangement_says_its_share_and_random_keys_about_theirs(
    fraction: float, n: int, d: int
) -> None:
    advice = advise(n, fraction, d=d)
    even = torch.full((1, n), -1 / (n - 1), dtype=torch.float64)
    even[:, 0] = 1.0
    information = RowStatistics(observe(even / advice.settings[1].tau)).information
    assert float(information) == pytest.approx(fraction * math.log(n), rel=1e-9)

    rows = 250_000 // n
    keys = torch.nn.functional.normalize(torch.randn(rows, n, d, dtype=torch.float64), dim=-1)
    cosines = keys[..., 0].clone()  # with the first axis as the query
    cosines[:, 0] = 1.0
    shares = RowStatistics(observe(cosines / advice.tau)).information / math.log(n)
    error = float(shares.std()) / rows**0.5
    assert abs(float(shares.mean()) - fraction) < 0.005 + 4 * error  # what the command claims
    assert error < 0.002


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
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"acutance: {sentence}")
    assert result.stdout == ""


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
    assert result.stderr.startswith(f"acutance: {sentence}")


def test_help_needs_neither_torch_nor_scipy() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from acutance.cli import app\n"
        "for name in ('predict', 'temperature'):\n"
        "    assert CliRunner().invoke(app, [name, '--help']).exit_code == 0\n"
        "print({'torch', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "set()"


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


def test_the_verdict_stays_beside_the_value_at_40_columns() -> None:
    from acutance.report.prediction_table import prediction_table
    from acutance.report.screen import Screen

    stream = io.StringIO()
    row = theory.predict("softmax", 4096, logit_std=2.0)
    Screen(file=stream, width=40).print(prediction_table(row))
    (line,) = [each for each in stream.getvalue().splitlines() if "155.728" in each]
    assert line.split()[:4] == ["effective_keys", "155.728", "off,", "−52"]
