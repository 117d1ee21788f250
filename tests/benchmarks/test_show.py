"""What is made of a report: judgements, tables, Markdown, figures, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from acutance.from_json import SEAL
from benchmarks.__main__ import main, read
from benchmarks.cpu import figures, machine, page, render, runner
from benchmarks.cpu.cases import CASES, Case
from benchmarks.cpu.goals import judge
from benchmarks.cpu.records import (
    BenchReport,
    CaseResult,
    Check,
    Environment,
    Peak,
    Row,
    Settings,
    Spread,
)

PAGES = Path(__file__).parents[2] / "docs" / "_static"
Invoke = Callable[..., tuple[int, str, str]]
PLACE = Environment(
    "1.0", "2.13", "3.11", "Linux x86_64", "A processor", 2, "avx512", "GCC", "a mark",
    "2026-01-02T03:04:05+00:00", 0.25,
)  # fmt: skip


def spread(value: float) -> Spread:
    return Spread(value, value * 0.9, value * 1.1)


def timed(name: str, ratio: float, *, wall: float | None = None, ms: float = 100.0) -> Row:
    """A row whose CPU ratio is ``ratio``, and whose wall ratio is ``wall`` or the same."""
    wall = ratio if wall is None else wall
    return Row(
        name, "timed", "", (Check("output", 1e-7, 1e-6), Check("entropy", 2e-6, 1e-5)),
        spread(ms * wall), spread(ms * ratio), spread(wall), spread(ratio), 7, 2.0,
    )  # fmt: skip


def result(name: str, threads: int = 1, **ratios: float) -> CaseResult:
    case = CASES[name]
    rows = [
        timed(each, ratios.get(each.replace("-", "_"), 1.0))
        if each.replace("-", "_") in {"sdpa", *ratios}
        else Row(each, "not run", "left out")
        for each in case.contenders
    ]
    return CaseResult(case, threads, tuple(rows), complete=True)


def report(*results: CaseResult, cpu: str = "avx512", torch_cpu: str = "AVX512") -> BenchReport:
    peaks = (Peak(1, {"float32": 100.0}, 5.0), Peak(2, {"float32": 200.0}, 10.0))
    place = replace(PLACE, cpu=cpu, torch_cpu=torch_cpu)
    return BenchReport(Settings(7, True), place, peaks, results, complete=True)


@pytest.fixture
def example() -> BenchReport:
    return report(
        result("full-1024", acutance=0.84, acutance_avx2=0.98, blocked=1.5, naive=5.0),
        result("full-1024", 2, acutance=0.86, acutance_avx2=0.9, blocked=1.5),
        result("full-4096", acutance=0.8, acutance_avx2=0.97, blocked=1.4, naive=12.34),
        result("tiny-16-h1", acutance_unread=1.8, acutance=123.4),
        result("entropy-backward-causal-16384", statistics=0.4),
    )


def test_goals_are_judged_by_contender_threads_and_instruction_set(example: BenchReport) -> None:
    found = {(each.goal.name, each.case, each.threads): each.met for each in judge(example)}
    assert found == {
        ("forward-full", "full-1024", 1): True,
        ("blocked-1", "full-1024", 1): False,
        ("forward-full", "full-1024", 2): False,
        ("blocked-2", "full-1024", 2): True,
        ("forward-full", "full-4096", 1): True,
        ("blocked-1", "full-4096", 1): True,
        ("tiny", "tiny-16-h1", 1): False,
        ("entropy-backward", "entropy-backward-causal-16384", 1): True,
    }
    elsewhere = report(*example.results, cpu="avx2", torch_cpu="AVX2")
    found = {(each.goal.name, each.case, each.threads): each.met for each in judge(elsewhere)}
    assert ("forward-full", "full-1024", 1) not in found
    assert found["forward-avx2", "full-1024", 1] is False
    assert found["forward-avx2", "full-1024", 2] is True


def test_avx2_is_held_against_an_sdpa_of_avx2_only(example: BenchReport) -> None:
    """Whatever the native kernel was told to take: SDPA takes what the processor has."""
    for cpu, torch_cpu, decided in (
        ("avx2", "AVX2", True),
        ("avx2", "AVX512", False),
        ("avx512", "", False),  # a record from before it was kept
        ("avx2", "", True),
    ):
        named = {
            each.goal.name for each in judge(report(*example.results, cpu=cpu, torch_cpu=torch_cpu))
        }
        assert ("forward-avx2" in named) is decided, (cpu, torch_cpu)


def test_one_thread_is_judged_by_cpu_time_and_more_by_wall_time() -> None:
    case = replace(CASES["noise-full-1024"], name="noise-full-1024")
    rows = (timed("sdpa", 1.0), timed("noise", 1.2, wall=1.3))
    one, two = (CaseResult(case, threads, rows, True) for threads in (1, 2))
    assert [(each.value, each.met) for each in judge(report(one, two))] == [
        (1.2, True),
        (1.3, False),
    ]


def test_a_contender_without_a_number_meets_no_goal() -> None:
    case = CASES["noise-full-1024"]
    refused = CaseResult(case, 1, (timed("sdpa", 1.0), Row("noise", "failed", "wrong")), True)
    (judgement,) = judge(report(refused))
    assert (judgement.value, judgement.met) == (None, False)
    ((cells, met),) = render.summary([judgement])
    assert not met
    assert cells[2:5] == ("–", "none", "0 of 1")
    absent = CaseResult(case, 1, (timed("sdpa", 1.0), Row("noise", "not run", "absent")), True)
    assert judge(report(absent)) == []


def test_the_summary_has_best_worst_and_how_many(example: BenchReport) -> None:
    lines = {cells[0]: (cells[1:], met) for cells, met in render.summary(judge(example))}
    assert lines["output and every statistic, full, AVX-512"] == (
        ("≤ 0.85", "0.80", "0.86", "2 of 3", "full-1024, 2 threads"),
        False,
    )
    assert lines["backward of the entropy alone"][1]


def drawn(shown: object, width: int = 100) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def test_the_tables_fit_100_columns(example: BenchReport) -> None:
    text = drawn(render.table(example)) + drawn(render.goals(example))
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 100
    lines = text.splitlines()
    (line,) = [line for line in lines if line.startswith("acutance-unread") and "123" not in line
               and "1.80" in line]  # fmt: skip
    # 2 GFLOP in 180 ms; the floor is 20 ms and 256 exponentials
    assert line.split() == [
        "acutance-unread", "180", "1.80", "[1.62–1.98]", "≤", "1.50", "✗", "11", "11%", "9.00",
        "1e-07", "2e-06",
    ]  # fmt: skip
    assert any(line.startswith("flex") and line.split()[1:] == ["not", "run"] for line in lines)
    assert "full-1024, 2 threads: B=1 H=8 L=S=1024 E=64 float32" in lines
    assert "Goals are for AMD processors" in text


def test_a_report_cut_short_says_so(example: BenchReport) -> None:
    assert "INTERRUPTED" not in drawn(render.table(example))
    cut = replace(example, complete=False)
    assert "INTERRUPTED" in drawn(render.table(cut))
    assert "interrupted" in page.markdown(cut)


def test_the_markdown_holds_the_same_numbers(example: BenchReport) -> None:
    text = page.markdown(example)
    lines = text.splitlines()
    tables = re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE)
    assert len(tables) == 5  # goals, forward, tiny, backward, every way
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert (
        "| `full-1024` | `acutance` | 100 | 0.84 | 0.76–0.92 | 0.86 | 0.77–0.95 | ≤ 0.85 ✓✗ "
        "| 24 | 24% | 3.87 |"
    ) in lines
    assert "| `naive` | 5.00 | 12.3 |  | 2e-06 nat |" in lines
    assert "| `flex` | not run | not run |  |  |" in lines
    assert "- full-1024, full-4096: flex: not run: left out" in lines
    assert "A processor" in text
    assert "2026-01-02" in text
    assert "on an Intel Xeon" in text


def test_figures_are_drawn_light_and_dark(tmp_path: Path, example: BenchReport) -> None:
    pytest.importorskip("matplotlib")
    written = figures.draw(example, tmp_path / "bench.svg")
    assert sorted(path.name for path in written) == sorted(
        f"bench{part}{end}.svg" for part in ("", "-time") for end in ("", "-dark")
    )
    light, dark = (tmp_path / name for name in ("bench.svg", "bench-dark.svg"))
    assert light.read_bytes() != dark.read_bytes()
    assert "#0d1117" in dark.read_text(encoding="utf-8")
    assert len(set(figures._lines(example))) == len(judge(example)) == 8


def test_times_are_of_a_head_and_lengths_of_plain_cases(example: BenchReport) -> None:
    plain = [each for each in example.results if each.threads == 1 and figures._plain(each, False)]
    assert [each.case.name for each in plain] == ["full-1024", "full-4096"]
    found = figures._times(plain)
    assert found["acutance"] == {1024: pytest.approx(84 / 8), 4096: pytest.approx(80 / 8)}


def test_nothing_to_draw_draws_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert figures.draw(report(), tmp_path / "bench.svg") == []


def test_the_page_is_what_its_record_says() -> None:
    record = read(PAGES / "bench.json")
    assert (PAGES / "bench-results.txt").read_text(encoding="utf-8") == page.markdown(record)
    assert len(judge(record)) > 50


# -- the command ----------------------------------------------------------------------------------

TINIEST = Case("tiniest", 16, 16, "tiny", width=16, heads=2, quick=True)


@pytest.fixture
def tiniest(monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]) -> None:
    monkeypatch.setitem(CASES, "tiniest", TINIEST)
    limits(machine, _SQUARES=(32,), _CONVOLUTIONS=())


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    def call(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as refused:
            code = int(str(refused.code))
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_the_command_writes_what_it_found_and_goes_on(
    tiniest: None, invoke: Invoke, monkeypatch, tmp_path: Path
) -> None:
    target, text = tmp_path / "bench.json", tmp_path / "bench.md"
    given = ("tiniest", "--rounds", 1, "--json", target)
    code, out, _ = invoke(*given, "--markdown", text)
    assert code == 0, out
    found = BenchReport.from_json(target.read_text(encoding="utf-8"))
    assert found.complete
    assert text.read_text(encoding="utf-8") == page.markdown(found)
    assert "tiniest, 1 thread" in out
    assert "is there already: --resume goes on from it" in invoke(*given)[2]

    code, _, _ = invoke(*given, "--threads", "1,2", "--resume")
    assert code == 0
    more = BenchReport.from_json(target.read_text(encoding="utf-8"))
    assert [each.threads for each in more.results] == [1, 2]
    assert more.results[0] == found.results[0]

    code, out, _ = invoke("--from", target, "--markdown", text)
    assert code == 0
    assert "tiniest, 2 threads" in out
    assert text.read_text(encoding="utf-8") == page.markdown(more)


def test_the_command_keeps_each_finished_case(
    tiniest: None, invoke: Invoke, stop_at: Callable[..., None], tmp_path: Path
) -> None:
    target = tmp_path / "bench.json"

    def stop() -> None:
        raise KeyboardInterrupt

    stop_at(runner, "take_turns", 1, stop)  # in the second case
    code, out, _ = invoke("tiniest", "tiny-1-h1", "--rounds", 1, "--json", target)
    assert code == 130
    assert "INTERRUPTED" in out
    found = BenchReport.from_json(target.read_text(encoding="utf-8"))
    assert not found.complete
    assert [each.case.name for each in found.results if each.complete] == ["tiniest"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["casual-1024"], "did you mean 'causal-1024'?"),
        (["tiny", "--threads", "two"], "--threads: invalid list of whole numbers value: 'two'"),
        (["tiny", "--threads", "0"], "threads must be at least 1, got 0"),
        (["tiny", "--resume"], "--resume goes on with the file of --json, and none is given"),
        (["--from", "no-such-file"], "there is no file at no-such-file"),
        (["tiny", "--figure", "bench.pdf"], "must end in .png or .svg, got bench.pdf"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(
    invoke: Invoke, arguments: list[str], message: str
) -> None:
    code, _, err = invoke(*arguments)
    assert code == 2
    assert message in err.splitlines()[-1]


def test_a_record_without_digest_of_before_loads(tmp_path: Path) -> None:
    data = json.loads((PAGES / "bench.json").read_text(encoding="utf-8"))
    whole = read(PAGES / "bench.json")
    data.pop(SEAL, None)
    (tmp_path / "old.json").write_text(json.dumps(data), encoding="utf-8")
    assert read(tmp_path / "old.json") == whole


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.json: not a benchmark report"):
        read(tmp_path / "other.json")


def test_the_list_shows_groups_and_goals(invoke: Invoke) -> None:
    code, out, _ = invoke("--list", "noise", "decode", "--quick")
    assert code == 0
    names = [line.split()[1] for line in out.splitlines() if line.startswith(("noise", "decode"))]
    assert names == ["noise-causal-1024", "decode-1x8192"]
