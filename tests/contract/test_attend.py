"""Attention and its statistics against the float64 oracle and against PyTorch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from acutance import attention, row_statistics
from acutance.rowstats import METRICS, RowStatistics, dense_statistics, merge
from acutance.testing import (
    MASKS,
    AttentionCase,
    assert_close_to_oracle,
    attention_case,
    exact_scores,
    score_error,
)
from tests.contract.names import metric_names

#: Metrics of statistics without the gap histogram.
EXACT = metric_names(noise=True)

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Uninitialised memory holds NaN: a result nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def added_size(options: dict[str, Any], keys: int) -> float:
    """Largest size of what is added to the scores of a case."""
    size = 0.0
    for name in ("attn_mask", "bias"):
        tensor = options.get(name)
        if tensor is not None and tensor.is_floating_point():
            size += float(tensor[tensor > -1e4].abs().amax()) if (tensor > -1e4).any() else 0.0
    if "alibi_slopes" in options:
        far = keys + abs(options.get("query_offset", 0)) + 100
        size += float(options["alibi_slopes"].abs().amax()) * far
    return size


def check_case(case: AttentionCase) -> tuple[Tensor, RowStatistics, dict[str, Tensor]]:
    """Run a case and hold everything it returns against the oracle."""
    out, stats = attention(*case.tensors, **case.options, return_stats=True, noise=True)
    oracle = dense_statistics(*case.tensors, **case.options)
    delta = score_error(
        case.query,
        case.key,
        case.options.get("scale"),
        added=added_size(case.options, case.key.shape[2]),
    )
    norm = float(torch.linalg.vector_norm(case.value.double(), dim=-1).amax())
    assert stats.available == EXACT
    assert_close_to_oracle(stats, oracle, score_error=delta, value_norm=norm, name=case.name)
    assert out.dtype == case.query.dtype
    return out, stats, oracle


def relative(measured: Tensor, oracle: Tensor) -> float:
    """Largest error relative to the larger of the value and 1 (a nat, a logit, a key, a weight)."""
    measured, oracle = measured.double(), oracle.double()
    assert torch.equal(measured.isnan(), oracle.isnan())
    error = torch.where(measured == oracle, 0.0, (measured - oracle).abs())
    return float((error / oracle.abs().clamp(min=1.0)).nan_to_num(0.0).amax())


# -- the oracle, over everything at random ----------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask", MASKS)
def test_random_calls_are_the_oracle(mask: str, dtype: torch.dtype) -> None:
    for seed in range(6):
        for magnitude in (0.1, 1.0, 10.0):
            case = attention_case(seed, mask=mask, dtype=dtype, magnitude=magnitude)
            out, stats, oracle = check_case(case)
            bound = 1e-9 if dtype == torch.float64 else 2e-5
            for name in stats.available:
                size = bound
                if name == "noise_gain":  # in squares of the values
                    size *= max(1.0, float(case.value.double().square().sum(-1).amax()))
                # rounding of the whole row counts where little is left without the first key
                of_rest = name in ("first_gap", "rest_jensen_gap")
                weight = torch.sigmoid(-oracle["first_gap"].double()) if of_rest else 1
                if name == "rest_logit_std":
                    # its square is what the first key leaves of the whole row's, whose rounding is
                    # up to 8 eps of the whole
                    wide = torch.promote_types(dtype, torch.float32)
                    whole = oracle["logit_std"].double() / oracle[name].double()
                    lost = 4 * torch.finfo(wide).eps * whole.square().nan_to_num(posinf=1)
                    weight = oracle[name].double().clamp(max=1) / (lost / bound).clamp(min=1)
                measured, expected = weight * stats[name].double(), weight * oracle[name].double()
                assert relative(measured, expected) <= size, (case.name, name)
            half = torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
            assert relative(out, oracle["output"]) <= bound + half, case.name


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 6), marks=pytest.mark.slow)])
@pytest.mark.parametrize("mask", MASKS)
def test_random_products_of_size_1e4(mask: str, seeds: range) -> None:
    """The float32 product itself is off by 1e-3 of a logit there; entropy by no more."""
    for seed in seeds:
        for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-3), (torch.bfloat16, 1e-3)):
            case = attention_case(seed, mask=mask, dtype=dtype, magnitude=1e4)
            _, stats, oracle = check_case(case)
            for name in ("entropy", "varentropy", "effective_keys", "top_weight", "max_gap"):
                assert relative(stats[name], oracle[name]) <= bound, (case.name, name)


def test_a_wide_product_of_size_1e4() -> None:
    size = (1e4 * 8**0.5 / 8) ** 0.5 * 8**0.25
    query = normal(1, 2, 64, 64, dtype=torch.float32) * size
    key = normal(1, 2, 500, 64, seed=1, dtype=torch.float32) * size
    stats, oracle = row_statistics(query, key), dense_statistics(query, key)
    assert 5e3 < float(oracle["logit_std"].mean()) < 2e4
    assert relative(stats.entropy, oracle["entropy"]) <= 1e-3
    assert_close_to_oracle(stats, oracle, score_error=score_error(query, key))


ROWS = {
    "uniform ±1e4": (torch.rand(1000, generator=torch.Generator().manual_seed(2)) * 2 - 1) * 1e4,
    "one-hot": torch.zeros(1000).index_fill(0, torch.tensor(7), 1e4),
    "outlier": normal(1000, dtype=torch.float32).index_fill(0, torch.tensor(7), -1e4),
    "1e4 + N(0, 1)": 1e4 + normal(1000, seed=1, dtype=torch.float32),
    "all equal 1e4/3": torch.full((1000,), 1e4 / 3),
    "two at the top": torch.full((1000,), -1e4).index_fill(0, torch.tensor([7, 8]), 1e4),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("row", ROWS)
def test_exact_logits_of_size_1e4(row: str, masked: bool) -> None:
    query, key = exact_scores(ROWS[row])
    mask = None
    if masked:
        mask = torch.ones(1, 1000, dtype=torch.bool)
        mask[0, ::3] = False
        mask[0, 7] = True
    stats = row_statistics(query, key, scale=1.0, key_mask=mask)
    oracle = dense_statistics(query, key, scale=1.0, key_mask=mask)
    assert_close_to_oracle(stats, oracle, name=row)
    for name in stats.available:
        error = (stats[name].double() - oracle[name].double()).abs()
        assert (error <= 2e-5 * oracle[name].abs().clamp(min=0.05)).all(), (name, error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_have_the_entropy_of_their_float64_values(dtype: torch.dtype) -> None:
    query, key = normal(2, 4, 64, 64, dtype=dtype) * 2, normal(2, 4, 300, 64, seed=1, dtype=dtype)
    for options in ({}, {"is_causal": True, "query_offset": 236}):
        found = row_statistics(query, key, **options)
        want = dense_statistics(query.double(), key.double(), **options)
        assert (found.entropy.double() - want["entropy"]).abs().max() <= 1e-5
        assert found.entropy.dtype == torch.float32


# -- PyTorch's own attention ------------------------------------------------------------------

SDPA: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "boolean": {"attn_mask": torch.ones(9, 13, dtype=torch.bool).tril(4)},
    "boolean of batches": {"attn_mask": torch.ones(2, 1, 1, 13, dtype=torch.bool).tril(8)},
    "boolean of rows": {"attn_mask": torch.ones(9, 1, dtype=torch.bool)},
    "additive": {"attn_mask": torch.full((9, 13), -torch.inf).triu(3)},
    "finite minimum": {"attn_mask": torch.full((9, 13), torch.finfo(torch.float32).min).triu(3)},
    "relative": {"attn_mask": normal(4, 9, 13, dtype=torch.float32)},
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", SDPA)
def test_the_output_is_pytorch_s(case: str, dtype: torch.dtype) -> None:
    options = dict(SDPA[case])
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.to(dtype)
    query = normal(2, 4, 9, 16, dtype=dtype)
    for heads in (4, 2, 1):
        key, value = normal(2, heads, 13, 16, dtype=dtype), normal(2, heads, 13, 16, dtype=dtype)
        ours = attention(query, key, value, enable_gqa=heads < 4, **options)
        theirs = F.scaled_dot_product_attention(query, key, value, enable_gqa=heads < 4, **options)
        bound = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


def test_options_stand_where_pytorch_has_them() -> None:
    query = normal(1, 2, 5, 8)
    positional = attention(query, query, query, None, True, 0.5, True)
    named = attention(query, query, query, is_causal=True, scale=0.5, enable_gqa=True)
    assert torch.equal(positional, named)


# -- laws -------------------------------------------------------------------------------------


def assert_same(left: RowStatistics, right: RowStatistics, tolerance: float = 1e-12) -> None:
    assert left.available == right.available
    for name in left.available:
        torch.testing.assert_close(
            left[name], right[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
        )


@pytest.mark.parametrize("offset", [0, 6, -2])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_causal_and_window_are_their_explicit_mask(offset: int, window: int | None) -> None:
    query, key, value = normal(2, 2, 7, 4), normal(2, 2, 13, 4, seed=1), normal(2, 2, 13, 3, seed=2)
    distance = torch.arange(7)[:, None] + offset - torch.arange(13)
    mask = (distance >= 0) & (distance < (window or 99))
    out, stats = attention(
        query,
        key,
        value,
        is_causal=True,
        query_offset=offset,
        window=window,
        return_stats=True,
        noise=True,
    )
    for explicit in (mask, torch.zeros(7, 13).masked_fill(~mask, -torch.inf)):
        other, others = attention(query, key, value, explicit, return_stats=True, noise=True)
        torch.testing.assert_close(out, other, rtol=1e-12, atol=1e-12)
        assert_same(stats, others)
    assert torch.equal(stats.n_keys, mask.sum(-1).expand(2, 2, 7))


def test_grouped_queries_are_repeated_heads() -> None:
    query, key, value = normal(2, 6, 7, 4), normal(2, 2, 9, 4, seed=1), normal(2, 2, 9, 3, seed=2)
    options: dict[str, Any] = {
        "sinks": normal(6, seed=3),
        "bias": normal(6, 7, 9, seed=4),
        "alibi_slopes": normal(6, seed=5).abs(),
    }
    out, stats = attention(
        query, key, value, enable_gqa=True, return_stats=True, noise=True, **options
    )
    other, others = attention(
        query,
        key.repeat_interleave(3, 1),
        value.repeat_interleave(3, 1),
        return_stats=True,
        noise=True,
        **options,
    )
    torch.testing.assert_close(out, other, rtol=1e-12, atol=1e-12)
    assert_same(stats, others)


def test_a_row_that_sees_nothing() -> None:
    query, key, value = normal(1, 2, 4, 8), normal(1, 2, 6, 8), normal(1, 2, 6, 5)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[2] = False
    for sinks in (None, torch.zeros(2)):
        for dtype in FLOATS:
            out, stats = attention(
                query.to(dtype),
                key.to(dtype),
                value.to(dtype),
                mask,
                sinks=sinks,
                return_stats=True,
                noise=True,
            )
            assert out[:, :, 2].eq(0).all()
            assert stats.n_keys[:, :, 2].eq(0).all()
            for name in EXACT:
                row = stats[name][:, :, 2]
                if name in ("lse", "max_logit"):
                    assert row.eq(-torch.inf).all()
                elif name != "n_keys":
                    assert row.isnan().all(), name
                assert stats[name][:, :, [0, 1, 3]].isfinite().all(), name
    nothing, stats = attention(query, key, value, torch.zeros(4, 6).bool(), return_stats=True)
    assert nothing.eq(0).all()
    assert stats.n_keys.eq(0).all()


def test_one_query_and_one_key() -> None:
    query, key, value = normal(2, 3, 1, 4), normal(2, 3, 9, 4, seed=1), normal(2, 3, 9, 5, seed=2)
    check_case(AttentionCase(query, key, value, {}, "one query"))
    check_case(AttentionCase(query, key, value, {"is_causal": True, "query_offset": 8}, "decode"))
    check_case(AttentionCase(query, key[:, :, :1], value[:, :, :1], {}, "one of each"))
    check_case(AttentionCase(key, query, value[:, :, :1], {}, "one key"))


@pytest.mark.parametrize("heads", [4, 2])
def test_strides_of_a_projection(heads: int) -> None:
    """(B, L, H, E) tensors transposed, and slices of one packed projection."""
    query = normal(2, 9, 4, 8).transpose(1, 2)
    packed = normal(2, 11, heads, 2 * 8 + 5, seed=1).transpose(1, 2)
    key, value = packed[..., 8:16], packed[..., 16:]
    assert not query.is_contiguous()
    assert not value.is_contiguous()
    options = {"enable_gqa": heads < 4, "is_causal": True, "query_offset": 2}
    out, stats, _ = check_case(AttentionCase(query, key, value, options, "strided"))
    again, others = attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        **options,
        return_stats=True,
        noise=True,
    )
    assert torch.equal(out, again)
    assert_same(stats, others, 0.0)
    mask = (normal(11, 9) > 0).T  # a mask with strides of its own
    check_case(
        AttentionCase(query, key, value, {"enable_gqa": heads < 4, "attn_mask": mask}, "mask")
    )


def test_nan_in_a_query_stays_in_its_row() -> None:
    query, key, value = normal(1, 2, 6, 8), normal(1, 2, 9, 8, seed=1), normal(1, 2, 9, 3, seed=2)
    clean, before = attention(query, key, value, return_stats=True, noise=True)
    for bad in (torch.nan, torch.inf):
        query[0, 0, 3, 1] = bad
        out, stats = attention(query, key, value, return_stats=True, noise=True)
        others = torch.arange(6) != 3
        assert out[0, 0, 3].isnan().all()
        assert stats.entropy[0, 0, 3].isnan()
        assert torch.equal(out[0, 0, others], clean[0, 0, others])
        for name in EXACT:
            assert torch.equal(stats[name][0, 0, others], before[name][0, 0, others]), name
            assert torch.equal(stats[name][0, 1], before[name][0, 1]), name


def test_a_hidden_key_may_hold_anything_in_its_scores() -> None:
    query, key = normal(1, 1, 6, 8), normal(1, 1, 9, 8, seed=1)
    seen = torch.arange(9) != 8
    for options in ({"key_mask": seen[None]}, {"is_causal": True}, {"attn_mask": seen}):
        want = row_statistics(query, key, **options)
        for bad in (torch.nan, torch.inf, 1e300):
            spoilt = key.clone()
            spoilt[0, 0, 8] = bad
            assert_same(row_statistics(query, spoilt, **options), want, 0.0)


def test_packed_documents_are_separate_calls() -> None:
    query, key, value = normal(1, 2, 12, 8), normal(1, 2, 12, 8, seed=1), normal(1, 2, 12, 3)
    cuts = [0, 3, 4, 12]
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(cuts).diff())
    for option in (
        {"cu_seqlens": torch.tensor(cuts)},
        {"cu_seqlens": torch.tensor(cuts, dtype=torch.int32)},
        {"document_ids": ids},
        {"document_ids": ids[None]},
        {"document_ids": (ids, ids)},
        {"document_ids": (ids.to(torch.int32), ids[None])},
    ):
        out, stats = attention(
            query, key, value, is_causal=True, **option, return_stats=True, noise=True
        )
        for a, b in itertools.pairwise(cuts):
            part = slice(a, b)
            alone, its = attention(
                query[:, :, part],
                key[:, :, part],
                value[:, :, part],
                is_causal=True,
                return_stats=True,
                noise=True,
            )
            torch.testing.assert_close(out[:, :, part], alone, rtol=1e-12, atol=1e-12)
            for name in EXACT:
                torch.testing.assert_close(
                    stats[name][:, :, part],
                    its[name],
                    rtol=1e-12,
                    atol=1e-12,
                    equal_nan=True,
                    msg=name,
                )


def test_alibi_is_its_matrix() -> None:
    query, key, value = normal(2, 4, 7, 8), normal(2, 2, 9, 8, seed=1), normal(2, 2, 9, 3)
    slopes = 2.0 ** -torch.arange(1.0, 5.0, dtype=torch.float64)
    distance = (torch.arange(7)[:, None] + 2 - torch.arange(9)).abs()
    matrix = -slopes[:, None, None] * distance
    shared: dict[str, Any] = {
        "enable_gqa": True,
        "is_causal": True,
        "query_offset": 2,
        "return_stats": True,
    }
    out, stats = attention(query, key, value, alibi_slopes=slopes, **shared)
    other, others = attention(query, key, value, bias=matrix, **shared)
    torch.testing.assert_close(out, other, rtol=1e-12, atol=1e-12)
    assert_same(stats, others)


def test_a_relative_bias_is_added_to_unscaled_scores() -> None:
    """T5: no scale, one learned number for each head and distance bucket."""
    query, key, value = normal(2, 4, 7, 8), normal(2, 4, 7, 8, seed=1), normal(2, 4, 7, 3, seed=2)
    bucket = (torch.arange(7)[:, None] - torch.arange(7)).clamp(-3, 3) + 3
    bias = normal(7, 4, seed=3)[bucket].permute(2, 0, 1)[None]
    out, stats = attention(query, key, value, bias=bias, scale=1.0, return_stats=True)
    weights = torch.softmax(query @ key.mT + bias, -1)
    torch.testing.assert_close(out, weights @ value, rtol=1e-12, atol=1e-12)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-12, atol=1e-12)


def test_softcap_bounds_the_scores_before_the_mask() -> None:
    query, key, value = normal(1, 2, 7, 8), normal(1, 2, 7, 8, seed=1), normal(1, 2, 7, 3, seed=2)
    scores = 2.0 * torch.tanh(query @ key.mT * 8**-0.5 * 10 / 2.0)
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    out, stats = attention(10 * query, key, value, is_causal=True, softcap=2.0, return_stats=True)
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.max_logit, scores.amax(-1), rtol=1e-12, atol=1e-12)
    assert stats.max_logit.abs().max() <= 2.0


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    query, key, value = normal(1, 2, 7, 8), normal(1, 2, 7, 8, seed=1), normal(1, 2, 7, 3, seed=2)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64)
    joint = torch.cat([query @ key.mT * 8**-0.5, sinks[None, :, None, None].expand(1, 2, 7, 1)], -1)
    weights = torch.softmax(joint, -1)
    out, stats = attention(query, key, value, sinks=sinks, return_stats=True)
    torch.testing.assert_close(out, weights[..., :-1] @ value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.sink_mass, weights[..., -1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(stats.entropy, -torch.xlogy(weights, weights).sum(-1))
    assert stats.n_keys.eq(7).all()
    assert row_statistics(query, key).sink_mass.eq(0).all()
    zero = attention(query, key, value, sinks=torch.zeros(2).double())  # softmax one
    exps = (query @ key.mT * 8**-0.5).exp()
    torch.testing.assert_close(zero, exps @ value / (1 + exps.sum(-1, keepdim=True)))


# -- dropout ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("keys", [9, 600])
def test_statistics_are_of_the_weights_before_dropout(keys: int) -> None:
    query, key = normal(1, 2, 7, 8), normal(1, 2, keys, 8, seed=1)
    value = normal(1, 2, keys, 3, seed=2)
    out, stats = attention(query, key, value, return_stats=True, noise=True)
    dropped, others = attention(query, key, value, dropout_p=0.5, return_stats=True, noise=True)
    assert_same(stats, others, 0.0)
    assert not torch.equal(out, dropped)
    torch.manual_seed(3)
    first = attention(query, key, value, dropout_p=0.5)
    second = attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(3)
    again = attention(query, key, value, dropout_p=0.5)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("p", [0.1, 0.8])
def test_dropout_keeps_the_expectation_and_drops_its_share(p: float) -> None:
    rows, keys = 200, 1000
    query, key = torch.zeros(1, 2, rows, 4), torch.zeros(1, 2, keys, 4)
    out = attention(query, key, torch.ones(1, 2, keys, 1), dropout_p=p)
    error = math.sqrt(p / (1 - p) / keys)  # of one row
    assert abs(out.mean() - 1) < 4 * error / math.sqrt(2 * rows)
    assert 0.9 * error < out.std() < 1.1 * error
    # whole weights are dropped: identity values show which
    each = torch.eye(keys).expand(1, 2, -1, -1)
    kept = attention(query, key, each, dropout_p=p)
    assert kept.unique().numel() == 2
    share = float((kept > 0).float().mean())
    assert abs(share - (1 - p)) < 4 * math.sqrt(p * (1 - p) / kept.numel())
    assert not torch.equal(kept[0, 0], kept[0, 1]), "heads are dropped apart"
    assert not torch.equal(kept[0, 0, 0], kept[0, 0, 1]), "rows are dropped apart"


# -- tiles ------------------------------------------------------------------------------------


@pytest.mark.few(5)
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
def test_many_ragged_tiles_are_the_oracle(mask: str) -> None:
    for seed, queries, keys in ((0, 9, 600), (1, 3, 513), (2, 260, 300)):
        for dtype in (torch.float64, torch.float32):
            case = attention_case(seed, mask=mask, dtype=dtype, queries=queries, keys=keys)
            out, _, oracle = check_case(case)
            assert relative(out, oracle["output"]) <= (1e-12 if dtype == torch.float64 else 2e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("low", [-1e4, -3.0])
def test_rows_whose_keys_come_late(low: float) -> None:
    """The first tiles of a row hold nothing, or only what the last ones dwarf."""
    scores = torch.full((5, 700), low, dtype=torch.float64)
    scores[:, 600:] = normal(5, 100)
    mask = torch.ones(5, 700, dtype=torch.bool)
    mask[1, :300], mask[2, :650], mask[3], mask[4, 100:] = False, False, False, False
    key = torch.eye(5, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        query = key.view(1, 1, 5, 5).to(dtype)
        case = AttentionCase(
            query,
            scores.T.contiguous().view(1, 1, 700, 5).to(dtype),
            normal(1, 1, 700, 3, seed=1, dtype=dtype),
            {"attn_mask": mask, "scale": 1.0},
            f"late, {dtype}",
        )
        _, stats, oracle = check_case(case)
        assert stats.n_keys.flatten().tolist() == [700, 400, 50, 0, 100]
        assert relative(stats.entropy, oracle["entropy"]) <= (
            1e-12 if dtype == torch.float64 else 2e-6
        )


@pytest.mark.parametrize(
    ("shape", "keys"),
    [((7, 4, 5, 8), 17), ((2, 40, 3, 8), 30), ((3, 2, 1, 8), 2100), ((1, 1, 300, 8), 4500)],
)
def test_tiles_that_hold_several_batches_and_rows_that_span_several_tiles(
    shape: tuple[int, ...], keys: int
) -> None:
    batch, heads, _, width = shape
    query, key = normal(*shape), normal(batch, heads // 2 or 1, keys, width, seed=1)
    value = normal(batch, heads // 2 or 1, keys, 3, seed=2)
    mask = normal(batch, 1, 1, keys, seed=3) > -0.5
    for options in ({"attn_mask": mask}, {"is_causal": True, "query_offset": keys - shape[2]}):
        options["enable_gqa"] = True
        check_case(AttentionCase(query, key, value, options, f"{shape}, {keys}, {options}"))
        single = tuple(part.float() for part in (query, key, value))
        check_case(AttentionCase(*single, options, f"{shape}, {keys}, {options}, float32"))


def test_statistics_of_shards_merge_to_those_of_the_whole() -> None:
    query, key, value = normal(2, 3, 5, 8), normal(2, 3, 20, 8, seed=1), normal(2, 3, 20, 4, seed=2)
    whole = row_statistics(query, key, value, noise=True)
    left, right = (
        row_statistics(query, key[:, :, part], value[:, :, part], noise=True)
        for part in (slice(0, 7), slice(7, 20))
    )
    assert_same(left.merge(right), whole)
    state = merge(left.state, right.state)
    assert torch.equal(state.n, whole.state.n)


def test_row_statistics_are_those_of_attention() -> None:
    case = attention_case(5, mask="everything", dtype=torch.float64)
    _, stats = attention(*case.tensors, **case.options, return_stats=True, noise=True)
    assert_same(row_statistics(*case.tensors, **case.options, noise=True), stats, 0.0)
    bare = row_statistics(case.query, case.key, **case.options)
    assert bare.available == tuple(name for name in EXACT if name != "noise_gain")
    for name in bare.available:
        torch.testing.assert_close(bare[name], stats[name], rtol=0, atol=0, equal_nan=True)
    assert isinstance(attention(*case.tensors, **case.options), Tensor)


@pytest.mark.parametrize("lengths", [(0, 300, 300), (1, 300, 0), (1, 0, 300)])
def test_nothing_to_attend_to_at_a_length_that_is_bounded_first(
    lengths: tuple[int, int, int],
) -> None:
    """From 256 queries on the kernel bounds scores by the vectors; there may be none of those."""
    batch, queries, keys = lengths
    query, key = torch.randn(batch, 2, queries, 8), torch.randn(batch, 2, keys, 8)
    out, stats = attention(query, key, key, return_stats=True)
    assert out.shape == query.shape
    assert (out == 0).all()
    assert stats.n_keys.shape == (batch, 2, queries)
    assert keys > 0 or (stats.lse == -torch.inf).all()


@pytest.mark.parametrize("weights", ["softmax", "relu2"])
def test_statistics_are_one_line_in_a_terminal_and_list_what_they_have(weights: str) -> None:
    query = torch.randn(1, 2, 5, 4)
    stats: Any = row_statistics(query, query, weights=weights)
    assert "rows (1, 2, 5)" in repr(stats)
    assert "\n" not in repr(stats)
    assert len(repr(stats)) < 120
    assert set(stats.available) == {name for name in dir(stats) if name in METRICS}
