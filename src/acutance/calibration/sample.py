"""Which windows of a text a calibration reads: a number of each length, spread over the text."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from acutance.corpus import texts as corpus
from acutance.corpus.load_model import TextModel

__all__ = ["Sample", "batches", "default_lengths", "draw", "spread", "told"]


@dataclass(frozen=True)
class Sample:
    """Windows of one length.

    Attributes:
        pieces: the tokens of each window that is read, in the order of the text.
        whole: windows that the text has.
        tokens: tokens that the text has, cut to this length.
    """

    pieces: list[list[int]]
    whole: int
    tokens: int

    @property
    def share(self) -> float:
        """Part of the text's tokens that is read."""
        return sum(map(len, self.pieces)) / self.tokens


def spread(count: int, most: int, seed: int) -> list[int]:
    """Numbers below ``count``, rising: one drawn from each of ``most`` equal parts, or all.

    Example:
        >>> spread(5, 8, 0)
        [0, 1, 2, 3, 4]
        >>> [place // 25 for place in spread(100, 4, 0)]
        [0, 1, 2, 3]
    """
    if count <= most:
        return list(range(count))
    drawn = random.Random(f"{seed} {count} {most}")
    edges = [part * count // most for part in range(most + 1)]
    return [drawn.randrange(start, stop) for start, stop in pairwise(edges)]


def draw(
    texts: Sequence[corpus.Text], tokenizer: Any, lengths: Sequence[int], most: int, seed: int
) -> dict[int, Sample]:
    """Whole windows of every length, each with the tokenizer's special tokens.

    Args:
        texts: what to read; no window spans two.
        tokenizer: of the model.
        lengths: rising.
        most: windows of each length; 0 takes all.
        seed: of the places.

    Returns:
        By length, longest first.

    Raises:
        CorpusError: if a text gives no token.
        ValueError: if there are fewer than two windows of one length.
    """
    once = _Once(tokenizer)
    found = {}
    for length in reversed(lengths):  # the longest is the first that a text is too short for
        pieces = corpus.windows(texts, once, length)
        tokens = sum(map(len, pieces))
        whole = [piece for piece in pieces if len(piece) == length]
        if len(whole) < 2:
            raise ValueError(
                f"calibration takes at least 2 windows of {length} tokens, and the text has "
                f"{tokens} tokens: give more text, or shorter --lengths"
            )
        chosen = spread(len(whole), most or len(whole), seed)
        found[length] = Sample([whole[place] for place in chosen], len(whole), tokens)
    return found


def default_lengths(loaded: TextModel) -> tuple[int, ...]:
    """An eighth of the model's longest window, and its doubles."""
    longest = loaded.window(None)
    return tuple(sorted({max(2, longest >> step) for step in (3, 2, 1, 0)}))


def batches(
    loaded: TextModel, samples: Mapping[int, Sample], size: int
) -> dict[int, list[dict[str, Any]]]:
    """The windows of every length, as many tokens at once as ``size`` of the longest have."""
    windows, longest = {}, max(samples)
    for length, sample in samples.items():
        together = max(1, size * longest // length)
        windows[length] = [
            _batch(loaded, sample.pieces[start : start + together])
            for start in range(0, len(sample.pieces), together)
        ]
    return windows


def _batch(loaded: TextModel, pieces: Sequence[Sequence[int]]) -> dict[str, Any]:
    ids = torch.tensor(pieces, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False):
        batch |= {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
    return batch


def told(samples: Mapping[int, Sample]) -> str:
    """How much of the text is read, in a sentence."""
    parts = [
        f"{len(one.pieces)} of {length} tokens ({_percent(one.share)})"
        for length, one in sorted(samples.items())
    ]
    if all(len(one.pieces) == one.whole for one in samples.values()):
        return f"reads every whole window of the text: {', '.join(parts)}"
    return (
        f"reads windows spread over the text: {', '.join(parts)}; --windows changes their number, "
        f"0 reads all"
    )


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %") if share >= 0.01 else f"{100 * share:.1g} %"


class _Once:
    """A tokenizer that reads each text once, however many lengths it is cut to."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._seen: dict[str, Any] = {}

    def __call__(self, text: str, **options: Any) -> Any:
        key = f"{sorted(options.items())} {text}"
        if key not in self._seen:
            self._seen[key] = self._tokenizer(text, **options)
        return self._seen[key]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
