"""Two thousand damaged and forged files: each is refused with one line, harmless, or the same."""

from __future__ import annotations

import io
import json
import math
import random
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console

import acutance
from acutance.calibration import ApplyError, Law
from acutance.calibration.loss_table import LossTable, Reading, Saving
from acutance.comparison import compare
from acutance.from_json import SEAL
from acutance.probing import QueryKeySample, load_queries_keys, load_state
from acutance.report.exports import summary_view
from acutance.summary.state import Run, State
from acutance_lab.command import summary as shown_records
from acutance_lab.record import UNTESTED, Claim, Estimate, Record, load

COUNT = 2000
_MUTATOR = runpy.run_path(str(Path(__file__).with_name("mutator.py")))
damaged, forged_json, forged_tensors = (
    _MUTATOR[name] for name in ("damaged", "forged_json", "forged_tensors")
)


class Kind(NamedTuple):
    """A kind of file: a good one, how it is read to plain numbers, and what is shown of it."""

    path: Path
    read: Callable[[Path], Any]
    numbers: Callable[[Any], Any]
    show: Callable[[Any], object]
    tensors: bool = False


def _console() -> Console:
    return Console(file=io.StringIO(), width=100)


def _probed(model: torch.nn.Module, **options: Any) -> Any:
    tokens = torch.arange(12).reshape(2, 6)
    with acutance.probe(model, **options) as probe:
        model(torch.nn.functional.one_hot(tokens % 8, 8).float())
    return probe


def _state(folder: Path, model: torch.nn.Module) -> Kind:
    path = folder / "state"
    summary = _probed(model, structure=True, examples=2).summary({"model": "m", "windows": 2})
    State(summary, Run({"length": 6}, 2, ((0, 2),), 12)).save(path)
    return Kind(
        path,
        load_state,
        lambda state: (state.run, state.summary.to_dict()),
        lambda state: (_console().print(summary_view(state.summary)), state.summary.to_dict()),
        tensors=True,
    )


def _sample(folder: Path, model: torch.nn.Module) -> Kind:
    path = folder / "sample"
    _probed(model, keep=True).queries_keys().save(path)
    return Kind(
        path,
        load_queries_keys,
        lambda one: (one.heads, one.is_causal, one.query.tolist(), one.key.tolist()),
        _compared,
        tensors=True,
    )


def _compared(sample: QueryKeySample) -> None:
    if sample.length >= 4:
        compare("scaled_dot", n=4, source=sample, samples=2, costs=False)


def _calibration(folder: Path, model: torch.nn.Module) -> Kind:
    path, settings = folder / "calibration", {"model": "a", "text": "b", "lengths": [4, 8]}
    table = LossTable(settings, Saving(str(path), every=3))
    for number in range(3):
        gradient = torch.randn(8, dtype=torch.float64)
        loss = torch.tensor([1.5 + number], dtype=torch.float64)
        table.get("change", number, partial(Reading, loss, torch.tensor([7]), gradient))

    def resumed(where: Path) -> LossTable:
        return LossTable(settings, Saving(str(where), resume=True))

    def numbers(table: LossTable) -> Any:
        rows = [(row.loss, row.count, row.values) for row in table.readings.values()]
        return [[column.tolist() for column in row] for row in rows]

    return Kind(path, resumed, numbers, numbers, tensors=True)


def _law(folder: Path, model: torch.nn.Module) -> Kind:
    path = folder / "law.json"
    laws = {(0, 0): acutance.scaling.LogN(train_length=64), (0, 1): "ssmax"}
    Law.of(model, laws, lengths=[4, 8], target="entropy").save(path)

    def show(law: Law) -> object:
        try:
            with acutance.apply(model, law):
                model(torch.randn(1, 4, 8))
        except (ValueError, ApplyError) as error:
            return _one_line(error)
        return law.record()

    return Kind(path, Law.load, Law.record, show)


def _reproduced(folder: Path) -> Kind:
    path = folder / "record.json"
    claims = (
        Claim("mean", "the mean is 1", within=0.01, bound="n", expected="holds only where"),
        Claim("kind", "for some", relation="<=", bound="of", sense="in"),
    )
    rows = [claims[0].row("mean", 1, Estimate(1 + n * n / 999, 0.001), {"n": n}) for n in range(6)]
    rows += [claims[1].row("x", 1.0, float(i), {"of": of}) for i, of in enumerate("abc")]
    rows += [
        UNTESTED.row("y", math.nan, math.nan, {"n": 3}),
        claims[0].row("mean", math.inf, math.inf, {"n": 9}),
    ]
    about = {"torch": "2"}
    Record("one", "One", "it is 1", claims, tuple(rows), 0, True, 1.5, about).save(path)
    return Kind(
        path,
        load,
        lambda one: one.to_dict(),
        lambda one: _console().print(shown_records([one])),
    )


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("files")
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    made = (_state, _sample, _calibration, _law)
    found = {make.__name__: make(folder, model) for make in made}
    return found | {"_reproduced": _reproduced(folder)}


def _one_line(error: Exception) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    assert len(text) < 1000
    return text


NAMES = ("_state", "_sample", "_calibration", "_law", "_reproduced")


@pytest.mark.parametrize("count", [COUNT // 5, pytest.param(COUNT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_damaged_and_forged_files(
    kinds: dict[str, Kind], name: str, count: int, tmp_path: Path
) -> None:
    kind, chance, path = kinds[name], random.Random(name), tmp_path / "file"
    good = kind.path.read_bytes()
    before = repr(kind.numbers(kind.read(kind.path)))
    kind.show(kind.read(kind.path))
    refused = 0
    for number in range(count // len(NAMES) + 1):
        forged = number % 2
        if not forged:
            data = damaged(good, chance)
        elif kind.tensors:
            data = forged_tensors(kind.path, chance)
        else:
            data = forged_json(good.decode(), chance).encode()
        path.write_bytes(data)
        try:
            found = kind.read(path)
        except (ValueError, OSError) as error:
            _one_line(error)
            refused += 1
            continue
        if forged:
            if number % 16 == 1 or not kind.tensors:  # what is slow to show, less often
                kind.show(found)
        else:
            assert repr(kind.numbers(found)) == before
    assert refused > count // len(NAMES) // 2


def test_files_of_the_first_version_have_no_digest(kinds: dict[str, Kind], tmp_path: Path) -> None:
    for name in ("_law", "_reproduced"):
        kind, path = kinds[name], tmp_path / name
        record = json.loads(kind.path.read_text())
        del record[SEAL]
        path.write_text(json.dumps(record))
        assert repr(kind.numbers(kind.read(path))) == repr(kind.numbers(kind.read(kind.path)))
