"""Shards of a corpus, probed apart and joined."""

from __future__ import annotations

import itertools
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import acutance
from acutance.cli import app
from acutance.corpus.probe_corpus import run_windows
from acutance.corpus.ranks import Ranks
from acutance.probing import Shard, load_state, merge_states
from acutance.summary.state import ranges

TOY = runpy.run_path(str(Path(__file__).with_name("toy.py")))
text_model, windows, options = TOY["text_model"], TOY["windows"], TOY["options"]
assert_same_rows = TOY["assert_same_rows"]


def run(seed: int = 0, pieces: Any = None, **given: Any) -> Any:
    return run_windows(
        text_model(seed), pieces or windows(), options(**given), {"text": ["a"]}, Ranks()
    )


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The three shards of one run."""
    folder = tmp_path_factory.mktemp("shards")
    paths = [folder / f"{number}.safetensors" for number in (1, 2, 3)]
    for number, path in enumerate(paths, 1):
        assert run(save=path, shard=Shard(number, 3)).finished
    return paths


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_shards_in_any_order_join_to_the_run_over_all(three: list[Path]) -> None:
    whole = run().state
    for order in itertools.permutations(three):
        joined = merge_states(order)
        assert joined.run == whole.run
        assert joined.run.complete
        assert dict(joined.summary.about) == dict(whole.summary.about)
        assert_same_rows(joined.summary, whole.summary)


def test_joined_states_join_again_and_resume(three: list[Path], tmp_path: Path) -> None:
    part, whole = tmp_path / "part", tmp_path / "whole"
    merge_states([three[2], three[0]]).save(part)
    state = load_state(part)
    assert (state.run.windows, state.run.complete) == (15, False)
    assert "shard" not in state.summary.about
    merge_states([part, three[1]]).save(whole)
    rest = run(save=part, resume=True)
    assert rest.resumed == 15
    for found in (load_state(whole), load_state(part)):
        assert found.run == run().state.run
        assert_same_rows(found.summary, rest.state.summary)


def test_a_shard_says_what_it_is(three: list[Path]) -> None:
    about = load_state(three[1]).summary.about
    assert about["shard"] == "2/3"
    assert (about["windows"], about["windows_in_all"], about["complete"]) == (8, 23, False)
    assert load_state(three[1]).run.done[:2] == ((2, 4), (8, 10))


def test_no_window_is_counted_twice(three: list[Path], tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"1\.s.* and .*1\.s.* both contain windows 0 to 1 of 23, so row"
    ):
        merge_states([three[0], three[0]])
    halves = tmp_path / "half"
    run(save=halves, shard=Shard(2, 2))
    with pytest.raises(ValueError, match=r"both contain windows .* rows would count twice"):
        merge_states([three[0], halves])


def test_other_runs_are_refused(three: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    for given, match in (
        ({"seed": 1}, r"1\.safetensors is for another model than .*other"),
        ({"batch_size": 3}, "batch size is 2 in .*1.safetensors and 3 in .*other"),
        ({"pieces": windows(24)}, r"1\.safetensors is for another text than .*other"),
        ({"verify": False}, "verify is True in .* and False in"),
    ):
        part = 3 if "batch_size" in given or "pieces" in given else 2
        run(save=other, shard=Shard(part, 3), **given)
        first = three[0]
        state = load_state(other)
        with pytest.raises(ValueError, match=f"have the same settings, but .*{match}|both contain"):
            merge_states([first, other])
        assert state.run.difference(load_state(first).run, "a", "b")


def test_layers_that_do_not_fit_are_refused(three: list[Path], tmp_path: Path) -> None:
    state = load_state(three[1])
    layers = (state.summary.layers[1], state.summary.layers[0])
    renamed = [
        {"module": other.module, "heads": layer.heads}
        for layer, other in zip(layers, state.summary.layers, strict=True)
    ]
    from dataclasses import replace

    changed = tuple(
        replace(layer, module=fields["module"])
        for layer, fields in zip(layers, renamed, strict=True)
    )
    odd = tmp_path / "odd"
    replace(state, summary=replace(state.summary, layers=changed)).save(odd)
    with pytest.raises(
        ValueError,
        match=r"odd cannot be merged with .*1\.safetensors: only records of the same layer",
    ):
        merge_states([three[0], odd])


def test_ranges() -> None:
    assert ranges([]) == ()
    assert ranges([(5, 7), (0, 5), (8, 9)]) == ((0, 7), (8, 9))
    with pytest.raises(ValueError, match="windows 2 to 3 occur twice"):
        ranges([(0, 4), (2, 5)])
    with pytest.raises(ValueError, match="windows 1 to 1 occur twice"):
        ranges([(0, 4), (1, 2)])


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/", "/2", "a/b", "1/2/3", "-1/2", "²/3", ""])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ValueError, match="a shard must be i/n with 1 ≤ i ≤ n"):
        Shard.parse(text)


def test_shards_deal_every_batch_once() -> None:
    for count, batches in itertools.product((1, 2, 5), (0, 1, 9)):
        dealt = [index for i in range(count) for index in Shard(i + 1, count).of(batches)]
        assert sorted(dealt) == list(range(batches))


# -- the command ----------------------------------------------------------------------------------


def test_merge_writes_what_a_run_writes(three: list[Path], tmp_path: Path) -> None:
    out, page, numbers = tmp_path / "out", tmp_path / "out.html", tmp_path / "out.json"
    result = invoke("merge", *three, "-o", out, "--report", page, "--json", numbers)
    assert result.exit_code == 0, result.output
    whole = run().state.summary
    assert_same_rows(acutance.load(out), whole)
    record = json.loads(numbers.read_text())
    assert record["about"]["complete"] is True
    assert [head["metrics"]["entropy"]["mean"] for head in record["heads"]] == pytest.approx(
        whole.mean("entropy").tolist(), rel=1e-12
    )
    assert "<html" in page.read_text(encoding="utf-8")
    assert "state written to" in result.output.replace("\n", " ")
    assert "second" in result.output  # the table


def test_merge_says_what_is_missing(three: list[Path]) -> None:
    result = invoke("merge", *three[:2])
    assert result.exit_code == 0, result.output
    assert "incomplete: 16 of 23 windows" in result.output.replace("\n", " ")


def test_merge_refuses_in_one_sentence(three: list[Path], tmp_path: Path) -> None:
    foreign, cut = tmp_path / "foreign", tmp_path / "cut"
    foreign.write_text("not a state, but some text that is long enough")
    cut.write_bytes(three[1].read_bytes()[:-5])
    out = tmp_path / "out"
    for bad in (foreign, cut, three[0], tmp_path / "missing"):
        result = invoke("merge", three[0], bad, "-o", out)
        assert result.exit_code == 1, result.output
        said = [line for line in result.stderr.splitlines() if line]
        assert len(said) == 1
        assert said[0].startswith("acutance: ")
        assert bad.name in said[0]
    assert not out.exists()
    assert invoke("merge").exit_code == 2
    assert torch.is_tensor(acutance.load(three[0]).moments.mean)  # and what was there is untouched


def test_options_that_go_together(tmp_path: Path) -> None:
    result = invoke("probe", "--resume")
    assert result.exit_code == 2
    assert "--save" in result.output
    result = invoke("probe", "--resume", "--save", tmp_path / "a", "--keep-qk", tmp_path / "b")
    assert result.exit_code == 2
    result = invoke("probe", "--shard", "3/2")
    assert result.exit_code == 2
    assert "a shard must be i/n with 1 ≤ i ≤ n" in " ".join(result.stderr.split())
