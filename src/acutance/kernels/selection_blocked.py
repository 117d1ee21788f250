"""Times the plain PyTorch kernel on a small call, for the choice between it and the native one."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from acutance.kernels import blocked
from acutance.kernels.call import KernelCall, Rule
from acutance.masks import Masking

__all__ = ["blocked_seconds"]

_WIDTH = 64


def blocked_seconds(queries: int, keys: int) -> Callable[[], float]:
    """A function that runs one head in float32 and returns the CPU time that it took."""
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(1, 1, rows, _WIDTH, generator=generator, dtype=torch.float32, device=device)
        for rows in (queries, keys)
    )
    masking = Masking(batch=1, heads=1, group=1, queries=queries, keys=keys, device=device)
    call = KernelCall(query, key, key, masking, Rule(scale=_WIDTH**-0.5))

    def once() -> float:
        start = time.process_time()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            blocked.forward(call)
        return time.process_time() - start

    return once
