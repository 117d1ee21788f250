"""Cases are legal, repeatable and as varied as they claim to be."""

from __future__ import annotations

import pytest
import torch

from acutance import attention
from acutance.testing import MASKS, attention_case, exact_scores


@pytest.mark.parametrize("mask", MASKS)
def test_every_case_is_legal_and_repeatable(mask: str) -> None:
    for seed in range(12):
        state = torch.get_rng_state()
        case, again = attention_case(seed, mask=mask), attention_case(seed, mask=mask)
        assert torch.equal(torch.get_rng_state(), state), "the global random state is left alone"
        assert case.name == again.name
        assert case.options.keys() == again.options.keys()
        for left, right in zip(case.tensors, again.tensors, strict=True):
            assert torch.equal(left, right)
        out = attention(*case.tensors, **case.options)
        assert out.shape == (*case.query.shape[:3], case.value.shape[-1])
        assert out.isfinite().all()


def test_cases_vary_in_everything() -> None:
    cases = [attention_case(seed) for seed in range(300)]
    assert {case.query.dtype for case in cases} == {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    }
    drawn = {case.name.split(": ")[1].split(",")[0] for case in cases}
    assert drawn == set(MASKS)
    assert {case.query.shape[0] for case in cases} == {1, 2, 3}
    assert {case.query.shape[1] // case.key.shape[1] for case in cases} == {1, 2, 3}
    assert {case.query.is_contiguous() for case in cases} == {True, False}
    assert {case.query.shape[2] == 1 for case in cases} == {True, False}
    assert any(case.query.shape[2] > case.key.shape[2] for case in cases)
    assert any(case.value.shape[3] != case.query.shape[3] for case in cases)
    assert any("scale" in case.options for case in cases)
    assert max(max(case.query.shape[2], case.key.shape[2]) for case in cases) == 24


def test_some_rows_see_nothing() -> None:
    for mask in ("decode", "boolean", "padding", "documents"):
        counts = []
        for seed in range(20):
            case = attention_case(seed, mask=mask, dtype=torch.float32)
            _, stats = attention(*case.tensors, **case.options, return_stats=True)
            counts.append(int((stats.n_keys == 0).sum()))
        assert 0 < sum(count > 0 for count in counts) < 20, mask


@pytest.mark.parametrize("magnitude", [0.1, 1.0, 100.0])
def test_the_magnitude_is_the_scores_standard_deviation(magnitude: float) -> None:
    spreads = []
    for seed in range(40):
        case = attention_case(
            seed, mask="none", dtype=torch.float64, magnitude=magnitude, queries=50, keys=50
        )
        case.options.pop("scale", None)
        _, stats = attention(*case.tensors, **case.options, return_stats=True)
        spreads.append(stats.logit_std.square().mean())
    assert 0.7 * magnitude < torch.stack(spreads).mean().sqrt() < 1.4 * magnitude


def test_lengths_can_be_given() -> None:
    case = attention_case(0, queries=2, keys=31)
    assert (case.query.shape[2], case.key.shape[2], case.value.shape[2]) == (2, 31, 31)


def test_an_unknown_mask_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mask must be one of none, causal, .*, got 'casual'"):
        attention_case(0, mask="casual")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exact_scores_are_exact(dtype: torch.dtype) -> None:
    scores = torch.tensor([1e4, -3.25, 1 / 3], dtype=dtype)
    query, key = exact_scores(scores)
    assert torch.equal((query @ key.mT).flatten(), scores)
    assert query.dtype == dtype
