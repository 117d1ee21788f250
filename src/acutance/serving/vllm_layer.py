"""What the reader asks vLLM's attention layers: their options, cache layout, and rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acutance.capture.kernel_functions.reading import alibi
from acutance.serving.cache_layout import CacheLayout

__all__ = ["alibi_bias", "discover_layout", "option", "ranks", "window_of"]


def discover_layout(layer: Any, cache: Tensor) -> CacheLayout:
    """Find out how a layer's implementation stores keys and values."""
    impl = layer.impl
    update = getattr(impl, "do_kv_cache_update", None)
    if update is None:
        raise ValueError(
            f"the cache of {type(impl).__name__} is not read: it has no do_kv_cache_update"
        )

    update = getattr(update, "__wrapped__", update)  # without what a reader does before

    def write(key: Tensor, value: Tensor, scratch: Tensor, slots: Tensor) -> None:
        update(layer, key, value, scratch, slots)

    return CacheLayout.discover(
        write, cache, heads=layer.num_kv_heads, width=layer.head_size, value_width=layer.head_size_v
    )


def option(impl: Any, name: str) -> Any:
    """An option of an implementation; None if it has no such option."""
    return getattr(impl, name, None)


def window_of(impl: Any) -> int | None:
    """Number of keys that a row sees, itself included; None for all.

    Implementations store the window as a number, or as keys to the left and right of the row's.
    """
    window = option(impl, "sliding_window")
    if isinstance(window, tuple | list):
        window = window[0] + 1 if window[0] is not None and window[0] >= 0 else None
    return None if window is None or window <= 0 else int(window)


def alibi_bias(impl: Any, position: int, rows: int, keys: int) -> Tensor | None:
    """The bias (1, Hq, L, S) of ALiBi; None without."""
    slopes = option(impl, "alibi_slopes")
    return None if slopes is None else alibi(torch.as_tensor(slopes).float(), rows, keys, position)


def ranks() -> tuple[int, int]:
    """Number of this process among the workers, and among those that share the heads of a layer."""
    try:
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank

        parallel, part = get_current_vllm_config().parallel_config, get_tensor_model_parallel_rank()
    except (ImportError, AssertionError):  # no configuration or groups: there is one worker
        return 0, 0
    rank = torch.distributed.get_rank()
    if parallel.data_parallel_size == 1:  # copies of a model that do not know of each other
        rank += parallel.data_parallel_index * parallel.world_size
    return rank, part
