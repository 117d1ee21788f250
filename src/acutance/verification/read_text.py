"""Token ids of a text, long enough to reach beyond a model's sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from acutance.capture.module_names import unwrap
from acutance.corpus.load_model import OptionError, TextModel
from acutance.corpus.texts import Text, special_tokens
from acutance.verification.expectation import windows_of

__all__ = ["token_ids"]

_SHORT = 96  # tokens of a model without windows
_BEYOND = 32  # tokens beyond the widest window


def token_ids(loaded: TextModel, texts: Sequence[Text], length: int | None) -> Tensor:
    """The first tokens of the first text, (1, L).

    Args:
        loaded: the model.
        texts: what to read.
        length: number of tokens; None reaches 32 tokens beyond the widest window, and reads at
            least 96.

    Raises:
        OptionError: if the text is too short, or the model has fewer positions.
    """
    config: Any = getattr(unwrap(loaded.model), "config", None)
    widest = max(windows_of(config), default=0)
    beyond = f" to reach beyond the sliding window of {widest}" if widest and not length else ""
    wanted = length if length is not None else max(_SHORT, widest + _BEYOND)
    if length is None and loaded.positions is not None:
        wanted = min(wanted, loaded.positions)
    wanted = loaded.window(wanted)
    text = texts[0]
    room = wanted - loaded.tokenizer.num_special_tokens_to_add(pair=False)
    ids = list(islice(chain.from_iterable(text.tokens(loaded.tokenizer)), room))
    if len(ids) < room:
        raise OptionError(
            f"--text {text.name} has {len(ids)} tokens, but {room} are needed{beyond}: give a "
            "longer text, or fewer tokens with --length"
        )
    before, after = special_tokens(loaded.tokenizer)
    pieces = [[*before, *ids, *after]]
    loaded.check_tokens(pieces)
    return torch.tensor(pieces, dtype=torch.int64)
