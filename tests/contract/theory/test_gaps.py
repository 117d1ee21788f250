"""Gap counts and critical scales of measured scores, by brute force and on random rows."""

import math
import tracemalloc

import numpy as np
import pytest

from acutance.theory import critical_scale, gap_count


def scores_for_counting(rng):
    scores = rng.standard_normal((3, 5, 40))
    scores[0, 0, 10:] = -np.inf
    scores[1, 2] = np.round(scores[1, 2], 1)  # ties below the maximum
    scores[1, 2, 7] = 9.0
    return scores


def test_supremum_is_attained_at_a_gap():
    rng = np.random.default_rng(0)
    scores = scores_for_counting(rng)
    scale = critical_scale(scores)
    assert scale.shape == (3, 5)
    everywhere = np.geomspace(1e-6, 20, 3000)
    for at in np.ndindex(3, 5):
        row = scores[at]
        gaps = np.sort(row.max() - row)
        gaps = gaps[np.isfinite(gaps) & (gaps > 0)]
        at_gaps = np.log(gap_count(row, gaps)) / gaps
        assert scale[at] == at_gaps.max()
        elsewhere = np.log(gap_count(row, everywhere)) / everywhere
        assert elsewhere.max() <= scale[at]
        just_below = gaps * (1 - 1e-9)
        assert (np.log(gap_count(row, just_below)) / just_below).max() < scale[at]


def test_gap_count_by_comparison():
    scores = scores_for_counting(np.random.default_rng(1))
    t = np.array([[0.0, 0.1], [1.0, 2.5], [50.0, np.inf]])
    gaps = scores.max(-1, keepdims=True) - scores
    expected = ((gaps[..., None, None] <= t) & np.isfinite(gaps)[..., None, None]).sum(2)
    counts = gap_count(scores, t)
    assert counts.shape == (3, 5, 3, 2)
    assert (counts == expected).all()
    assert isinstance(gap_count(scores[0, 0], 1.0), float)


def test_ties_and_masks():
    low = -math.inf
    rows = [[1.0, 1.0, 0.0], [1.0, low, low], [low, low, low], [1.0, 0.0, low], [2.0, 2.0, 2.0]]
    assert critical_scale(rows) == pytest.approx([np.inf, 0, np.nan, math.log(2), np.inf], nan_ok=1)
    assert gap_count(rows, 0.0).tolist() == [2, 1, 0, 1, 3]
    assert gap_count(rows, math.inf).tolist() == [3, 1, 0, 2, 3]
    # Keys tied below the maximum count together: three at gap 2.
    assert critical_scale([2.0, 0.0, 0.0]) == pytest.approx(math.log(3) / 2, rel=1e-15)
    assert critical_scale([5.0]) == 0.0
    assert critical_scale(np.float16([7.0, 7.001])) == math.inf


def test_critical_scale_shifts_and_scales():
    scores = np.random.default_rng(2).standard_normal((4, 100))
    scale = critical_scale(scores)
    assert critical_scale(scores + 3) == pytest.approx(scale, rel=1e-11)
    assert critical_scale(4 * scores) == pytest.approx(scale / 4, rel=1e-13)
    assert (critical_scale(scores[:, ::-1]) == scale).all()


def test_entropy_collapses_above_the_critical_scale():
    scores = np.random.default_rng(3).standard_normal((50, 2000))
    scale = critical_scale(scores)[:, None]
    gaps = scores.max(-1, keepdims=True) - scores
    below, above = (np.median(1 / np.exp(-f * scale * gaps).sum(-1)) for f in (0.3, 4.0))
    assert below < 0.05
    assert above > 0.95


@pytest.mark.parametrize("n", [64, 1024, 16384])
def test_one_gap_needs_log_n(n):
    scores = np.zeros((2, n))
    scores[0, 3], scores[1, n - 1] = 0.5, 4.0
    assert critical_scale(scores).tolist() == [math.log(n) / 0.5, math.log(n) / 4.0]


def test_gap_law_of_random_rows():
    """A row's Λ scatters with a tail so heavy that its mean is infinite, so quantiles: what was
    seen once, and √(2 log n), lie in the middle half; the median grows as it should."""
    rng, sizes = np.random.default_rng(7), [64, 1024, 16384]
    seen = {"normal": [3.05, 3.61, 4.79], "uniform": [63, 1083, 13927]}
    medians = {"normal": [], "uniform": []}
    for index, n in enumerate(sizes):
        rows = 400 if n < 10_000 else 150
        for name, draw in (("normal", rng.standard_normal), ("uniform", rng.random)):
            scale = critical_scale(draw((rows, n)))
            low, middle, high = np.quantile(scale, [0.25, 0.5, 0.75])
            medians[name].append(middle)
            assert low < seen[name][index] < high
            if name == "normal":
                assert low < math.sqrt(2 * math.log(n)) < high
    assert (np.diff(medians["normal"]) > 0).all()
    assert medians["normal"][2] < 2 * medians["normal"][0]

    # n times the largest uniform spacings are independent exponentials: Λ/n has a limit law.
    spacings = np.cumsum(rng.exponential(size=(4000, 400)), axis=1)
    limit = np.sort((np.log(np.arange(2, 402)) / spacings).max(axis=1))
    rank = 2000
    for n, middle in zip(sizes, medians["uniform"], strict=True):
        rows = 400 if n < 10_000 else 150
        band = 4 * 0.5 * 4000 * (rows**-0.5 + 4000**-0.5)  # ranks, 4 standard errors of a median
        assert limit[int(rank - band)] < middle / n < limit[int(rank + band)]


def test_rows_are_read_block_by_block():
    scores = np.random.default_rng(9).standard_normal((64, 256, 1024)).astype(np.float32)
    view = scores.transpose(1, 0, 2)[:, ::-1]  # not contiguous; blocks have 2²⁰ scores
    parts = [view[:, i : i + 4] for i in range(0, 64, 4)]
    whole = np.concatenate([critical_scale(part) for part in parts], 1)
    counts = np.concatenate([gap_count(part, [0.5, 3.0]) for part in parts], 1)
    tracemalloc.start()
    in_blocks = critical_scale(view)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (in_blocks == whole).all()
    assert (gap_count(view, [0.5, 3.0]) == counts).all()
    assert whole.shape == (256, 64)
    assert whole[3, 0] == critical_scale(scores[63, 3])
    assert peak < 6 * 8 * 2**20 < scores.nbytes  # float64 blocks, never a copy of the scores


def test_no_rows():
    assert critical_scale(np.empty((0, 4))).shape == (0,)
    assert gap_count(np.empty((0, 4)), [1.0, 2.0]).shape == (0, 2)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (gap_count, ([1.0], -1.0), r"^t: .* at least 0, got t=-1$"),
        (gap_count, ([1.0], math.nan), r"^t: .* got t=nan$"),
        (gap_count, ([math.nan, 1.0], 1.0), r"^scores: .* got NaN or \+inf$"),
        (critical_scale, ([math.inf, 1.0],), r"^scores: .* got NaN or \+inf$"),
        (critical_scale, (np.empty((3, 0)),), r"^scores: .* at least one key, .* \(3, 0\)$"),
        (critical_scale, (1.0,), r"^scores: .* got \(\)$"),
    ],
)
def test_domain(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
