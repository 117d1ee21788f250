"""Files: modes, what is left behind, and what is no file."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from acutance.calibration import Law
from acutance.cli import app
from acutance.files import check_regular, write_text, write_whole

NOBODY = 65534
NOWHERE = (
    "probe --text /no/text", "report /no/state", "merge /no/state",
    "probe --law /no/law", "compare --from /no/state", "calibrate -o /no/where", "probe /no/model",
)  # fmt: skip


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A directory, as a user sees it whom modes bind."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    root = os.geteuid() == 0
    if root:
        for given in NOWHERE:  # what commands import may be closed to others
            said(*given.split())
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in (folder, *folder.iterdir()):
            path.chmod(0o700)
            if path.is_file():
                path.unlink()
        for path in folder.iterdir():
            path.rmdir()
        folder.rmdir()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def said(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "400"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("bits", [0o600, 0o640, 0o666, 0o755])
def test_a_file_that_is_rewritten_keeps_its_mode(tmp_path: Path, bits: int) -> None:
    path, link = tmp_path / "state", tmp_path / "link"
    path.write_text("before")
    path.chmod(bits)
    link.symlink_to(path)
    for target in (path, link):
        write_text(target, str(target))
        assert path.read_text() == str(target)
        assert mode(path) == bits


def test_what_is_written_meanwhile_is_as_secret_as_the_file(tmp_path: Path) -> None:
    path, seen = tmp_path / "state", []
    path.write_text("")
    path.chmod(0o600)
    write_whole(path, lambda name: seen.append(mode(Path(name))))
    assert seen == [0o600]


def test_a_new_file_has_the_mode_of_the_umask_and_nobody_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda _: pytest.fail("the umask is of every thread"))
            write_text(tmp_path / "state", "new")
        assert mode(tmp_path / "state") == 0o640
    finally:
        os.umask(before)


def test_files_of_other_threads_keep_their_mode(tmp_path: Path) -> None:
    """Four in ten of another thread's files were readable by all."""
    before, writing, modes = os.umask(0o077), threading.Event(), set()

    def others() -> None:
        for index in range(2_000):
            handle = os.open(tmp_path / f"o{index}", os.O_CREAT | os.O_WRONLY, 0o666)
            modes.add(stat.S_IMODE(os.fstat(handle).st_mode))
            os.close(handle)
        writing.set()

    try:
        thread = threading.Thread(target=others)
        thread.start()
        while not writing.is_set():
            write_text(tmp_path / "state", "ours")
        thread.join()
    finally:
        os.umask(before)
    assert modes == {0o600}


def test_a_read_only_file_is_not_replaced(nobody: Path) -> None:
    path = nobody / "law.json"
    path.write_text("kept")
    path.chmod(0o444)
    with pytest.raises(PermissionError, match=r"law.json cannot be written: it is read-only$"):
        write_text(path, "new")
    assert path.read_text() == "kept"
    assert os.listdir(nobody) == ["law.json"]
    code, text = said("calibrate", "-o", path)
    assert code == 2
    assert "law.json is read-only" in text


def test_a_directory_that_may_not_be_looked_into_takes_one_sentence(nobody: Path) -> None:
    closed, listed, blind = nobody / "closed", nobody / "listed", nobody / "blind"
    for folder, bits in ((closed, 0), (listed, 0o555), (blind, 0o333)):
        folder.mkdir()
        folder.chmod(bits)
    assert "closed is not writable" in said("probe", "--save", closed / "state")[1]
    assert "does not exist or cannot be read" in said("probe", "--save", closed / "a" / "state")[1]
    assert "listed is not writable" in said("calibrate", "-o", listed / "law")[1]
    for command in ("report", "merge"):
        code, text = said(command, closed / "state")
        assert (code, text.count("acutance: ")) == (1, 1)
        assert "cannot be read: Permission denied" in text
    code, text = said("probe", closed)
    assert (code, text) == (1, f"acutance: {closed} cannot be listed: Permission denied")
    write_text(blind / "state", "whole")  # it may be written to, not listed
    blind.chmod(0o777)
    assert (blind / "state").read_text() == "whole"
    (blind / "state").unlink()


def test_a_file_that_may_not_be_read_takes_one_sentence(nobody: Path) -> None:
    path = nobody / "model.safetensors"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(PermissionError, match=r"model.safetensors cannot be read: Permission"):
        check_regular(path)
    for arguments in (("probe", "--text", path), ("report", path),
                      ("probe", "--law", path), ("compare", "--from", path)):  # fmt: skip
        code, text = said(*arguments)
        assert code == 1
        assert text == f"acutance: {path} cannot be read: Permission denied"
    (nobody / "config.json").write_text("{}")
    code, text = said("probe", nobody)
    assert (code, text) == (1, f"acutance: {path} cannot be read: Permission denied")


def test_pipes_devices_and_directories_are_not_waited_for(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, Path("/dev/zero"), folder):
        what = "directory" if path == folder else "pipe or a device"
        for arguments in (
            ("probe", "--text", path), ("report", path),
            ("probe", "--law", path), ("compare", "--from", path), ("merge", path),
            ("diff", path, path), ("calibrate", "--text", path), ("alarms", path),
        ):  # fmt: skip
            code, text = said(*arguments)
            assert code == 1, (arguments, text)
            assert text.count("acutance: ") == 1
            assert f"{path} is a {what}" in text
    assert "pipe it to --text -" in said("probe", "--text", pipe)[1]
    for path in (pipe, Path("/dev/zero")):
        assert f"{path} is a pipe or a device, not a file" in said("verify", path)[1]
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    assert "is a pipe or a device" in said("probe", tmp_path)[1]


def test_states_and_records_that_are_pipes_are_not_waited_for(tmp_path: Path) -> None:
    from acutance.calibration.loss_table import LossTable, Saving
    from acutance_lab.record import load

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for read in (load, Law.load, lambda path: LossTable({}, Saving(str(path), resume=True))):
        with pytest.raises(OSError, match=r"pipe is a pipe or a device, not a file"):
            read(pipe)


def test_what_killed_writes_left_goes_with_the_next_write(tmp_path: Path) -> None:
    for name in (".out.json.abc.part", ".out.json.0123.part", ".other.abc.part"):
        (tmp_path / name).write_text("half")
    write_text(tmp_path / "out.json", "whole")
    assert sorted(os.listdir(tmp_path)) == [".other.abc.part", "out.json"]
