"""Triton's passes around the forward kernel: moments of logits from sums over keys; gaps."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from acutance import row_statistics
from acutance.kernels.call import KernelCall
from acutance.masks import check_masking
from acutance.rowstats import dense_statistics, observe
from acutance.testing import assert_close_to_oracle, score_error

pytest.importorskip("triton", reason="triton is not installed (pip install triton, on Linux)")

import triton

from acutance.kernels.gpu import arguments, key_moments

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The interpreter computes with numpy, which warns where a GPU gives infinity and NaN."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def call(query: Tensor, key: Tensor, **options: Any) -> KernelCall:
    scale = options.pop("scale", query.shape[-1] ** -0.5)
    masking = check_masking(query, key, **options)
    return KernelCall(query, key, None, masking, scale)


# -- moments of logits from sums over keys ------------------------------------------------------

CAUSAL = {"is_causal": True, "query_offset": 400}


@pytest.mark.parametrize("options", [CAUSAL, {}], ids=["causal", "full"])
def test_moments_of_rows_are_those_of_their_dot_products(options: dict[str, Any]) -> None:
    query, key = normal(1, 2, 130, 20, seed=0), normal(1, 1, 530, 20, seed=1) + 5
    means, squares = key_moments.row_moments(query, key, call(query, key, **options))
    products = query.double() @ key.double().mT
    chunk = key_moments.chunk_size(20)
    assert chunk == 128
    for first in (0, 128):
        rows = slice(first, min(first + 128, 130))
        seen = min(530, first + 401) if options else 530
        part = products[:, :, rows, chunk : seen // chunk * chunk]
        want = part.mean(-1) - products[:, :, rows, 0]
        assert (means[:, :, rows] - want).abs().max() <= 1e-5
        want = (part - part.mean(-1, keepdim=True)).square().sum(-1)
        assert (squares[:, :, rows] / want - 1).abs().max() <= 2e-6


ALIKE = normal(1, 1, 530, 1, seed=3) * normal(1, 1, 1, 20, seed=4)
#: Keys, and whether their products can be trusted for most rows.
KEYS = {
    "an offset that all share": (normal(1, 1, 530, 20, seed=1) + 300, True),
    "channels of unequal size": (
        normal(1, 1, 530, 20, seed=1) * torch.logspace(-2, 2, 20, device=DEVICE),
        True,
    ),
    "almost all along one line": (1000 * ALIKE + normal(1, 1, 530, 20, seed=1), False),
}


@pytest.mark.parametrize("name", KEYS)
def test_moments_hold_where_keys_are_large_or_alike(name: str) -> None:
    """Where the products of keys cancel, the kernel looks at the pairs themselves."""
    key, exact = KEYS[name]
    query = normal(1, 1, 130, 20, seed=0)
    if name == "almost all along one line":  # rows at right angles to it
        line = ALIKE[0, 0, :1] / ALIKE[0, 0, :1].norm()
        query = query - (query @ line.mT) * line
    _, squares = key_moments.row_moments(query, key, call(query, key, **CAUSAL))
    assert (squares.isfinite().double().mean() > 0.9) == exact
    stats = row_statistics(query, key, backend="triton", **CAUSAL)
    oracle = dense_statistics(query, key, **CAUSAL)
    assert_close_to_oracle(stats, oracle, score_error=score_error(query, key), name=name)


def test_keys_that_are_all_equal_leave_no_spread() -> None:
    query, key = normal(1, 1, 130, 20, seed=0), torch.full((1, 1, 530, 20), 1e4 / 3, device=DEVICE)
    stats = row_statistics(query, key, backend="triton", **CAUSAL)
    # How a product of matrices sums decides whether equal columns give equal scores. Each is within
    # bound = (E + 4) u · scale · sum |q||k| of the exact one, 4 for scale and unit of log 2,
    # so that they lie within twice that: no deviation is above bound, no variance above its square,
    # nor is log n - H, at most a mean of such variances over inverse temperatures from 0 to 1.
    sizes = 20**-0.5 * (query.abs().double() @ key.abs().double().mT).amax(-1)
    bound = (20 + 4) * 2.0**-24 * sizes
    assert bound.max() < 0.1  # squares of scores, of 1e4, would leave several
    assert (stats.logit_std <= bound).all()
    assert (stats.varentropy.abs() <= bound.square() + 1e-20).all()
    assert ((stats.entropy - stats.n_keys.log()).abs() <= bound.square() + 1e-6).all()


def test_a_key_without_numbers_spoils_only_rows_that_see_it() -> None:
    query, key = normal(1, 1, 130, 16, seed=0), normal(1, 1, 530, 16, seed=1)
    clean = row_statistics(query, key, backend="triton", **CAUSAL)
    key[0, 0, 450, 3] = torch.nan
    found = row_statistics(query, key, backend="triton", **CAUSAL)
    for name in ("logit_mean", "logit_std", "entropy"):
        assert torch.equal(found[name][..., :50], clean[name][..., :50])
        assert found[name][..., 50:].isnan().all()


def test_which_calls_sum_their_keys() -> None:
    query, key = normal(1, 1, 130, 16, seed=0), normal(1, 1, 530, 16, seed=1)
    for options, expected in (
        ({}, True),
        (CAUSAL, True),
        ({"window": 600}, False),
        ({"alibi_slopes": torch.ones(1, device=DEVICE)}, False),
        ({"key_mask": torch.ones(1, 530, dtype=torch.bool, device=DEVICE)}, False),
        ({"scale": -1.0}, False),
    ):
        assert key_moments.has_moments(call(query, key, **options)) == expected
    assert not key_moments.has_moments(call(query[:, :, :128], key))
    assert not key_moments.has_moments(call(query, key[:, :, :511]))


# -- the gap histogram --------------------------------------------------------------------------


def whole_numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


MASKED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal, rows without keys": {"is_causal": True, "query_offset": -3},
    "causal window": {"is_causal": True, "window": 50, "query_offset": 60},
    "mask": {"attn_mask": whole_numbers(20, 90, seed=2) > 0},
    "bias": {"bias": whole_numbers(1, 2, 20, 90, seed=3)},
    "negative scale": {"scale": -1 / 8},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_are_the_definition_s(name: str, dtype: torch.dtype) -> None:
    """Scores that every order of summation makes exactly, from one bin to beyond all of them."""
    options = {"scale": 1 / 8, **MASKED[name]}
    options = {
        key: part.to(DEVICE) if isinstance(part, Tensor) else part for key, part in options.items()
    }
    query = whole_numbers(1, 2, 20, 8, seed=0).to(DEVICE, dtype)
    key = whole_numbers(1, 1, 90, 8, seed=1).to(DEVICE, dtype)
    found, want = (
        row_statistics(query, key, gaps=True, enable_gqa=True, backend=backend, **options)
        for backend in ("triton", "blocked")
    )
    assert found.backend == "triton"
    assert torch.equal(found.state.gaps, want.state.gaps)
    assert torch.equal(found.n_keys, want.n_keys)
    if name == "full":
        scores = query.double() @ key.double().mT / 8
        assert torch.equal(found.state.gaps, observe(scores, gaps=True).gaps)
        assert (found.state.gaps.sum(-1) < 90).any()
    torch.testing.assert_close(found.keys_90, want.keys_90, equal_nan=True)


# -- tile sizes ---------------------------------------------------------------------------------


class Device:
    """A kernel and the device that it runs on, which has room for so many rows of a tile."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.launched: list[tuple[int, int, int, int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(
            *, BLOCK_M: int, BLOCK_N: int, num_warps: int, num_stages: int, **_: Any
        ) -> None:
            if self.room < BLOCK_M:
                raise triton.runtime.errors.OutOfResources(1, 0, "shared memory")
            self.launched.append((BLOCK_M, BLOCK_N, num_warps, num_stages))

        return launch


@pytest.mark.parametrize("queries", [4, 40, 4096])
@pytest.mark.parametrize("tiles", [arguments.FORWARD, arguments.QUERIES, arguments.KEYS])
def test_tile_sizes_come_from_a_table(
    queries: int, tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One size a launch, nothing is timed; a device without room for it takes the next."""
    monkeypatch.setattr(arguments, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    query = torch.zeros(1, 1, queries, 64, dtype=torch.bfloat16)
    given = {
        "QUERY": (query, 0, 0, 64),
        "M": query,
        "queries": queries,
        "BLOCK_E": 64,
        "BLOCK_V": 64,
    }
    sizes = arguments.tile_sizes(tiles, queries=queries, width=128, item=2, capability=(9, 0))
    assert len(sizes) >= 2
    for room in sorted({rows for rows, *_ in sizes}):
        device = Device(room)
        launch = arguments.Launcher(device, tiles)  # type: ignore[arg-type]
        for _ in range(2):
            launch(lambda tile: 1, **given)
        assert device.launched == 2 * [next(size for size in sizes if size[0] <= room)]
    nowhere = arguments.Launcher(Device(0), tiles)  # type: ignore[arg-type]
    with pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        nowhere(lambda tile: 1, **given)
