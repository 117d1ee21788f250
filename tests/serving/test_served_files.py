"""Served rows are written to files, by several threads, and errors do not stop serving."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import acutance
from acutance.capture.attention_call import AttentionCall
from acutance.serving import ServedRows, prometheus_text
from acutance.serving.vllm_plugin import VllmReader
from tests.serving.test_serving import LENGTHS, serve
from tests.serving.vllm_stand_in import Impl


def test_summaries_of_another_thread_lose_nothing() -> None:
    served, ended, errors = ServedRows(every=1), threading.Event(), list[Exception]()
    call = AttentionCall("layer", "test", *torch.randn(3, 1, 1, 1, 4))

    def ask() -> None:
        while not ended.is_set():
            try:
                served.summary()
            except Exception as error:
                errors.append(error)

    served.add(["layer"], call, None)
    thread, interval = threading.Thread(target=ask), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(100):
            served.add(["layer"], call, None)
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert served.summary().layers[0].rows == 101


def test_a_folder_that_cannot_be_written_to_is_named_and_serving_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    served, _ = serve([Impl()])
    reader = VllmReader(served, file / "below", 1e9)
    with pytest.warns(UserWarning, match=r"attention was not written to .*below: "):
        reader.write()


def test_an_error_while_writing_is_named_and_serving_goes_on(tmp_path: Path) -> None:
    class Broken(ServedRows):
        def write(self, *args: Any, **options: Any) -> None:
            raise ValueError("the disk says no")

    served = Broken(every=1)
    reader = VllmReader(served, tmp_path, 1e9)
    reader.write()  # no row yet
    served.add(["layer"], AttentionCall("layer", "test", *torch.randn(3, 1, 1, 1, 4)), None)
    with pytest.warns(UserWarning, match="attention was not written to .*: the disk says no"):
        reader.write()


def test_that_no_row_was_read_is_named(tmp_path: Path) -> None:
    served = serve([Impl()], dtype=torch.int8)[0]
    with pytest.warns(UserWarning, match=r"no row was read: model\.layers\.0\.self_attn: a cache"):
        VllmReader(served, tmp_path, 1e9).write()
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_by_one_thread_at_a_time(tmp_path: Path) -> None:
    class Slow(ServedRows):
        writers, most = 0, 0

        def write(self, *args: Any, **options: Any) -> None:
            self.writers += 1
            self.most = max(self.most, self.writers)
            time.sleep(0.1)
            self.writers -= 1

    served = Slow(every=1)
    served.add(["layer"], AttentionCall("layer", "test", *torch.randn(3, 1, 1, 1, 4)), None)
    reader = VllmReader(served, tmp_path, 1e9)
    threads = [threading.Thread(target=reader.write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served.most == 1


def test_the_last_rows_are_written_when_the_engine_is_idle(tmp_path: Path) -> None:
    serve([Impl(), Impl()], folder=tmp_path)
    file, end = tmp_path / "attention-rank0.json", time.monotonic() + 30
    while not file.exists() or json.loads(file.read_text())["heads"]["rows"][0] != sum(LENGTHS):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_files_are_written_and_read_again(tmp_path: Path) -> None:
    served, _ = serve([Impl(), Impl()])
    served.write(tmp_path / "out", "rows", about={"engine": "stand-in"})
    summary = acutance.load(tmp_path / "out" / "rows.safetensors")
    assert summary.about["engine"] == "stand-in"
    record = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert record["heads"]["entropy_mean"] == pytest.approx(summary.mean("entropy").tolist())
    text = (tmp_path / "out" / "rows.prom").read_text()
    lines = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    assert lines.count("acutance_entropy_sum") == lines.count("acutance_entropy_count") == 8
    first = next(line for line in text.splitlines() if line.startswith("acutance_entropy_sum"))
    assert first.startswith('acutance_entropy_sum{layer="0",module="model.layers.0.self_attn"')
    total = float(summary.mean("entropy")[0]) * sum(LENGTHS)
    assert float(first.split()[-1]) == pytest.approx(total)


def test_prometheus_escapes_labels_and_names_unknown_metrics() -> None:
    summary = serve([Impl()])[0].summary()
    assert ',job="a\\"b"}' in prometheus_text(summary, labels=[("job", 'a"b')])
    with pytest.raises(ValueError, match="entropi"):
        prometheus_text(summary, ["entropi"])
