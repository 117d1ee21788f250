"""The HTML report as text: self-contained, safe with any string, always the same, not too large."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch

from acutance.diagnose.sentences import METRIC_WORDS
from acutance.escapes import visible
from acutance.probing import HeadSummary, Layer, Moments, edges
from acutance.report import html
from acutance.report.html_page.packing import BUDGET, LEVELS, SOFT, encode
from acutance.report.html_page.write import SCRIPTS
from acutance.rowstats import METRICS
from acutance.structure import STRUCTURE
from acutance.summary.cells import Parts
from acutance.summary.readouts.by_octave import Profile
from acutance.summary.readouts.distances import Distances
from acutance.summary.readouts.moments import SCALES
from tests.contract.report.test_page import HOSTILE, Make, Page
from tests.page_data import decode, unpack


def data_of(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The page's record and its arrays."""
    return unpack(Page(text).scripts[0])


def numbers(record: dict[str, Any], arrays: dict[str, Any], name: str, part: str) -> Any:
    metric = next(one for one in record["metrics"] if one["name"] == name)
    return decode(arrays[f"{name}.{part}"], *metric["codes"][part], metric["soft"])


def test_every_element_the_scripts_ask_for_is_there(summary_of: Make) -> None:
    ids = {attributes.get("id") for _, attributes in Page(html(summary_of())).tags}
    own = "".join(own_script(name) for name in SCRIPTS)
    asked = set(re.findall(r'\$\("([\w-]+)"\)', own))
    assert len(asked) >= 40
    assert asked <= ids


def own_script(name: str) -> str:
    return (
        files("acutance.report.html_page")
        .joinpath("assets", f"{name}.js")
        .read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_never_makes_markup_of_text(name: str) -> None:
    banned = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|DOMParser"
    assert not re.search(banned + r"|</script|<!--", own_script(name))


def test_the_library_comes_with_its_licences() -> None:
    folder = files("acutance.report.html_page").joinpath("assets")
    code = folder.joinpath("plot.js").read_text(encoding="utf-8")
    licences = folder.joinpath("plot.txt").read_text(encoding="utf-8")
    comment, _, library = code.partition("*/\n")
    assert comment == f"/*!\n{licences}"  # they go wherever the code goes
    assert library.startswith("var Plot=")
    assert 2e5 < len(code) < 3e5
    assert "</script" not in code.lower()
    assert "<!--" not in code
    named = re.findall(r"^(\S+) \d+\.\d+\.\d+ \((\w+)\)", licences, re.MULTILINE)
    assert {"@observablehq/plot", "d3-scale", "isoformat"} <= {name for name, _ in named}
    assert {kind for _, kind in named} == {"ISC"}
    assert len(named) == 15
    assert "Permission to use, copy, modify" in licences


def test_hostile_strings_stay_inside_the_data(summary_of: Make) -> None:
    summary = summary_of(
        (1, 1),
        about={"model": HOSTILE, HOSTILE: HOSTILE, "shape": (1, 2), "nothing": None},
        layer={1: {"module": HOSTILE, "source": HOSTILE}},
        unread=[HOSTILE, "\udc80"],
        not_provided=["\u202e", HOSTILE],
    )
    text = html(summary)
    page = Page(text)
    assert page.open == []
    assert len(page.scripts) == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert "alert(" not in text
    assert re.fullmatch(r"[\w+/]+=*", page.scripts[0])
    shown = HOSTILE.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    record, _ = data_of(text)
    assert record["about"][:2] == [["model", shown], [shown, shown]]
    assert record["about"][2:] == [["shape", "1, 2"], ["nothing", "None"]]
    assert record["layers"][1]["module"] == record["layers"][1]["source"] == shown
    assert record["unread"] == [shown, "\\udc80"]
    assert record["not_provided"] == ["\\u202e", shown]
    text.encode("utf-8")


@pytest.mark.parametrize(
    "point", [0, 7, 0x1B, 0x85, 0x202E, 0x2066, 0x2028, 0xD800, 0xDFFF, 0xFEFF]
)
def test_what_cannot_be_seen_is_written_out(point: int) -> None:
    shown = visible(f"a{chr(point)}b")
    assert shown.isprintable()
    assert re.fullmatch(r"a\\(x[0-9a-f]{2}|u[0-9a-f]{4})b", shown)


def test_placeholders_in_the_data_are_data(summary_of: Make) -> None:
    record, _ = data_of(html(summary_of(about={"model": "{{data}} {{policy}}"})))
    assert record["about"] == [["model", "{{data}} {{policy}}"]]


def test_the_numbers_are_those_of_the_summary(summary_of: Make) -> None:
    summary = summary_of((3, 2), rows=50)
    record, arrays = data_of(html(summary))
    columns = summary.columns()
    assert [metric["name"] for metric in record["metrics"]] == list(METRICS)
    for column, metric in enumerate(record["metrics"]):
        name = metric["name"]
        for part in ("mean", "std", "min", "max"):
            read = numbers(record, arrays, name, part)
            assert read == pytest.approx(columns[f"{name}_{part}"], rel=2**-23)  # float32
        assert metric["layer"] == pytest.approx(
            [float(summary.layer(index).mean[0, column]) for index in range(2)], rel=1e-4
        )
        assert (metric["unit"], metric["meaning"]) == (METRICS[name].unit, METRICS[name].meaning)
        assert record["edges"][metric["kind"]] == pytest.approx(edges(name), rel=1e-5)


def test_what_key_lengths_do_is_on_the_page_where_it_was_measured(summary_of: Make) -> None:
    layers = [
        {"module": f"m<{i}>", "mean": share, "heads": [{}]} for i, share in ((0, 0.1), (1, 0.4))
    ]
    key_norms = {"tokens": 64, "is_causal": True, "mean": 0.25, "layers": layers}
    summary = summary_of()
    plain, _ = data_of(html(summary))
    record, _ = data_of(html(summary, key_norms))
    *same, added = record["findings"]
    assert same == plain["findings"]
    assert (added["label"], added["layer"], added["head"]) == ("Key lengths", None, None)
    assert added["sentence"].startswith("25% of the rows would have another top key")
    assert "10% to 40% by layer, most in m<1>; 2 heads, 64 tokens" in added["sentence"]


def test_sentences_of_a_saved_state_are_there_once(summary_of: Make) -> None:
    about = {"judged": ["log_n hurts.", "Leave the model as it is."]}
    saved = dataclasses.replace(summary_of(), about=about)
    record, _ = data_of(html(saved))
    assert record["judged"] == {"rows": [], "sentences": saved.about["judged"]}
    assert "judged" not in dict(record["about"])


def test_changes_that_the_loss_decided_on_are_a_table(summary_of: Make) -> None:
    law = {"name": f"off:{HOSTILE}", "reason": "why", "delta": 0.1, "error": 0.02}
    laws = [law | {"verdict": "hurts"}, law | {"error": None, "verdict": "no difference found"}]
    record, _ = data_of(html(summary_of(), None, {"laws": laws, "sentences": ["all\x1b"]}))
    assert "judged" not in dict(record["about"])
    first, second = record["judged"]["rows"]
    assert first == [visible(f"off:{HOSTILE}"), "why", "+0.1000 ± 0.0200", "hurts"]
    assert second[2:] == ["+0.1000", "no difference found"]
    assert record["judged"]["sentences"] == [visible("all\x1b")]
    for nothing in (None, {"laws": []}):
        assert data_of(html(summary_of(), None, nothing))[0]["judged"] is None


def test_a_cache_plan_is_a_metric_of_the_map_and_words_for_each_head(
    summary_of: Make, cache_plan: dict[str, Any]
) -> None:
    record, arrays = data_of(html(summary_of((4, 2)), plan=cache_plan))
    assert record["groups"][0] == "Cache plan"
    shown = record["plan"]
    assert shown["heads"] == [0, 0, 1, 1, None, None]
    assert shown["key_heads"][0]["keeps"] == visible("4 first and \x1b")
    assert shown["key_heads"][0]["options"][0] == [
        visible("4 first and \x1b"),
        0.125,
        0.01,
        0.02,
        True,
    ]
    kept = numbers(record, arrays, "kept_share", "mean")
    np.testing.assert_allclose(kept, [0.125, 0.125, 1.0, 1.0, np.nan, np.nan], atol=1e-4)
    cost = numbers(record, arrays, "cost_to_shrink", "mean")
    np.testing.assert_allclose(cost, [0.03, 0.03, -0.1, -0.1, np.nan, np.nan], atol=1e-4)
    described = {one["name"]: one for one in record["metrics"]}
    ends = [described["cost_to_shrink"][end] for end in ("low", "high")]
    assert ends == pytest.approx([-0.1, 0.03])
    assert described["kept_share"]["layer"] == [0.5625, None]
    plain, _ = data_of(html(summary_of((4, 2))))
    assert plain["plan"] is None
    assert "Cache plan" not in plain["groups"]
    without = cache_plan | {
        "costs_at": None,
        "key_heads": [one | {"cost": None, "options": []} for one in cache_plan["key_heads"]],
    }
    names = [one["name"] for one in data_of(html(summary_of((4, 2)), plan=without))[0]["metrics"]]
    assert "kept_share" in names
    assert "cost_to_shrink" not in names


def test_a_histogram_reads_back_to_its_resolution(summary_of: Make) -> None:
    summary = summary_of((2,), rows=500, varentropy={(0, 1): math.nan})
    record, arrays = data_of(html(summary))
    for column, metric in enumerate(record["metrics"]):
        heights = arrays[f"{metric['name']}.bars"].reshape(2, -1)
        for head in range(2):
            exact = summary.moments.histogram[head, column].numpy()
            rows, wide = exact.sum(), heights.shape[1]
            assert rows == (0 if (metric["name"], head) == ("varentropy", 1) else 500)
            peak = arrays[f"{metric['name']}.peak"][head] / 65535 * rows
            assert peak == pytest.approx(exact.max(), abs=rows / 65535)
            read = np.zeros(64)
            read[metric["first"] : metric["first"] + wide] = heights[head] / 255 * peak
            assert read == pytest.approx(exact, abs=peak / 255 + rows / 65535)
            assert ((read > 0) == (exact > 0)).all()


@pytest.mark.parametrize(("width", "steps"), [(1, 254), (2, 65534)])
def test_codes_are_within_half_a_step(width: int, steps: int) -> None:
    values = np.random.default_rng(0).normal(size=500) * np.logspace(-6, 5, 500)
    values[7] = math.nan
    for soft in SOFT.values():
        codes, low, high = encode(values, width, soft)
        bent, read = np.arcsinh(values / soft), np.arcsinh(decode(codes, low, high, soft) / soft)
        assert np.isnan(read[7])
        assert np.nanmax(np.abs(bent - read)) <= 0.5001 * (high - low) / steps


def test_nan_is_no_number_and_rows_that_did_not_count_are_told(summary_of: Make) -> None:
    record, arrays = data_of(html(summary_of((2,), entropy={(0, 0): math.nan})))
    metric = record["metrics"][1]
    assert metric["name"] == "entropy"
    for part in ("mean", "std", "min", "max"):
        assert np.isnan(numbers(record, arrays, "entropy", part)).tolist() == [True, False]
    assert metric["rows"] == [0, 40]
    mean = numbers(record, arrays, "entropy", "mean")
    assert metric["layer"] == [pytest.approx(mean[1], rel=1e-4)]


def test_a_summary_of_nothing_gives_a_page() -> None:
    nothing = HeadSummary((), tuple(METRICS), Moments.none(0, len(METRICS)))
    assert data_of(html(nothing))[0]["findings"] == []
    headless = HeadSummary((Layer("a", 0),), ("entropy",), Moments.none(0, 1))
    assert data_of(html(headless))[0]["metrics"][0]["layer"] == [None]


def large(layers: int, heads: int) -> HeadSummary:
    """A summary of noise, which no compression helps, with structure, distances and profiles."""
    names, places = (*METRICS, *STRUCTURE), layers * heads
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    values = draw(len(names), places, 1) + 0.4 * draw(len(names), places, 1) * draw(
        len(names), places, 60
    )
    for index, name in enumerate(names):
        values[index] = (
            values[index] * 4 if SCALES.get(name, "unit") != "unit" else values[index] / 2
        )
    values[names.index("n_keys")] = 512.0  # enough of them to put heads into classes
    none = Profile.none(places, len(names), 12)
    shape = (places, len(names), 12)
    profile = dataclasses.replace(none, count=none.count + 9, mean=draw(*shape), rows=none.rows + 9)
    apart = Distances.none(places, 12)
    distances = dataclasses.replace(
        apart, rows=apart.rows + 9, mass=draw(places, 2, 12) / 12, even=draw(places, 2, 12) / 12
    )
    return HeadSummary(
        tuple(Layer(f"model.layers.{i}.self_attn", heads, rows=60) for i in range(layers)),
        names,
        Moments.of(values, names),
        optional_parts=Parts(profile=profile, distances=distances),
    )


@pytest.mark.slow
def test_the_largest_model_stays_under_one_and_a_half_megabytes() -> None:
    summary = large(80, 64)
    text = html(summary)
    assert len(text.encode()) < 1.5e6
    record, arrays = data_of(text)
    assert len(Page(text).scripts[0]) <= BUDGET
    columns = summary.columns()
    for name in summary.metrics:  # every mean is there, to a step of 16 bits
        read = numbers(record, arrays, name, "mean")
        assert read == pytest.approx(columns[f"{name}_mean"], rel=1e-3, abs=1e-6)
    assert {"entropy", "gaussian_entropy", "normalized_entropy"} <= set(record["level"]["bars"])


def test_levels_get_coarser() -> None:
    sizes = [
        (level.mean, level.rest, -level.join, level.heights, level.distances) for level in LEVELS
    ]
    assert all(
        all(fine >= coarse for fine, coarse in zip(*pair, strict=True))
        for pair in itertools.pairwise(sizes)
    )


def test_every_number_has_words_for_its_ends() -> None:
    assert set(METRIC_WORDS) >= {*METRICS, *STRUCTURE}
    assert all(said.low != said.high for said in METRIC_WORDS.values())
