"""acutance calibrate judges its law on held-out text before it writes it."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import acutance
from tests.contract.trained import decoder, directory, encoder

STDLIB = Path(sysconfig.get_path("stdlib"))


def calibrate(run: Callable[..., Any], folder: Path, tokens: int, *options: Any) -> Any:
    """The decoder of the package, calibrated on so much of a file it was not trained on."""
    (folder / "text.py").write_text((STDLIB / "tarfile.py").read_text()[:tokens])
    law = folder / "law.json"
    given = ("--text", folder / "text.py", "--windows", 16, "--passes", 3, "-o", law)
    return run("calibrate", directory(), *given, *options), law


def test_a_law_that_helps_is_written_with_its_effect(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Beyond the 128 bytes of training, entropy held constant lowers the decoder's loss."""
    done, law = calibrate(run, tmp_path, 24000, "--lengths", "128,1024")
    assert done.exit_code == 0, done.err
    said = " ".join(done.err.split())
    assert "judged on 5 held-out windows (next token): the law helps: loss changes by -" in said
    judged = json.loads(law.read_text())["judged"]
    assert (judged["verdict"], judged["windows"], judged["lengths"]) == ("helps", 5, [1024])
    assert judged["delta"] < -judged["error"]
    loaded = acutance.Law.load(law)
    assert loaded.judged == judged
    loaded.check(decoder())


def test_a_law_that_hurts_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    options = ("--lengths", "32,64", "--target", "top_weight=0.97", "--json", tmp_path / "all.json")
    done, law = calibrate(run, tmp_path, 4000, *options)
    assert done.exit_code == 1
    assert not law.exists()
    said = " ".join(done.err.split())
    assert "held-out windows (next token): the law hurts: loss changes by +" in said
    assert "it raises the loss of held-out text; --even-if-worse writes it" in said
    assert "top weight" in done.out  # the table is shown all the same
    assert json.loads((tmp_path / "all.json").read_text())["law"]["judged"]["verdict"] == "hurts"
    done, law = calibrate(run, tmp_path, 4000, *options, "--even-if-worse")
    assert done.exit_code == 0, done.err
    assert json.loads(law.read_text())["judged"]["verdict"] == "hurts"


def test_a_law_fitted_to_the_loss_is_judged_on_further_text(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    options = ("--target", "loss", "--lengths", "128,384", "--windows", 12, "--passes", 2)
    done, law = calibrate(run, tmp_path, 12000, *options, "--json", tmp_path / "all.json")
    assert done.exit_code == 0, done.err
    said = " ".join(done.err.split())
    assert "reads windows spread over the text: 12 of 384 tokens" in said
    assert "judged on 7 held-out windows (next token): the law helps: loss changes by -" in said
    assert "With the law the loss of 4 windows that were not fitted to" in " ".join(
        done.out.split()
    )
    assert "on the 8 fitted windows alone, the derivatives of the others are not" in " ".join(
        done.out.split()
    )
    assert json.loads(law.read_text())["judged"]["verdict"] == "helps"
    assert json.loads((tmp_path / "all.json").read_text())["fitted"] == 8


def test_where_no_law_is_found_nothing_is_judged_or_written(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Inside the 128 bytes of training, few windows show no head that a factor helps."""
    (tmp_path / "law.json").write_text("an earlier law")
    options = ("--target", "loss", "--lengths", "32", "--windows", 6, "--overwrite")
    done, law = calibrate(run, tmp_path, 2000, *options, "--json", tmp_path / "all.json")
    assert done.exit_code == 0, done.err
    said, shown = (" ".join(text.split()) for text in (done.err, done.out))
    assert f"no law was found, so {law} was not written" in said
    assert "held-out windows" not in said
    assert law.read_text() == "an earlier law"
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["changed"] == 0
    assert "judged" not in record["law"]
    assert "beyond noise: every head stays as it is" in shown
    assert "Fitted to 4 windows in 1 pass;" in shown


def test_a_model_without_a_head_cannot_be_fitted_to_the_loss(run: Callable[..., Any]) -> None:
    assert "needs a language model" in run("calibrate", "--target", "loss").output
    done = run("calibrate", encoder(), "--target", "loss")
    assert done.exit_code == 1
    assert "was saved without a language-model" in done.err


def test_text_that_is_too_short_to_judge_on(run: Callable[..., Any], tmp_path: Path) -> None:
    done, law = calibrate(run, tmp_path, 200, "--lengths", "32,64")
    assert done.exit_code == 1
    assert "fitting and judging need at least 2 windows of 64 tokens each" in done.err
    assert "or --even-if-worse for a law that nothing judged" in done.err
    assert done.err.count("\n") == 1
    done, law = calibrate(run, tmp_path, 200, "--lengths", "32,64", "--even-if-worse")
    assert done.exit_code == 0, done.err
    assert "the text is too short, so the loss under the law was not measured" in done.err
    assert "judged" not in json.loads(law.read_text())


def test_a_model_without_a_head_is_calibrated_unjudged(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    law = tmp_path / "law.json"
    done = run("calibrate", "--lengths", "16,32", "--windows", 2, "--passes", 2, "-o", law)
    assert done.exit_code == 0, done.err
    assert "the model has no language-model head, so the loss under the law" in done.err
    assert "judged" not in json.loads(law.read_text())
