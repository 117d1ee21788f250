"""Windows of texts that losses are compared on, and texts with such windows held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from acutance.calibration.fit.windows import Turn, spread
from acutance.calibration.losses import Loss, LossError, MaskedTokens, choose_loss
from acutance.corpus.load_model import TextModel
from acutance.corpus.texts import Text, with_special_tokens
from acutance.judging.judge_model import Windows

__all__ = ["HeldOut", "hold_out", "loss_of", "text_windows"]

#: Windows that are held out: a quarter of the text, within these limits.
_LEAST, _MOST = 2, 16


def text_windows(
    loaded: TextModel, texts: Sequence[Text], lengths: Sequence[int], most: int, seed: int
) -> Windows:
    """Windows spread over texts, and the same text cut into windows of the shorter lengths.

    Args:
        loaded: the model.
        texts: what to read; no window spans two.
        lengths: lengths of the parts that each window is cut into, ascending.
        most: windows of the longest length; 0 takes all.
        seed: of their places.

    Raises:
        ValueError: if there are fewer than two windows.
    """
    room, ids = _room(loaded, lengths[-1]), [_ids(loaded, text) for text in texts]
    places = [
        (number, start)
        for number, own in enumerate(ids)
        for start in range(0, len(own) - room + 1, room)
    ]
    if len(places) < 2:
        raise ValueError(
            f"a comparison needs at least 2 windows of {lengths[-1]} tokens, and the text has "
            f"{sum(map(len, ids))} tokens: give more text, or read shorter windows"
        )
    chosen = [places[index] for index in spread(len(places), most or len(places), seed)]
    turns = []
    for group, (number, start) in enumerate(chosen):
        window = ids[number][start : start + room]
        for length in lengths:
            step = _room(loaded, length)
            pieces = [
                with_special_tokens(loaded.tokenizer, window[at : at + step])
                for at in range(0, room - step + 1, step)
            ]
            loaded.check_tokens(pieces)
            tokens = torch.tensor(pieces, dtype=torch.int64)
            batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            turns.append(Turn(length, batch, torch.full((len(pieces),), group)))
    return Windows(tuple(turns), "window").by_text([number for number, _ in chosen])


class HeldOut:
    """Texts split into a part to fit a law to and an end held out to judge it on.

    Attributes:
        fit: texts with tokens left to fit to.
        judged: texts with a held-out end.
        tokenizer: the model's tokenizer, but reading only the part before the held-out end.
        ends: the model's tokenizer, but reading only the held-out end.
    """

    def __init__(self, loaded: TextModel, texts: Sequence[Text], starts: Sequence[int]) -> None:
        cuts = {text.content: start for text, start in zip(texts, starts, strict=True)}
        self.tokenizer = _Part(loaded.tokenizer, cuts, ends=False)
        self.ends = _Part(loaded.tokenizer, cuts, ends=True)
        lengths = [len(_ids(loaded, text)) for text in texts]
        pairs = list(zip(texts, starts, lengths, strict=True))
        self.fit = [text for text, start, _ in pairs if start > 0]
        self.judged = [text for text, start, length in pairs if start < length]


def hold_out(
    loaded: TextModel, texts: Sequence[Text], longest: int, least: int = _LEAST
) -> HeldOut:
    """Hold out the ends of texts: a quarter of the windows, at least ``least`` and at most 16.

    Args:
        loaded: the model.
        texts: what to split.
        longest: tokens of a window.
        least: windows held out at least.

    Raises:
        ValueError: if there are fewer than twice ``least`` windows: half to fit to, half to judge
            on.
    """
    room = _room(loaded, longest)
    lengths = [len(_ids(loaded, text)) for text in texts]
    counts = [length // room for length in lengths]
    total = sum(counts)
    if total < 2 * least:
        what, option = (
            ("fitting", "shorter --lengths")
            if least == _LEAST
            else ("probing", "a shorter --length")
        )
        raise ValueError(
            f"{what} and judging need at least {least} windows of {longest} tokens each, and the "
            f"text has {sum(lengths)} tokens: give more text, or {option}"
        )
    wanted = max(least, min(_MOST, total // 4))
    starts, before, given = [], 0, 0
    for length, count in zip(lengths, counts, strict=True):
        before += count
        own = before * wanted // total - given  # as large a part of each text, to one window
        given += own
        starts.append((count - own) * room if own else length)
    return HeldOut(loaded, texts, starts)


def loss_of(loaded: TextModel) -> Loss:
    """The loss of a text model: of masked tokens for a masked model, else of the next token.

    Raises:
        LossError: if a masked model's tokenizer has no mask token.
    """
    if not type(loaded.model).__name__.endswith("MaskedLM"):
        return choose_loss(loaded.model, None)
    token = getattr(loaded.tokenizer, "mask_token_id", None)
    if not isinstance(token, int):
        raise LossError(
            f"the tokenizer of {loaded.name} has no mask token, which the masked-token loss needs; "
            "name one that has it with --tokenizer"
        )
    return MaskedTokens(token, special=loaded.tokenizer.all_special_ids)


class _Part:
    """A tokenizer that returns only the tokens before, or only those after, a cut in each text."""

    def __init__(self, tokenizer: Any, cuts: dict[str, int], *, ends: bool) -> None:
        self._tokenizer, self._cuts, self._ends = tokenizer, cuts, ends

    def __call__(self, text: str, **options: Any) -> Any:
        found = self._tokenizer(text, **options)
        if text not in self._cuts:
            return found
        ids, cut = found["input_ids"], self._cuts[text]
        return {"input_ids": ids[cut:] if self._ends else ids[:cut]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _ids(loaded: TextModel, text: Text) -> list[int]:
    """The tokens of a text, without special tokens."""
    found: list[int] = loaded.tokenizer(text.content, add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    return found


def _room(loaded: TextModel, length: int) -> int:
    """Number of tokens of text in a window of this length, without special tokens."""
    room = length - int(loaded.tokenizer.num_special_tokens_to_add(pair=False))
    if room < 2:
        raise ValueError(f"a window of {length} tokens is too short for the model's special tokens")
    return room
