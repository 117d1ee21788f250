"""The terminal table: every number at every width, with colour and without."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from acutance.probing import HeadSummary, Moments
from acutance.report import console_table
from acutance.rowstats import METRICS

Make = Callable[..., HeadSummary]
CELL = re.compile(r"\d\.\d\d")


def printed(summary: HeadSummary, width: int, colour: str | None = None, **options: object) -> str:
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=colour is not None, color_system=colour, **options
    )
    console.print(console_table(summary))
    return file.getvalue()


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if "│" in line][1:]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_twelve_heads_stand_side_by_side(summary_of: Make, width: int) -> None:
    summary = summary_of((12,) * 6, normalized_entropy={(3, 7): 0.07})
    text = printed(summary, width)
    assert max(map(len, text.splitlines())) <= width
    assert len(rows(text)) == 6
    for line in rows(text):
        assert len(CELL.findall(line)) == 13  # twelve heads and their mean
    assert CELL.findall(rows(text)[3])[7] == "0.07"
    assert "normalized entropy" in text.splitlines()[0]
    assert "sharp" in text.splitlines()[1]


def test_without_colour_nothing_but_text_is_written(summary_of: Make) -> None:
    for options in ({}, {"no_color": True}):
        assert "\x1b" not in printed(summary_of(), 80, **options)


def test_no_color_keeps_the_numbers(summary_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(summary_of((2,)), 80, "truecolor")
    assert not re.search(r"\x1b\[[^m]*[34]8;", text)
    assert len(CELL.findall(text.splitlines()[4])) == 3


def test_colour_is_used_where_the_terminal_has_enough_of_it(summary_of: Make) -> None:
    # rich keeps the codes of a style from its first use, so either may show here
    for colour in ("truecolor", "256"):
        assert re.search(r"48;[25];", printed(summary_of(), 80, colour))
    assert not re.search(r"\x1b\[[^m]*4\d", printed(summary_of(), 80, "standard"))


def test_heads_that_do_not_fit_fold_in_equal_parts(summary_of: Make) -> None:
    text = printed(summary_of((32,) * 3), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert len(rows(text)) == 12
    assert [re.findall(r"\d+–\d+", line)[0] for line in rows(text)[:4]] == [
        "0–7",
        "8–15",
        "16–23",
        "24–31",
    ]
    assert len(CELL.findall(text.replace("0.00  0.20  0.40  0.60  0.80  1.00", ""))) == 3 * 33


def test_a_large_model_gets_one_line_for_each_layer(summary_of: Make) -> None:
    summary = summary_of((64,) * 80, rows=2, normalized_entropy={(5, 9): 0.03, (5, 63): 0.99})
    text = printed(summary, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert len(rows(text)) == 80
    line = rows(text)[5]
    assert (CELL.findall(line)[0], CELL.findall(line)[4]) == ("0.03", "0.99")
    assert re.findall(r"h\d+", line) == ["h9", "h63"]
    assert len(rows(printed(summary, 500))) == 80
    assert len(CELL.findall(rows(printed(summary, 500))[0])) == 65


@pytest.mark.parametrize("width", [1, 8, 20, 39, 80, 200])
def test_any_width_and_ragged_layers_print(summary_of: Make, width: int) -> None:
    text = printed(summary_of((12, 4, 0, 33, 1)), width, "truecolor")
    assert re.sub(r"\x1b\[[^m]*m", "", text).strip()


def test_layers_keep_their_own_number_of_heads(summary_of: Make) -> None:
    lines = rows(printed(summary_of((3, 1, 0)), 80))
    assert [len(CELL.findall(line)) for line in lines] == [4, 2, 0]
    assert len({line.index("│") for line in lines}) == 1


def test_nan_is_a_dash_and_leaves_the_mean(summary_of: Make) -> None:
    line = rows(printed(summary_of((2,), normalized_entropy={(0, 0): math.nan, (0, 1): 0.5}), 80))
    assert line[0].split() == ["0", "–", "0.50", "│", "0.50"]


def test_another_metric_stands_in(summary_of: Make) -> None:
    summary = summary_of((2,), metrics=("entropy", "lse"))
    assert printed(summary, 80).startswith("mean entropy (nat) over rows, layer × head")
    large = summary_of((2,), metrics=("lse",), lse={(0, 0): 123456.0, (0, 1): -2e-5})
    assert rows(printed(large, 80))[0].split()[1:3] == ["1e5", "-2e-5"]


def test_what_was_left_out_and_how_far_to_trust_it(summary_of: Make) -> None:
    summary = summary_of(
        (1, 1, 1, 1),
        rows=1752,
        layer={
            0: {"padded": 371, "empty": 2},
            1: {"padded": 12, "status": "mismatch", "error": 0.25},
            3: {"status": "captured", "error": None},
        },
        unread=["decoder.0.cross: dropout is on"],
        not_provided=["decoder.1.self: of its own score"],
    )
    text = printed(summary, 200)
    assert "1,752 rows read per head; left out: 0 to 371 padded, 0 to 2 that see" in text
    assert "Verified (layers 0, 2): every call's output was recomputed" in text
    assert "Captured (layer 3): " in text
    assert "Mismatch (layer 1): the output recomputed from the captured arguments differs" in text
    assert "(relative difference 2.5e-01)" in text
    assert "layers 0–3: model.layers.*.attn" in text
    assert "could not be read:\n  – decoder.0.cross: dropout is on" in text
    assert "which acutance could not provide:\n  – decoder.1.self: of its own score" in text


@pytest.mark.parametrize("width", [40, 80])
def test_an_incomplete_run_says_so_first(summary_of: Make, width: int) -> None:
    about = {"complete": False, "windows": 28, "windows_in_all": 1092, "tokens": 14336}
    text = " ".join(printed(summary_of((2,), about=about), width).split())
    assert text.startswith("! Incomplete: 28 of 1,092 windows were read (14,336 tokens);")
    assert "Incomplete" not in printed(summary_of((2,)), width)


def test_heads_are_counted_by_class(summary_of: Make) -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    plain = dict.fromkeys(places, 0.4)
    spread = dict.fromkeys(places[1:3], 0.95)
    text = printed(
        summary_of((2, 2), normalized_entropy=spread, top_weight=plain | {(0, 0): 0.6}), 200
    )
    assert "Heads by class: diffuse 2, sharp 1." in text
    assert "by what they do" not in printed(summary_of((2, 2), top_weight=plain), 200)


def test_hostile_names_are_shown_and_drive_nothing(summary_of: Make) -> None:
    name = "a[bold]b[/bold]\x1b[31mred\x07\udc80"
    text = printed(summary_of((1, 1), layer={1: {"module": name}}, unread=[name]), 80)
    assert text.count(r"a[bold]b[/bold]\x1b[31mred\x07\udc80") == 3
    text.encode("utf-8")


def test_a_terminal_of_few_characters_gets_those(summary_of: Make) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    summary = summary_of((32, 2), normalized_entropy={(0, 0): math.nan}, unread=["größe: ∞"])
    Console(file=file, width=80).print(console_table(summary))
    file.flush()
    assert b"layer x head" in raw.getvalue()
    assert b"gr??e: inf" in raw.getvalue()


def test_a_summary_of_nothing_prints() -> None:
    nothing = HeadSummary((), tuple(METRICS), Moments.none(0, len(METRICS)))
    assert printed(nothing, 80).startswith("0 rows read")


def test_heads_that_were_chosen_keep_their_numbers(summary_of: Make) -> None:
    alike = summary_of((2, 2), layer={key: {"chosen": (3, 7)} for key in (0, 1)})
    text = printed(alike, 80)
    assert text.splitlines()[3].split() == ["layer", "h3", "h7", "│", "mean"]
    assert "Read in layers 0–1: heads 3, 7." in text
    mixed = printed(summary_of((2, 2), layer={1: {"chosen": (3, 7)}}), 80)
    assert mixed.splitlines()[3].split() == ["layer", "#0", "#1", "│", "mean"]
    assert "Read in layer 1: heads 3, 7." in mixed
    many = tuple(range(100, 164))
    large = summary_of((64,) * 80, rows=2, layer={key: {"chosen": many} for key in range(80)})
    assert set(re.findall(r"h\d+", rows(printed(large, 80))[0])) <= {f"h{head}" for head in many}


def test_a_star_in_a_name_is_not_a_number(summary_of: Make) -> None:
    summary = summary_of(
        (1, 1, 1), layer={0: {"module": "x*"}, 1: {"module": "x1"}, 2: {"module": "x2"}}
    )
    text = printed(summary, 200)
    assert "layer 0: x*\n" in text
    assert "layers 1–2: x*\n" in text
