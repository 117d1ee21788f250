"""The figures of README.md are those of the recorded benchmark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.cpu.cases import CASES
from benchmarks.cpu.records import BenchReport, CaseResult

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORD = BenchReport.from_json(
    (ROOT / "docs" / "_static" / "bench.json").read_text(encoding="utf-8")
)
CONTENDERS = {
    "`F.scaled_dot_product_attention` (output alone)": "sdpa",
    "`acutance.attention`, output and statistics": "acutance",
    "the same on AVX2": "acutance-avx2",
    "the same without the native kernel, in plain PyTorch": "blocked",
    "softmax with its n×n weights, then `-(p * log(p + 1e-9)).sum(-1)`": "naive",
}


def result(case: str, threads: int = 1) -> CaseResult:
    (found,) = (
        each for each in RECORD.results if (each.case.name, each.threads) == (case, threads)
    )
    return found


def cells(readme: str) -> dict[str, list[str]]:
    lines = re.findall(r"^\|(.+)\|$", readme, re.MULTILINE)
    table = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {first: rest for first, *rest in table if first in CONTENDERS}


def wrong(readme: str) -> list[str]:
    """The cells of the table that the record does not bear out."""
    out = []
    for first, rest in cells(readme).items():
        contender = CONTENDERS[first]
        cases = (result("full-4096"), result("causal-4096"))
        for case, ratio, memory in ((cases[0], *rest[:2]), (cases[1], *rest[2:4])):
            found = case.row(contender)
            digits = len(ratio.split()[0].partition(".")[2])
            median = case.ratio(found).median
            if ratio != f"{median:.{digits}f} ×":
                out.append(f"{first}: {ratio}, measured {median:.3f}")
            if memory != f"{found.peak_mib:.0f} MiB":
                out.append(f"{first}: {memory}, measured {found.peak_mib:.1f}")
        if contender != "sdpa":
            error = max(case.row(contender).error("entropy") for case in cases)
            if rest[4] != f"{error:.0e} nat".replace("e-0", "e-"):
                out.append(f"{first}: {rest[4]}, measured {error:.1e}")
    return out


def test_the_table_of_the_readme_is_the_record_s() -> None:
    assert set(cells(README)) == set(CONTENDERS)
    assert wrong(README) == []


@pytest.mark.parametrize(
    ("ours", "other"), [("0.76 ×", "0.75 ×"), ("17 MiB", "16 MiB"), ("6e-6 nat", "5e-6 nat")]
)
def test_a_cell_that_differs_is_found(ours: str, other: str) -> None:
    assert ours in README
    assert len(wrong(README.replace(ours, other, 1))) == 1


def medians(group: str, contender: str) -> list[float]:
    found = [
        each.ratio(row).median
        for each in RECORD.results
        if each.case.group == group and not each.case.name.startswith("step-")
        for row in each.rows
        if row.contender == contender and row.status == "timed"
    ]
    assert len(found) >= 8
    return found


def test_the_guide_names_the_cases_that_were_not_run() -> None:
    guide = (ROOT / "docs" / "guide" / "benchmark.md").read_text(encoding="utf-8")
    found = re.search(
        r"^The record has every case except (.+), which were not run", guide, re.MULTILINE
    )
    said = re.findall(r"`([^`]+)`", found[1]) if found else []
    assert set(said) == set(CASES) - {each.case.name for each in RECORD.results}


def test_the_ranges_of_the_readme_are_the_record_s() -> None:
    alone, backward = re.search(
        r"^\| statistics without an output \| ([\d.]+ to [\d.]+) × .*\n"
        r"\| backward pass through output and statistics \| ([\d.]+ to [\d.]+) × ",
        README,
        re.MULTILINE,
    ).groups()
    for said, found in (
        (alone, medians("statistics", "statistics")),
        (backward, medians("backward", "acutance")),
    ):
        assert said == f"{min(found):.2f} to {max(found):.2f}"
