"""The name under which a transformers model takes and returns its key-value cache.

It is ``cache`` since transformers 5.24, ``past_key_values`` before; layers of older releases took
``past_key_value``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: Every such name, the newest first.
CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")


def cache_argument(names: Iterable[str]) -> str | None:
    """The first of :data:`CACHE_ARGUMENTS` in ``names``, a forward method's; None without a cache.

    Example:
        >>> cache_argument(["input_ids", "past_key_values"]), cache_argument(["input_ids"])
        ('past_key_values', None)
    """
    known = set(names)
    return next((name for name in CACHE_ARGUMENTS if name in known), None)


def returned_cache(output: Any) -> Any:
    """The key-value cache in a model's output; None if it returned none."""
    if hasattr(output, "cache"):
        return output.cache
    return getattr(output, "past_key_values", None)
