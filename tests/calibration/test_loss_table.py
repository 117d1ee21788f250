"""Tables of losses: every row once, whatever stops a run, and states of earlier versions."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from acutance.calibration.loss_table import COMPARISON, FIT, LossTable, Reading, Saving
from acutance.summary.files import sealed

FILES = Path(__file__).parents[1] / "contract" / "files"


class Killed(BaseException):
    """Ends a run as SIGKILL does."""


def reading(number: int) -> Reading:
    """One with different shapes for different numbers."""
    return Reading(
        torch.full((number, 2), 0.1 * number, dtype=torch.float64),
        torch.full((number, 2), number),
        torch.arange(float(number - 1), dtype=torch.float64),
    )


def test_a_row_is_read_once_whatever_stops_the_run(tmp_path: Path) -> None:
    made: list[int] = []

    def make(number: int, stop: type[BaseException] | None = None) -> Reading:
        if stop is not None:
            raise stop
        made.append(number)
        return reading(number)

    saving = Saving(str(tmp_path / "state"), resume=True, every=2)
    for count, stop in ((1, Killed), (3, Killed), (4, KeyboardInterrupt), (5, ValueError)):
        with suppress(stop), LossTable({}, saving) as table:
            for number in range(1, count + 1):
                table.get("change", number, lambda number=number: make(number))
            table.get("change", 9, lambda stop=stop: make(9, stop))
    with LossTable({}, saving) as table:
        for number in range(1, 6):
            found = table.get("change", number, lambda: make(9))
            for name in ("loss", "count", "values"):
                torch.testing.assert_close(
                    getattr(found, name), getattr(reading(number), name).double()
                )
    assert made == [1, 1, 2, 3, 3, 4, 5]  # killed before a second window was there, and a fourth


@pytest.mark.parametrize("name", ["calibration.safetensors", "budget.safetensors.costs"])
def test_a_state_without_names_is_not_lost_by_a_run_that_stops(name: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copy(FILES / name, state)
    with safe_open(state, framework="pt") as file:
        settings = json.loads(file.metadata()["settings"])
        losses = file.get_tensor("loss")
    saving = Saving(str(state), resume=True)
    with suppress(KeyboardInterrupt), LossTable(settings, saving) as table:
        table.get("first", 0, lambda: reading(1))
        raise KeyboardInterrupt
    for _ in range(2):
        with LossTable(settings, saving) as table:
            found = [table.get("any", number, lambda: reading(1)) for number in range(len(losses))]
        assert [float(one.loss) for one in found] == losses.tolist()


def test_a_state_of_other_windows_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """The comparison of 4 windows, and a run on 3."""
    state = tmp_path / "state"
    shutil.copy(FILES / "judge.safetensors", state)
    with safe_open(state, framework="pt") as file:
        settings = json.loads(file.metadata()["settings"])
    saving = Saving(str(state), resume=True, tables={"": COMPARISON})
    assert len(LossTable(settings, saving, [1] * 4).readings) == 12
    with pytest.raises(ValueError, match=r"the number of windows \(--windows\) was 4 and is now 3"):
        LossTable(settings | {"windows": 3}, saving, [1] * 3)


def test_a_window_that_an_earlier_version_read_twice_keeps_the_others_in_place(
    tmp_path: Path,
) -> None:
    """Its states list readings in the order of their making, without what they are of."""
    losses = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    tensors = {"loss": losses, "count": torch.ones(3), "gradient": torch.zeros(3, 2)}
    header = {"schema": "acutance.loss_calibration/1", "settings": "{}"}
    save_file(tensors, tmp_path / "state", metadata=sealed(header, tensors))
    with LossTable({}, Saving(str(tmp_path / "state"), resume=True)) as table:
        asked = ["first", "first", "second", "first"]
        found = [table.get(change, 0, lambda: reading(9)) for change in asked]
    assert [float(one.loss) for one in found] == [1.0, 2.0, 3.0, 2.0]


def earlier(path: Path) -> bytes:
    """Write the main table of a fit of an earlier version, and return the file's content."""
    tensors = {"loss": torch.ones(1), "count": torch.ones(1), "gradient": torch.zeros(1)}
    rows = json.dumps([[0, 0, 0.0, [], [1]]])
    header = {"schema": "acutance.losses/1", "settings": "{}", "changes": '["a"]', "rows": rows}
    save_file(tensors, path, metadata=sealed(header, tensors))
    return path.read_bytes()


def test_a_file_of_an_earlier_version_stays_until_its_table_is_taken_over(tmp_path: Path) -> None:
    """The run stops after a reading of its first table, then after one of its main table."""
    state = tmp_path / "state"
    made: list[int] = []
    content = earlier(state)

    def make() -> Reading:
        made.append(1)
        return Reading(torch.tensor(2.0), torch.tensor(1), torch.zeros(1))

    for windows in (1, 2):
        saving = Saving(str(state), resume=True, tables={"": FIT, ".windows": FIT})
        with LossTable({}, saving, name=".windows") as table:
            for number in range(windows):
                table.get("a", number, make)
        assert len(made) == windows
        assert state.read_bytes() == content
    for _ in range(2):
        with LossTable({}, saving) as table:
            assert float(table.get("a", 0, make).loss) == 1.0
            table.get("b", 0, make)
        with LossTable({}, saving, name=".windows") as table:
            assert len(table.readings) == 2
        saving = Saving(str(state), resume=True, tables={"": FIT, ".windows": FIT})
    assert len(made) == 3


def test_a_file_of_another_function_is_refused_before_a_run(tmp_path: Path) -> None:
    state = tmp_path / "state"
    searched = {"": "search for a plan to resume", ".costs": FIT}
    for tables, name, other, says in (
        ({"": COMPARISON}, "", searched, "it contains a comparison to resume"),
        (searched, ".costs", {"": COMPARISON}, "it contains a table '.costs', which this run"),
    ):
        with LossTable({}, Saving(str(state), tables=tables), name=name) as table:
            table.get("a", 0, lambda: reading(2))
        content = state.read_bytes()
        with pytest.raises(ValueError, match=f"state contains no .*: {says}"):
            LossTable({}, Saving(str(state), resume=True, tables=other), name=list(other)[-1])
        assert state.read_bytes() == content


def test_a_damaged_file_beside_that_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    state, beside = tmp_path / "state", tmp_path / "state.costs"
    earlier(state)
    beside.write_bytes(earlier(beside)[:-1] + b"x")
    with pytest.raises(ValueError, match=r"^\S+state\.costs contains no fit .* is damaged"):
        LossTable(
            {}, Saving(str(state), resume=True, tables={"": FIT, ".costs": FIT}), name=".costs"
        )
