"""Windows of texts that losses are compared on, and texts with such windows held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from acutance.calibration.losses import Loss, LossError, MaskedTokens, choose_loss
from acutance.calibration.windows import Turn, spread
from acutance.corpus.load_model import TextModel
from acutance.corpus.texts import Text, special_tokens
from acutance.judging.judge_model import Windows

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
    room, ids = _room(loaded, lengths[-1]), [text.tokenised(loaded.tokenizer) for text in texts]
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
    before, after = special_tokens(loaded.tokenizer)
    turns = []
    for group, (number, start) in enumerate(chosen):
        window = ids[number][start : start + room]
        for length in lengths:
            step = _room(loaded, length)
            pieces = [
                before + window[at : at + step] + after for at in range(0, room - step + 1, step)
            ]
            loaded.check_tokens(pieces)
            tokens = torch.tensor(pieces, dtype=torch.int64)
            batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
            turns.append(Turn(length, batch, torch.full((len(pieces),), group)))
    return Windows(tuple(turns), "window").by_text([number for number, _ in chosen])


@dataclass(frozen=True)
class HeldOut:
    """Texts split into a part to fit a law to and an end held out to judge it on.

    Attributes:
        fit: the beginnings of the texts, as tokens.
        judged: the held-out ends, as tokens.
    """

    fit: list[Text]
    judged: list[Text]


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
    ids = [text.tokenised(loaded.tokenizer) for text in texts]
    counts = [len(own) // room for own in ids]
    total = sum(counts)
    if total < 2 * least:
        what, option = (
            ("fitting", "shorter --lengths")
            if least == _LEAST
            else ("probing", "a shorter --length")
        )
        raise ValueError(
            f"{what} and judging need at least {least} windows of {longest} tokens each, and the "
            f"text has {sum(map(len, ids))} tokens: give more text, or {option}"
        )
    wanted = max(least, min(_MOST, total // 4))
    held, before, given = HeldOut([], []), 0, 0
    for text, tokens, count in zip(texts, ids, counts, strict=True):
        before += count
        own = before * wanted // total - given  # as large a part of each text, to one window
        given += own
        start = (count - own) * room if own else len(tokens)
        parts = (held.fit, tokens[:start]), (held.judged, tokens[start:])
        for side, part in parts:
            if part:
                side.append(replace(text, content=part))
    return held


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


def _room(loaded: TextModel, length: int) -> int:
    """Number of tokens of text in a window of this length, without special tokens."""
    room = length - int(loaded.tokenizer.num_special_tokens_to_add(pair=False))
    if room < 2:
        raise ValueError(f"a window of {length} tokens is too short for the model's special tokens")
    return room
