"""Compile the kernels for a capability that no device here needs to have: ``... 90 bfloat16``.

A process of its own, since Triton decides when it is imported whether kernels are interpreted.
Prints one JSON object: the shared memory of each kernel, bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from acutance.kernels import gpu
from acutance.kernels.backward import SumGradients
from acutance.kernels.blocked import Sums
from acutance.kernels.gpu import arguments, tuning
from acutance.kernels.tiles import Rule
from acutance.masks import Masking


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


def main(capability: int, dtype: torch.dtype) -> None:
    triton.runtime.driver.set_active(NoDevice(capability))
    found: dict[str, int] = {}
    sizes = {"BLOCK_M": 32, "BLOCK_N": 32}

    def compile_only(self: Any, blocks: Callable[[Any], int], given: Mapping[str, Any]) -> None:
        kernel = self._kernel.warmup(**given, **sizes, grid=(blocks(sizes),), num_warps=4)
        assert kernel.asm["cubin"], "no machine code"
        found[kernel.metadata.name] = kernel.metadata.shared

    tuning.Launcher.__call__ = compile_only  # type: ignore[method-assign]
    arguments.interpreted = lambda: True  # any device will do
    arguments.why_not = lambda *_: None
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
    rule = Rule(scale=0.3, softcap=5.0, sinks=torch.zeros(2))
    sums: Sums = gpu.forward(query, key, value, masking, rule, True)
    rows = torch.zeros(1, 2, 40)
    grad = SumGradients(torch.zeros(1, 2, 40, 12, dtype=dtype), *[rows] * 9)
    wanted = (True, True, True, False, True, True)
    gpu.backward(grad, sums, query, key, value, masking, rule, wanted)
    plain = Masking(batch=1, heads=1, group=2, queries=40, keys=70)
    gpu.forward(query, key, None, plain, Rule(scale=0.3), False)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), getattr(torch, sys.argv[2]))
