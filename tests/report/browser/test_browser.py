"""The HTML report in a real browser: read, pointed at, clicked, typed into, printed."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import acutance
from acutance.probing import HeadSummary, Moments
from acutance.report.html_page.write import Report
from acutance.rowstats import METRICS
from acutance.summary.cells import Parts
from acutance.summary.readouts.by_octave import Profile
from acutance.summary.readouts.distances import Distances
from acutance.summary.readouts.examples import Examples
from tests.report.test_page import large

Make = Callable[..., HeadSummary]
Show = Callable[..., Any]  # a page of conftest.py
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)><!--"


def with_structure(summary: HeadSummary, words: list[str]) -> HeadSummary:
    """The summary with a made-up course over n, distances and rows of text."""
    heads, metrics = summary.moments.count.shape
    none = Profile.none(heads, metrics, 5)
    profile = dataclasses.replace(
        none,
        rows=none.rows + 8,
        count=none.count + 8,
        groups=none.groups + 4,
        log_n=torch.arange(5.0, dtype=torch.float64).expand(heads, 5) * math.log(2.0),
        mean=torch.rand(heads, metrics, 5, dtype=torch.float64) + 1.0,
        between=none.between + 1.0,
    )
    mass = torch.full((heads, 2, 4), 0.125, dtype=torch.float64)
    tokens = torch.arange(len(words))
    weights = torch.full((len(words),), 0.25 / (len(words) - 1), dtype=torch.float64)
    weights[1] = 0.75
    examples = Examples.none(heads, 1)
    for head in range(heads):
        examples.put(
            (head, 0), information=1.5, entropy=0.5, position=3, n_keys=len(words),
            weights=weights, tokens=tokens, last=len(words) - 1,
        )  # fmt: skip
    examples = dataclasses.replace(examples, words=dict(enumerate(words)))
    even = Distances.none(heads, 4)
    distances = dataclasses.replace(even, rows=even.rows + 40, mass=mass, even=mass.clone())
    beside = Parts(profile=profile, distances=distances, examples=examples)
    return dataclasses.replace(summary, optional_parts=beside)


def test_the_page_says_what_it_shows(summary_of: Make, show: Show) -> None:
    page = show(summary_of((3, 2), about={"model": "small model", "text": "prose"}))
    assert page.text("h1") == "small model"
    assert page.run("document.title") == "small model · attention report"
    lead = page.text("#lead")
    assert all(word in lead for word in ("sum to 100%", "sharp", "diffuse", "nats", "entropy"))
    assert page.text("#tiles").split("\n")[:3] == [
        "Measured",
        "5 heads",
        "2 layers, 40 rows (query tokens) each",
    ]
    assert "2 of 2 layers" in page.text("#tiles")
    assert page.text("#low") == "sharp: all on one token"
    assert page.run("document.querySelectorAll('#map .head').length") == 5
    assert page.run("document.querySelector('#map .head').getAttribute('aria-label')").startswith(
        "layer 0, head 0: 0.6"
    )
    assert page.text("#unread").endswith("None: every captured attention call could be read.")
    assert page.text("#not-provided") == ""


def test_hostile_strings_are_text(summary_of: Make, show: Show) -> None:
    words = ["[CLS]", HOSTILE, "a\u202eb", "\ud800", "\u2028", "]]>"]
    summary = summary_of(
        (3, 2),
        about={"model": HOSTILE, HOSTILE: ["prose", HOSTILE]},
        layer={1: {"module": HOSTILE, "source": HOSTILE}},
        unread=[HOSTILE, "\udc80\u202e"],
        not_provided=[HOSTILE],
    )
    page = show(with_structure(summary, words), "#L1H1")
    assert page.text("h1") == HOSTILE
    assert page.run("document.title") == f"{HOSTILE} · attention report"
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert HOSTILE in page.text("#samples")
    assert "a\\u202eb \\ud800 \\u2028 ]]>" in page.text("#samples .context")
    assert page.text("#samples .attended li").startswith(HOSTILE)
    assert HOSTILE in page.text("#head-where")
    assert page.text("#unread li:nth-child(2)") == "\\udc80\\u202e"
    assert page.text("#not-provided h3").startswith("Attention left to the model")
    assert page.text("#not-provided li") == HOSTILE
    assert HOSTILE in page.text("#layers")
    assert HOSTILE in page.text("#about")


def test_an_address_opens_a_head_and_a_metric(summary_of: Make, show: Show) -> None:
    page = show(summary_of((2, 3)), "#L1H2:entropy")
    assert page.text("#head-name") == "Layer 1 · head 2"
    assert page.text("#meaning").startswith("Shannon entropy of the weights.")
    assert page.run("document.querySelector('[aria-selected=true]').ariaLabel").startswith(
        "layer 1, head 2: "
    )
    page.run("location.hash = '#L0H1'")
    page.until("document.getElementById('head-name').textContent === 'Layer 0 · head 1'")
    page.run("location.hash = '#L7H9'")
    assert page.text("#head-name") == "Layer 0 · head 1"


def test_pointing_clicking_and_choosing(summary_of: Make, show: Show) -> None:
    page = show(summary_of((3, 2), normalized_entropy={(1, 0): 0.07}))
    assert page.text("#head-name") == "Layer 1 · head 0"  # the sharpest is open at first
    page.move(".head[data-at='1']")
    assert page.run("getComputedStyle(document.getElementById('tip')).visibility") == "visible"
    assert page.text("#tip strong") == "Layer 0 · head 1"
    assert "40 rows · verified" in page.text("#tip")
    page.click(".head[data-at='1']")
    assert page.text("#head-name") == "Layer 0 · head 1"
    assert page.run("location.hash") == "#L0H1"
    assert "Layer 0 · head 1 opened" in page.text("#say")
    page.choose("max logit")
    assert page.text("#layers-title") == "Max logit, layer by layer"
    assert page.text("#histogram-title") == "Max logit over rows"
    assert page.run("location.hash") == "#L0H1:max_logit"
    page.click("#next")
    assert page.text("#head-name") == "Layer 0 · head 2"
    for chart in ("histogram", "layer-plot", "theory-plot"):
        assert page.run(f"document.querySelector('#{chart} svg').getAttribute('aria-label')")


def test_a_head_is_drawn_with_its_prediction(show: Show) -> None:
    model = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    with torch.no_grad(), acutance.probe(model) as probe:
        mask = nn.Transformer.generate_square_subsequent_mask(200)
        model(*[4 * torch.randn(2, 200, 32)] * 3, attn_mask=mask, is_causal=True)
    heads = probe.summary().predict()
    page = show(probe.summary(), "#L0H1:entropy")
    label = page.run("document.querySelector('#range svg').getAttribute('aria-label')")
    measured, predicted, _ = (float(word) for word in re.findall(r"[0-9.]+[0-9]", label))
    assert measured == pytest.approx(float(heads.measured["entropy"][1]), rel=1e-3)
    assert predicted == pytest.approx(float(heads.predicted["entropy"][1]), rel=1e-3)
    assert "These numbers describe the head well." in page.text("#range-note")
    assert "Line without points: predicted." in page.text("#profile-note")
    assert "Not predicted" not in page.text("#theory-note")


def test_a_head_that_one_key_dominates_is_said_to_have_no_prediction(show: Show) -> None:
    query, key, value = torch.randn(3, 1, 4, 64, 16)
    query[:, 3], key[:, 3, :, 0], query[:, 3, :, 0], key[:, 3, 5, 0] = 0, 0, 1, 60

    class Fixed(nn.Module):
        def forward(self) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(query, key, value)

    model = Fixed()
    with acutance.probe(model) as probe:
        model()
    page = show(probe.summary(), "#L0H3:entropy")
    assert "Not predicted: 1 head in which a few tokens" in page.text("#theory-note")
    assert "for this head: a few tokens beyond the first dominate" in page.text("#range-note")


@pytest.mark.slow
def test_five_thousand_heads_are_drawn_in_two_seconds(show: Show) -> None:
    summary, times = large(80, 64), []
    for _ in range(3):
        page = show(summary)
        drawn = {
            one["name"]: one["value"] for one in page.send("Performance.getMetrics")["metrics"]
        }
        times.append(drawn["TaskDuration"])
    assert min(times) < 2.0, times  # seconds that the page's thread was busy
    assert page.run("document.querySelectorAll('.head').length") > 0


def test_a_dot_of_a_chart_opens_its_head(summary_of: Make, show: Show) -> None:
    page = show(summary_of((3, 2)), "#L0H0")
    dot = "#theory-plot [aria-label=dot] circle:nth-of-type(4)"
    page.move(dot)
    tip = "document.querySelector('#theory-plot [aria-label=tip]').textContent"
    page.until(f"{tip}.includes('Layer 1 · head 0')")
    page.click(dot)
    assert page.text("#head-name") == "Layer 1 · head 0"


def test_rows_of_unknown_tokens_say_what_is_known(summary_of: Make, show: Show) -> None:
    summary = with_structure(summary_of((2,)), ["the", "cat", "sat", "here"])
    assert summary.examples is not None
    none = {name: torch.full_like(getattr(summary.examples, name), -1) for name in (
        "position", "query", "tokens", "context",
    )}  # fmt: skip
    examples = dataclasses.replace(summary.examples, **none)
    beside = Parts(summary.optional_parts, examples=examples)
    page = show(dataclasses.replace(summary, optional_parts=beside), "#L0H1")
    assert page.text("#samples p") == "A query: entropy 0.50 nats over 4 tokens"
    assert page.text("#samples .attended li").replace("\n", " ") == "token 75% · position 1"
    assert page.run("document.querySelectorAll('#samples .context').length") == 0


def test_classes_and_recommendations_are_shown(summary_of: Make, show: Show) -> None:
    page = show(summary_of((3, 2), first_weight={(0, 1): 0.8}), "#L0H1")
    assert "sink" in page.text("#head-words").split()
    assert "Large weight on the first token." in page.text("#head-words .advice")
    assert page.text("#head-words").count("80%") == 1  # each thing once
    assert "of its weight on the first visible key" in page.text("#head-words")
    assert "LAYER.HEAD" not in page.text("#head-words")
    assert page.text("#findings .urgent h3") == "Large weight on the first token"
    page.click("#next")
    page.click("#findings .urgent button")
    assert page.text("#head-name") == "Layer 0 · head 1"
    page.click("#classes button")
    assert page.text("#classes [aria-pressed=true]") == "sink 1"
    assert page.run("document.querySelectorAll('#table tbody tr').length") == 1
    page.click("#classes button")
    assert page.run("document.querySelectorAll('#table tbody tr').length") == 5


def test_every_control_is_named_and_shows_its_focus(summary_of: Make, show: Show) -> None:
    page = show(summary_of((3, 2), first_weight={(0, 1): 0.8}))
    names = page.run(
        """[...document.querySelectorAll("button, select, input, summary, [tabindex='0']")]
        .filter((one) => one.offsetParent).map((one) => one.ariaLabel || one.textContent.trim()
        || (one.labels && one.labels[0] && one.labels[0].textContent.trim()) || "")"""
    )
    assert len(names) >= 30
    assert all(names)
    seen = []
    for _ in range(14):
        page.key("Tab")
        style = page.run(
            "(() => { const one = document.activeElement, shown = getComputedStyle(one);"
            " return [shown.outlineStyle, shown.outlineWidth, one.matches('.head')]; })()"
        )
        assert style[0] != "none"
        assert style[1] != "0px"
        seen.append(style[2])
    assert seen.count(True) == 1  # the map is one stop; arrows go on from there
    levels = page.run(
        "[...document.querySelectorAll('h1, h2, h3, h4')].filter((one) => one.offsetParent)"
        ".map((one) => +one.tagName[1])"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_cache_plan_is_on_the_map_and_in_the_panel(
    summary_of: Make, show: Show, cache_plan: dict[str, Any]
) -> None:
    page = show(summary_of((4, 2)), "#L0H1", plan=cache_plan)
    assert page.run("document.getElementById('metric').selectedOptions[0].text") == "kept share"
    labels = page.run("[...document.querySelectorAll('#map .head')].map((one) => one.ariaLabel)")
    assert labels[1].startswith("layer 0, head 1: 0.125")
    assert labels[1].endswith("keeps 4 first and \\x1b")
    assert "keeps" not in labels[5]
    said = page.text("#plan-words")
    assert said.startswith("Key head 0 (query heads 0 to 1) keeps 4 first and \\x1b: 13% of its")
    assert said.endswith("Expected cost: +0.030 nat a token.")
    chosen = "document.querySelector('#plan-options tr.now')"
    assert page.run(f"{chosen}.ariaLabel") == "4 first and \\x1b, the plan's choice"
    assert page.run("[...document.querySelectorAll('.tiles dd.big')].pop().textContent") == (
        "56% of the bytes"
    )
    page.move("#map .head:nth-of-type(2)")
    page.until("document.getElementById('tip').style.visibility === 'visible'")
    assert "Cache plan: keeps 4 first" in page.text("#tip")
    page.choose("cost to shrink, nat")
    assert page.run("document.querySelector('#map .head').textContent") == "0.03"
    page.run("location.hash = '#L1H0'")
    page.until("document.getElementById('plan-part').hidden")


def test_keys_move_through_the_map(summary_of: Make, show: Show) -> None:
    page = show(summary_of((3, 2)), "#L1H1")
    page.run("document.querySelector('[aria-selected=true]').focus()")
    at = "document.activeElement.dataset.at"
    for key, place in [
        ("ArrowUp", "1"),
        ("ArrowRight", "2"),
        ("ArrowDown", "4"),
        ("Home", "3"),
        ("End", "4"),
    ]:
        page.key(key)
        assert page.run(at) == place, key
    assert page.run("document.querySelectorAll('#map [tabindex=\"0\"]').length") == 1
    page.key("ArrowLeft")
    page.key("Enter")
    assert page.text("#head-name") == "Layer 1 · head 0"
    page.key("ArrowUp")
    page.key(" ")
    assert page.text("#head-name") == "Layer 0 · head 0"
    page.key("Escape")
    assert page.run("document.getElementById('tip').style.visibility") == "hidden"


def test_the_table_sorts_and_the_filter_filters(summary_of: Make, show: Show) -> None:
    summary = summary_of((3, 2), normalized_entropy={(1, 0): 0.07, (0, 2): math.nan})
    page = show(summary)
    first = "#table tbody tr:first-child th"
    assert page.text(first) == "L0H0"
    page.click("#table thead th:nth-child(2) button")
    assert page.text(first) == "L1H0"
    assert (
        page.run("document.querySelector('#table th[aria-sort=ascending]').textContent")
        == "normalized entropy ↑"
    )
    assert page.text("#table tbody tr:last-child th") == "L0H2"  # no number comes last, either way
    page.click("#table thead th:nth-child(2) button")
    assert page.text("#table tbody tr:last-child th") == "L0H2"
    page.run("document.getElementById('filter').focus()")
    for letter in "l0 max_logit>1":
        page.key(letter, letter)
    assert page.text("#filter-hint") == "3 heads found."
    assert page.run("document.querySelectorAll('#map .out').length") == 2
    assert page.run("document.querySelectorAll('#table tbody tr').length") == 3
    for letter in " nosuch<1":
        page.key(letter, letter)
    assert page.text("#filter-hint") == "There is no metric named nosuch. 3 heads found."


@pytest.mark.parametrize(
    ("typed", "hint", "heads"),
    [
        ("entropy<1", "1 head found.", ["L0H2"]),
        ("entropy < 1", "1 head found.", ["L0H2"]),
        ("effective keys>300", "1 head found.", ["L1H0"]),
        ("Effective Keys > 300", "1 head found.", ["L1H0"]),
        ("effective_keys >= 300 L1", "1 head found.", ["L1H0"]),
        ("layer 1 effective keys > 300", "1 head found.", ["L1H0"]),
        ("layer 1 head 1", "1 head found.", ["L1H1"]),
        ("max logit < 3", "1 head found.", ["L1H1"]),
        ("max<3", "1 head found.", ["L1H1"]),
        ("0.1 < entropy ≤ 1", "1 head found.", ["L0H2"]),
        ("entropy > 1 effective keys < 300 l1", "1 head found.", ["L1H1"]),
        ("entropy, nat < 1", "1 head found.", ["L0H2"]),
        ("verified", "5 heads found.", None),
        ("entropy", "Give entropy a bound, such as entropy > 1.", None),
        ("sharpness", "No module, status or class contains “sharpness”.", None),
        ("< 3", "“<3” needs a metric before it.", None),
        ("entropy <", "Give entropy a bound, such as entropy > 1. “<” is not a valid bound: write "
         "a metric, < or >, and a number.", None),
        ("tokens > 300", "There is no metric named tokens.", None),
    ],
)  # fmt: skip
def test_the_find_box_takes_names_and_labels_with_spaces(
    summary_of: Make, show: Show, typed: str, hint: str, heads: list[str] | None
) -> None:
    summary = summary_of(
        (3, 2), entropy={(0, 2): 0.21}, effective_keys={(1, 0): 400.0}, max_logit={(1, 1): 2.0}
    )
    page = show(summary)
    page.run(
        f"(() => {{ const box = document.getElementById('filter'); box.value = {typed!r};"
        " box.dispatchEvent(new Event('input')); })()"
    )
    assert page.text("#filter-hint") == hint
    shown = page.run(
        "[...document.querySelectorAll('#table tbody th')].map((one) => one.innerText)"
    )
    assert shown == (heads or ["L0H0", "L0H1", "L0H2", "L1H0", "L1H1"])


def test_what_must_be_known_first_stands_first(summary_of: Make, show: Show) -> None:
    about = {"complete": False, "windows": 28, "windows_in_all": 1092, "untrained": True}
    page = show(summary_of((3, 2), about=about))
    incomplete, untrained = page.text("#notices").split("\n\n")
    assert incomplete.startswith("Incomplete: 28 of 1,092 windows were read")
    assert untrained.startswith("Untrained: ")
    top = "document.querySelector('#notices p').getBoundingClientRect().top"
    assert page.run(top) < page.run("document.querySelector('h1').getBoundingClientRect().top")


def test_structure_is_drawn(summary_of: Make, show: Show) -> None:
    page = show(with_structure(summary_of((3, 2)), ["the", "cat", "sat", "here"]), "#L0H1:entropy")
    assert page.text("#profile-title") == "Entropy against visible tokens"
    named = page.run("document.querySelector('#profile svg').getAttribute('aria-label')")
    assert named == "Layer 0 · head 1: entropy against tokens the row can see, n"
    assert page.run("document.querySelectorAll('#profile [aria-label=dot] circle').length") == 5
    assert page.run("document.querySelectorAll('#distances [aria-label=rect] rect').length") == 7
    assert page.text("#samples .query") == "here"
    assert page.text("#profile-note").endswith("standard error between sequences.")
    page.move("#distances svg")
    tip = "document.querySelector('#distances [aria-label=tip]').textContent"
    page.until(f"{tip}.includes('of the weight')")
    assert page.text("#samples .attended li").replace("\n", " ") == "cat 75% · position 1"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1440])
def test_it_fits_the_window_and_is_readable(
    summary_of: Make, show: Show, width: int, dark: bool
) -> None:
    page = show(summary_of((12,) * 6), width=width, dark=dark)
    root = "document.documentElement"
    assert page.run(f"[innerWidth, {root}.scrollWidth - {root}.clientWidth]") == [width, 0]
    shade = "getComputedStyle(document.body)"
    ink, paper = (
        [int(part) for part in page.run(f"{shade}.{name}.match(/\\d+/g).slice(0, 3)")]
        for name in ("color", "backgroundColor")
    )
    assert (sum(ink) > sum(paper)) is dark

    def luminance(colour: list[int]) -> float:
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(ink), luminance(paper)))
    assert (high + 0.05) / (low + 0.05) > 7.0  # WCAG AAA
    wide = page.run(
        "[...document.querySelectorAll('.plot svg')]"
        ".every((one) => one.getBoundingClientRect().right <= innerWidth)"
    )
    assert wide is True


def test_long_lists_of_heads_break(summary_of: Make, show: Show) -> None:
    every = {(layer, head): 0.5 for layer in range(2) for head in range(0, 64, 2)}
    page = show(summary_of((64, 64), first_weight=every), width=390)
    assert page.text("#findings .places button").count(",") == 31
    root = "document.documentElement"
    assert page.run(f"{root}.scrollWidth - {root}.clientWidth") == 0


def test_tokens_that_bring_their_blanks_are_set_as_they_stand(summary_of: Make, show: Show) -> None:
    pieces = ["Th", "e", " ", "cat", " sat"]
    page = show(with_structure(summary_of((2,)), pieces), "#L0H0:entropy_slope")
    assert page.text("#samples .context") == "The cat sat"
    listed = page.run("[...document.querySelectorAll('#samples code')].map((one) => one.innerText)")
    assert listed[:2] == ["cat", "e"]  # the query, the most attended
    assert "␣" in listed
    words = show(with_structure(summary_of((2,)), ["the", "cat", "##s"]), "#L0H0")
    assert words.text("#samples .context") == "the cat##s"


def test_nothing_is_minus_zero(summary_of: Make, show: Show) -> None:
    page = show(summary_of((1,), entropy_slope={(0, 0): -0.0}))
    page.run("document.getElementById('numbers-part').open = true")
    assert "−0" not in page.text("#head-numbers").split()


def test_it_prints_light_and_whole(summary_of: Make, show: Show) -> None:
    page = show(summary_of((3, 2)), dark=True)
    page.send("Emulation.setEmulatedMedia", media="print")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("getComputedStyle(document.getElementById('head')).position") == "static"
    page.send(
        "Emulation.setDeviceMetricsOverride",
        width=760, height=1000, deviceScaleFactor=1, mobile=False,
    )  # fmt: skip
    assert page.run("document.documentElement.scrollWidth") <= 760
    pdf = base64.b64decode(page.send("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000
    assert page.run("document.getElementById('numbers-part').open") is True


def test_heads_of_mixed_layers_keep_their_numbers(summary_of: Make, show: Show) -> None:
    summary = summary_of(
        (2, 4, 1),
        layer={0: {"module": "decoder.0.cross_attn", "chosen": (1, 7)}, 2: {"status": "mismatch"}},
    )
    page = show(summary, "#L0H7")
    assert page.text("#head-name") == "Layer 0 · head 7"
    assert page.text("#head-where").startswith("decoder.0.cross_attn (cross-attention) · ")
    assert page.text("#modules").split("\n") == [
        "layer 0: decoder.0.cross_attn (cross-attention)", "layers 1–2: model.layers.*.attn",
    ]  # fmt: skip
    heads = page.run("[...document.querySelectorAll('#map thead th')].map((one) => one.innerText)")
    assert heads == ["layer", "0", "1", "2", "3", "7", "mean"]
    page.run("document.querySelector('[aria-selected=true]').focus()")
    page.key("ArrowDown")
    assert page.run("document.activeElement.ariaLabel").startswith("layer 1, head 3: ")
    assert "1 layer did not verify" in page.text("#alarm")


def test_one_head_and_none(summary_of: Make, show: Show) -> None:
    assert show(summary_of((1,))).text("#head-name") == "Layer 0 · head 0"
    nothing = HeadSummary((), tuple(METRICS), Moments.none(0, len(METRICS)))
    page = show(nothing)
    assert "No findings" in page.text("#findings")
    few = show(summary_of((2,), metrics=("max_logit", "lse")))
    assert few.text("#range-note").startswith("No prediction for this head. A prediction needs")


def test_a_notebook_shows_the_page_in_a_frame_of_its_own(
    summary_of: Make, blank: Any, tmp_path: Path
) -> None:
    shown = Report.of(summary_of((3, 2), about={"model": HOSTILE}))._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><title>notebook</title><p>cell</p>{shown}", encoding="utf-8")
    page = blank
    page.send("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)
    page.send("Page.navigate", url=path.as_uri())
    page.until("document.querySelector('iframe') !== null")

    def frames() -> list[str]:
        """Sessions of frames that the browser keeps apart from the page, as it does this one."""
        page.run("1")
        attached = [
            one for one in page.browser.events if one["method"] == "Target.attachedToTarget"
        ]
        return [one["params"]["sessionId"] for one in attached]

    end = time.monotonic() + 30
    while not frames():
        assert time.monotonic() < end, "the frame is in the page's own process"
        time.sleep(0.05)
    (frame,) = frames()
    for domain in ("Runtime", "Log"):
        page.browser.send(f"{domain}.enable", frame)

    def inside(script: str) -> Any:
        answer = page.browser.send("Runtime.evaluate", frame, expression=script, returnByValue=True)
        return answer["result"].get("value")

    while inside("document.documentElement?.dataset.ready") != "yes":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert inside("document.querySelector('h1').textContent") == HOSTILE
    assert page.run("document.title") == "notebook"
