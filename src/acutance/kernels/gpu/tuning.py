"""Tile sizes: candidates for Ampere and Hopper, tried once per kind of call and kept."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from acutance.kernels.gpu.language import Kernel, interpreted, triton

__all__ = ["TUNE_VARIABLE", "Launcher", "candidates", "one_size", "size_class", "tried"]

#: Set to 0, this environment variable takes the first candidate untried: sums are then split, and
#: so rounded, alike in every process.
TUNE_VARIABLE = "ACUTANCE_TRITON_TUNE"
#: In the interpreter: small, and unequal, so that rows and keys cannot be confused.
SMALL = {"BLOCK_M": 16, "BLOCK_N": 32}

#: Rows, keys, warps, stages. On Hopper a block of 64 rows and 4 warps leaves room for a second one
#: on the same multiprocessor, whose products then overlap with the sums of the first.
FORWARD = (
    (128, 64, 8, 3),
    (64, 64, 4, 3),
    (64, 128, 4, 2),
    (128, 128, 8, 2),
    (64, 32, 4, 2),
    (32, 32, 4, 2),
    (16, 64, 4, 3),
    (16, 32, 4, 2),
)
#: The gradient of queries: two products of a tile at a time, one sum held.
QUERIES = (
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (64, 128, 8, 2),
    (64, 32, 4, 2),
    (32, 64, 4, 2),
    (32, 32, 4, 2),
    (16, 64, 4, 2),
    (16, 32, 4, 1),
)
#: The gradients of keys and values: two sums held, so that few rows go at a time.
KEYS = (
    (32, 128, 8, 2),
    (64, 128, 8, 2),
    (64, 64, 4, 2),
    (32, 64, 4, 2),
    (32, 32, 4, 2),
    (16, 64, 4, 2),
    (16, 32, 4, 1),
)
#: Products of float32 without tensor cores keep their operands in registers, whatever the kernel.
FLOAT32 = (
    (64, 32, 8, 2),
    (32, 32, 8, 2),
    (32, 32, 4, 2),
    (16, 32, 4, 2),
)
#: The gap histogram: first what suits heads up to 128 wide.
GAPS = ((64, 64, 4, 2), (32, 64, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1))
#: Shared memory that a program may take, bytes, by compute capability; other devices get the least.
SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
LEAST_SHARED = 99 << 10
#: How many candidates are tried: each costs seconds of compiling, once.
TRIED = 4

_chosen = threading.local()


def tried() -> int:
    """How many tile sizes a call may be given."""
    return 1 if interpreted() or os.environ.get(TUNE_VARIABLE) == "0" else TRIED


@contextmanager
def one_size(index: int) -> Iterator[None]:
    """Launch with the candidate of this place, untimed, in this thread.

    Where the device has no room for it, or there are fewer, the next one is taken, from the
    beginning behind the last.
    """
    _chosen.index = index
    try:
        yield
    finally:
        _chosen.index = None


def size_class(length: int) -> int:
    """Lengths that share their tile sizes: 0 to 16, to 64, to 1024 and beyond."""
    return sum(length > bound for bound in (16, 64, 1024))


def candidates(
    tiles: tuple[tuple[int, int, int, int], ...],
    *,
    queries: int,
    width: int,
    item: int,
    capability: tuple[int, int],
) -> list[tuple[int, int, int, int]]:
    """Those tile sizes that suit a call, best guess first.

    Args:
        tiles: rows, keys, warps and stages of each.
        queries: L.
        width: padded widths of a key and its value together.
        item: bytes of an element of what is multiplied.
        capability: of the device.

    Returns:
        At most :data:`TRIED`, at least one.

    Example:
        >>> candidates(FORWARD, queries=4096, width=256, item=2, capability=(9, 0))[0]
        (128, 64, 8, 3)
        >>> candidates(FORWARD, queries=4, width=256, item=2, capability=(9, 0))
        [(16, 64, 4, 3), (16, 32, 4, 2)]
    """
    room = SHARED.get(capability, LEAST_SHARED)
    most = max(16, 1 << (queries - 1).bit_length())
    found = [
        (rows, keys, warps, stages)
        for rows, keys, warps, stages in (tiles if item == 2 else FLOAT32)
        if rows <= most and item * width * (rows + stages * keys) <= room
    ]
    return found[:TRIED] or [tiles[-1]]


class Launcher:
    """Launches a kernel with tile sizes for the call, by Triton's autotuner over the candidates.

    One that is ``fixed`` takes the first tile size that the device has room for.
    """

    def __init__(
        self,
        kernel: Kernel,
        tiles: tuple[tuple[int, int, int, int], ...],
        key: list[str],
        *,
        fixed: bool = False,
    ) -> None:
        self._kernel, self._tiles, self._key, self._fixed = kernel, tiles, key, fixed
        self._tuned: dict[tuple[Any, ...], Any] = {}

    def __call__(self, blocks: Any, arguments: Mapping[str, Any]) -> None:
        """Launch.

        Args:
            blocks: from the chosen sizes (``BLOCK_M`` and ``BLOCK_N`` by name) to the number of
                programs.
            arguments: of the kernel, by name, less the tile sizes.
        """
        if interpreted():
            self._kernel[(blocks(SMALL),)](**arguments, **SMALL)
            return
        if self._fixed:
            tensor = next(part for part in arguments.values() if isinstance(part, torch.Tensor))
            with torch.cuda.device(tensor.device):
                self._launch_first(list(self._tiles), blocks, arguments)
            return
        query = arguments["QUERY"]
        with torch.cuda.device(query.device):
            found = candidates(
                self._tiles,
                queries=arguments["queries"],
                width=arguments["BLOCK_E"] + arguments["BLOCK_V"],
                # the sums of the values themselves are taken in float32
                item=4 if arguments.get("NOISE") else query.element_size(),
                capability=torch.cuda.get_device_capability(query.device),
            )
            if os.environ.get(TUNE_VARIABLE) == "0":
                found = found[:1]
            index = getattr(_chosen, "index", None)
            if index is not None:
                self._launch_first([*found[index % len(found) :], *found], blocks, arguments)
                return
            self._autotuner(tuple(found))[lambda meta: (blocks(meta),)](**arguments)

    def _launch_first(
        self, sizes: list[tuple[int, int, int, int]], blocks: Any, arguments: Mapping[str, Any]
    ) -> None:
        """Launch with the first of these sizes that the device has room for."""
        for place, (rows, keys, warps, stages) in enumerate(sizes):
            tile = {"BLOCK_M": rows, "BLOCK_N": keys}
            launch = self._kernel[(blocks(tile),)]
            try:
                launch(**arguments, **tile, num_warps=warps, num_stages=stages)
                return
            except triton.runtime.errors.OutOfResources:  # the tuner passes over it too
                if place == len(sizes) - 1:
                    raise

    def _autotuner(self, found: tuple[tuple[int, int, int, int], ...]) -> Any:
        """Triton's own tuner over these sizes."""
        if found not in self._tuned:
            configs = [
                triton.Config(
                    {"BLOCK_M": rows, "BLOCK_N": keys}, num_warps=warps, num_stages=stages
                )
                for rows, keys, warps, stages in found
            ]
            self._tuned[found] = triton.autotune(configs=configs, key=self._key)(self._kernel)
        return self._tuned[found]
