"""acutance calibrate judges its law on held-out text before it writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import acutance
from acutance.judging import NextToken
from acutance_lab.trained import decoder
from tests.contract.judging.test_judged_calibration import calibrate


def test_judging_resumes_where_it_was_interrupted(
    run: Callable[..., Any], tmp_path: Path, stop_at: Callable[..., Iterator[int]]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    state, calls = tmp_path / "state", stop_at(NextToken, "score", 3, interrupt)
    options = ("--target", "loss", "--lengths", "128,384", "--windows", 12, "--passes", 2)
    options = (*options, "--save", state, "--even-if-worse")
    done, law = calibrate(run, tmp_path, 12000, *options)
    assert done.exit_code == 130
    assert f"fitted and judged; continue from {state} with --resume" in " ".join(
        done.stderr.split()
    )
    assert not law.exists()
    done, law = calibrate(run, tmp_path, 12000, *options, "--resume")
    assert done.exit_code == 0, done.stderr
    windows = json.loads(law.read_text())["judged"]["windows"]
    assert windows > 2
    # each window with and without the law, less the three that were done
    assert next(calls) == 4 + 2 * windows - 3


@pytest.mark.parametrize("judged", ["good", {"delta": 0.1}])
def test_a_damaged_judgement_is_refused(judged: Any, tmp_path: Path) -> None:
    from acutance.from_json import sealed_json

    law = acutance.Law.of(decoder(), "ssmax")
    record = law.record() | {"judged": judged}
    (tmp_path / "law.json").write_text(json.dumps(sealed_json(record)))
    with pytest.raises(ValueError, match="'judged' must be a JSON object with a 'verdict'"):
        acutance.Law.load(tmp_path / "law.json")
