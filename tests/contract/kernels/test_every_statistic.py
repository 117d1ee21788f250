"""Every statistic against the float64 definition: on each backend, and each instruction set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import acutance
from acutance import kernels, testing
from tests.contract.names import metric_names


def check(backend: str, mask: str, dtype: torch.dtype, queries: int | None = None) -> None:
    """One random call; keys that hold a share of the weight are in ``rowstats/test_gaps.py``."""
    seed = sorted(testing.MASKS).index(mask)
    case = testing.attention_case(seed, mask=mask, dtype=dtype, queries=queries)
    out, stats = acutance.attention(
        *case.tensors, **case.options, return_stats=True, noise=True, backend=backend
    )
    oracle = testing.dense_statistics(*case.tensors, **case.options)
    assert set(metric_names(noise=True)) == set(oracle) - {"output"}
    for name in metric_names(noise=True):
        assert getattr(stats, name).shape == out.shape[:-1], name
    testing.assert_close_to_oracle(
        stats,
        oracle,
        score_error=testing.score_error(case.query, case.key),
        value_norm=float(case.value.double().norm(dim=-1).max()),
        name=f"{backend}, {case.name}",
    )


@pytest.mark.parametrize("mask", testing.MASKS)
@pytest.mark.parametrize("backend", ["native", "blocked"], indirect=True)
def test_on_every_backend(backend: str, mask: str) -> None:
    check(backend, mask, torch.float32)
    check(backend, mask, torch.float64)


@pytest.mark.parametrize("mask", ["everything", "causal"])
@pytest.mark.parametrize("backend", ["triton"], indirect=True)
def test_on_the_gpu_backend(backend: str, mask: str) -> None:
    """Its interpreter takes seconds for a call."""
    check(backend, mask, torch.float32)


def test_on_every_instruction_set() -> None:
    if (why := kernels.info().why_not) is not None:
        pytest.skip(why)
    runs = {
        cpu: subprocess.Popen(
            [sys.executable, "-m", "tests.contract.kernels.test_every_statistic"],
            env=os.environ | {"ACUTANCE_CPU": cpu},
            stderr=subprocess.PIPE,
            text=True,
        )
        for cpu in kernels.info().cpus
        if cpu != kernels.info().cpu  # which the tests above run
    }
    said = {cpu: run.communicate(timeout=300)[1] for cpu, run in runs.items()}
    assert {cpu: said[cpu] for cpu, run in runs.items() if run.returncode != 0} == {}


if __name__ == "__main__":
    assert kernels.info().cpu == os.environ["ACUTANCE_CPU"]
    for mask in testing.MASKS:
        check("native", mask, torch.float32)
        check("native", mask, torch.float32, 1)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        check("native", "everything", dtype)
