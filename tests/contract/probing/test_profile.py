"""Profiles against numpy, and slopes against lines that are known."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import acutance
from acutance.probing import Profile, load

M, H, B, L = 3, 2, 4, 37


def random_rows(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """(metrics, heads, B, L) with holes, counts (B, 1, L) over six octaves, rows that count."""
    values = torch.randn(M, H, B, L, dtype=dtype) + 5
    values[1][torch.rand(H, B, L) < 0.3] = torch.nan
    values[2, 0] = torch.inf
    n = torch.randint(1, 50, (B, 1, L))
    kept = (torch.rand(B, 1, L) < 0.8).expand(B, H, L)
    return values, n, kept


def check(found: Profile, values: Tensor, n: Tensor, kept: Tensor, exact: float) -> None:
    n = n.expand(B, H, L)
    for head in range(H):
        for octave in range(found.octaves):
            here = (n[:, head] >= 1 << octave) & (n[:, head] < 2 << octave) & kept[:, head]
            assert int(found.rows[head, octave]) == int(here.sum())
            if bool(here.any()):
                logs = n[:, head][here].double().log()
                assert float(found.log_n[head, octave]) == pytest.approx(float(logs.mean()))
            for metric in range(M):
                rows = values[metric, head].double()
                use = here & rows.isfinite()
                at = (head, metric, octave)
                assert int(found.count[at]) == int(use.sum())
                assert int(found.groups[at]) == int(use.any(1).sum())
                if not bool(use.any()):
                    assert float(found.mean[at]) == float(found.M2[at]) == 0
                    assert found.std[at].isnan()
                    continue
                there = rows[use].numpy()
                assert float(found.mean[at]) == pytest.approx(there.mean(), rel=exact)
                squares = ((there - there.mean()) ** 2).sum()
                assert float(found.M2[at]) == pytest.approx(squares, rel=exact, abs=exact)
                between = sum(
                    int(use[b].sum()) * (rows[b][use[b]].mean().item() - there.mean()) ** 2
                    for b in range(B)
                    if bool(use[b].any())
                )
                assert float(found.between[at]) == pytest.approx(between, rel=exact, abs=exact)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float64, 1e-11), (torch.float32, 1e-4)])
def test_a_profile_equals_numpy(dtype: torch.dtype, exact: float) -> None:
    values, n, kept = random_rows(dtype)
    check(Profile.of(values, n, kept), values, n, kept, exact)


def test_heads_may_see_different_numbers_of_keys_and_lose_different_rows() -> None:
    values, _, _ = random_rows()
    n, kept = torch.randint(1, 50, (B, H, L)), torch.rand(B, H, L) < 0.7
    check(Profile.of(values, n, kept), values, n, kept, 1e-11)


@pytest.mark.parametrize("split", [0, 1, 3, 4])
def test_sequences_apart_merge_to_the_whole(split: int) -> None:
    values, n, kept = random_rows()
    whole = Profile.of(values, n, kept)
    left = Profile.of(values[:, :, :split], n[:split], kept[:split])
    right = Profile.of(values[:, :, split:], n[split:], kept[split:])
    for merged in (left.merge(right), right.merge(left)):
        for name, part in whole.tensors().items():
            other = merged.tensors()[name]
            if part.dtype == torch.int64:
                assert torch.equal(part, other), name
            else:
                assert torch.allclose(part, other, rtol=1e-11, atol=1e-11), name


def test_none_is_the_identity_and_octaves_are_padded() -> None:
    values, n, kept = random_rows()
    found = Profile.of(values, n, kept)
    for octaves in (0, found.octaves):
        none = Profile.none(H, M, octaves)
        for merged in (found.merge(none), none.merge(found)):
            for name, part in found.tensors().items():
                assert torch.equal(part, merged.tensors()[name]), name
    assert found.padded(30).octaves == 30
    assert Profile.of(values, n, torch.zeros(B, H, L, dtype=torch.bool)).octaves == 0
    assert Profile.of(values[..., :0], n[..., :0], kept[..., :0]).octaves == 0


def test_join_and_heads_are_inverse() -> None:
    values, n, kept = random_rows()
    found = Profile.of(values, n, kept)
    short = Profile.of(values, n.clamp(max=3), kept)
    joined = Profile.join([found, short])
    for name, part in found.tensors().items():
        assert torch.equal(joined.heads(0, H).tensors()[name], part), name
        assert torch.equal(joined.select([1, 0]).tensors()[name], part[[1, 0]]), name
    assert int(joined.heads(H, 2 * H).count.sum()) == int(short.count.sum())


def test_the_error_is_from_sequence_to_sequence() -> None:
    """Rows all alike within each sequence are one draw each, however many there are."""
    per_sequence = torch.randn(30, dtype=torch.float64)
    values = per_sequence.view(1, 1, 30, 1).expand(1, 1, 30, 50).contiguous()
    found = Profile.of(values, torch.full((30, 1, 50), 64), torch.ones(30, 1, 50).bool())
    expected = per_sequence.numpy().std(ddof=1) / math.sqrt(30)
    assert float(found.error[0, 0, 6]) == pytest.approx(expected, rel=1e-12)
    assert float(found.error[0, 0, 6]) > 3 * float(found.std[0, 0, 6]) / math.sqrt(1500)
    assert Profile.of(values[:, :, :1], torch.full((1, 1, 50), 64), torch.ones(1, 1, 50).bool()
                      ).error[0, 0, 6].isnan()  # fmt: skip


def line(slope: float, noise: float, sequences: int, longest: int = 256) -> Profile:
    """Causal rows of metric 1 + slope · log n, every sequence off by a draw of its own."""
    n = torch.arange(1, longest + 1).double()
    off = noise * torch.randn(sequences, 1, dtype=torch.float64)
    values = (1 + slope * n.log() + off).view(1, 1, sequences, longest)
    whole = torch.ones(sequences, 1, longest, dtype=torch.bool)
    return Profile.of(values, n.long().view(1, 1, -1), whole)


def test_a_line_is_found_exactly() -> None:
    found = line(0.7, 0.0, 3).slope(0, 0, least_n=8)
    assert found is not None
    assert found.value == pytest.approx(0.7, abs=1e-12)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.significant
    assert (found.octaves, found.sequences) == (6, 3)
    assert found.low == pytest.approx(1 + 0.7 * math.log(found.low_n))
    assert found.high == pytest.approx(1 + 0.7 * math.log(found.high_n))
    assert 8 <= found.low_n < 16
    assert found.high_n == pytest.approx(256)


def test_the_standard_error_covers_and_noise_is_not_significant() -> None:
    torch.manual_seed(1)
    beyond = significant = 0
    for _ in range(200):
        sequences, longest = 6, 64
        n = torch.arange(1, longest + 1).double()
        tilt = 0.4 * torch.randn(sequences, 1, dtype=torch.float64)  # a slope of its own each
        values = (tilt * n.log()).view(1, 1, sequences, longest)
        profile = Profile.of(values, n.long().view(1, 1, -1), torch.ones(6, 1, 64).bool())
        found = profile.slope(0, 0)
        assert found is not None
        beyond += abs(found.value) > 2.6 * found.error
        significant += found.significant
    # with 5 degrees of freedom 4.8 % of draws are beyond 2.6 standard errors and 2 % beyond the
    # margin; three binomial deviations of 200 draws above that
    assert beyond <= 19
    assert significant <= 10


def test_too_little_for_a_slope() -> None:
    assert line(0.7, 0.0, 1).slope(0, 0) is None  # one sequence
    assert line(0.7, 0.0, 3, longest=3).slope(0, 0) is None  # two octaves
    assert line(0.7, 0.0, 3).slope(0, 0, least_n=129) is None
    assert line(0.7, 0.0, 3).slope(0, 0, fewest=10) is None
    assert Profile.none(1, 1).slope(0, 0) is None


def test_arrays_that_no_rows_give() -> None:
    values, n, kept = random_rows()
    good = Profile.of(values, n, kept).tensors()
    checked = Profile.checked(good, H, M)
    assert torch.equal(checked.count, good["count"])
    bad = {
        "rows": good["rows"] - 100,
        "count": good["count"].double(),
        "mean": good["mean"] * torch.nan,
        "M2": -good["M2"] - 1,
        "groups": good["groups"][:1],
        "between": good["between"] + torch.inf,
    }
    for name, tensor in bad.items():
        with pytest.raises(ValueError, match=f"'{name}' of a profile"):
            Profile.checked({**good, name: tensor}, H, M)
    with pytest.raises(ValueError, match="a profile must have 0 to 32 octaves, got 40"):
        Profile.checked({**good, "rows": torch.zeros(H, 40).long()}, H, M)


def test_plain_numbers() -> None:
    values, n, kept = random_rows()
    found = Profile.of(values, n, kept)
    (first, _) = found.to_dicts(("a", "b", "c"))
    assert first["from"] == [1, 2, 4, 8, 16, 32]
    assert first["rows"] == found.rows[0].tolist()
    assert first["metrics"]["b"]["mean"] == found.mean[0, 1].tolist()
    assert np.allclose(first["typical"], found.log_n[0].exp().numpy())


def test_a_probe_without_a_profile_finds_the_same_moments(tmp_path: Path) -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x, found = torch.randn(2, 20, 8), {}
    for profile in (True, False):
        with acutance.probe(layer, structure=True, profile=profile) as probe:
            for _ in range(2):
                layer(x, x, x)
        found[profile] = probe.summary()
    full, plain = found[True], found[False]
    assert full.profile is not None
    assert plain.profile is None
    for name, part in full.moments.tensors().items():
        torch.testing.assert_close(
            getattr(plain.moments, name), part, rtol=0, atol=0, equal_nan=True
        )
    assert plain.positions is not None
    assert full.positions is not None
    assert torch.equal(plain.positions.mean, full.positions.mean)
    plain.save(tmp_path / "state")
    assert load(tmp_path / "state").profile is None
    assert plain.merge(full).profile is None  # it would be of some rows only
    with pytest.raises(TypeError, match="profile must be True or False, got 'no'"):
        acutance.probe(layer, profile="no")  # type: ignore[arg-type]


class Fixed(torch.nn.Module):
    """Four heads with given queries and keys; in the last, key 5 is far above all others."""

    def forward(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        query, key, value = torch.randn(3, 1, 4, 64, 16, generator=draw)
        query *= torch.tensor([0.5, 1.0, 2.0, 1.0])[:, None, None]
        query[:, 3], key[:, 3, :, 0], query[:, 3, :, 0] = 0, 0, 1
        key[:, 3, 5, 0] = 60
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def test_without_what_it_needs_no_prediction_is_written() -> None:
    model = Fixed()
    with acutance.probe(model, metrics=("entropy",)) as probe:
        model(0)
    summary = probe.summary()
    assert "predicted_entropy" not in summary.columns()
    assert all("predicted_entropy" not in head for head in summary.to_dict()["heads"])
