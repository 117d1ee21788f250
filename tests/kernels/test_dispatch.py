"""Which backend takes a call, what it says, and that all of them agree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from acutance import compiling, kernels
from acutance.attend import attention, row_statistics
from acutance.kernels import fast_path, library
from acutance.rowstats import RowState, RowStatistics, dense_statistics
from acutance.rowstats.metrics import metric_names
from acutance.testing import MASKS, assert_close_to_oracle, attention_case, score_error

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

HERE = not isinstance(library.load(), str)
needs_native = pytest.mark.skipif(not HERE, reason=str(library.load()))
CPU_BACKENDS = [
    pytest.param("native", marks=needs_native),
    "blocked",
]
SMOOTH = [name for name in EXACT if name not in ("n_keys", "noise_gain")]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# -- every backend is the oracle ---------------------------------------------------------------


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_backend_is_the_oracle(backend: Any, mask: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        case = attention_case(2, mask=mask, dtype=dtype, longest=20)
        options = case.options | {"return_stats": True, "noise": True, "backend": backend}
        out, stats = attention(*case.tensors, **options)
        assert stats.backend == backend
        oracle = dense_statistics(*case.tensors, **case.options)
        bias = 4.0 * ("bias" in options) + 4.0 * ("attn_mask" in options)
        delta = score_error(
            case.query,
            case.key,
            case.options.get("scale"),
            added=bias + 200.0 * ("alibi_slopes" in options),
        )
        norm = float(torch.linalg.vector_norm(case.value.double(), dim=-1).amax())
        assert_close_to_oracle(stats, oracle, score_error=delta, value_norm=norm, name=case.name)
        eps = 1e-9 if dtype == torch.float64 else 2e-5 + torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), oracle["output"], rtol=eps, atol=eps)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "query_offset": -1},
        {"attn_mask": normal(5, 9, seed=7) > -0.3, "softcap": 3.0},
        {"window": 3, "sinks": normal(4, seed=8, dtype=torch.float64)},
        {"bias": normal(4, 5, 9, seed=9, dtype=torch.float64)},
        {"key_mask": normal(2, 9, seed=10) > -0.5},
    ],
    ids=["plain", "causal", "masked capped", "window sinks", "bias", "padding"],
)
def test_every_backend_has_the_gradients_of_the_oracle(
    backend: Any, options: dict[str, Any]
) -> None:
    """Output and metrics at once, weighted at random, in float64."""
    shapes = (2, 4, 5, 6), (2, 2, 9, 6), (2, 2, 9, 3)
    inputs = [normal(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    options = {
        name: part.clone().requires_grad_() if name in ("bias", "sinks") else part
        for name, part in options.items()
    }
    leaves = [part.requires_grad_() for part in inputs]
    leaves += [options[name] for name in ("bias", "sinks") if name in options]

    def total(found: Any, out: Tensor) -> Tensor:
        sums = (out * normal(*out.shape, seed=20, dtype=torch.float64)).sum()
        for i, name in enumerate(SMOOTH):
            part = found[name]
            part = torch.where(part.isfinite(), part, 0.0)
            sums = sums + (part * normal(*part.shape, seed=21 + i, dtype=torch.float64)).sum()
        return sums

    oracle = dense_statistics(*inputs, **options, enable_gqa=True)
    want = torch.autograd.grad(total(oracle, oracle["output"]), leaves)
    out, stats = attention(*inputs, **options, enable_gqa=True, return_stats=True, backend=backend)
    assert stats.backend == backend
    found = torch.autograd.grad(total(stats, out), leaves)
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@needs_native
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"softcap": 2.0, "window": 3}])
def test_gradcheck_of_the_native_kernel(options: dict[str, Any]) -> None:
    inputs = [
        normal(1, 2, 3, 4, dtype=torch.float64).requires_grad_(),
        normal(1, 1, 5, 4, seed=1, dtype=torch.float64).requires_grad_(),
        normal(1, 1, 5, 2, seed=2, dtype=torch.float64).requires_grad_(),
    ]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        out, stats = attention(
            *tensors, **options, enable_gqa=True, return_stats=True, backend="native"
        )
        names = ("entropy", "varentropy", "lse", "collision", "logit_std", "first_weight")
        return (out, *(stats[name] for name in (*names, "logit_mean", "max_logit")))

    assert torch.autograd.gradcheck(call, inputs)


def test_training_takes_the_same_backend_as_inference() -> None:
    query = normal(1, 2, 6, 8).requires_grad_()
    out, stats = attention(query, query, query, return_stats=True)
    with torch.no_grad():
        plain, others = attention(query, query, query, return_stats=True)
    assert stats.backend == others.backend
    assert torch.equal(out, plain)
    assert stats.entropy.requires_grad
    for name in RowState._fields:
        assert torch.equal(getattr(stats.state, name), getattr(others.state, name)), name
    # of the same sums, by torch's operations and in native code: entropies below log 6 nats
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(stats.entropy, others.entropy, rtol=0.0, atol=4 * eps)


# -- the choice --------------------------------------------------------------------------------


def test_auto_takes_the_native_kernel_where_it_can() -> None:
    query = normal(1, 2, 3, 8)
    fastest = "native" if HERE else "blocked"
    assert row_statistics(query, query).backend == fastest
    assert attention(query, query, query, return_stats=True)[1].backend == fastest
    wide = normal(1, 1, 2, 300)
    assert row_statistics(wide, wide).backend == "blocked"
    _, dropped = attention(query, query, query, dropout_p=0.5, return_stats=True)
    assert dropped.backend == "blocked"


@pytest.mark.parametrize(
    ("backend", "options", "width", "reason"),
    [
        pytest.param("native", {"dropout_p": 0.1}, 8, "dropout", marks=needs_native),
        pytest.param("native", {}, 257, "heads wider than 256", marks=needs_native),
    ],
)
def test_a_backend_that_cannot_says_why(
    backend: Any, options: dict[str, Any], width: int, reason: str
) -> None:
    query = normal(1, 1, 2, width)
    with pytest.raises(
        ValueError, match=rf"^backend='{backend}' does not support this call: {reason}"
    ):
        attention(query, query, query, **options, backend=backend)


def test_a_backend_that_does_not_exist_is_refused() -> None:
    query = normal(1, 1, 2, 8)
    names = "'auto', 'native', 'blocked', 'triton'"
    for given in ("fast", None, 3):
        with pytest.raises(ValueError, match=rf"^backend must be one of {names}, got {given!r}$"):
            row_statistics(query, query, backend=given)  # type: ignore[call-overload]


def test_weights_that_are_no_softmax_take_whole_rows() -> None:
    query = normal(1, 1, 2, 8)
    _, stats = attention(query, query, query, weights="relu2", return_stats=True)
    assert stats.backend == "rows"
    with pytest.raises(ValueError, match=r"^backend='native' supports only softmax of dot"):
        attention(query, query, query, weights="relu2", backend="native")


def test_states_that_no_kernel_made_name_none() -> None:
    query = normal(1, 1, 2, 8)
    stats = row_statistics(query, query)
    assert stats.merge(stats).backend is None
    assert RowStatistics(stats.state).backend is None


def test_the_environment_names_a_backend_for_the_calls_it_can_take(
    use_backend: Callable[[str], None],
) -> None:
    wide = torch.ones(1, 1, 2, 300)
    narrow = wide[..., :3]
    fastest = "native" if HERE else "blocked"
    for name, backends in {
        "blocked": ["blocked", "blocked"],
        "native": [fastest, "blocked"],
    }.items():
        use_backend(name)
        assert [row_statistics(query, query).backend for query in (narrow, wide)] == backends
    use_backend("fast")
    with pytest.raises(ValueError, match="ACUTANCE_BACKEND must be one of 'auto'"):
        row_statistics(narrow, narrow)


@pytest.mark.slow
def test_the_environment_is_read_by_a_new_process() -> None:
    code = """
import acutance, torch
query = torch.ones(1, 1, 2, 3)
print(acutance.row_statistics(query, query).backend)
"""
    environment = os.environ | {"ACUTANCE_BACKEND": "blocked"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "blocked\n"


def test_without_the_library_everything_still_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after an install without a compiler."""
    monkeypatch.setenv(library.FOLDER_VARIABLE, str(tmp_path))
    library.load.cache_clear()
    try:
        query = normal(1, 2, 5, 8)
        out, stats = attention(query, query, query, is_causal=True, return_stats=True)
        assert stats.backend == "blocked"
        assert not torch.equal(out, query)
        reason = "acutance was installed without its native kernels, because no compiler built them"
        with pytest.raises(
            ValueError, match=f"^backend='native' does not support this call: {reason}$"
        ):
            row_statistics(query, query, backend="native")
        found = kernels.info()
        assert (found.native, found.why_not, found.auto) == (False, reason, "blocked")
        assert (found.path, found.cpu, found.cpus) == (None, None, ())
        assert f"no: {reason}" in str(found)
    finally:
        monkeypatch.undo()
        library.load.cache_clear()
        assert isinstance(library.load(), str) is not HERE


def test_a_library_that_does_not_load_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libacutance.so").write_text("no library")
    monkeypatch.setenv(library.FOLDER_VARIABLE, str(tmp_path))
    library.load.cache_clear()
    try:
        assert str(library.load()).startswith("the native kernels cannot be loaded: ")
    finally:
        monkeypatch.undo()
        library.load.cache_clear()


@needs_native
def test_info_says_what_runs_here() -> None:
    found = kernels.info()
    assert found.native
    assert found.auto == row_statistics(*[normal(1, 1, 1, 1)] * 2).backend
    assert found.cpu in found.cpus
    assert found.threads == torch.get_num_threads()
    text = str(found)
    for part in (found.cpu, found.compiler, found.path, "auto on the CPU", "threads"):
        assert str(part) in text


# -- past the dispatcher -----------------------------------------------------------------------


@pytest.fixture
def counted(native_calls: Callable[[str], list[Any]]) -> list[Any]:
    """Every call that went past PyTorch's dispatcher."""
    return native_calls("forward")


def test_the_short_way_and_the_operator_agree() -> None:
    query, key, value = normal(2, 4, 9, 8), normal(2, 2, 11, 8, seed=1), normal(2, 2, 11, 3, seed=2)
    for options in ({}, {"is_causal": True, "query_offset": 2}, {"window": 4}, {"scale": 0.2}):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            inputs = [part.to(dtype) for part in (query, key, value)]
            out, stats = attention(*inputs, **options, enable_gqa=True, return_stats=True)
            watched = [part.clone().requires_grad_() for part in inputs]
            want, others = attention(*watched, **options, enable_gqa=True, return_stats=True)
            assert isinstance(stats, fast_path.PackedStatistics) is HERE
            assert not isinstance(others, fast_path.PackedStatistics)
            assert torch.equal(out, want)
            assert out.dtype == dtype
            for name in RowState._fields:
                left, right = getattr(stats.state, name), getattr(others.state, name)
                assert torch.equal(left, right), name
                assert left.dtype == right.dtype
            bare = row_statistics(*inputs[:2], **options, enable_gqa=True)
            assert torch.equal(bare.entropy, stats.entropy)


def test_large_results_are_tensors_from_the_start() -> None:
    query = normal(1, 2, 700, 8)
    stats = row_statistics(query, query)
    want = row_statistics(query, query, backend="blocked")
    assert torch.equal(stats.n_keys, want.n_keys)
    torch.testing.assert_close(stats.entropy, want.entropy, rtol=2e-5, atol=2e-5)


def test_packed_statistics_are_statistics() -> None:
    query = normal(1, 2, 4, 8)
    stats = row_statistics(query, query)
    assert isinstance(stats, RowStatistics)
    assert stats.state is stats.state
    assert stats.merge(stats).n_keys.eq(8).all()
    assert "entropy" in stats.as_dict()
    with pytest.raises(AttributeError, match="cannot assign"):
        stats.backend = "other"  # type: ignore[misc]


def test_what_must_be_seen_goes_through_the_operator(counted: list[str]) -> None:
    """Gradients, modes, transforms and tracers see one operator; nothing slips past them."""
    query = normal(1, 2, 4, 8)

    def entropy(x: Tensor) -> Tensor:
        return row_statistics(x, x).entropy

    entropy(query)
    assert len(counted) == 1
    assert compiling.unobserved()
    assert isinstance(row_statistics(query, query), fast_path.PackedStatistics) is HERE
    wanting = query.clone().requires_grad_()
    assert not isinstance(row_statistics(wanting, wanting), fast_path.PackedStatistics)
    with torch.no_grad():
        assert isinstance(row_statistics(wanting, wanting), fast_path.PackedStatistics) is HERE
    with torch.device("cpu"):  # a function mode
        assert not compiling.unobserved()
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert not compiling.unobserved()
    with forward_ad.dual_level():
        assert not compiling.unobserved()

    names = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        entropy(query)
    assert "acutance.attend_rows.default" in names
    seen: list[bool] = []

    def mapped(x: Tensor) -> Tensor:
        seen.append(compiling.unobserved())
        return x.sum()

    torch.vmap(mapped)(query)
    torch.func.grad(mapped)(query)
    assert seen == [False, False]
    exported = torch.export.export(_Entropy(), (query,))
    assert "attend_rows" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(query), entropy(query))


class _Entropy(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return row_statistics(x, x).entropy


def test_autocast_reaches_the_short_way() -> None:
    query = normal(1, 2, 4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(query, query, query).dtype == torch.bfloat16


def test_inference_mode_results_are_inference_tensors() -> None:
    query = normal(1, 2, 4, 8)
    with torch.inference_mode():
        out, stats = attention(query, query, query, return_stats=True)
        assert out.is_inference()
        assert stats.entropy.is_inference()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
        ({"enable_gqa": 1}, TypeError, "enable_gqa must be True or False, got 1"),
        ({"return_stats": 1}, TypeError, "return_stats must be True or False, got 1"),
        ({"noise": 0}, TypeError, "noise must be True or False, got 0"),
        ({"query_offset": True}, TypeError, "query_offset must be an integer, got True"),
        ({"query_offset": 2**62}, ValueError, "query_offset must be at most"),
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number, got nan"),
        ({"scale": "1"}, TypeError, "scale must be a number, got '1'"),
    ],
)
def test_the_short_way_refuses_what_the_long_one_refuses(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    query = normal(1, 2, 4, 8)
    with pytest.raises(error, match=message):
        attention(query, query, query, **options)
