"""Compile the kernels for a capability that no device here needs to have: ``... 90 [bfloat16]``.

A process of its own, since Triton decides when it is imported whether kernels are interpreted, and
keeps what it compiled by device. Prints one JSON object: of each kernel of a plain causal call of
width 64, and of the forward kernel at width 128, what :func:`resources` counts; and where a dtype
is given, with every mask and every gradient at once, its shared memory, bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from acutance.kernels import gpu
from acutance.kernels.call import KernelCall, SumGradients, Sums
from acutance.kernels.gpu import arguments
from acutance.masks import Masking

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SMALL = {"BLOCK_M": 32, "BLOCK_N": 32}
#: Rows, keys, warps and stages of the plain call, a candidate of every kernel and capability.
PLAIN = {"BLOCK_M": 64, "BLOCK_N": 64}
WARPS, STAGES = 4, 2
#: Of twice the width: as many pairs a thread.
WIDE_ROWS, WIDE_WARPS = 128, 8
#: Rows of a plain call: so many that the keys are summed.
LENGTH = 1024


class NoDevice:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def run(tool: str, *arguments: str) -> str:
    command = [str(TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(kernel: Any) -> dict[str, float]:
    """What a kernel takes, from its machine code.

    Registers a thread; bytes of the stack a thread, which hold what the registers do not; shared
    memory, bytes; and instructions a thread for each pair of a query and a key in whole tiles, 0
    for kernels that meet no pairs.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = run("cuobjdump", "-res-usage", file.name)
        listing = run("nvdisasm", "-c", file.name)
    found = {name: int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK")}
    pairs = PLAIN["BLOCK_M"] * PLAIN["BLOCK_N"] / (32 * WARPS)
    name = kernel.metadata.name
    length = 0
    if name == "gaps_kernel":
        length = shortest_loop(listing, "MMA", 1)  # counts four bins once
    elif name not in ("chunk_kernel", "running_kernel", "rows_kernel"):
        length = shortest_loop(listing, "MUFU.EX2", int(pairs))  # an exponential of every pair
    return {
        "registers": found["REG"],
        "stack": found["STACK"],
        "shared": kernel.metadata.shared,
        "instructions": length / pairs,
    }


def shortest_loop(listing: str, what: str, times: int) -> int:
    """Instructions of the shortest loop that has ``what`` so often.

    That of the tiles without masks: those of the edges do more, and outer loops hold both.
    """
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    lengths = []
    for end, instruction in enumerate(code):
        target = re.search(r"BRA.*(\.L_x_\d+)", instruction)
        if target and labels.get(target[1], end + 1) <= end:
            body = code[labels[target[1]] : end + 1]
            if sum(what in each for each in body) >= times:
                lengths.append(len(body))
    return min(lengths)


def main(capability: int, dtype: torch.dtype | None) -> None:
    triton.runtime.driver.set_active(NoDevice(capability))
    compiled: dict[str, Any] = {}
    sizes: dict[str, int] = dict(SMALL)

    def compile_only(self: Any, blocks: Callable[[Any], int], **given: Any) -> None:
        tile, (warps, stages) = sizes, (WARPS, STAGES)
        if sizes["BLOCK_M"] == WIDE_ROWS:
            warps = WIDE_WARPS
        if self._fixed:
            rows, keys, warps, stages = self._tiles[0]
            tile = {"BLOCK_M": rows, "BLOCK_N": keys}
        options = {"num_warps": warps, "num_stages": stages}
        kernel = self._kernel.warmup(**given, **tile, grid=(blocks(tile),), **options)
        assert kernel.asm["cubin"], "no machine code"
        compiled[kernel.metadata.name] = kernel

    arguments.Launcher.__call__ = compile_only  # type: ignore[method-assign]
    arguments.why_not = lambda *_: None  # any device will do
    if dtype is not None:
        everything(dtype)
    found: dict[str, Any] = {"shared": {name: k.metadata.shared for name, k in compiled.items()}}
    compiled.clear()
    sizes |= PLAIN
    plain(64)
    found["plain"] = {name: resources(kernel) for name, kernel in compiled.items()}
    sizes["BLOCK_M"] = WIDE_ROWS
    plain(128)
    found["plain"]["forward_kernel, 128 wide"] = resources(compiled["forward_kernel"])
    print(json.dumps(found))


def everything(dtype: torch.dtype) -> None:
    """Every mask and every gradient at once; and statistics alone."""
    query, key = torch.zeros(1, 2, 40, 24, dtype=dtype), torch.zeros(1, 1, 70, 24, dtype=dtype)
    value = torch.zeros(1, 1, 70, 12, dtype=dtype)
    masking = Masking(
        batch=1,
        heads=1,
        group=2,
        queries=40,
        keys=70,
        attn_mask=torch.ones(40, 70, dtype=torch.bool),
        bias=torch.zeros(1, 2, 40, 70, dtype=dtype),
        key_mask=torch.ones(1, 70, dtype=torch.bool),
        query_documents=torch.zeros(1, 40, dtype=torch.int64),
        key_documents=torch.zeros(1, 70, dtype=torch.int64),
        alibi_slopes=torch.ones(2),
        causal=True,
        offset=3,
        window=50,
    )
    call = KernelCall(query, key, value, masking, 0.3, softcap=5.0, sinks=torch.zeros(2))
    sums: Sums = gpu.forward(call._replace(noise=True, gaps=True))
    rows = torch.zeros(1, 2, 40)
    grad = SumGradients(torch.zeros(1, 2, 40, 12, dtype=dtype), *[rows] * 9)
    wanted = (True, True, True, False, True, True)
    gpu.backward(grad, sums, call, wanted)
    plain = Masking(batch=1, heads=1, group=2, queries=40, keys=70)
    gpu.forward(KernelCall(query, key, None, plain, scale=0.3))


def plain(width: int) -> None:
    """Causal attention in bfloat16, and gradients of the output and of the entropy."""
    query = torch.zeros(1, 1, LENGTH, width, dtype=torch.bfloat16)
    masking = Masking(batch=1, heads=1, group=1, queries=LENGTH, keys=LENGTH, causal=True)
    call = KernelCall(query, query, query, masking, scale=0.125, gaps=True)
    sums: Sums = gpu.forward(call)
    if width > 64:
        return
    rows = torch.zeros(1, 1, LENGTH)
    parts = dict.fromkeys(SumGradients._fields) | {"out": query, "Z": rows, "U": rows}
    wanted = (True, True, True, False, False, False)
    gpu.backward(SumGradients(**parts), sums, call, wanted)


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]) if sys.argv[2:] else None)
