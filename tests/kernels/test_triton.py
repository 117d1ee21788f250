"""The Triton kernels: in Triton's interpreter anywhere, compiled where there is a CUDA device.

Skipped, but for the refusals, where triton is not installed: ``pip install triton`` on Linux.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acutance.attend import attention
from acutance.kernels import blocked, gpu
from acutance.kernels.backward import backward as blocked_backward
from acutance.kernels.call import Gradients, KernelCall, SumGradients, Sums
from acutance.kernels.gpu import language, supported, unsupported_gradient, why_not
from acutance.masks import check_masking
from acutance.rowstats import RowState, RowStatistics, dense_statistics
from acutance.rowstats.metrics import metric_names
from acutance.testing import (
    MASKS,
    AttentionCase,
    assert_close_to_oracle,
    attention_case,
    exact_scores,
    score_error,
)

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton, on Linux)",
)


class Kernels:
    """The kernels on one device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None, noise: bool, **options: Any
    ) -> Sums:
        """The sums of a call given as users give it, checked to be the kernel's own."""
        given = call(self.device, query, key, value, **options)._replace(noise=noise)
        assert gpu.supported(given) is None
        sums: Sums = gpu.forward(given)
        return Sums(*(part.cpu() for part in sums))

    def backward(
        self, grad: SumGradients, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Gradients:
        """Gradients of a forward call of these kernels."""
        given = call(self.device, query, key, value, **options)
        wanted = wants(**options)
        assert gpu.supported(given) is None
        assert gpu.unsupported_gradient(given.masking, wanted) is None
        sums = gpu.forward(given)
        grad = SumGradients(*(None if part is None else part.to(self.device) for part in grad))
        found = gpu.backward(grad, sums, given, wanted)
        return Gradients(*(None if part is None else part.cpu() for part in found))


def call(
    device: str, query: Tensor, key: Tensor, value: Tensor | None, **options: Any
) -> KernelCall:
    """What :func:`acutance.attention` hands to a kernel."""
    options = {
        name: part.to(device)
        if isinstance(part, Tensor)
        else tuple(each.to(device) for each in part)
        if isinstance(part, tuple)
        else part
        for name, part in options.items()
    }
    options.pop("enable_gqa", None)
    scale = options.pop("scale", query.shape[-1] ** -0.5)
    softcap, sinks = options.pop("softcap", None), options.pop("sinks", None)
    query, key = query.to(device), key.to(device)
    value = None if value is None else value.to(device)
    masking = check_masking(query, key, **options)
    return KernelCall(query, key, value, masking, scale, softcap, sinks)


def wants(**options: Any) -> tuple[bool, ...]:
    mask = options.get("attn_mask")
    added = mask is not None and mask.is_floating_point()
    return (True, True, True, added, "bias" in options, "sinks" in options)


@pytest.fixture
def kernels() -> Kernels:
    pytest.importorskip("triton", reason="triton is not installed (pip install triton, on Linux)")
    return Kernels("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where a GPU gives infinity and NaN."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def statistics(sums: Sums, sinks: Tensor | None = None) -> RowStatistics:
    """Statistics of the sums, as :func:`acutance.row_statistics` makes them."""
    fields = sums._asdict()
    del fields["out"]
    none = sums.Z.unsqueeze(-1)[..., :0]
    sink = none if sinks is None else sinks.float().view(1, -1, 1).expand_as(sums.Z)
    return RowStatistics(RowState(sink=sink, **fields))


def check(kernels: Kernels, case: AttentionCase) -> None:
    """Hold every metric, and the output, against the float64 oracle."""
    sums = kernels.forward(*case.tensors, True, **case.options)
    stats = statistics(sums, case.options.get("sinks"))
    oracle = dense_statistics(*case.tensors, **case.options)
    delta = score_error(
        case.query, case.key, case.options.get("scale"), added=added_size(case, case.key.shape[2])
    )
    norm = float(torch.linalg.vector_norm(case.value.double(), dim=-1).amax())
    assert stats.available == EXACT
    assert_close_to_oracle(stats, oracle, score_error=delta, value_norm=norm, name=case.name)
    same_output(sums.out, oracle["output"], case)


def added_size(case: AttentionCase, keys: int) -> float:
    """Largest size of what is added to the scores."""
    size = 0.0
    for name in ("attn_mask", "bias"):
        tensor = case.options.get(name)
        if tensor is not None and tensor.is_floating_point() and (tensor > -1e4).any():
            size += float(tensor[tensor > -1e4].abs().amax())
    if "alibi_slopes" in case.options:
        far = keys + abs(case.options.get("query_offset", 0)) + case.query.shape[2]
        size += float(case.options["alibi_slopes"].abs().amax()) * far
    return size


def same_output(out: Tensor, oracle: Tensor, case: AttentionCase) -> None:
    """Within the rounding of the output and, for half precision, of every weight before it."""
    assert out.dtype == case.query.dtype
    largest = float(case.value.abs().amax())
    eps = torch.finfo(out.dtype).eps
    bound = 2e-5 if out.dtype == torch.float32 else eps
    assert (out.double() - oracle).abs().max() <= bound * max(1.0, largest)


# -- the forward pass -------------------------------------------------------------------------


@pytest.mark.few(5)
@pytest.mark.parametrize("mask", MASKS)
def test_random_calls_are_the_oracle(kernels: Kernels, mask: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for seed in range(3):
        magnitude = (1.0, 10.0, 0.1)[seed]
        case = attention_case(
            seed, mask=mask, dtype=dtypes[seed], magnitude=magnitude, queries=18 + seed, keys=45
        )
        check(kernels, case)


LONG: dict[str, dict[str, Any]] = {
    "whole tiles": {},
    "causal": {"is_causal": True, "query_offset": 97},
    "causal, rows without keys": {"is_causal": True, "query_offset": -5},
    "window": {"window": 50, "query_offset": 60},
    "causal window": {"window": 70, "is_causal": True, "query_offset": 90},
    "softcap": {"softcap": 3.0, "is_causal": True, "query_offset": 97},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.03]), "is_causal": True, "query_offset": 97},
    "negative scale": {"scale": -0.2},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LONG)
def test_rows_of_several_tiles_are_the_oracle(
    kernels: Kernels, name: str, dtype: torch.dtype
) -> None:
    """130 keys: whole tiles between two edges, widths that fill no tile, grouped heads."""
    query, key = normal(1, 2, 33, 20, dtype=dtype), normal(1, 1, 130, 20, seed=1, dtype=dtype)
    options = {"enable_gqa": True, **LONG[name]}
    case = AttentionCase(query, key, normal(1, 1, 130, 12, seed=2, dtype=dtype), options, name)
    check(kernels, case)


ROWS = {
    "uniform ±1e4": (torch.rand(200, generator=torch.Generator().manual_seed(2)) * 2 - 1) * 1e4,
    "one-hot": torch.zeros(200).index_fill(0, torch.tensor(7), 1e4),
    "outlier below": normal(200).index_fill(0, torch.tensor(7), -1e4),
    "outlier above, late": normal(200).index_fill(0, torch.tensor(170), 1e4),
    "1e4 + N(0, 1)": 1e4 + normal(200, seed=1),
    "all equal 1e4/3": torch.full((200,), 1e4 / 3),
    "first tile 1e4 above the rest": normal(200, seed=1) + 1e4 * (torch.arange(200) < 32),
    "first tile 1e4 below the rest": normal(200, seed=1) - 1e4 * (torch.arange(200) < 32),
    "two at the top": torch.full((200,), -1e4).index_fill(0, torch.tensor([7, 8]), 1e4),
    "a single key": torch.tensor([3.25]),
}


@pytest.mark.grid
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("row", ROWS)
def test_exact_logits_of_size_1e4(kernels: Kernels, row: str, window: int | None) -> None:
    query, key = exact_scores(ROWS[row])
    options = {"scale": 1.0, "window": window, "query_offset": 110 if window else 0}
    if window and len(ROWS[row]) == 1:
        options["query_offset"] = 0
    stats = statistics(kernels.forward(query, key, None, False, **options))
    oracle = dense_statistics(query, key, **options)
    assert_close_to_oracle(stats, oracle, name=row)
    for name in stats.available:
        error = (stats[name].double() - oracle[name].double()).abs().nan_to_num(0.0)
        assert (error <= 2e-5 * oracle[name].abs().nan_to_num(0.0).clamp(min=0.05)).all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_have_the_entropy_of_their_float64_values(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    query, key = normal(1, 2, 20, 64, dtype=dtype) * 2, normal(1, 2, 200, 64, seed=1, dtype=dtype)
    options = {"is_causal": True, "query_offset": 180}
    stats = statistics(kernels.forward(query, key, None, False, **options))
    want = dense_statistics(query.double(), key.double(), **options)
    assert (stats.entropy.double() - want["entropy"]).abs().max() <= 1e-5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_without_numbers_stays_alone(kernels: Kernels, bad: float) -> None:
    query, key, value = (
        normal(1, 1, 20, 8),
        normal(1, 1, 70, 8, seed=1),
        normal(1, 1, 70, 8, seed=2),
    )
    spoiled = query.clone()
    spoiled[0, 0, 3, 2] = bad
    clean, found = (kernels.forward(q, key, value, True) for q in (query, spoiled))
    others = torch.arange(20) != 3
    for name, left, right in zip(Sums._fields, clean, found, strict=True):
        assert torch.equal(left[:, :, others], right[:, :, others]), name
    for name in ("out", "Z", "U", "W", "Q", "mean", "M2"):
        assert not getattr(found, name)[0, 0, 3].isfinite().any(), name
    assert found.n[0, 0, 3] == 70
    assert not found.m[0, 0, 3].isfinite()


def test_rows_that_see_nothing_hold_nothing(kernels: Kernels) -> None:
    query, key, value = (
        normal(1, 2, 20, 8),
        normal(1, 2, 70, 8, seed=1),
        normal(1, 2, 70, 3, seed=2),
    )
    mask = torch.ones(20, 70, dtype=torch.bool)
    mask[4] = False
    for sinks in (None, torch.tensor([0.5, -200.0])):
        found = kernels.forward(query, key, value, True, attn_mask=mask, sinks=sinks)
        given = call("cpu", query, key, value, attn_mask=mask, sinks=sinks)
        want = blocked.forward(given._replace(noise=True))
        for name, ours, theirs in zip(Sums._fields, found, want, strict=True):
            assert ours.shape == theirs.shape, name
            assert ours.dtype == theirs.dtype, name
            assert torch.equal(ours[:, :, 4], theirs[:, :, 4]), name


def test_results_are_the_same_from_run_to_run(kernels: Kernels) -> None:
    tensors = normal(1, 2, 20, 8), normal(1, 1, 70, 8, seed=1), normal(1, 1, 70, 8, seed=2)
    runs = [kernels.forward(*tensors, True, is_causal=True, query_offset=50) for _ in range(2)]
    for left, right in zip(*runs, strict=True):
        assert torch.equal(left, right)
    grad = SumGradients(*[normal(1, 2, 20, 8), *[normal(1, 2, 20)] * 9])
    twice = [kernels.backward(grad, *tensors, is_causal=True) for _ in range(2)]
    for left, right in zip(*twice, strict=True):
        assert left is right is None or torch.equal(left, right)


# -- the backward pass ------------------------------------------------------------------------

FULL: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 50},
    "causal window": {"window": 41, "is_causal": True, "query_offset": 40},
    "window": {"window": 30, "query_offset": 20},
    "padding": {"key_mask": torch.arange(70)[None] % 3 > 0},
    "boolean": {"attn_mask": normal(20, 70, seed=7) > 0.5},
    "documents": {"document_ids": (torch.arange(20)[None] // 9, torch.arange(70)[None] // 33)},
    "additive": {"attn_mask": normal(1, 2, 20, 70, seed=8).masked_fill_(
        normal(1, 2, 20, 70, seed=9) > 1, -torch.inf
    )},
    "bias": {"bias": normal(1, 2, 20, 70, seed=8)},
    "softcap, sinks": {"softcap": 2.0, "sinks": torch.tensor([0.5, 3.0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.05]), "scale": -0.3},
}  # fmt: skip


def exact(part: Any) -> Any:
    """Floating tensors in float64, anything else as it is."""
    return part.double() if isinstance(part, Tensor) and part.is_floating_point() else part


def gradients(dtype: torch.dtype, names: tuple[str, ...]) -> SumGradients:
    parts = {
        name: normal(1, 2, 20, 12, seed=20, dtype=dtype) if name == "out"
        else normal(1, 2, 20, seed=21 + index) if name in names
        else None
        for index, name in enumerate(SumGradients._fields)
    }  # fmt: skip
    return SumGradients(**parts)


def compare_gradients(
    kernels: Kernels, dtype: torch.dtype, grad: SumGradients, options: dict[str, Any], factor: float
) -> None:
    query, key = normal(1, 2, 20, 20, dtype=dtype), normal(1, 1, 70, 20, seed=1, dtype=dtype)
    value = normal(1, 1, 70, 12, seed=2, dtype=dtype)
    found = kernels.backward(grad, query, key, value, **options)
    given = call(
        "cpu",
        *(query.double(), key.double(), value.double()),
        **{name: exact(part) for name, part in options.items()},
    )
    sums = blocked.forward(given)
    wide = SumGradients(*(exact(part) for part in grad))
    want = blocked_backward(wide, sums, given, wants(**options))
    for name, ours, theirs in zip(Gradients._fields, found, want, strict=True):
        assert (ours is None) == (theirs is None), name
        if ours is not None and theirs is not None:
            # every sum rounds its terms, and the result is rounded to the input's dtype
            bound = factor * torch.finfo(dtype).eps * theirs.abs().max()
            assert (ours.double() - theirs).abs().max() <= bound, name


@pytest.mark.few(4)
@pytest.mark.parametrize("name", FULL)
def test_every_gradient_is_the_blocked_path_s_in_float64(kernels: Kernels, name: str) -> None:
    grad = gradients(torch.float32, SumGradients._fields)
    compare_gradients(kernels, torch.float32, grad, FULL[name], 16.0)


@pytest.mark.few(3)
@pytest.mark.parametrize("part", SumGradients._fields[1:])
def test_one_gradient_alone(kernels: Kernels, part: str) -> None:
    grad = gradients(torch.float32, (part,))._replace(out=None)
    compare_gradients(kernels, torch.float32, grad, {"is_causal": True, "query_offset": 50}, 16.0)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["causal", "bias", "softcap, sinks"])
def test_half_precision_gradients(kernels: Kernels, name: str, dtype: torch.dtype) -> None:
    grad = gradients(dtype, ("Z", "U", "W"))
    options = {key: part.to(dtype) if isinstance(part, Tensor) else part
               for key, part in FULL[name].items()}  # fmt: skip
    compare_gradients(kernels, dtype, grad, options, 2.0)


def test_small_float16_gradients_do_not_vanish(kernels: Kernels) -> None:
    """A loss averaged over many rows leaves 1e-7 for each: below float16's smallest number here."""
    grad = SumGradients(*[None if part is None else part * 2.0**-24 for part in gradients(
        torch.float32, ("Z", "U"))])._replace(out=None)  # fmt: skip
    query = normal(1, 2, 20, 20, dtype=torch.float16)
    key = normal(1, 1, 70, 20, seed=1, dtype=torch.float16) * 64
    given = call("cpu", query, key, key, scale=0.01)
    found = kernels.backward(grad, query, key, key, scale=0.01).query
    sums = blocked.forward(given)
    want = blocked_backward(grad, sums, given, (True,) + (False,) * 5).query
    assert found is not None
    assert want is not None
    assert want.abs().max() > 0
    assert (
        found.float() - want.float()
    ).abs().max() <= 2.0**-24  # one step of what it is stored in


def test_gradients_of_rows_that_see_nothing_are_zero(kernels: Kernels) -> None:
    mask = torch.zeros(20, 70, dtype=torch.bool)
    mask[3:, ::2] = True
    grad = gradients(torch.float32, SumGradients._fields)
    query, key, value = normal(1, 2, 20, 20), normal(1, 1, 70, 20, seed=1), normal(1, 1, 70, 12)
    found = kernels.backward(grad, query, key, value, attn_mask=mask, sinks=torch.zeros(2))
    for part in found[:3]:
        assert part is not None
        assert part.isfinite().all()
    assert found.query is not None
    assert found.key is not None
    assert found.query[:, :, :3].eq(0).all()
    assert found.query[:, :, 3:].ne(0).any(-1).all()
    assert found.key[:, :, 1::2].eq(0).all()


# -- through the public call ------------------------------------------------------------------


def test_attention_runs_here_when_asked_to(kernels: Kernels) -> None:
    found = {}
    for backend in ("triton", "blocked"):
        leaves = [normal(1, 2, 20, 8, seed=seed).to(kernels.device) for seed in range(3)]
        for leaf in leaves:
            leaf.requires_grad_()
        out, stats = attention(*leaves, is_causal=True, return_stats=True, backend=backend)
        assert stats.backend == backend
        loss = out.square().sum() + stats.entropy.square().sum() + stats.lse.sum()
        found[backend] = [out, stats.varentropy, *torch.autograd.grad(loss, leaves)]
    for ours, theirs in zip(found["triton"], found["blocked"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# -- compiling -------------------------------------------------------------------------------


#: Registers, bytes of stack (what registers do not hold), bytes of shared memory, instructions a
#: pair: at most, by capability, with 64 rows, 64 keys and 4 warps; bfloat16, 64 wide, causal. At
#: twice the width with 128 rows and 8 warps. Of the histogram with one of sixteen sums.
BUDGETS = {
    "80": {
        "chunk_kernel": (124, 0, 20480, 0.0),
        "running_kernel": (90, 0, 32, 0.0),
        "rows_kernel": (128, 0, 8192, 0.0),
        "forward_kernel": (255, 40, 24576, 16.4),
        "forward_kernel, 128 wide": (255, 128, 65536, 20.7),
        "gaps_kernel": (232, 0, 10240, 25.2),
        "queries_kernel": (188, 0, 32768, 14.4),
        "keys_kernel": (255, 8, 33792, 19.4),
    },
    "90": {
        "chunk_kernel": (124, 0, 20480, 0.0),
        "running_kernel": (92, 0, 32, 0.0),
        "rows_kernel": (138, 0, 16384, 0.0),
        "forward_kernel": (188, 0, 40960, 15.0),
        "forward_kernel, 128 wide": (255, 32, 98304, 17.2),
        "gaps_kernel": (158, 0, 16384, 22.6),
        "queries_kernel": (168, 0, 49152, 11.2),
        "keys_kernel": (255, 32, 50176, 15.2),
    },
    "100": {
        "chunk_kernel": (124, 0, 20480, 0.0),
        "running_kernel": (92, 0, 32, 0.0),
        "rows_kernel": (120, 0, 16392, 0.0),
        "forward_kernel": (255, 64, 41984, 13.7),
        "forward_kernel, 128 wide": (255, 272, 102432, 15.8),
        "gaps_kernel": (152, 0, 16392, 22.6),
        "queries_kernel": (152, 0, 58368, 13.4),
        "keys_kernel": (255, 160, 67584, 15.6),
    },
}
#: Kernels that every call with all masks and gradients runs; those of keys' sums need none.
MASKED = {"forward_kernel", "gaps_kernel", "queries_kernel", "keys_kernel", "largest_kernel"}


@pytest.mark.slow
@needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles for CUDA on Linux")
@pytest.mark.parametrize(
    "arguments", [("80", "float32"), ("90", "bfloat16"), ("100",)], ids=" ".join
)
def test_every_kernel_compiles_within_its_budget_without_a_device(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """The plain call, held to what it takes; in a dtype every mask and every gradient at once.

    A100, H100 and B200 have these capabilities.
    """
    script = Path(__file__).with_name("triton_compile.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    budgets = BUDGETS[arguments[0]]
    assert set(found["shared"]) == (MASKED if arguments[1:] else set())
    assert all(0 < size <= 99 << 10 for size in found["shared"].values())
    assert set(found["plain"]) == set(budgets)
    for kernel, budget in budgets.items():
        names = ("registers", "stack", "shared", "instructions")
        for name, most in zip(names, budget, strict=True):
            assert found["plain"][kernel][name] <= most, (kernel, name)
        # else it is not the loop that is counted
        assert found["plain"][kernel]["instructions"] > (8 if budget[-1] else -1)


# -- what is refused --------------------------------------------------------------------------


def plain(query: Tensor, **options: Any) -> KernelCall:
    return call("cpu", query, query, query, **options)


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, "triton is not installed"),
        (SimpleNamespace(__version__="3.3.1"), "triton 3.3.1 is older than 3.4"),
    ],
)
def test_without_a_triton_that_is_new_enough_every_call_is_refused(
    installed: object, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language, "triton", installed)  # another cannot be installed here
    assert supported(plain(normal(1, 1, 4, 8))) == reason


REFUSED: dict[str, tuple[Callable[[], KernelCall], str]] = {
    "float64": (lambda: plain(normal(1, 1, 4, 8, dtype=torch.float64)), "float64 inputs"),
    "wide": (lambda: plain(normal(1, 1, 4, 300)), "heads wider than 256"),
    "empty": (lambda: plain(normal(1, 1, 0, 8)), "no queries, keys or widths"),
    "dropout": (
        lambda: plain(normal(1, 1, 4, 8))._replace(dropout_p=0.5),
        "dropout",
    ),
}


@needs_triton
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reason = REFUSED[name]
    given = make()
    on_cpu = "inputs on cpu, not on cuda"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert supported(given) == on_cpu
    assert why_not(given) == on_cpu
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert supported(given) == reason


def test_refused_calls_are_the_blocked_path_s() -> None:
    given = plain(normal(1, 1, 4, 8, dtype=torch.float64), is_causal=True)
    noisy = given._replace(noise=True)
    found, want = gpu.forward(noisy), blocked.forward(noisy)
    assert all(torch.equal(left, right) for left, right in zip(found, want, strict=True))
    grad = SumGradients(None, *[torch.ones(1, 1, 4, dtype=torch.float64)] * 9)
    wanted = (True,) * 3 + (False,) * 3
    ours = gpu.backward(grad, found, given, wanted)
    theirs = blocked_backward(grad, want, given, wanted)
    assert torch.equal(ours.query, theirs.query)
    assert torch.equal(ours.key, theirs.key)


def test_the_gradient_of_a_shared_bias_is_not_here() -> None:
    query = normal(1, 2, 4, 8)
    for shape, reason in (((4, 4), "the gradient of a broadcast bias"), ((1, 2, 4, 4), None)):
        masking = call("cpu", query, query, None, bias=torch.zeros(shape)).masking
        wanted = (True, True, True, False, True, False)
        assert unsupported_gradient(masking, wanted) == reason
        assert unsupported_gradient(masking, (True, True, True, False, False, False)) is None
