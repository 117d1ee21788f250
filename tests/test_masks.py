"""Tiles, put side by side, are the dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acutance.masks import Masking, Region, hides


def dense(masking: Masking, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Visible keys, counts, first keys and added numbers, assembled from tiles of a size."""
    shape = (masking.batch, masking.heads, masking.group, masking.queries, masking.keys)
    seen = torch.zeros(shape, dtype=torch.bool)
    added = torch.zeros(shape)
    count = torch.zeros(shape[:4], dtype=torch.int64)
    first = torch.full(shape[:4], masking.keys)
    for b in range(masking.batch):
        for h in range(masking.heads):
            for i in range(0, masking.queries, rows):
                part = slice(i, min(i + rows, masking.queries))
                region = Region(slice(b, b + 1), slice(h, h + 1), part)
                place = (slice(b, b + 1), slice(h, h + 1), slice(None), part)
                for tile in masking.tiles(region, width):
                    assert 0 < tile.width <= width
                    view = seen[(*place, slice(tile.start, tile.stop))]
                    assert not view.any(), "tiles do not overlap"
                    view.fill_(True)
                    if tile.hidden is not None:
                        hidden = tile.hidden
                        view[..., hidden.start : hidden.stop] &= ~hidden.mask
                    sums = added[(*place, slice(tile.start, tile.stop))]
                    for bias in tile.biases:
                        sums += bias
                    if tile.alibi is not None:
                        slopes, distance = tile.alibi
                        sums -= slopes * distance
                    count[place] += (
                        tile.width
                        if tile.hidden is None
                        else tile.hidden.visible(tile.width, count.dtype)
                    )
                    found = tile.first()
                    if found is None:
                        found = torch.tensor(0), torch.tensor(True)
                    column, inside = found
                    new = torch.where(inside, column + tile.start, masking.keys)
                    first[place] = torch.minimum(first[place], new)
    return seen, count, first, added


def expected(masking: Masking) -> Tensor:
    """The same mask from its definition."""
    i = torch.arange(masking.queries)[:, None] + masking.offset
    j = torch.arange(masking.keys)
    seen = torch.ones(
        masking.batch, masking.heads * masking.group, masking.queries, masking.keys
    ).bool()
    if masking.causal:
        seen &= j <= i
    if masking.window is not None:
        seen &= (i - j).abs() < masking.window
    for mask in (masking.attn_mask, masking.bias):
        if mask is not None:
            seen &= mask if mask.dtype == torch.bool else ~hides(mask)
    if masking.key_mask is not None:
        seen &= masking.key_mask[:, None, None]
    if masking.query_documents is not None and masking.key_documents is not None:
        same = masking.query_documents[:, :, None] == masking.key_documents[:, None, :]
        seen &= same[:, None]
    return seen.unflatten(1, (masking.heads, masking.group))


CASES = {
    "nothing": {},
    "causal": {"causal": True},
    "causal, offset": {"causal": True, "offset": 4},
    "causal, negative offset": {"causal": True, "offset": -3},
    "causal, past the keys": {"causal": True, "offset": 40},
    "causal, before the keys": {"causal": True, "offset": -40},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "wide window": {"window": 100},
    "causal window": {"window": 4, "causal": True},
    "causal window, offset": {"window": 4, "causal": True, "offset": 7},
    "window past the keys": {"window": 4, "offset": 30},
    "boolean": {"attn_mask": torch.rand(2, 6, 11, 17, generator=torch.Generator()) > 0.4},
    "boolean keys": {"attn_mask": torch.rand(17, generator=torch.Generator()) > 0.4},
    "boolean heads": {"attn_mask": torch.rand(6, 1, 17, generator=torch.Generator()) > 0.4},
    "boolean rows": {"attn_mask": torch.rand(11, 1, generator=torch.Generator()) > 0.4},
    "additive": {"attn_mask": torch.tensor([0.0, -1.0, -torch.inf, -1e30]).repeat(5)[:17]},
    "padding": {"key_mask": torch.arange(17).expand(2, 17) < torch.tensor([[9], [17]])},
    "padding, causal": {"key_mask": torch.arange(17).repeat(2, 1) > 4, "causal": True},
    "documents": {
        "query_documents": torch.arange(11)[None] // 4,
        "key_documents": torch.arange(17)[None] // 4,
        "causal": True,
    },
    "two batches of documents": {
        "query_documents": torch.stack([torch.arange(11) // 4, torch.arange(11) // 7]),
        "key_documents": torch.arange(17)[None] // 4,
        "window": 6,
    },
    "bias": {"bias": torch.arange(17.0)},
    "bias of heads and mask": {
        "bias": torch.arange(6.0)[:, None, None],
        "attn_mask": torch.full((11, 17), -torch.inf).triu(1),
    },
    "alibi": {"alibi_slopes": torch.arange(1.0, 7.0), "offset": 2, "causal": True},
}


@pytest.mark.few(8)
@pytest.mark.parametrize("size", [(1, 1), (4, 5), (11, 17), (100, 100)])
@pytest.mark.parametrize("case", CASES)
def test_tiles_are_the_dense_mask(case: str, size: tuple[int, int]) -> None:
    masking = Masking(batch=2, heads=3, group=2, queries=11, keys=17, **CASES[case])
    seen, count, first, added = dense(masking, *size)
    want = expected(masking)
    assert torch.equal(seen, want)
    assert torch.equal(count, want.sum(-1))
    earliest = torch.where(want.any(-1), want.double().argmax(-1), masking.keys)
    assert torch.equal(first, earliest)
    sums = torch.zeros_like(added)
    for tensor in (masking.bias, masking.attn_mask):
        if tensor is not None and tensor.is_floating_point():
            sums += tensor.expand(2, 6, 11, 17).unflatten(1, (3, 2))
    if masking.alibi_slopes is not None:
        i = torch.arange(11)[:, None] + masking.offset
        distance = (i - torch.arange(17)).abs()
        sums -= masking.alibi_slopes.view(1, 3, 2, 1, 1) * distance
    assert torch.equal(torch.where(want, added, 0.0), torch.where(want, sums, 0.0))


def test_the_band_says_how_much_work_is_left_out() -> None:
    causal = Masking(batch=1, heads=1, group=1, queries=1024, keys=1024, causal=True)
    region = Region(slice(0, 1), slice(0, 1), slice(256, 512))
    tiles = list(causal.tiles(region, 128))
    assert [tile.start for tile in tiles] == [0, 128, 256, 384]
    assert [tile.hidden is None for tile in tiles] == [True, True, False, False]
    windowed = Masking(batch=1, heads=1, group=1, queries=1024, keys=1024, causal=True, window=64)
    starts = [tile.start for tile in windowed.tiles(region, 128)]
    assert (min(starts), max(starts)) == (193, 449)
    past = Masking(batch=1, heads=1, group=1, queries=4, keys=4, causal=True, offset=-9)
    assert list(past.tiles(Region(slice(0, 1), slice(0, 1), slice(0, 4)), 4)) == []


@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [
        (torch.float64, [-1e9, -1e30]),
        (torch.float32, [-1e9, torch.finfo(torch.float32).min]),
        (torch.bfloat16, [-1.1e9, torch.finfo(torch.bfloat16).min]),
        (torch.float16, [-32752.0, torch.finfo(torch.float16).min]),
    ],
)
def test_hides(dtype: torch.dtype, hidden: list[float]) -> None:
    assert hides(torch.tensor([-torch.inf, *hidden], dtype=dtype)).all()
    assert not hides(torch.tensor([torch.inf, torch.nan, 0.0, -3e4], dtype=dtype)).any()
