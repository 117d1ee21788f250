"""The benchmark of the CUDA kernels, as far as it goes without a device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

FILE = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_benchmark", module)
    spec.loader.exec_module(module)
    return module


def test_without_a_device_it_says_so(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_case_counts_the_work_of_its_visible_pairs(gpu: ModuleType) -> None:
    full, causal = (gpu.Case(4096, 64, causal, "bfloat16") for causal in (False, True))
    assert (full.batch, full.heads) == (4, 32)
    assert full.flop == 4 * 4 * 32 * 4096**2 * 64
    assert causal.flop / full.flop == pytest.approx(0.5, abs=2e-4)
    assert gpu.Case(65536, 64, True, "bfloat16").batch == 1


def test_the_gate_sees_an_error(gpu: ModuleType) -> None:
    exact = torch.linspace(-1, 1, 9, dtype=torch.float64)
    eps = 2.0**-8
    assert gpu.share(exact + eps, exact, eps, None) == pytest.approx(0.5)
    assert gpu.share(exact + 3 * eps, exact, eps, None) > 1.0
    assert gpu.share(exact + 3 * eps, exact, eps, exact + eps) < 1.0
    assert gpu.share(exact * torch.nan, exact, eps, None) == float("inf")


def test_the_gate_of_a_small_case(gpu: ModuleType) -> None:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton, on Linux)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with np.errstate(all="ignore"):
        found = gpu.gate(gpu.Case(48, 16, True, "bfloat16", tokens=48, model_width=32), device)
    assert set(found) > {"entropy", "varentropy", "lse", "output", "gradient of key"}
    assert 0.0 < max(found.values()) <= 1.0, found


def test_the_table_has_times_and_reasons(gpu: ModuleType) -> None:
    timed = gpu.Timing("acutance", "forward", "timed", [1.0], 1.0, 1.05, 400.0, 12.0)
    absent = gpu.Timing("materialised", "forward", "not run: maps take 512 GiB")
    rows = [gpu.asdict(timing) for timing in (timed, absent)]
    report = {"environment": {"device": "x"}, "cases": [{"name": "full-1", "timings": rows}]}
    lines = gpu.markdown(report).splitlines()
    assert lines[-2] == "| full-1 | forward | acutance | 1.000 | 1.05 | 400 | 12 |"
    assert "not run: maps take 512 GiB" in lines[-1]
    assert {line.count("|") for line in lines[2:]} == {len(gpu.COLUMNS) + 1}
