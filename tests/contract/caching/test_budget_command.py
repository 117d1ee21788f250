"""acutance budget, as a shell user meets it."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import acutance
from tests.contract.trained import decoder, directory


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.py"
    path.write_text((Path(sysconfig.get_path("stdlib")) / "copy.py").read_text()[:2048])
    return path


def test_a_plan_is_found_written_and_judged(
    run: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    plan, record = tmp_path / "plan.json", tmp_path / "budget.json"
    result = run(
        "budget", directory(), "--text", text, "--lengths", 96, "--windows", 4, "--keep", 0.5,
        "--streaming", "2,14", "-o", plan, "--json", record, "--figure", tmp_path / "frontier.svg",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "The plan takes" in result.output
    loaded = acutance.CachePlan.load(plan).check(decoder())
    assert loaded.share(96) <= 0.5
    written = json.loads(record.read_text())
    (chosen,) = [one for one in written["points"] if one["chosen"]]
    assert chosen["share"] == loaded.share(96)
    assert written["plan"] == loaded.record()
    assert written["windows"] == 2
    assert "<svg" in (tmp_path / "frontier.svg").read_text()
    assert loaded.search["n"] == 96
    for length, said in ((96, False), (128, True)):
        judged = run(
            "judge", directory(), "--text", text, "--law", plan, "--lengths", length, "--windows", 2
        )
        assert judged.exit_code == 0, judged.output
        assert ("was searched on windows of 96 tokens, not 128" in judged.output) is said
        assert "UserWarning" not in judged.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--keep", 0.5, "--max-loss", 0.1], "give keep or max_loss"),
        (["--streaming", "4"], "FIRST,RECENT"),
        (["--lengths", "64,96"], "a plan is for one length"),
        (["--streaming", "200,30"], "got first=200 and recent=30 for windows of 96 tokens"),
        (["--streaming", "2,94"], "got first=2 and recent=94 for windows of 96 tokens"),
        (
            ["--lengths", 1024],
            "at least 4 windows of 1024 tokens, half to propose plans",
        ),
        (["--lengths", 4096], "at least 2 windows of 4096 tokens, and the text has"),
    ],
)
def test_what_is_refused(
    run: Callable[..., Any], text: Path, options: list[Any], message: str
) -> None:
    given = [] if "--lengths" in options else ["--lengths", 96]
    result = run("budget", directory(), "--text", text, "--windows", 4, *given, *options)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())


def test_models_without_a_causal_cache_are_refused_in_one_sentence(
    run: Callable[..., Any], text: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(directory())
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    refused = run("budget", tmp_path / "bert", "--text", text, "--lengths", 96)
    assert refused.exit_code == 1
    assert refused.err.splitlines()[-1] == (
        "acutance: BertForMaskedLM has no key-value cache: its forward method takes none"
    )
