"""Notices: what a reader must know before any number of a summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acutance.corpus.checkpoint import NOT_LOADED, in_words

__all__ = ["notices"]


def notices(about: Mapping[str, Any]) -> list[str]:
    """Sentences for the top of a table or page; none where a run is whole and its model trained.

    Args:
        about: the facts of a summary.

    Example:
        >>> notices({"complete": True, "windows": 8})
        []
        >>> notices({"complete": False, "windows": 28, "windows_in_all": 1092, "tokens": 14336})
        ['Incomplete: 28 of 1,092 windows were read (14,336 tokens); every number below is of that
        part of the text.']
    """
    found = []
    if (missing := about.get(NOT_LOADED)) is not None:
        found.append(in_words(str(missing)))
    if about.get("complete") is False:
        done, total = about.get("windows"), about.get("windows_in_all")
        tokens, shard = about.get("tokens"), about.get("shard")
        of = f", of shard {shard}" if shard else ""
        amount = "a part of the windows was read"
        if isinstance(done, int) and isinstance(total, int):
            many = f" ({tokens:,} tokens{of})" if isinstance(tokens, int) else ""
            amount = f"{done:,} of {total:,} windows were read{many}"
        found.append(f"Incomplete: {amount}; every number below is of that part of the text.")
    if about.get("untrained") is True:
        found.append(
            "Untrained: every norm has its initial gain and the weights look drawn at random. The "
            "numbers below describe an initialisation, not what a model has learned."
        )
    return found
