"""The kernel as an operator: compiled, fake, under autocast and in inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance import attention, row_statistics
from acutance.rowstats import dense_statistics
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """(2, 4, 9, 8) queries laid out as a projection leaves them, 11 keys of 2 heads, Ev = 3."""
    query = normal(2, 9, 4, 8, dtype=dtype).transpose(1, 2)
    key, value = normal(2, 2, 11, 8, seed=1, dtype=dtype), normal(2, 2, 11, 3, seed=2, dtype=dtype)
    return tuple(part.detach().requires_grad_() for part in (query, key, value))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": 2},
    "masked": {"attn_mask": normal(9, 11) > 0, "window": 5},
    "everything": {
        "bias": normal(11, 9, seed=3).T.requires_grad_(),
        "sinks": normal(4, seed=4).requires_grad_(),
        "softcap": 5.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1]),
        "key_mask": torch.arange(11) < torch.tensor([[7], [11]]),
        "document_ids": (torch.arange(9) // 4, torch.arange(11)[None] // 4),
    },
    "lengths": {"cu_seqlens": torch.tensor([0, 4, 11])},
}


def everything(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> list[Tensor]:
    """The output and every metric, all read inside the graph."""
    out, stats = attention(
        query, key, value, enable_gqa=True, return_stats=True, noise=True, **options
    )
    return [out, *(getattr(stats, name) for name in EXACT)]


def gradients(results: list[Tensor], variables: list[Tensor]) -> list[Tensor]:
    total = sum(
        (i + 1) * part.nan_to_num(0.0, neginf=0.0).sum()
        for i, part in enumerate(results)
        if part.requires_grad
    )
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, variables))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def same(left: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
        )


@pytest.mark.few(1)
@pytest.mark.parametrize("case", OPTIONS)
def test_a_whole_graph_without_a_break(case: str) -> None:
    options = OPTIONS[case]
    variables = [*inputs(), *(part for part in options.values() if requires_grad(part))]
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    results, wanted = compiled(*variables[:3], **options), everything(*variables[:3], **options)
    same(results, wanted, 0.0)
    same(gradients(results, variables), gradients(wanted, variables), 0.0)


def requires_grad(part: object) -> bool:
    return isinstance(part, Tensor) and part.requires_grad


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the default backend's own, about itself
def test_the_default_backend() -> None:
    def loss(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, stats = attention(
            query, key, value, is_causal=True, query_offset=2, enable_gqa=True, return_stats=True
        )
        return out.square().mean() + (stats.entropy - 1.0).square().mean() + stats.lse.mean()

    variables = list(inputs())
    compiled = torch.compile(loss, fullgraph=True)
    result, wanted = compiled(*variables), loss(*variables)
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=1e-6)
    same(
        list(torch.autograd.grad(result, variables)),
        list(torch.autograd.grad(wanted, variables)),
        1e-6,
    )


@pytest.mark.parametrize(
    "lengths", [(7, 8), pytest.param((7, 8, 13, 40), marks=pytest.mark.slow)], ids=len
)
def test_lengths_offsets_and_windows_that_change_are_one_graph(lengths: tuple[int, ...]) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # loads the whole compiler

    def decode(query: Tensor, key: Tensor, offset: int, window: int) -> Tensor:
        stats = row_statistics(query, key, is_causal=True, query_offset=offset, window=window)
        return stats.entropy + stats.gaussian_entropy

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(decode, fullgraph=True, backend=counter, dynamic=True)
    graphs = []
    for length in lengths:
        query, key = normal(2, 3, 5, 8), normal(2, 3, length, 8, seed=length)
        arguments = (query, key, length - 5, length // 2)
        torch.testing.assert_close(compiled(*arguments), decode(*arguments), equal_nan=True)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * len(lengths)


@pytest.mark.slow
@pytest.mark.usefixtures("blocked_only")  # which takes dropout whatever takes the rest
def test_dropout_does_not_break_the_graph() -> None:
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    variables = list(inputs())
    first, second = compiled(*variables, dropout_p=0.5), compiled(*variables, dropout_p=0.5)
    plain = everything(*variables)
    assert not torch.equal(first[0], second[0])
    same(first[1:], plain[1:], 0.0)
    assert all(grad.isfinite().all() for grad in gradients(first, variables))


def test_bad_input_is_refused_while_compiling() -> None:
    query, key, _ = (part.detach() for part in inputs())
    compiled = torch.compile(row_statistics, backend="aot_eager")
    with pytest.raises(Exception, match="key and value must have the same source length S"):
        compiled(query, key, key[:, :, 1:], enable_gqa=True)


# -- the operators ----------------------------------------------------------------------------

NAMES = (
    *("query", "key", "value", "attn_mask", "bias", "key_mask", "query_documents"),
    *("key_documents", "alibi_slopes", "sinks", "seed", "causal", "offset", "window", "scale"),
    *("softcap", "dropout_p", "backend"),
)


def arguments(dtype: torch.dtype = torch.float32, **changed: Any) -> list[Any]:
    """Arguments of the operator by position."""
    query, key, value = inputs(dtype)
    given = dict.fromkeys(NAMES) | {
        "query": query,
        "key": key,
        "value": value,
        "causal": False,
        "offset": 0,
        "scale": 0.3,
        "dropout_p": 0.0,
        "backend": "auto",
    }
    assert set(changed) <= set(given)
    return list((given | changed).values())


def test_attention_runs_on_meta_tensors() -> None:
    query, key, value = (part.to("meta") for part in inputs())
    out, stats = attention(query, key, value, enable_gqa=True, is_causal=True, return_stats=True)
    assert (out.shape, out.device.type) == ((2, 4, 9, 3), "meta")
    assert stats.effective_keys.shape == (2, 4, 9)


# -- modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_what_pytorch_casts_and_nothing_inside(dtype: torch.dtype) -> None:
    query, key, value = inputs()
    with torch.autocast("cpu", dtype=dtype):
        out, stats = attention(query, key, value, enable_gqa=True, return_stats=True)
        want = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        mixed = attention(query, key.to(dtype), value, enable_gqa=True)
        entropy = stats.entropy
    assert out.dtype == want.dtype == mixed.dtype == dtype
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
    assert entropy.dtype == torch.float32
    half = [part.to(dtype) for part in (query, key, value)]
    oracle = dense_statistics(*half, enable_gqa=True)
    assert (entropy.double() - oracle["entropy"]).abs().max() <= 1e-5
    grads = torch.autograd.grad(out.float().sum() + entropy.sum(), (query, key, value))
    assert [grad.dtype for grad in grads] == [torch.float32] * 3


@pytest.mark.parametrize("weights", ["relu2", "sigmoid", "entmax15"])
def test_autocast_casts_nothing_inside_whole_rows(weights: str) -> None:
    query, key, value = inputs()
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": True, "weights": weights}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, stats = attention(query, key, value, return_stats=True, **options)
    half = [part.to(torch.bfloat16) for part in (query, key, value)]
    want, expected = attention(*half, return_stats=True, **options)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want)
    torch.testing.assert_close(
        stats.effective_keys, expected.effective_keys, rtol=0, atol=0, equal_nan=True
    )


def test_autocast_leaves_float64_alone() -> None:
    query, key, value = inputs(torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, stats = attention(query, key, value, enable_gqa=True, return_stats=True)
    assert out.dtype == stats.entropy.dtype == torch.float64


def test_inference_mode() -> None:
    query, key, value = inputs()
    want = everything(query, key, value)
    with torch.inference_mode():
        found = everything(query, key, value)
        assert all(part.is_inference() for part in found)
    same(found, [part.detach() for part in want], 0.0)
