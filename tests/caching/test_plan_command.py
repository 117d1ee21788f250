"""acutance plan, as a shell user meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acutance import CachePlan, HeadPlan
from acutance.caching.find_plan import budget
from acutance.caching.frontier import read_costs
from acutance_lab import texts
from acutance_lab.trained import decoder, directory
from tests.contract.caching.test_plan_command import STREAMING, another, words
from tests.page_data import unpack


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with a plan for the embedded decoder, which has 3 layers of 2 key heads."""
    heads = {0: STREAMING, (1, 1): HeadPlan(key_bits=8, value_bits=4), (2, 0): HeadPlan("dropped")}
    CachePlan.of(decoder(), heads).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_the_record_of_a_search_holds_a_plan_and_its_costs(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    code = texts.read(texts.files("held out")).long()
    found = budget(decoder(), code[: 4 * 96].view(4, 96), keep=0.6, plans=[STREAMING])
    found.to_json(tmp_path / "budget.json")
    costs = read_costs(tmp_path / "budget.json")
    assert costs is not None
    one = found.costs[0]
    assert costs.of(one.module, one.head, STREAMING) == (one.slope[0], one.curvature[0])
    assert costs.n == 96
    result = run("plan", tmp_path / "budget.json", "--lengths", 96)
    assert result.exit_code == 0, result.output
    assert "cost, nat" in result.output
    assert "derivatives to second order at 96 tokens" in words(result.output)
    assert CachePlan.load(tmp_path / "budget.json") == found.plan


def test_a_report_shows_the_plan_beside_the_heads(
    run: Callable[..., Any], saved: Path, tmp_path: Path
) -> None:
    state, page, record = (
        tmp_path / "state.safetensors",
        tmp_path / "page.html",
        tmp_path / "r.json",
    )
    text = tmp_path / "text.py"
    text.write_text("def zero():\n    return 0\n" * 20)
    probed = run("probe", directory(), "--text", text, "--length", 64, "--save", state)
    assert probed.exit_code == 0, probed.output
    result = run("report", state, "--plan", saved, "-o", page, "--json", record)
    assert result.exit_code == 0, result.output
    assert "2+30 ×2" in result.output
    shown, _ = unpack(re.findall(r'id="data">([^<]+)<', page.read_text())[0])
    assert shown["plan"]["key_heads"][0]["keeps"] == "2 first and 30 recent keys"
    written = json.loads(record.read_text())["cache_plan"]
    plan = CachePlan.load(saved)
    assert written["bytes"] == plan.bytes(4096)
    assert [one["keeps"] for one in written["key_heads"][2:5]] == [
        "all keys", "all keys in 8 bits and values in 4", "nothing",
    ]  # fmt: skip
    assert written["heads"][-1] == len(written["key_heads"]) - 1
    other = tmp_path / "other.json"
    another().save(other)
    refused = run("report", state, "--plan", other)
    assert refused.exit_code == 1
    assert "other.json is for another model, LlamaForCausalLM, than the probed" in refused.stderr
