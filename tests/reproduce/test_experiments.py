"""Every experiment at its quick size: verdicts as stated, and none that a wrong formula keeps."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from acutance import theory
from acutance.report import plot_style
from acutance.reproduce import EXPERIMENTS, Record, Run, run_one
from acutance_lab.experiment import Measured
from acutance_lab.experiment import experiment as made_of
from acutance_lab.experiments import noise
from acutance_lab.figure import Page
from acutance_lab.record import Claim
from acutance_lab.run import draw
from acutance_lab.sampling import gaussian_collision

Check = Callable[[Record], None]

FROM_ARTICLES = {
    "noise", "information", "temperature", "invariance", "mean_field", "sparsity_exp",
    "sparsity_relu2", "sparsity_identity", "sparsity_linear", "sparsity_decay", "homogeneous",
    "scores",
}  # fmt: skip
BEYOND = {"finite_n", "gap_law", "simplex", "entropy_floor", "ssmax", "freezing"}
REAL = {"real_heads", "real_sinks", "real_topk", "real_distance", "real_lengths"}
TRAINED = REAL | {
    "first", "max_retrieval", "mlm_table", "qk_norm_scale", "calibrated_length", "swan",
}  # fmt: skip
#: Measured for seconds: those that train, and sums over many samples.
LONG = TRAINED - {"real_distance"} | {
    "noise", "information", "invariance", "mean_field", "scores", "gap_law", "freezing",
    "sparsity_linear", "sparsity_exp", "finite_n", "temperature", "entropy_floor",
}  # fmt: skip
NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in EXPERIMENTS
]
by_name = pytest.mark.parametrize("name", NAMES)


def test_every_experiment_is_there() -> None:
    assert set(EXPERIMENTS) == FROM_ARTICLES | BEYOND | TRAINED
    assert set(EXPERIMENTS) > LONG


def test_the_guide_counts_the_theorems_and_marks_them() -> None:
    tested = [
        claim for experiment in EXPERIMENTS.values() for claim in experiment.tested(quick=True)
    ]
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "reproduce.md").read_text("utf-8")
    theorems = sum(claim.theorem for claim in tested)
    assert theorems >= 25
    assert f"{theorems} of the {len(tested)} claims at the quick size are theorems" in guide
    for name, experiment in EXPERIMENTS.items():
        (line,) = (line for line in guide.splitlines() if line.startswith(f"| `{name}` |"))
        assert experiment.claims[0].theorem is line.endswith(" holds (theorem) |")


def measurement(run: Run) -> Iterator[Measured]:
    """The root of a number.

    Rows for one x.

    Predicted: √(1 + x) is 1 + x/2:
    for small x.

    Figure: A root is nearly a line. Line: 1 + x/2. Marks: √(1 + x).
    """
    yield "root", "√", 1.05, 1.1**0.5, {"x": 0.1}


def test_the_texts_of_an_experiment_are_those_of_its_docstring() -> None:
    claim = Claim("root", "√(1 + x) is 1 + x/2", within=0.01)
    made = made_of(claim, figure=[], needs="transformers")(measurement)
    assert (made.name, made.needs) == ("measurement", "transformers")
    assert made.title == "The root of a number"
    assert made.prediction == "√(1 + x) is 1 + x/2: for small x"
    assert made.draw == Page("A root is nearly a line", "Line: 1 + x/2. Marks: √(1 + x).", [])
    assert run_one(made).judgements[0].kind == "holds"
    # python -OO has no docstrings
    measurement.__doc__ = None
    made = made_of(claim, figure=[])(measurement)
    assert (made.title, made.prediction) == ("measurement", "measurement")
    assert made.draw == Page("measurement", "", [])


def test_every_experiment_says_what_it_is_what_is_predicted_and_what_is_drawn() -> None:
    for name, made in EXPERIMENTS.items():
        assert isinstance(made.draw, Page)
        texts = [made.title, made.prediction, made.draw.title, made.draw.note]
        assert all(text and text != name for text in texts), name
        assert made.draw.note.endswith("."), name


@pytest.mark.parametrize(
    ("name", "key"), [("noise", "averages"), ("real_heads", "floor"), ("real_topk", "floor")]
)
def test_what_an_article_does_not_say_is_not_credited_to_it(name: str, key: str) -> None:
    """9593 gives no rate, and 9034 has the mean-field entropy as an approximation, not a bound."""
    (claim,) = (claim for claim in EXPERIMENTS[name].claims if claim.key == key)
    assert claim.source == ""


def test_heads_are_not_picked_by_the_error_that_is_claimed_of_them() -> None:
    """A share of the heads, sorted by their error, is no condition on them."""
    holds, every, *_ = EXPERIMENTS["calibrated_length"].claims
    assert (holds.key, holds.bound, holds.expected) == ("holds", "", "holds")
    assert (every.key, every.bound, every.expected) == ("every", "", "does not hold")


def measured(record: Record, claim: str, **where: float | int | str) -> tuple[float, float]:
    (row,) = record.of(claim, **where)
    return row.measured, row.error


def verdicts_are_those_stated_beforehand(record: Record) -> None:
    unexpected = {
        judgement.claim.key: (judgement.verdict, dict(judgement.worst.condition))
        for judgement in record.judgements
        if not judgement.as_expected
    }
    assert not unexpected
    assert {row.claim for row in record.rows} - {""} == {
        judgement.claim.key for judgement in record.judgements
    }
    for row in record.rows:
        assert math.isfinite(row.measured), row


def a_wrong_prediction_changes_every_verdict(record: Record) -> None:
    assert record.judgements
    for judgement in record.judgements:
        assert judgement.decided, judgement.claim.key


def no_theorem_is_left_to_chance(record: Record) -> None:
    theorems = {j.claim.key: j.claim for j in record.judgements if j.claim.theorem}
    assert all(claim.expected == "holds" for claim in theorems.values())
    assert not any(row.error for row in record.rows if row.claim in theorems)


def the_error_of_every_mean_can_be_judged(record: Record) -> None:
    random = [row for row in record.rows if row.claim and row.samples and row.error]
    for row in random:
        assert row.samples >= 30, row
        assert abs(row.skewness) < 0.35, row


def figures_are_whole_and_titled(record: Record) -> None:
    experiment = EXPERIMENTS[record.name]
    for theme in (plot_style.LIGHT, plot_style.DARK):
        figure = experiment.draw(record, theme)
        for axes in figure.axes:
            assert axes.get_xlabel()
            assert axes.get_ylabel()
            assert axes.has_data()
        assert any(axes.get_legend() for axes in figure.axes)
        titles = [text.get_text() for text in figure.texts]
        assert titles
        assert all(titles)
        # a mark that leaves its panel would be a measurement that nobody sees
        width, height = figure.get_size_inches()
        canvas = figure.canvas.get_renderer()  # type: ignore[attr-defined]
        for text in figure.texts:
            box = text.get_window_extent(canvas)
            assert box.x1 <= width * figure.dpi, text.get_text()
            assert box.y1 <= height * figure.dpi


def a_scale_is_measured_well_enough_to_tell_5_per_cent(record: Record) -> None:
    # not only by luck of the seed: the tolerance itself, 4 standard errors, is below 5 per cent
    rows = record.of("scale", n=512)
    assert len(rows) == 4
    assert all(row.allowed < 0.05 * row.predicted for row in rows)


def entropy_under_log_n_drifts_as_computed_elsewhere(record: Record) -> None:
    value, error = measured(record, "drift", n=512, γ=1.0)
    assert value == pytest.approx(5.7419, abs=4 * error + 5e-5)


def a_growth_that_is_wrong_is_told_whatever_the_seed(record: Record) -> None:
    # 4 standard errors and the share left open are well below what √log n is off by
    (row,) = record.of("growth", logits="normal", n=256)
    assert abs(row.measured - row.predicted) - row.allowed > 2 * row.error
    assert row.error < 0.0045


def gap_counts_are_those_of_a_plain_loop(record: Record) -> None:
    generator = np.random.default_rng(11)
    draws = {"normal": generator.standard_normal, "uniform": lambda n: generator.uniform(-1, 1, n)}
    for family, sample in draws.items():
        found = []
        for _ in range(3000):
            gaps = np.sort(sample(64))[::-1]
            gaps = gaps[0] - gaps[1:]
            found.append(max(math.log(rank) / gap for rank, gap in enumerate(gaps, 2)))
        value, error = measured(record, "limit", logits=family, n=64)
        low, high = np.quantile(found, [0.5 - 2 / math.sqrt(3000), 0.5 + 2 / math.sqrt(3000)])
        assert low - 4 * error <= value <= high + 4 * error, family


def what_little_training_cannot_decide_is_tested_at_full_size_only(record: Record) -> None:
    experiment = EXPERIMENTS["mlm_table"]
    keys = [judgement.claim.key for judgement in record.judgements]
    assert keys == ["entropy", "same"]
    assert set(experiment.full_only) | set(keys) == {claim.key for claim in experiment.claims}
    gains = [row for row in record.of("") if row.quantity == "gain in accuracy"]
    assert len(gains) == 5  # shown, not judged
    assert all(row.error > 0 for row in gains)


def both_laws_answer_the_same_strings(record: Record) -> None:
    rows = record.of("order")
    for row in rows:
        assert abs(row.measured) * 64 == pytest.approx(round(abs(row.measured) * 64))
        # of a difference of answers to the same strings, not of a bare number
        assert row.error > 0 or abs(row.measured) in (0, 1)


def ssmax_gives_the_weights_of_its_paper(record: Record) -> None:
    assert measured(record, "softmax", n=1000)[0] == pytest.approx(0.129, abs=5e-4)
    assert measured(record, "ssmax", n=1000)[0] == pytest.approx(0.9997, abs=1e-4)


def temperature_finds_the_published_range(record: Record) -> None:
    (row,) = record.of("limit", n=4096)
    assert row.measured == pytest.approx(0.4745, abs=5e-5)
    (share,) = record.of("share")
    assert share.measured == pytest.approx(0.2055, abs=2e-4)


def entropy_at_finite_n_agrees_everywhere(record: Record) -> None:
    assert all(row.agrees for row in record.of("entropy"))
    assert len(record.of("entropy")) == 36


#: What is asked of every record, and of single ones.
EVERY: tuple[Check, ...] = (
    verdicts_are_those_stated_beforehand,
    a_wrong_prediction_changes_every_verdict,
    no_theorem_is_left_to_chance,
    the_error_of_every_mean_can_be_judged,
    figures_are_whole_and_titled,
)
ALSO: dict[str, tuple[Check, ...]] = {
    "invariance": (
        a_scale_is_measured_well_enough_to_tell_5_per_cent,
        entropy_under_log_n_drifts_as_computed_elsewhere,
    ),
    "gap_law": (
        a_growth_that_is_wrong_is_told_whatever_the_seed,
        gap_counts_are_those_of_a_plain_loop,
    ),
    "mlm_table": (what_little_training_cannot_decide_is_tested_at_full_size_only,),
    "first": (both_laws_answer_the_same_strings,),
    "ssmax": (ssmax_gives_the_weights_of_its_paper,),
    "temperature": (temperature_finds_the_published_range,),
    "finite_n": (entropy_at_finite_n_agrees_everywhere,),
}


@by_name
def test_an_experiment_at_its_quick_size(name: str) -> None:
    record = run_one(EXPERIMENTS[name], quick=True)  # once: some take ten seconds
    for check in (*EVERY, *ALSO.get(name, ())):
        check(record)


def test_noise_of_a_heavy_tail_agrees_with_its_integral_whatever_the_seed() -> None:
    # the mean of as many plain samples has a skewness of up to 0.44
    n, b = 1024, 2 / 3
    for seed in range(5):
        run = Run("noise", quick=True, seed=seed)
        value = run.normal(n, 16)
        found = noise.output_error(
            run, torch.zeros(n, dtype=torch.float64), value, "laplace", b, 2000
        )
        exact = theory.exact_noise_mse(np.full(n, 1 / n), value.numpy(), "laplace", b)
        assert abs(found.value - exact) < 4 * found.error, seed
        assert abs(found.skewness) < 0.35


def test_a_collision_that_few_rows_carry_agrees_with_its_integral_whatever_the_seed() -> None:
    # the mean of as many plain rows has a skewness of 0.4 and an error of 6 per cent
    exact = float(theory.expected_collision_gauss(4096, 2.0))
    for seed in range(3):
        (found,) = gaussian_collision(Run("", quick=True, seed=seed), 4096, 500, [2.0])
        assert abs(found.value - exact) < 4 * found.error, seed
        assert found.error < 0.02 * exact
        assert abs(found.skewness) < 0.2


class Tiny(Run):
    """The full set of rows, of models that were hardly trained."""

    def size(self, quick: int, full: int) -> int:
        return 2


@pytest.mark.slow
def test_at_full_size_every_claim_has_its_rows() -> None:
    experiment = EXPERIMENTS["mlm_table"]
    rows = list(experiment.measure(Tiny("mlm_table", quick=False)))
    assert {row.claim for row in rows} - {""} == {claim.key for claim in experiment.claims}
    gains = {
        (row.condition["seed"], row.condition["n"]): row.measured
        for row in rows
        if row.quantity == "gain in accuracy"
    }
    for row in rows:
        if row.claim == "equal":  # its sign is in the other row
            assert row.measured == pytest.approx(abs(gains[row.condition["seed"], 64]))
        if row.claim in ("above", "most"):
            of = [gain for (_, n), gain in gains.items() if n == row.condition["n"]]
            mean = sum(of) / 2
            share = sum(gain > 0 for gain in of) / 2
            assert row.measured == pytest.approx(mean if row.claim == "above" else share)
        if row.claim == "above":  # two trainings: half their distance
            assert row.error == pytest.approx(abs(of[0] - of[1]) / 2)


def test_figures_are_written_light_and_dark(tmp_path: Path) -> None:
    record = run_one(EXPERIMENTS["ssmax"], quick=True)
    paths = draw(EXPERIMENTS["ssmax"], record, tmp_path)
    assert [path.name for path in paths] == [
        "ssmax.png", "ssmax.svg", "ssmax-dark.png", "ssmax-dark.svg",
    ]  # fmt: skip
    for path in (paths[1], paths[3]):
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 20
    pictures = []
    for path in paths[::2]:
        with Image.open(path) as picture:
            pictures.append(np.asarray(picture.convert("L"), float))
    light, dark = pictures
    assert light.shape == dark.shape
    assert light[0, 0] > 250
    assert dark[0, 0] < 30
    assert light.std() > 10
    assert dark.std() > 10
    before = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    assert [path.read_bytes() for path in draw(EXPERIMENTS["ssmax"], record, tmp_path)] == before


def test_numbers_differ_by_seed_and_not_otherwise() -> None:
    one, again, other = (run_one(EXPERIMENTS["homogeneous"], quick=True, seed=s) for s in (0, 0, 1))
    assert replace(one, seconds=0.0) == replace(again, seconds=0.0)
    assert one.rows != other.rows
    assert other.as_expected
