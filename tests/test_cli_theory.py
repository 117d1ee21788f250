"""``acutance predict`` and ``acutance temperature`` as a shell user meets them."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from acutance import METRICS, testing, theory
from acutance.report import prediction_figures
from acutance.report.prediction_sample import sample_rows
from acutance.report.prediction_table import prediction_table, remarks
from acutance.report.temperature import advise
from acutance.rowstats import RowStatistics, observe
from acutance.rowstats.metrics import metric_names


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: testing.run([str(argument) for argument in arguments])


@pytest.fixture
def few_points(limits: Callable[..., None]) -> None:
    """Curves of 6 points; each takes up to 0.1 s."""
    limits(prediction_figures, _POINTS=6)


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
    record = json.loads(result.out, parse_constant=lambda text: pytest.fail(text))
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


def test_help_needs_neither_torch_nor_scipy() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from acutance.cli import app\n"
        "for name in ('predict', 'temperature'):\n"
        "    assert CliRunner().invoke(app, [name, '--help']).exit_code == 0\n"
        "print({'torch', 'scipy', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "set()"


def test_the_verdict_stays_beside_the_value_at_40_columns() -> None:
    from acutance.report.prediction_table import prediction_table
    from acutance.report.screen import Screen

    stream = io.StringIO()
    row = theory.predict("softmax", 4096, logit_std=2.0)
    Screen(file=stream, width=40).print(prediction_table(row))
    (line,) = [each for each in stream.getvalue().splitlines() if "155.728" in each]
    assert line.split()[:4] == ["effective_keys", "155.728", "off,", "−52"]
