"""Means and covariances of the first keys of a head: they give every row's plain moments of logits.

Where a row sees a whole stretch of keys and its logits are dot products, the mean of those logits
is ``q · mean(k)``, and their summed squared deviation ``qᵀ C q`` with C = Σ (k − k̄)(k − k̄)ᵀ. So
chunks of keys are summed once, in O(S d²), and the forward kernel adds nothing of it pair by pair.

Keys are centred by the mean of their chunk before they are multiplied; chunks are merged in
float64. Means are about the head's first key, whose score each row knows: an offset that all keys
share costs no digits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (what a kernel is given are pointers and numbers of the device: Python has no types for them)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.kernels.call import KernelCall
from acutance.kernels.gpu.arguments import Launcher, by_head, flags, padded
from acutance.kernels.gpu.language import constant, jit, tl
from acutance.kernels.gpu.scores import rows_of

#: Keys summed at a time within a chunk.
STEP = constant(32)
#: Largest ratio of the products' size to the sum of squares that they make, at which they count.
MOST = constant(512.0)
#: With fewer queries, or fewer chunks of keys, the sums over keys cost as much as they save.
FEWEST_QUERIES, FEWEST_CHUNKS = 129, 4


def has_moments(call: KernelCall) -> bool:
    """Whether the mean and variance of logits can be computed from sums of k and k kᵀ over keys.

    They can, without computing the logits, if keys are masked by position only, every row sees a
    prefix of the keys, and logits are dot products times a positive factor. False also for calls
    too small for this to save time.
    """
    given, masking = flags(call), call.masking
    plain = not (given.changed or given.data or given.window)
    enough = FEWEST_CHUNKS * chunk_size(call.query.shape[-1])
    return plain and masking.queries >= FEWEST_QUERIES and masking.keys >= enough


def chunk_size(width: int) -> int:
    """Number of keys of a chunk: the chunks' sums need at most half the memory of the keys."""
    return max(128, 2 * padded(width))


@jit
def chunk_kernel(
    KEY, MEANS, PRODUCTS, heads, chunks, E: tl.constexpr, BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Means of some components of a chunk's keys, and a tile of their product matrix KᵀK."""
    ROWS: tl.constexpr = BLOCK_M if BLOCK_M < BLOCK_E else BLOCK_E
    COLUMNS: tl.constexpr = BLOCK_N if BLOCK_N < BLOCK_E else BLOCK_E
    across: tl.constexpr = BLOCK_E // COLUMNS
    tiles: tl.constexpr = BLOCK_E // ROWS * across
    tile = tl.program_id(0) % tiles
    at = tl.program_id(0) // tiles
    head = at // chunks
    K, key_row = rows_of(KEY, head // heads, head % heads)
    a = tile // across * ROWS + tl.arange(0, ROWS)
    b = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    j = (at % chunks * CHUNK + tl.arange(0, STEP)).to(tl.int64)
    first_a = tl.load(K + a, mask=a < E, other=0.0).to(tl.float32)
    first_b = tl.load(K + b, mask=b < E, other=0.0).to(tl.float32)
    mean_a, mean_b = first_a * 0.0, first_b * 0.0
    for step in tl.range(0, CHUNK, STEP):
        rows = K + (j + step) * key_row
        k = tl.load(rows[None, :] + a[:, None], mask=(a < E)[:, None], other=0.0)
        mean_a += tl.sum(k.to(tl.float32) - first_a[:, None], 1)
        k = tl.load(rows[:, None] + b[None, :], mask=(b < E)[None, :], other=0.0)
        mean_b += tl.sum(k.to(tl.float32) - first_b[None, :], 0)
    mean_a, mean_b = mean_a / CHUNK, mean_b / CHUNK
    # every tile with these rows writes the same
    tl.store(MEANS + at.to(tl.int64) * BLOCK_E + a, mean_a)
    first_a, first_b = first_a + mean_a, first_b + mean_b
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, CHUNK, STEP):
        rows = K + (j + step) * key_row
        k = tl.load(rows[None, :] + a[:, None], mask=(a < E)[:, None], other=0.0)
        left = k.to(tl.float32) - first_a[:, None]
        k = tl.load(rows[:, None] + b[None, :], mask=(b < E)[None, :], other=0.0)
        right = k.to(tl.float32) - first_b[None, :]
        total = tl.dot(left, right, total, input_precision="tf32x3")
    tl.store(PRODUCTS + (at.to(tl.int64) * BLOCK_E + a[:, None]) * BLOCK_E + b[None, :], total)


@jit
def running_kernel(
    MEANS, PRODUCTS, RUNNING_MEANS, chunks, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Turn sums of single chunks into sums of all chunks up to each, for a tile of one head's KᵀK.

    The first chunk is left out: the forward kernel computes its scores one by one.
    """
    ROWS: tl.constexpr = BLOCK_M if BLOCK_M < BLOCK_E else BLOCK_E
    COLUMNS: tl.constexpr = BLOCK_N if BLOCK_N < BLOCK_E else BLOCK_E
    across: tl.constexpr = BLOCK_E // COLUMNS
    tiles: tl.constexpr = BLOCK_E // ROWS * across
    head = (tl.program_id(0) // tiles).to(tl.int64) * chunks
    tile = tl.program_id(0) % tiles
    a = tile // across * ROWS + tl.arange(0, ROWS)
    b = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    mean_a = tl.zeros((ROWS,), tl.float64)
    mean_b = tl.zeros((COLUMNS,), tl.float64)
    count = total.sum() * 0.0
    for chunk in tl.range(1, chunks):
        MEAN = MEANS + (head + chunk) * BLOCK_E
        at = PRODUCTS + ((head + chunk) * BLOCK_E + a[:, None]) * BLOCK_E + b[None, :]
        share = CHUNK / (count + CHUNK)
        away_a = tl.load(MEAN + a).to(tl.float64) - mean_a
        away_b = tl.load(MEAN + b).to(tl.float64) - mean_b
        total += tl.load(at).to(tl.float64) + (away_a * (count * share))[:, None] * away_b[None, :]
        mean_a += away_a * share
        mean_b += away_b * share
        count += CHUNK
        tl.store(at, total.to(tl.float32))
        tl.store(RUNNING_MEANS + (head + chunk) * BLOCK_E + a, mean_a.to(tl.float32))


@jit
def rows_kernel(
    QUERY, RUNNING_MEANS, PRODUCTS, ROW_MEANS, ROW_SQUARES, query_heads, group, queries, keys,
    offset, E: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Mean and summed squared deviations of the logits of ``BLOCK_M`` rows, over whole chunks.

    The chunks are those that all rows of the surrounding block of 128 see. The mean is less the dot
    product with the first key. The squared deviations are NaN where rounding may dominate them: the
    error of an entry of KᵀK is at most some roundings of the root of its two diagonal entries.
    """
    COLUMNS: tl.constexpr = BLOCK_N if BLOCK_N < BLOCK_E else BLOCK_E
    blocks = tl.cdiv(queries, BLOCK_M)
    block = tl.program_id(0) % blocks
    whole_head = tl.program_id(0) // blocks
    batch = whole_head // query_heads
    head = whole_head % query_heads
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < queries
    chunks = keys // CHUNK
    last = last_chunk(block * BLOCK_M, keys, offset, CHUNK, CAUSAL)
    Q, query_row = rows_of(QUERY, batch, head)
    if last > 0:
        places = Q + rows.to(tl.int64)[:, None] * query_row
        chunk = (batch * (query_heads // group) + head // group).to(tl.int64) * chunks + last
        mean = tl.zeros((BLOCK_M,), tl.float32)
        size, squared = mean, mean
        for right in tl.range(0, BLOCK_E, COLUMNS):
            b = right + tl.arange(0, COLUMNS)
            turned = tl.zeros((BLOCK_M, COLUMNS), tl.float32)
            for left in tl.range(0, BLOCK_E, COLUMNS):
                a = left + tl.arange(0, COLUMNS)
                q = tl.load(places + a[None, :], mask=there[:, None] & (a < E)[None, :], other=0.0)
                products = tl.load(PRODUCTS + (chunk * BLOCK_E + a[:, None]) * BLOCK_E + b[None, :])
                turned = tl.dot(q.to(tl.float32), products, turned, input_precision="tf32x3")
            q = tl.load(places + b[None, :], mask=there[:, None] & (b < E)[None, :], other=0.0)
            q = q.to(tl.float32)
            diagonal = tl.maximum(tl.load(PRODUCTS + (chunk * BLOCK_E + b) * BLOCK_E + b), 0.0)
            mean += tl.sum(q * tl.load(RUNNING_MEANS + chunk * BLOCK_E + b)[None, :], 1)
            size += tl.sum(tl.abs(q) * tl.sqrt(diagonal)[None, :], 1)
            squared += tl.sum(turned * q, 1)
        exact = size * size <= squared * MOST
        row = whole_head.to(tl.int64) * queries + rows
        tl.store(ROW_MEANS + row, mean, mask=there)
        tl.store(ROW_SQUARES + row, tl.where(exact, squared, float("nan")), mask=there)


@jit
def last_chunk(row, keys, offset, CHUNK: tl.constexpr, CAUSAL: tl.constexpr):
    """Index of the last chunk that ``row`` and all rows of its block of 128 see completely.

    It does not depend on the tile size.
    """
    stop = keys
    if CAUSAL:
        stop = tl.maximum(tl.minimum(stop, row // 128 * 128 + offset + 1), 0)
    return stop // CHUNK - 1


_chunk = Launcher(chunk_kernel, ((32, 32, 4, 2),), fixed=True)
_running = Launcher(running_kernel, ((32, 32, 4, 1),), fixed=True)
_rows = Launcher(rows_kernel, ((64, 32, 4, 2),), fixed=True)


def row_moments(query: Tensor, key: Tensor, call: KernelCall) -> tuple[Tensor, Tensor]:
    """Moments of each row's dot products with the keys of all whole chunks it sees, but the first.

    Args:
        query: (B, Hq, L, E), with dense rows.
        key: (B, H, S, E), with dense rows.
        call: the call, for which :func:`has_moments` holds.

    Returns:
        Means, less the product with the first key, and summed squared deviations, (B, Hq, L),
        float32. The second is NaN where it would not be exact; both are undefined for rows that see
        no such chunk.
    """
    B, H, S, E = key.shape
    width, chunk = padded(E), chunk_size(E)
    chunks = S // chunk
    means = torch.empty(B, H, chunks, width, dtype=torch.float32, device=key.device)
    running = torch.empty_like(means)
    products = torch.empty(B, H, chunks, width, width, dtype=torch.float32, device=key.device)
    shared: dict[str, Any] = {"PRODUCTS": products, "BLOCK_E": width, "CHUNK": chunk}

    def across(tile: dict[str, int]) -> int:
        return B * H * -(-width // tile["BLOCK_M"]) * -(-width // tile["BLOCK_N"])

    _chunk(
        lambda tile: chunks * across(tile),
        **shared, KEY=by_head(key), MEANS=means, heads=H, chunks=chunks, E=E,
    )  # fmt: skip
    _running(across, **shared, MEANS=means, RUNNING_MEANS=running, chunks=chunks)
    Hq, L = query.shape[1:3]
    row_means = torch.empty(B, Hq, L, dtype=torch.float32, device=key.device)
    row_squares = torch.empty_like(row_means)
    _rows(
        lambda tile: B * Hq * -(-L // tile["BLOCK_M"]),
        **shared, QUERY=by_head(query), RUNNING_MEANS=running, ROW_MEANS=row_means,
        ROW_SQUARES=row_squares, query_heads=Hq, group=Hq // H, queries=L, keys=S,
        offset=call.masking.offset, E=E, CAUSAL=call.masking.causal,
    )  # fmt: skip
    return row_means, row_squares
