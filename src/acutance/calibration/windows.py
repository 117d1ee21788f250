"""Windows of text of the lengths at which attention is measured: cut from batches, or drawn."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from acutance.calibration.law import check_positions
from acutance.corpus import texts as corpus
from acutance.corpus.load_model import TextModel
from acutance.shapes import check_count

#: What a model is called with: one tensor, or keywords. Windows first, tokens second.
AnyBatch: TypeAlias = "Tensor | Mapping[str, Any]"
#: Batches to cut into windows, or windows of each length.
AnyBatches: TypeAlias = "Iterable[AnyBatch] | Mapping[int, Iterable[AnyBatch]]"
#: Parts of the text that errors are estimated from, at most.
GROUPS = 64
_FIRST = ("input_ids", "inputs_embeds", "input_values", "pixel_values")


@dataclass(frozen=True)
class Turn:
    """One batch of windows of equal length, for one run of the model.

    Attributes:
        length: tokens of each window.
        batch: the batch as the model is called with it.
        groups: index of the part of the text that each window belongs to, (windows,) int64.
    """

    length: int
    batch: AnyBatch
    groups: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens of all its windows."""
        return self.length * self.groups.numel()

    def inputs(self, device: torch.device | None) -> dict[str, Any]:
        """The batch as keyword arguments, ``input_ids`` if it is a tensor, on a device."""
        batch = {"input_ids": self.batch} if isinstance(self.batch, Tensor) else self.batch
        return {
            name: part.to(device) if isinstance(part, Tensor) and device is not None else part
            for name, part in batch.items()
        }

    def run(self, model: torch.nn.Module, device: torch.device | None) -> None:
        """Call the model on the batch, moved to ``device``; None leaves it where it is."""
        inputs = self.inputs(device)
        if isinstance(self.batch, Tensor):
            model(inputs["input_ids"])
        else:
            model(**inputs)


def first_tokens(batch: AnyBatch, tokens: int) -> Any:
    """The first tokens of a batch's first window, in the form of the batch.

    Entries that are not tensors (B, length, ...) are passed on unchanged.
    """
    if isinstance(batch, Tensor):
        return batch[:1, :tokens]
    length = _length(batch)
    return {
        name: part[:1, :tokens]
        if isinstance(part, Tensor) and part.dim() >= 2 and part.shape[1] == length
        else part
        for name, part in batch.items()
    }


def check_lengths(
    lengths: Sequence[int] | None, batches: Mapping[int, Sequence[AnyBatch]]
) -> tuple[int, ...]:
    """Lengths of windows, ascending.

    Args:
        lengths: as given by the user; None takes those of ready windows, or the length of the
            longest batch and its halves down to an eighth.
        batches: from :func:`batches_by_length`.

    Raises:
        TypeError: if they are no list of whole numbers.
        ValueError: if they are not ascending, one is below 2, or no batch is that long.
    """
    ready = sorted(length for length in batches if length)
    last = ready[-1] if ready else max(_length(batch) for batch in batches[0])
    if lengths is None:
        return tuple(ready) or tuple(sorted({n for s in range(4) if (n := last >> s) >= 2}))
    if not isinstance(lengths, list | tuple | range):
        raise TypeError(f"lengths must be a list of whole numbers, got {lengths!r}")
    places = tuple(check_count("lengths", n, 2) for n in lengths)
    if not places or any(b <= a for a, b in itertools.pairwise(places)):
        raise ValueError(f"lengths must be ascending and not empty, got {list(places)}")
    if places[-1] > last:
        raise ValueError(
            f"lengths must be at most {last}, the tokens of the longest batch, got {places[-1]}"
        )
    if ready and (lacking := [n for n in places if n not in batches]):
        raise ValueError(
            f"lengths must have windows in batches, which has {ready}, got {lacking[0]}"
        )
    return places


def batches_by_length(batches: AnyBatches) -> dict[int, list[AnyBatch]]:
    """Check all batches and group them by window length, or under 0 if they are yet to be cut.

    Raises:
        TypeError: if ``batches`` holds anything but batches.
        ValueError: if there are no batches, a batch has no tokens, or windows differ from the
            stated length.
    """
    if isinstance(batches, Mapping) and batches and all(isinstance(n, int) for n in batches):
        ready = {
            check_count("lengths", n, 2): batches_by_length(part)[0] for n, part in batches.items()
        }
        for length, part in ready.items():
            for batch in part:
                if _length(batch) != length:
                    raise ValueError(
                        f"batches[{length}] must have windows of {length} tokens, got a batch with "
                        f"{_length(batch)}"
                    )
        return ready
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be a list of tensors (B, L) or of keyword arguments for the model, "
            f"got {type(batches).__name__}: put a single batch into a list"
        )
    found = list(batches)
    if not found:
        raise ValueError("batches must contain at least one batch, got none")
    for batch in found:
        _length(batch)
    return {0: found}


def cut(batches: Mapping[int, Sequence[AnyBatch]], lengths: Sequence[int]) -> list[Turn]:
    """Windows of every length, shortest first: those that are ready, or cut out of longer ones.

    Windows of one part of the text are in one group, whatever their length, so that what is
    measured at two lengths can be compared part by part.

    Args:
        batches: from :func:`batches_by_length`.
        lengths: rising.

    Example:
        >>> turns = cut(batches_by_length([torch.arange(24).view(2, 12)]), [4, 8])
        >>> [(turn.length, tuple(turn.batch.shape), turn.groups.tolist()) for turn in turns]
        [(4, (6, 4), [0, 0, 0, 1, 1, 1]), (8, (2, 8), [0, 1])]
    """
    last = batches[0] if 0 in batches else batches[lengths[-1]]
    parts = min(GROUPS, sum(_rows(batch) for batch in last))
    turns: list[Turn] = []
    for length in lengths:
        chosen = batches[0] if 0 in batches else batches[length]
        rows, before = sum(_rows(batch) for batch in chosen), 0
        for batch in chosen:
            pieces, own = _length(batch) // length, _rows(batch)
            if pieces:
                groups = (torch.arange(before, before + own) * parts // rows).repeat_interleave(
                    pieces
                )
                made, keep = _pieces(batch, length, pieces)
                if keep is not None:
                    groups = groups[keep]
                if groups.numel():
                    turns.append(Turn(length, made, groups))
            before += own
    return turns


def whole_turns(batches: Mapping[int, Iterable[AnyBatch]]) -> list[Turn]:
    """One :class:`Turn` for each batch, not cut, where each window is its own group.

    Args:
        batches: from :func:`batches_by_length`.
    """
    turns = []
    for of_length in batches.values():
        start = 0
        for batch in of_length:
            count = _rows(batch)
            turns.append(Turn(_length(batch), batch, torch.arange(start, start + count)))
            start += count
    return turns


def digest(turns: Sequence[Turn]) -> str:
    """Sixteen hexadecimal digits that change with any number of any window."""
    found = hashlib.sha256()
    for turn in turns:
        parts = {"": turn.batch} if isinstance(turn.batch, Tensor) else turn.batch
        for name, part in sorted(parts.items()):
            if isinstance(part, Tensor):
                found.update(f"{name} {tuple(part.shape)} {part.dtype}".encode())
                flat = part.detach().cpu().contiguous().reshape(-1)
                found.update(flat.view(torch.uint8).numpy().tobytes())
            else:
                found.update(f"{name} {part!r}".encode())
    return found.hexdigest()[:16]


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode for all modules, restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def cut_windows(
    model: torch.nn.Module, batches: AnyBatches, lengths: Sequence[int] | None
) -> tuple[list[Turn], tuple[int, ...], dict[int, int]]:
    """The windows of every length in batches, the lengths, and how many windows each of them has.

    Raises:
        ValueError: if a length is beyond the model's learned positions, or has windows of fewer
            than two parts of the text, so that no error can be estimated.
    """
    by_length = batches_by_length(batches)
    places = check_lengths(lengths, by_length)
    check_positions(model, places, stacklevel=4)
    turns = cut(by_length, places)
    counts = {}
    for length in reversed(places):
        of_length = [turn.groups.tolist() for turn in turns if turn.length == length]
        groups = list(itertools.chain(*of_length))
        counts[length] = len(groups)
        if len(set(groups)) < 2:
            raise ValueError(
                f"calibration needs at least 2 windows of {length} tokens, got {len(groups)}: "
                "give more text, or shorter lengths"
            )
    return turns, places, {length: counts[length] for length in places}


def _pieces(batch: AnyBatch, length: int, pieces: int) -> tuple[AnyBatch, Tensor | None]:
    """The windows of a batch, and which of them contain tokens (None if all do)."""
    if isinstance(batch, Tensor):
        return _cut(batch, length, pieces), None
    whole, own = _length(batch), _rows(batch)
    made: dict[str, Any] = {}
    for name, part in batch.items():
        made[name] = part
        if isinstance(part, Tensor) and part.shape[:2] == (own, whole):
            made[name] = _cut(part, length, pieces)
        elif isinstance(part, Tensor) and part.shape[:1] == (own,):
            made[name] = part.repeat_interleave(pieces, 0)
    mask = made.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return made, None
    keep = mask.bool().any(1)
    if bool(keep.all()):
        return made, None
    windows = keep.shape[0]
    return {
        name: part[keep] if isinstance(part, Tensor) and part.shape[:1] == (windows,) else part
        for name, part in made.items()
    }, keep.cpu()


def _cut(tensor: Tensor, length: int, pieces: int) -> Tensor:
    """(B, L, ...) to (B · pieces, length, ...)."""
    windows: Tensor = tensor[:, : length * pieces].unflatten(1, (pieces, length)).flatten(0, 1)
    return windows


def _tensor(batch: AnyBatch) -> Tensor:
    """The tensor of a batch that gives its numbers of windows and tokens."""
    found: Any = batch
    if isinstance(batch, Mapping):
        named = [batch[name] for name in _FIRST if name in batch]
        found = next((part for part in (*named, *batch.values()) if isinstance(part, Tensor)), None)
    if not isinstance(found, Tensor):
        names = f" of {', '.join(batch)}" if isinstance(batch, Mapping) else ""
        raise TypeError(
            "a batch must be a tensor (B, L), or a dict of keyword arguments for the model with "
            f"such a tensor, got {type(batch).__name__}{names}"
        )
    if found.dim() < 2 or found.shape[0] < 1 or found.shape[1] < 2:
        raise ValueError(
            "a batch must have shape (B, L, ...) with at least one window and 2 tokens, got "
            f"{tuple(found.shape)}"
        )
    return found


def _length(batch: AnyBatch) -> int:
    """Tokens of each window of a batch."""
    return _tensor(batch).shape[1]


def _rows(batch: AnyBatch) -> int:
    """Number of windows of a batch."""
    return _tensor(batch).shape[0]


@dataclass(frozen=True)
class Sample:
    """Windows of one length that were drawn from texts.

    Attributes:
        pieces: tokens of each drawn window, in the order of the text.
        whole: number of windows that the texts have.
        tokens: number of tokens that the texts have when cut to this length.
    """

    pieces: list[corpus.Tokens[int]]
    whole: int
    tokens: int

    @property
    def share(self) -> float:
        """The fraction of the texts' tokens that the drawn windows contain."""
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
    return [drawn.randrange(start, stop) for start, stop in itertools.pairwise(edges)]


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
    ids = [replace(text, content=text.tokenised(tokenizer)) for text in texts]
    samples = {}
    for length in reversed(lengths):  # the longest is the first that a text is too short for
        windows = corpus.windows(ids, tokenizer, length)
        whole, tokens = [one for one in windows if len(one) == length], sum(map(len, windows))
        if len(whole) < 2:
            raise ValueError(
                f"calibration needs at least 2 windows of {length} tokens, but the text has "
                f"{tokens} tokens: give more text, or shorter --lengths"
            )
        chosen = spread(len(whole), most or len(whole), seed)
        samples[length] = Sample([whole[index] for index in chosen], len(whole), tokens)
    return samples


def default_lengths(loaded: TextModel) -> tuple[int, ...]:
    """An eighth of the model's longest window, and its doubles."""
    return tuple(sorted({max(2, loaded.window(None) >> step) for step in range(4)}))


def batches(
    loaded: TextModel, samples: Mapping[int, Sample], size: int
) -> dict[int, list[dict[str, Any]]]:
    """Batches of windows by length; every batch has about the same number of tokens.

    Args:
        loaded: the model.
        samples: windows by length.
        size: windows of the longest length in a batch.
    """
    by_length: dict[int, list[dict[str, Any]]] = {}
    config = getattr(loaded.model, "config", None)
    for length, sample in samples.items():
        ids = torch.tensor(sample.pieces, dtype=torch.int64)
        for part in ids.split(max(1, size * max(samples) // length)):
            batch = {"input_ids": part, "attention_mask": torch.ones_like(part)}
            if getattr(config, "is_encoder_decoder", False):
                batch |= {f"decoder_{name}": tensor for name, tensor in batch.items()}
            by_length.setdefault(length, []).append(batch)
    return by_length


def describe_samples(samples: Mapping[int, Sample]) -> str:
    """How much of the text is read, in a sentence."""
    parts = []
    for length, sample in sorted(samples.items()):
        percent = 100 * sample.share
        share = f"{percent:.0f}" if percent >= 1 else f"{percent:.1g}"
        parts.append(f"{len(sample.pieces)} of {length} tokens ({share} %)")
    if all(len(sample.pieces) == sample.whole for sample in samples.values()):
        return f"reads every whole window of the text: {', '.join(parts)}"
    return (
        f"reads windows spread over the text: {', '.join(parts)}; change their number with "
        "--windows, 0 reads all"
    )
