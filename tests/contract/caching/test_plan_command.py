"""acutance plan, as a shell user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from acutance import CachePlan, HeadPlan
from tests.contract.trained import decoder, directory

STREAMING = HeadPlan("streaming", first=2, recent=30)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with a plan for the embedded decoder, which has 3 layers of 2 key heads."""
    heads = {0: STREAMING, (1, 1): HeadPlan(key_bits=8, value_bits=4), (2, 0): HeadPlan("dropped")}
    CachePlan.of(decoder(), heads).save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_plan_is_shown_and_written_for_other_tools(
    run: Callable[..., Any], saved: Path, tmp_path: Path
) -> None:
    result = run(
        "plan", saved, "--lengths", "128,512", "-o", tmp_path / "copy.json",
        "--export", f"kvpress:{tmp_path / 'press.py'}",
        "--export", f"duo_attention:{tmp_path / 'pattern'}",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    plan = CachePlan.load(saved)
    shown = words(result.output)
    assert "0 0.062 2+30 ×2 1" in shown  # 32 of 512 keys
    assert "full · 8/4 bit 2" in shown
    assert "none · full" in shown
    assert f"After 128 tokens: {plan.bytes(128):,} bytes" in shown
    assert f"{100 * plan.share(512):.1f} % of the full" in shown
    assert "kvpress: Key heads 1.1 keep 16 bits" in shown
    assert "duo_attention: Key heads 2.0 keep 2 first and 30 recent keys instead" in shown
    assert CachePlan.load(tmp_path / "copy.json") == plan
    assert "[(2, 30), (2, 30)]," in (tmp_path / "press.py").read_text()
    assert (tmp_path / "pattern" / "full_attention_heads.tsv").is_file()


def test_another_tools_plan_becomes_one_for_the_model(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    plan = CachePlan.of(decoder(), {1: STREAMING, (2, 0): STREAMING})
    plan.export("duo_attention", tmp_path / "pattern")
    source = f"duo_attention:{tmp_path / 'pattern'}"
    written = tmp_path / "plan.json"
    result = run("plan", source, "--model", directory(), "-o", written)
    assert result.exit_code == 0, result.output
    assert CachePlan.load(written) == plan
    refused = run("plan", source)
    assert refused.exit_code == 2
    assert "does not name its model" in words(refused.output.replace("│", " "))


def test_judge_measures_plans_by_name(run: Callable[..., Any], saved: Path, tmp_path: Path) -> None:
    CachePlan.load(saved).export("duo_attention", tmp_path / "pattern")
    text = tmp_path / "text.py"
    text.write_text("def zero(n):\n    return [n] * n\n" * 12)
    laws = [str(saved), f"duo_attention:{tmp_path / 'pattern'}"]
    result = run(
        "judge", directory(), "--text", text, "--lengths", 96, "--windows", 3, "--json", "-",
        *(part for law in laws for part in ("--law", law)),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    judged = json.loads(result.out)["laws"]
    assert [one["name"] for one in judged] == laws
    dropping, streaming = (one["delta"] for one in judged)
    assert dropping != streaming  # the table keeps keys of the dropped head
    assert 0.0 not in (dropping, streaming)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--export", "gguf:x"], 2, "there is no format 'gguf'; the formats are kvpress, duo_att"),
        (["--export", "kvpress"], 2, "it must be FORMAT:PATH"),
        (["--export", "kvpress:a.py", "--export", "kvpress:b.py"], 2, "kvpress is given twice"),
        (["--export", "kvpress:missing/press.py"], 2, "directory missing does not exist"),
        (["--lengths", "0"], 2, "lengths must be at least 2"),
    ],
)
def test_wrong_options_write_nothing(
    run: Callable[..., Any],
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("plan", saved, *options)
    assert result.exit_code == code
    assert message in words(result.output.replace("│", " "))
    assert list(tmp_path.iterdir()) == [saved]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "contains no cache plan: it is not JSON"),
        (lambda text: text.replace('"recent": 30', '"recent": 31'), "it is damaged or was edited"),
        (
            lambda text: json.dumps(
                {**json.loads(text), "schema": "acutance.cache_plan/2", "sha256": None}
            ),
            "its schema must be 'acutance.cache_plan/1', got 'acutance.cache_plan/2'",
        ),
        (lambda text: '{"schema": "acutance.budget/1", "plan": {}}', "contains no cache plan"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "judge"])
def test_a_damaged_file_or_another_version_is_one_sentence(
    run: Callable[..., Any],
    saved: Path,
    command: str,
    change: Callable[[str], str],
    message: str,
) -> None:
    saved.write_text(change(saved.read_text()))
    arguments = ["plan", saved] if command == "plan" else ["judge", directory(), "--law", saved]
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.err
    assert result.err.count("\n") == 1


def another() -> CachePlan:
    """A plan for a model with other heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return CachePlan.of(LlamaForCausalLM(config))


def test_a_plan_of_another_model_names_both(run: Callable[..., Any], tmp_path: Path) -> None:
    another().save(tmp_path / "plan.json")
    for arguments in (
        ["plan", tmp_path / "plan.json", "--model", directory()],
        ["judge", directory(), "--law", tmp_path / "plan.json", "--lengths", 64, "--windows", 2],
    ):
        result = run(*arguments)
        assert result.exit_code == 1
        name = type(decoder()).__name__
        assert f"is for another model, LlamaForCausalLM, not for this {name}" in result.err
