"""What a reader has to know before any number: sentences that stand first in every output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acutance.probing.checkpoint import NOT_LOADED, in_words

__all__ = ["alarms"]


def alarms(about: Mapping[str, Any]) -> list[str]:
    """Sentences on what makes all the numbers of a summary other than they seem.

    Args:
        about: what a summary says about itself.

    Example:
        >>> alarms({"weights_not_loaded": "2 tensors missing from its files (bias, weight)"})
        ['The model did not load: 2 tensors missing from its files (bias, weight). Random numbers
        stand for what is missing.']
        >>> alarms({})
        []
    """
    text = about.get(NOT_LOADED)
    return [] if text is None else [in_words(str(text))]
