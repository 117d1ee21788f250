"""A configuration of the Triton kernels is checked before its first use; in the interpreter."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acutance.attend import attention
from acutance.kernels import gpu
from acutance.kernels.call import KernelCall
from acutance.kernels.gpu import first_use
from acutance.masks import Masking

pytest.importorskip("triton", reason="triton is not installed (pip install triton, on Linux)")
passes = importlib.import_module("acutance.kernels.gpu.passes")


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch, use_backend: Callable[[str], None]) -> Iterator[None]:
    """Checks run in the interpreter too, from none made; ``auto`` is Triton."""
    monkeypatch.setattr(first_use, "interpreted", lambda: False)
    use_backend("triton")
    first_use.forget()
    with np.errstate(all="ignore"):
        yield
    first_use.forget()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [normal(1, 2, 20, 8, seed=seed, dtype=dtype) for seed in range(3)]


class Planted:
    """A launcher that does wrong after, or instead of, launching."""

    def __init__(self, module: Any, name: str, spoil: Any) -> None:
        self.launch, self.spoil, self.launches = getattr(module, name), spoil, 0

    def __call__(self, blocks: Any, **arguments: Any) -> None:
        self.launches += 1
        self.launch(blocks, **arguments)
        self.spoil(arguments)


def plant(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, spoil: Any) -> Planted:
    planted = Planted(module, name, spoil)
    monkeypatch.setattr(module, name, planted)
    return planted


def nothing(arguments: Any) -> None:
    pass


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal, grouped, noise": {"is_causal": True, "noise": True, "key": normal(1, 1, 20, 8)},
    "window, padding, sinks": {
        "window": 9,
        "key_mask": torch.arange(20)[None] < 15,
        "sinks": torch.zeros(2),
    },
    "softcap, ALiBi, documents": {
        "softcap": 5.0,
        "alibi_slopes": torch.ones(2),
        "document_ids": torch.arange(20)[None] // 9,
    },
    "mask and bias": {"attn_mask": torch.ones(20, 20).tril().log(), "bias": torch.ones(2, 20, 20)},
    "a boolean mask": {"attn_mask": torch.ones(20, 20, dtype=torch.bool)},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_right_kernels_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[list(KINDS).index(name) % 3]
    options = {"is_causal": False, **KINDS[name]}
    query, key, value = inputs(dtype)
    key = options.pop("key", key).to(dtype)
    if key.shape[1] == 1:
        value, options["enable_gqa"] = value[:, :1], True
    planted = plant(monkeypatch, passes, "_launch", nothing)
    for _ in range(2):
        _, stats = attention(query, key, value, return_stats=True, **options)
        assert stats.backend == "triton"
    assert planted.launches == 3  # one of the check


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_gradients_pass(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(monkeypatch, passes, "_launch_keys", nothing)
    leaves = [leaf.requires_grad_() for leaf in inputs(dtype)]
    for _ in range(2):
        out, stats = attention(*leaves, is_causal=True, return_stats=True)
        loss = out.float().square().sum() + stats.entropy.sum() + stats.lse.sum()
        torch.autograd.grad(loss, leaves)
    assert planted.launches == 3


SPOILED = {
    "out": lambda a: a["SUMS"].out.mul_(1.05),
    "Z": lambda a: a["SUMS"].Z.mul_(1.001),
    "W": lambda a: a["SUMS"].W.mul_(1.001),
    "M2": lambda a: a["SUMS"].M2[..., -1].zero_(),
    "n": lambda a: a["SUMS"].n[..., :1].sub_(1),
    "mean": lambda a: a["SUMS"].mean[..., 3].fill_(torch.nan),
    "first_index": lambda a: a["SUMS"].first_index.add_(1),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SPOILED)
def test_a_wrong_kernel_is_refused_with_one_warning(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = plant(monkeypatch, passes, "_launch", SPOILED[name])
    query, key, value = inputs()
    want = attention(query, key, value, return_stats=True, backend="blocked")
    with pytest.warns(RuntimeWarning, match=r"float32 of width 8 on cpu: its .* report") as caught:
        out, stats = attention(query, key, value, return_stats=True)
    assert len(caught) == 1
    assert stats.backend == "blocked"
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(stats.entropy, want[1].entropy)
    attention(query, key, value)  # no second warning, which would be an error
    assert planted.launches == 1
    with pytest.raises(ValueError, match=r"backend='triton' does not support this call: its "):
        attention(query, key, value, backend="triton")
    with pytest.warns(RuntimeWarning, match="width 8, causal on cpu"):
        attention(query, key, value, is_causal=True)  # another configuration is checked by itself


def test_a_wrong_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, passes, "_launch_keys", lambda a: a["DK"].mul_(-1.0))
    leaves = [leaf.requires_grad_() for leaf in inputs()]
    found = {}
    for backend in ("blocked", "auto"):
        out = attention(*leaves, backend=backend)
        if backend == "auto":
            with pytest.warns(RuntimeWarning, match="backward pass: its gradient of key differs"):
                found[backend] = torch.autograd.grad(out.square().sum(), leaves)
        else:
            found[backend] = torch.autograd.grad(out.square().sum(), leaves)
    for ours, theirs in zip(found["auto"], found["blocked"], strict=True):
        torch.testing.assert_close(ours, theirs)
    out = attention(*leaves, backend="triton")
    with pytest.raises(ValueError, match="does not support this call: the backward pass"):
        torch.autograd.grad(out.square().sum(), leaves)


def broken(arguments: Any) -> None:
    raise RuntimeError("PTX version 9.9 is not supported\nand a long listing")


def test_what_does_not_compile_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, passes, "_launch", broken)
    tensors = inputs()
    with pytest.raises(ValueError, match=r"does not compile or run \(RuntimeError: PTX version"):
        attention(*tensors, backend="triton")
    with pytest.warns(RuntimeWarning, match="PTX version 9.9 is not supported") as caught:
        _, stats = attention(*tensors, return_stats=True)
    attention(*tensors, is_causal=True)  # the same failure of another configuration is not
    assert len(caught) == 1
    assert "listing" not in str(caught[0].message)
    assert stats.backend == "blocked"


def test_too_little_memory_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(arguments: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        plant(patch, passes, "_launch", full)
        attention(*inputs())
        with pytest.raises(ValueError, match="no memory is left for the check"):
            attention(*inputs(), backend="triton")
    assert attention(*inputs(), return_stats=True)[1].backend == "triton"


def capturing(patch: pytest.MonkeyPatch) -> None:
    """As inside a CUDA graph's capture; where there is no GPU nothing can be captured."""
    patch.setattr(first_use, "_capturing", lambda _: True)


def test_nothing_is_checked_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(monkeypatch, passes, "_launch", nothing)
    tensors = inputs()
    with monkeypatch.context() as patch:
        capturing(patch)
        _, stats = attention(*tensors, return_stats=True)
        assert stats.backend == "blocked"
        with pytest.raises(ValueError, match="inside a CUDA graph's capture: run it once before"):
            attention(*tensors, backend="triton")
        assert planted.launches == 0
    attention(*tensors)
    with monkeypatch.context() as patch:
        capturing(patch)
        assert attention(*tensors, return_stats=True)[1].backend == "triton"
    assert planted.launches == 3


def test_threads_share_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(monkeypatch, passes, "_launch", lambda a: time.sleep(0.05))
    query = normal(1, 1, 20, 8)
    masking = Masking(batch=1, heads=1, group=1, queries=20, keys=20)
    found: list[str | None] = []

    def work() -> None:
        found.append(gpu.refusal_reason(KernelCall(query, query, None, masking, scale=1.0)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [None] * 4
    assert planted.launches == 1


def test_compiled_calls_are_checked_when_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, passes, "_launch", SPOILED["out"])
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    tensors = inputs()
    with pytest.warns(RuntimeWarning, match="its out differs"):
        out = compiled(*tensors)
    torch.testing.assert_close(out, attention(*tensors, backend="blocked"))


def test_random_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    attention(*inputs())
    assert first_use._verdicts
    assert torch.equal(torch.rand(3), want)


def test_a_wrong_histogram_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, passes, "_count", nothing)
    options = {"return_stats": True, "gaps": True}
    _, stats = attention(*inputs(), **options)
    assert stats.backend == "triton"
    first_use.forget()
    plant(monkeypatch, passes, "_count", lambda given: given["GAPS"][..., 3:5].zero_())
    with pytest.warns(RuntimeWarning, match=r"its gaps differ from the blocked path's by"):
        _, stats = attention(*inputs(), **options)
    assert stats.backend == "blocked"


def test_wrong_sums_of_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that use them: with fewer keys the same kernel is right."""
    moments = importlib.import_module("acutance.kernels.gpu.key_moments")
    plant(monkeypatch, moments, "_rows", lambda given: given["ROW_MEANS"].add_(1.0))
    query, key = normal(1, 1, 130, 8), normal(1, 1, 512, 8, seed=1)
    with pytest.warns(RuntimeWarning, match="its mean differs from the blocked path's by"):
        _, stats = attention(query, key, key, return_stats=True)
    assert stats.backend == "blocked"
    _, stats = attention(query, key[:, :, :200], key[:, :, :200], return_stats=True)
    assert stats.backend == "triton"
