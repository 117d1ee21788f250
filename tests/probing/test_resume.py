"""Runs that are killed, and go on from the last window they completed."""

from __future__ import annotations

import itertools
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.corpus.load_model import TextModel
from acutance.corpus.probe_corpus import run_windows
from acutance.corpus.ranks import Ranks
from acutance.corpus.texts import model_digest, text_digest
from acutance.files import write_text, write_whole
from acutance.probing import load_state
from acutance.summary.state import Shard

TOY = runpy.run_path(str(Path(__file__).with_name("toy.py")))
text_model, windows, options = TOY["text_model"], TOY["windows"], TOY["options"]
assert_same_rows = TOY["assert_same_rows"]
WINDOWS = 40


def run(pieces: Any, given: Any, model: TextModel | None = None) -> Any:
    return run_windows(model or text_model(), pieces, given, {}, Ranks())


def name(piece: list[int]) -> str:
    """What a window is called in the log."""
    return "-".join(map(str, piece[:5]))


def child(path: str, log: int) -> None:
    """Go on with the run; every batch that begins is a line of the log."""
    model = text_model()
    plain, begun = model.model.forward, itertools.count(1)

    def slow(input_ids: Any, attention_mask: Any) -> Any:
        os.write(log, f"{name(input_ids[0].tolist())}\n".encode())
        if next(begun) == 8:  # on a busy machine the killer comes late: wait for it
            signal.pause()
        return plain(input_ids, attention_mask)

    model.model.forward = slow
    run(windows(WINDOWS), options(batch_size=1, save=path, resume=True), model)


def killer(path: str, out: str) -> None:
    """Start the run again and again, and kill it at a moment that chance picks."""
    torch.set_num_threads(1)  # a process that has threads is not to be forked
    pieces = windows(WINDOWS)
    run(pieces[:2], options(batch_size=1, save=f"{path}.first"))  # imports, once for all
    start = time.perf_counter()
    run(pieces[:4], options(batch_size=1, save=f"{path}.first"))
    batch = (time.perf_counter() - start) / 4
    Path(f"{path}.first").unlink()
    chance = random.Random(11)
    life = []
    for _ in range(60):
        source, log = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(source)
            try:
                child(path, log)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(log)
        before = os.read(source, 64)  # its first batch begins
        time.sleep(chance.uniform(0.0, 8 * batch))
        os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        begun = before
        while part := os.read(source, 1 << 16):
            begun += part
        os.close(source)
        done = load_state(path).run.done if Path(path).exists() else ()
        life.append([os.WIFSIGNALED(status), begun.decode().split(), done])
        if not os.WIFSIGNALED(status) or sum(b - a for a, b in done) == WINDOWS:
            break
    Path(out).write_text(json.dumps(life))


@pytest.mark.slow
def test_a_run_killed_again_and_again_counts_every_window_once(tmp_path: Path) -> None:
    path, out = tmp_path / "state.safetensors", tmp_path / "life.json"
    done = subprocess.run([sys.executable, __file__, str(path), str(out)], check=False, timeout=240)
    assert done.returncode == 0
    life = json.loads(out.read_text())
    assert sum(killed for killed, _, _ in life) >= 5  # it was killed, many times
    pieces = windows(WINDOWS)
    names = [name(piece) for piece in pieces]
    assert len(set(names)) == WINDOWS
    kept: set[int] = set()
    for _, begun, ranges in life:
        now = {index for start, stop in ranges for index in range(start, stop)}
        assert now >= kept  # no window that was completed is lost
        assert not {names.index(one) for one in begun} & kept  # and none is run again
        kept = now
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as those that were killed: more may round matrix products otherwise
    try:
        final = run(pieces, options(batch_size=1, save=path, resume=True))
        whole = run(pieces, options(batch_size=1))
    finally:
        torch.set_num_threads(threads)
    assert final.finished
    assert final.state.run == whole.state.run
    assert whole.state.run.complete
    assert_same_rows(final.state.summary, whole.state.summary)
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"state.safetensors", "life.json"}  # not even half a file


def test_a_run_goes_on_where_an_interrupt_left_it(tmp_path: Path) -> None:
    path, pieces, model = tmp_path / "state", windows(), text_model()
    plain, calls = model.model.second.forward, []

    def stopped(*inputs: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:  # the first layer has read this batch by now
            raise KeyboardInterrupt
        return plain(*inputs, **more)

    model.model.second.forward = stopped
    part = run(pieces, options(save=path), model)
    assert not part.finished
    assert part.state.run.done == ((0, 6),)
    assert [layer.calls for layer in part.state.summary.layers] == [3, 3]
    assert part.state.summary.about["complete"] is False
    rest = run(pieces, options(save=path, resume=True))
    assert rest.resumed == 6
    assert rest.state.summary.about["windows"] == len(pieces)
    assert_same_rows(rest.state.summary, run(pieces, options()).state.summary)
    again = run(pieces, options(save=path, resume=True))
    assert again.finished
    assert again.resumed == len(pieces)
    assert again.probe is None
    assert_same_rows(again.state.summary, rest.state.summary)


def test_an_interrupt_before_anything_was_read() -> None:
    model = text_model()

    def stopped(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    model.model.forward = stopped
    with pytest.raises(KeyboardInterrupt):  # noqa: PT011, RUF100
        run(windows(), options(), model)


def test_the_state_is_written_as_often_as_asked(tmp_path: Path) -> None:
    path, pieces, seen = tmp_path / "state", windows(), []

    def look(*_: object) -> None:
        seen.append(load_state(path).run.windows if path.exists() else 0)

    run_windows(text_model(), pieces, options(save=path, save_every=6), {}, Ranks(), look)
    assert seen == [0, 0, 0, 6, 6, 6, 12, 12, 12, 18, 18, 18]
    assert load_state(path).run.windows == len(pieces) == 23


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("given", "seed", "match"),
    [
        ({"batch_size": 3}, 0, "batch size is 2 in .*state and 3 in this run"),
        ({"length": 12}, 0, "length is 9 in .*state and 12 in this run"),
        ({"verify": False}, 0, "verify is True in .*state and False in this run"),
        ({"noise": True}, 0, "noise is False in .*state and True in this run"),
        ({}, 1, "state is for another model than this run"),
        ({"structure": True}, 0, "metrics differ: attention_distance, .* only in this run"),
        ({"max_rows": 4}, 0, "max rows is not set in .*state and 4 in this run"),
        ({"shard": Shard(1, 2)}, 0, "it is for shard 1/1, this run for shard 1/2"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path, given: dict[str, Any], seed: int, match: str
) -> None:
    path, pieces = tmp_path / "state", windows()
    run(pieces, options(save=path))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"cannot be resumed with other settings: .*{match}"):
        run(pieces, options(save=path, resume=True, **given), text_model(seed))
    other = [*pieces[:-1], [*pieces[-1][:-1], 1 + pieces[-1][-1] % 49]]  # one token of one window
    with pytest.raises(ValueError, match="state is for another text than this run"):
        run(other, options(save=path, resume=True))
    halved = options(save=path, resume=True, every=2)
    with pytest.raises(ValueError, match=r"every is not set in .*state and 2 in this run"):
        run(pieces[::2], halved)  # the text that is left is another one, which is not the reason
    with pytest.raises(ValueError, match="state is for another text than this run"):
        run([*pieces, [3, 4]], options(save=path, resume=True))
    assert path.read_bytes() == before


def test_what_is_no_state_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("notes of mine")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        run(windows(), options(save=path, resume=True))
    assert path.read_text() == "notes of mine"


def test_a_part_is_removed_only_if_nobody_is_writing_it(tmp_path: Path) -> None:
    target, left = tmp_path / "state", tmp_path / ".state.abc.part"
    left.write_text("half")  # what a run that was killed leaves
    (tmp_path / ".state2.abc.part").write_text("of another file")
    resumed = f"from acutance.files import tidy; tidy({str(target)!r})"

    def write(name: str) -> None:
        subprocess.run([sys.executable, "-c", resumed], check=True)  # another run of this file
        Path(name).write_text("whole")

    write_whole(target, write)
    assert target.read_text() == "whole"
    assert {entry.name for entry in tmp_path.iterdir()} == {"state", ".state2.abc.part"}


def test_a_part_that_is_removed_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl", reason="an open file is not removed on Windows anyway")
    target, made = tmp_path / "state", []
    lock = fcntl.flock

    def removed_and_locked(handle: int, how: int) -> None:
        made.append(handle)
        if len(made) == 1:
            next(tmp_path.glob("*.part")).unlink()  # as another run would, just then
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", removed_and_locked)
    write_text(target, "whole")
    assert target.read_text() == "whole"
    assert len(made) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]


def test_what_cannot_be_written_is_named_and_devices_stay_devices(tmp_path: Path) -> None:
    def full(_: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"^.*state cannot be written: No space left on device$"):
        write_whole(tmp_path / "state", full)
    with pytest.raises(FileNotFoundError, match=r"nowhere.state cannot be written: No such file"):
        write_text(tmp_path / "nowhere" / "state", "")
    assert not any(tmp_path.iterdir())
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    for text in ("first", "second"):
        write_text(link, text)
        assert link.is_symlink()
        assert real.read_text() == text
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert not pipe.is_file()


def test_digests_tell_models_and_texts_apart() -> None:
    model = text_model().model
    same = text_model().model
    assert model_digest(model) == model_digest(same)
    for parameter in same.parameters():  # a step of training moves every weight a little
        parameter.data += 1e-6
    assert model_digest(model) != model_digest(same)
    assert model_digest(model) != model_digest(text_model().model.to(torch.bfloat16))
    for count in range(200):
        other = [0] * count
        assert text_digest([other, [1]]) != text_digest([[*other, 1]])


def test_the_configuration_counts_and_its_whereabouts_do_not() -> None:
    class Config:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

        def to_dict(self) -> dict[str, Any]:
            return self.fields

    model = text_model().model
    digests = []
    for fields in ({"rope": 1.0, "_name_or_path": "a"}, {"rope": 1.0, "_name_or_path": "b"},
                   {"rope": 2.0}):  # fmt: skip
        model.config = Config(**fields)
        digests.append(model_digest(model))
    assert digests[0] == digests[1] != digests[2]


def test_a_shard_without_a_window_is_refused() -> None:
    given = replace(options(), shard=Shard(13, 13))
    with pytest.raises(
        ValueError, match="shard 13/13 has no windows: the text has 23 windows, in 12"
    ):
        run(windows(), given)


if __name__ == "__main__":
    killer(sys.argv[1], sys.argv[2])
