"""Notices: what a reader must know before any number of a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["NOT_LOADED", "coverage_line", "not_loaded_sentence", "notices"]

#: What records call the weights that did not load.
NOT_LOADED = "weights_not_loaded"


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
        found.append(not_loaded_sentence(str(missing)))
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


def not_loaded_sentence(text: str) -> str:
    """Which weights did not load, as a sentence for a reader of numbers.

    Args:
        text: what :func:`acutance.corpus.checkpoint.not_loaded` gave.
    """
    return f"The model did not load: {text}. Random numbers stand for what is missing."


def coverage_line(modules: Sequence[str], unread: Sequence[str]) -> str:
    """How many modules' attention was read, and in which it was not.

    Args:
        modules: that were read.
        unread: what was not, each text beginning with the name of its module.

    Example:
        >>> coverage_line(["layers.0", "layers.1"], ["pool: its scores were overwritten"])
        'Coverage: attention read in 2 modules, not in 1: pool.'
    """
    names = dict.fromkeys(text.partition(": ")[0] for text in unread)
    read = f"Coverage: attention read in {len(modules)} module{'s' * (len(modules) != 1)}"
    return f"{read}, not in {len(names)}: {', '.join(names)}." if names else f"{read}."
