"""What kernels are launched with: masks as pointers and strides, compile-time flags, tile sizes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from acutance.kernels.call import KernelCall
from acutance.kernels.gpu.language import interpreted, triton, why_unavailable
from acutance.kernels.gpu.scores import Flags
from acutance.masks import mask_limit

#: Widest head, of queries or of values.
WIDEST = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supported(call: KernelCall) -> str | None:
    """Why a call cannot be run by these kernels, or None if it can.

    Returns:
        One clause, such as ``"float64 inputs"``, or None.

    Example:
        >>> from acutance.masks import Masking
        >>> query = torch.zeros(1, 1, 4, 8, dtype=torch.float64)
        >>> masking = Masking(batch=1, heads=1, group=1, queries=4, keys=4)
        >>> supported(KernelCall(query, query, None, masking, scale=1.0)) is None
        False
    """
    reason = why_not(call)
    if reason is not None:
        return reason
    query, masking = call.query, call.masking
    tensors = [call.key] if call.value is None else [call.key, call.value]
    if any(tensor.dtype != query.dtype or tensor.device != query.device for tensor in tensors):
        return "inputs of different dtypes or devices"
    if not query.numel() or not all(tensor.numel() for tensor in tensors):
        return "no queries, keys or widths"
    if max(masking.keys, masking.queries) >= 2**24:
        return "2²⁴ keys or queries, which float32 cannot count"
    return None


def why_not(call: KernelCall) -> str | None:
    """:func:`supported` without the checks of sizes: device, dtype, dropout and Triton only."""
    query, value = call.query, call.value
    reason = why_unavailable()
    if reason is not None:
        return reason
    if query.device.type != "cuda" and not interpreted():
        return f"inputs on {query.device.type}, not on cuda"
    if query.device.type == "cuda" and not _capable(query.device):
        return "a device other than NVIDIA's of compute capability 8.0 and above"
    if query.dtype not in DTYPES:
        return f"{str(query.dtype).removeprefix('torch.')} inputs"
    if call.dropout_p > 0.0:
        return "dropout"
    if max(tensor.shape[-1] for tensor in (query, value) if tensor is not None) > WIDEST:
        return f"heads wider than {WIDEST}"
    return None


@cache
def _capable(device: torch.device) -> bool:
    """Whether these kernels compile for a device: NVIDIA, compute capability 8.0 or above."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def padded(width: int) -> int:
    """The width of a tile for heads of ``width``: a power of two, at least 16 for ``tl.dot``."""
    return max(16, 1 << (width - 1).bit_length())


def dense_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if the stride of its last dimension is not 1."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def by_head(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor (B, H, rows, width) and its strides of batch, heads and rows."""
    return tensor, *tensor.stride()[:3]


def flags(call: KernelCall) -> Flags:
    """The compile-time options of the kernels for a call."""
    query, masking = call.query, call.masking
    mask = masking.attn_mask
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    documents = masking.query_documents is not None and masking.key_documents is not None
    changed = call.softcap is not None or masking.alibi_slopes is not None or call.scale < 0.0
    exact = torch.get_float32_matmul_precision() == "highest"
    return Flags(
        causal=masking.causal,
        window=masking.window is not None,
        mask=kind,
        bias=masking.bias is not None,
        key_mask=masking.key_mask is not None,
        documents=documents,
        alibi=masking.alibi_slopes is not None,
        softcap=call.softcap is not None,
        changed=changed or kind == 2 or masking.bias is not None,
        data=kind > 0 or masking.bias is not None or masking.key_mask is not None or documents,
        precision="ieee" if exact else "tf32x3",
        # the interpreter has no bfloat16 arithmetic of its own
        widen=interpreted() and query.dtype == torch.bfloat16,
        interpreted=interpreted(),
    )


def call_arguments(call: KernelCall, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Keyword arguments of every kernel of a call, whose queries and keys have dense rows.

    The pointer of a mask that is absent is the query's; it is never read.
    """
    masking, value = call.masking, call.value
    slopes, key_mask = masking.alibi_slopes, masking.key_mask
    rows, keys = masking.query_documents, masking.key_documents
    others = (
        1.0 if call.softcap is None else float(call.softcap),
        query if slopes is None else slopes.contiguous(),
        query if key_mask is None else key_mask.contiguous().view(torch.uint8),
        query if rows is None else rows.contiguous(),
        0 if rows is None or rows.shape[0] == 1 else masking.queries,
        query if keys is None else keys.contiguous(),
        0 if keys is None or keys.shape[0] == 1 else masking.keys,
    )
    return {
        "QUERY": by_head(query),
        "KEY": by_head(key),
        "MASKS": (_matrix(masking.attn_mask, query), _matrix(masking.bias, query), others),
        "query_heads": masking.heads * masking.group,
        "group": masking.group,
        "queries": masking.queries,
        "keys": masking.keys,
        "offset": masking.offset,
        "window": 0 if masking.window is None else min(masking.window, 2**30),
        "scale": float(call.scale),
        "E": query.shape[3],
        "BLOCK_E": padded(query.shape[3]),
        "BLOCK_V": padded(1 if value is None else value.shape[3]),
        "FLAGS": flags(call),
    }


def _matrix(mask: Tensor | None, query: Tensor) -> tuple[Any, ...]:
    """Pointer and strides of an L × S mask, 0 where it is broadcast, and the limit of hidden keys.

    Entries at or below the limit hide a key.
    """
    if mask is None:
        return query, 0, 0, 0, 0, 0.0
    full = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    steps = [0 if size == 1 else step for size, step in zip(full.shape, full.stride(), strict=True)]
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8), *steps, 0.0
    return mask, *steps, mask_limit(mask.dtype)


#: In the interpreter: small, and unequal, so that rows and keys cannot be confused.
SMALL = {"BLOCK_M": 16, "BLOCK_N": 32}

#: Rows, keys, warps, stages, the preferred first; another is taken for fewer queries, or where its
#: tiles find no room. Chosen by registers and shared memory of the compiled code; not timed yet.
FORWARD = (
    (128, 64, 8, 3),
    (64, 64, 4, 3),
    (64, 32, 4, 2),
    (32, 32, 4, 2),
    (16, 64, 4, 3),
    (16, 32, 4, 2),
)
#: The gradient of queries: two products of a tile at a time, one sum held.
QUERIES = (
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (32, 64, 4, 2),
    (32, 32, 4, 2),
    (16, 64, 4, 2),
    (16, 32, 4, 1),
)
#: The gradients of keys and values: two sums held, so that few rows go at a time.
KEYS = (
    (32, 128, 8, 2),
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
    (16, 32, 4, 2),
)
#: The gap histogram: first what suits heads up to 128 wide.
GAPS = ((64, 64, 4, 2), (32, 64, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1))
#: Shared memory that a program may take, bytes, by compute capability; other devices get the least.
SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
LEAST_SHARED = 99 << 10


def tile_sizes(
    tiles: tuple[tuple[int, int, int, int], ...],
    *,
    queries: int,
    width: int,
    item: int,
    capability: tuple[int, int],
) -> list[tuple[int, int, int, int]]:
    """The tile sizes that suit a call, the preferred first.

    Args:
        tiles: the sizes to choose from, each (rows, keys, warps, stages).
        queries: L.
        width: padded widths of a key and its value together.
        item: bytes of an element of the matrices that are multiplied.
        capability: of the device.

    Returns:
        At least one.

    Example:
        >>> tile_sizes(FORWARD, queries=4096, width=256, item=2, capability=(9, 0))[0]
        (128, 64, 8, 3)
        >>> tile_sizes(FORWARD, queries=4, width=256, item=2, capability=(9, 0))
        [(16, 64, 4, 3), (16, 32, 4, 2)]
    """
    room = SHARED.get(capability, LEAST_SHARED)
    most = max(16, 1 << (queries - 1).bit_length())
    found = [
        (rows, keys, warps, stages)
        for rows, keys, warps, stages in (tiles if item == 2 else FLOAT32)
        if rows <= most and item * width * (rows + stages * keys) <= room
    ]
    return found or [tiles[-1]]


class Launcher:
    """Launches a kernel with the first tile size for the call that the device has room for.

    One that is ``fixed`` has the same sizes for every call.
    """

    def __init__(
        self, kernel: Any, tiles: tuple[tuple[int, int, int, int], ...], *, fixed: bool = False
    ) -> None:
        self._kernel, self._tiles, self._fixed = kernel, tiles, fixed

    def __call__(self, blocks: Any, **arguments: Any) -> None:
        """Launch the kernel.

        Args:
            blocks: function from the tile sizes (``BLOCK_M`` and ``BLOCK_N`` by name) to the number
                of programs.
            **arguments: of the kernel, other than the tile sizes.
        """
        if interpreted():
            self._kernel[(blocks(SMALL),)](**arguments, **SMALL)
            return
        tensor = next(part for part in arguments.values() if isinstance(part, torch.Tensor))
        sizes = list(self._tiles)
        if not self._fixed:
            sizes = tile_sizes(
                self._tiles,
                queries=arguments["queries"],
                width=arguments["BLOCK_E"] + arguments["BLOCK_V"],
                # the sums of the values themselves are taken in float32
                item=4 if arguments.get("NOISE") else arguments["QUERY"][0].element_size(),
                capability=torch.cuda.get_device_capability(tensor.device),
            )
        with torch.cuda.device(tensor.device):
            for rows, keys, warps, stages in sizes:
                tile = {"BLOCK_M": rows, "BLOCK_N": keys}
                launch = self._kernel[(blocks(tile),)]
                try:
                    launch(**arguments, **tile, num_warps=warps, num_stages=stages)
                    return
                except triton.runtime.errors.OutOfResources:
                    if (rows, keys, warps, stages) == sizes[-1]:
                        raise
