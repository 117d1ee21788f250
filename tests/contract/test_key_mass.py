"""The weight that each key receives, against a softmax that is really formed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance import weights as weightings
from acutance.rowstats import dense_statistics
from acutance.testing import MASKS, AttentionCase, attention_case, score_error

BACKENDS = ["auto", "blocked"]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Uninitialised memory holds NaN: a result nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def oracle(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    """Sums of the dense weights: the output that values of a unit matrix have is the weights."""
    batch, heads, keys, _ = key.shape
    value = torch.eye(keys, dtype=torch.float64).expand(batch, heads, -1, -1)
    return dense_statistics(query, key, value, **options)["output"].sum(2)


def check(case: AttentionCase, backend: str) -> None:
    got = acutance.key_mass(case.query, case.key, **case.options, backend=backend)
    want = oracle(case.query, case.key, **case.options)
    dtype = torch.float64 if case.query.dtype == torch.float64 else torch.float32
    added = 0.0
    for name in ("attn_mask", "bias"):
        tensor = case.options.get(name)
        if tensor is not None and tensor.is_floating_point():
            added += float(tensor[tensor > -1e4].abs().max()) if (tensor > -1e4).any() else 0.0
    if "alibi_slopes" in case.options:
        added += float(case.options["alibi_slopes"].abs().max()) * 200
    off = score_error(case.query, case.key, case.options.get("scale"), added=added)
    # a weight is off by the error of its score and of the row's normaliser; then L of them add up
    relative = math.expm1(2 * off) + (case.query.shape[2] + 16) * torch.finfo(dtype).eps
    assert got.dtype == dtype
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=relative, atol=1e-30, msg=case.name)


@pytest.mark.grid
@pytest.mark.parametrize("mask", sorted(MASKS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_sum_of_the_dense_weights(mask: str, dtype: torch.dtype, backend: str) -> None:
    for seed in range(4):
        check(attention_case(seed, mask=mask, dtype=dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_tiles_add_up(backend: str) -> None:
    query, key = torch.randn(1, 4, 300, 8), torch.randn(1, 2, 300, 8)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.0])
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": True, "alibi_slopes": slopes}
    mass = acutance.key_mass(query, key, **options, backend=backend)
    scores = query.double() @ key.double().repeat_interleave(2, 1).mT / 8**0.5
    places = torch.arange(300)
    away = places[:, None] - places
    scores = (scores - slopes.view(4, 1, 1) * away.abs()).masked_fill(away < 0, -torch.inf)
    torch.testing.assert_close(mass.double(), scores.softmax(-1).sum(2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_adds_up_to_the_rows_that_see_a_key(backend: str) -> None:
    query, key = torch.randn(2, 6, 9, 8), torch.randn(2, 3, 9, 8)
    seen = torch.rand(2, 1, 9, 9) < 0.3
    seen[:, :, 4] = False
    options: dict[str, Any] = {"attn_mask": seen, "sinks": torch.randn(6), "enable_gqa": True}
    mass = acutance.key_mass(query, key, **options, backend=backend)
    stats = acutance.row_statistics(query, key, **options)
    rows = (stats.n_keys > 0).sum(-1) - stats.sink_mass.nansum(-1)
    assert float(rows.max()) < 8
    torch.testing.assert_close(mass.sum(-1), rows)


def test_rows_in_parts_add_up_to_the_whole() -> None:
    query, key = torch.randn(2, 1, 4, 50, 16, dtype=torch.float64)
    whole = acutance.key_mass(query, key, is_causal=True, window=20)
    first, last = (
        acutance.key_mass(rows, key, is_causal=True, window=20, query_offset=offset)
        for rows, offset in ((query[:, :, :34], 0), (query[:, :, 34:], 34))
    )
    assert float(last[..., :15].abs().max()) == 0.0
    torch.testing.assert_close(first + last, whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_hidden_reaches_no_key(backend: str) -> None:
    query, key = torch.randn(2, 1, 4, 200, 8)
    documents = (torch.arange(200) >= 150).long()[None]
    options: dict[str, Any] = {"is_causal": True, "document_ids": documents, "backend": backend}
    whole = acutance.key_mass(query, key, **options)
    query[:, :, 150:], key[:, :, 170:] = torch.nan, torch.nan
    mass = acutance.key_mass(query, key, **options)
    torch.testing.assert_close(mass[..., :150], whole[..., :150])
    assert mass[..., 150:].isnan().all()
    padding = torch.arange(200)[None] < 170
    mass = acutance.key_mass(query[:, :, :150], key, key_mask=padding, backend=backend)
    assert mass.isfinite().all()
    assert not mass[..., 170:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_no_keys(backend: str) -> None:
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    none = acutance.key_mass(query[:, :, :0], key, backend=backend)
    assert torch.equal(none, torch.zeros(1, 2, 5))
    assert acutance.key_mass(query, key[:, :, :0], backend=backend).shape == (1, 2, 0)


@pytest.mark.parametrize("weights", ["relu2", "sparsemax", "softmax_one", "sigmoid"])
@pytest.mark.parametrize("inference", [False, True])
def test_other_weights_are_summed(weights: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        query, key = torch.randn(2, 2, 4, 30, 8, dtype=torch.float64)
        mass = acutance.key_mass(query, key, weights=weights, is_causal=True)
        seen = torch.ones(30, 30, dtype=torch.bool).tril()
        want = weightings.get(weights)(query @ key.mT / 8**0.5, seen).sum(2)
    torch.testing.assert_close(mass, want)


def test_scores_temperatures_and_laws_are_those_of_statistics() -> None:
    query, key = torch.randn(2, 1, 2, 40, 8, dtype=torch.float64)
    norms = (torch.nn.functional.normalize(t, dim=-1) for t in (query, key))
    cosine = acutance.key_mass(query, key, score="cosine", scale=3.0)
    torch.testing.assert_close(cosine, acutance.key_mass(*norms, scale=3.0))
    product = acutance.key_mass(query, key, score=lambda q, k, first: q @ k.mT / 8**0.5)
    torch.testing.assert_close(product, acutance.key_mass(query, key))
    warm = acutance.key_mass(query, key, weights=weightings.Softmax(temperature=2.0))
    torch.testing.assert_close(warm, acutance.key_mass(query, key, scale=8**-0.5 / 2))
    law = acutance.scaling.LogN(train_length=10)
    factor = math.log(40) / math.log(10)
    scaled = acutance.key_mass(query, key, scaling=law)
    torch.testing.assert_close(scaled, acutance.key_mass(query, key, scale=factor * 8**-0.5))


def test_it_carries_no_gradient_and_leaves_none() -> None:
    query, key = (torch.randn(1, 2, 10, 8, requires_grad=True) for _ in range(2))
    for weights in ("softmax", "relu2"):
        assert not acutance.key_mass(query, key, weights=weights).requires_grad
    assert query.grad is None


def test_it_compiles_and_maps() -> None:
    query, key = torch.randn(2, 3, 1, 2, 10, 8)
    each = torch.stack([acutance.key_mass(q, k) for q, k in zip(query, key, strict=True)])
    assert torch.equal(torch.func.vmap(acutance.key_mass)(query, key), each)
    compiled = torch.compile(acutance.key_mass, backend="eager", fullgraph=True)
    assert torch.equal(compiled(query[0], key[0]), each[0])


def test_errors_name_the_argument() -> None:
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"key_mass has no option 'windw': choose from .*window"):
        acutance.key_mass(query, key, windw=2, enable_gqa=True)
    with pytest.raises(TypeError, match="key_mass has no option 'noise'"):
        acutance.key_mass(query, key, noise=True, enable_gqa=True)
    with pytest.raises(ValueError, match=r"query has 4 heads but key has 2: pass enable_gqa=True"):
        acutance.key_mass(query, key)
    with pytest.raises(TypeError, match="is_causal"):
        acutance.key_mass(query, key, is_causal=1, enable_gqa=True)
    mask = torch.ones(3, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"attn_mask .*exclude"):
        acutance.key_mass(query, key, attn_mask=mask, is_causal=True, enable_gqa=True)
    with pytest.raises(ValueError, match="backend='native' supports only softmax of dot products"):
        acutance.key_mass(query, key, weights="relu2", backend="native", enable_gqa=True)
