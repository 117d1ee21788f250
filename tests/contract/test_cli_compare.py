"""``acutance compare`` as a shell user meets it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from acutance import testing
from acutance.mechanisms import MECHANISMS
from acutance.probing import QueryKeySample

SMALL = ("compare", "--n", "16,32", "--d", "8", "--heads", "2", "--samples", "4", "--no-costs")
TWO = ("--mechanism", "relu2", "--mechanism", "decay")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: testing.run([str(argument) for argument in arguments])


def flat(text: str) -> str:
    """Sentences without the line breaks that the width put in."""
    return " ".join(text.split())


def test_a_comparison_is_printed_with_its_sentences(run: Callable[..., Any]) -> None:
    result = run(*SMALL, *TWO, "--mechanism", "sigmoid")
    assert result.exit_code == 0, result.output
    said = flat(result.out)
    assert said.startswith("Gaussian queries and keys, width 8; 8 rows, 2 heads mechanism n")
    assert "Without a prediction: sigmoid." in said
    assert f"• relu2: {MECHANISMS['relu2'].can_concentrate}" in said
    assert "exact expectations, the one that differs most" in said


def test_options_reach_the_comparison(run: Callable[..., Any]) -> None:
    result = run(
        *SMALL, *TWO, "--mean", "1,-0.5", "--std", "2", "--causal", "--seed", "3", "--batch", "2",
        "--json", "-",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.out)
    given = record["settings"]
    assert (given["query_mean"], given["key_mean"]) == (1.0, -0.5)
    assert (given["query_std"], given["key_std"]) == (2.0, 2.0)
    assert (given["is_causal"], given["seed"], given["batch"]) == (True, 3, 2)
    assert [(each["mechanism"], each["n"]) for each in record["results"]] == [
        ("relu2", 16), ("relu2", 32), ("decay", 16), ("decay", 32),
    ]  # fmt: skip
    assert record["complete"] is True


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        (
            ("--mechanism", "relu22"),
            2,
            "there is no mechanism named 'relu22'; did you mean 'relu2'?",
        ),
        (("--n", "16,x"), 2, "--n: must be whole numbers separated by commas, got '16,x'"),
        (("--n", ""), 2, "--n: must be whole numbers separated by commas, got ''"),
        (("--n", "1"), 2, "--n: must be at least 2, got '1'"),
        (
            ("--mean", "1,2,3"),
            2,
            "--mean: must be one number, or one for queries and one for keys, got '1,2,3'",
        ),
        (("--std", "0"), 2, "--std: must be finite and above 0, got '0'"),
        (("--mean", "nan"), 2, "--mean: must be finite, got 'nan'"),
        (("--from", "nowhere.safetensors"), 1, "no file at nowhere.safetensors"),
    ],
)
def test_misuse_is_one_sentence(
    run: Callable[..., Any], options: tuple[str, ...], status: int, says: str
) -> None:
    result = run(*SMALL, *TWO, *options)
    assert result.exit_code == status, result.output
    assert says in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert result.out == ""


@pytest.mark.parametrize("options", [("--d", "1"), ("--heads", "0"), ("--figure", "a.gif")])
def test_misuse_of_a_number_names_the_option(
    run: Callable[..., Any], options: tuple[str, str]
) -> None:
    result = run(*SMALL, *TWO, *options)
    assert result.exit_code == 2
    assert options[0] in result.output


def test_the_mechanisms_are_listed(run: Callable[..., Any]) -> None:
    result = run("compare", "--list")
    assert result.exit_code == 0
    lines = [line for line in result.out.splitlines()[1:] if not line.startswith(" ")]
    assert [line.split()[0] for line in lines] == list(MECHANISMS)


def test_queries_and_keys_of_a_model(run: Callable[..., Any], tmp_path: Path) -> None:
    part = torch.randn(3, 40, 8)
    QueryKeySample(part, part.roll(1, 2), part, ("a", "b", "c"), True).save(tmp_path / "qk")
    one = ("--mechanism", "decay", "--no-costs")
    result = run("compare", "--from", tmp_path / "qk", *one, "--json", "-")
    assert result.exit_code == 0, result.output
    given = json.loads(result.out)["settings"]
    assert given["n"] == [10, 20, 40]
    assert given["heads_of_the_model"] == ["a", "b", "c"]
    assert given["is_causal"] is True
    assert given["query_mean"] is None
    result = run("compare", "--from", tmp_path / "qk", *one, "--n", "41")
    assert result.exit_code == 1
    assert "n must be at most the 40 tokens" in result.err


def test_the_question_is_printed_with_its_answers_and_softmax_is_known() -> None:
    options = "compare --n 8 --d 8 --heads 2 --no-costs --mechanism softmax"
    result = testing.run(options.split())
    assert result.exit_code == 0, result.output
    assert "What it shows: Can it concentrate on few keys as n grows?" in result.out
    assert "scaled_dot" in result.out
