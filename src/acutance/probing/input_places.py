"""Where the queries and keys of a captured call stand in the input."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.masks import Masking
from acutance.probing.row_sampling import Sample
from acutance.structure.blocks import last_visible

__all__ = ["InputPlaces", "PlaceReader"]


@dataclass(frozen=True)
class InputPlaces:
    """Where the rows and keys of a call stand.

    Attributes:
        queries: (1 or B, L), the key at which each query stands; None where queries are of another
            sequence than the keys.
        last: the key at which the call's last query stands, drawn or not; −1 where not known.
        before: tokens of the input before key 0, which a cache that slides with a window has lost.
        begins: whether the call holds the whole sequence so far, and so begins a new one.
    """

    queries: Tensor | None
    last: int = -1
    before: int = 0
    begins: bool = True

    @property
    def in_input(self) -> Tensor | None:
        """Where each query stands in the input, (1 or B, L)."""
        return None if self.queries is None else self.queries + self.before


class PlaceReader(threading.local):
    """Follows the layers of one thread, whose calls may continue from those before."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def of(
        self, whole: AttentionCall, masking: Masking, sample: Sample | None, module: Any = None
    ) -> InputPlaces:
        """The places of a call.

        A call whose queries are as many as its keys, or that says where they begin, is believed.
        Else queries are the last of a longer sequence, in a cache, and stand at the last key they
        see.

        Args:
            whole: the call before rows were drawn from it.
            masking: of the rows that are read.
            sample: how they were drawn; None if all are there.
            module: whose call it is; its window tells of a cache that slides.
        """
        if whole.cross:
            return InputPlaces(None)
        queries, keys, device = whole.query.shape[2], whole.key.shape[2], whole.query.device
        if queries >= keys or whole.is_causal or whole.query_offset:
            first = whole.query_offset
            last = first + queries - 1
            if sample is None:
                places = torch.arange(first, first + queries, device=device)[None]
            else:
                places = sample.positions.to(device) + first
        else:
            places = last_visible(masking)
            last = int(places.max()) if places.numel() else -1
        begins = last < queries
        tokens = queries if begins else self._tokens.get(whole.module, 0) + queries
        self._tokens[whole.module] = tokens
        window = _window(whole, module)
        slides = window is not None and queries < keys == window - 1 + queries
        before = max(0, tokens - 1 - last) if slides and not begins else 0
        return InputPlaces(places, last, before, begins)


def _window(call: AttentionCall, module: Any) -> int | None:
    """The sliding window of a layer, also where a mask stands for it in the call."""
    config = getattr(module, "config", None)
    known = (getattr(part, "sliding_window", None) for part in (module, config))
    return call.window or next((each for each in known if isinstance(each, int)), None)
