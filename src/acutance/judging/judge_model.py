"""acutance.judge: what a law does to a model's loss, on the same windows with and without it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.law import check_positions
from acutance.calibration.loss_table import (
    COMPARISON,
    LossTable,
    Reading,
    Saving,
    measure_batch,
    numbered_change,
)
from acutance.calibration.losses import AnyLoss, Loss, LossError, MaskedTokens, choose_loss
from acutance.calibration.windows import (
    AnyBatches,
    Turn,
    batches_by_length,
    check_lengths,
    cut,
    digest,
    evaluating,
    spread,
    whole_turns,
)
from acutance.corpus.load_model import TextModel
from acutance.corpus.texts import Text, model_digest, special_tokens
from acutance.judging.changes import Change, as_changes, check_fit, for_train_length
from acutance.judging.paired import LossComparison, compare_losses, octaves

__all__ = ["judge"]

#: Called after each run of the model: tokens, windows that are now done, and whether they ran now
#: rather than in the run that is resumed.
Advance = Callable[[int, int, bool], None]
#: Texts from which errors are those between texts.
SEVERAL = 5


@dataclass(frozen=True)
class Windows:
    """Windows to judge on, in batches, and the group that each belongs to.

    Attributes:
        turns: batches; the groups of a batch are one number for each of its windows, from 0.
        unit: what a group is: ``window``, ``text`` or ``part of the text``.
    """

    turns: tuple[Turn, ...]
    unit: str

    @property
    def count(self) -> int:
        """Number of windows."""
        return sum(turn.groups.numel() for turn in self.turns)

    @property
    def groups(self) -> Tensor:
        """The group of every window, int64."""
        return torch.cat([turn.groups for turn in self.turns])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of windows, ascending."""
        return tuple(sorted({turn.length for turn in self.turns}))

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return sum(turn.tokens for turn in self.turns)

    def by_text(self, texts: Sequence[Hashable]) -> Windows:
        """These windows grouped by text, if they are from at least 5 texts; unchanged otherwise.

        Args:
            texts: the text of each present group.
        """
        numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        if len(numbers) < SEVERAL:
            return self
        group = torch.tensor([numbers[text] for text in texts])
        turns = tuple(replace(turn, groups=group[turn.groups]) for turn in self.turns)
        return Windows(turns, "text")


def judge(
    model: torch.nn.Module,
    windows: AnyBatches | Tensor,
    laws: Any,
    *,
    loss: AnyLoss | None = None,
    lengths: Sequence[int] | None = None,
    texts: Sequence[Hashable] | None = None,
    train_length: int | None = None,
    save: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> LossComparison:
    r"""Compare a model's loss with and without each law, on the same windows.

    Every window is read once as the model is and once under each law. What is compared is the
    difference of the two losses of the same token, so what makes one window harder than another
    cancels. Means are given for all predictions and by octave of n, the number of tokens that a
    prediction could read: its position for a causal model, the window's length for a masked one.

    Args:
        model: a language model with its head, or any model with a loss of your own; it is put into
            evaluation mode meanwhile.
        windows: text that no law was fitted to: tokens (B, L), read one window at a time, or a
            list of such tensors or of mappings of the model's keywords, with ``input_ids``, each
            read at once; windows first, tokens second. Errors take windows for independent, and
            there are at least 2.
        laws: a law as :func:`acutance.apply` takes it, a name or file of one, a
            :class:`~acutance.judging.Change`; or a list of these, or a mapping from names to them.
        loss: None or ``"next_token"``, the cross-entropy of each token given those before it; a
            :class:`~acutance.judging.MaskedTokens`; or a function of model and batch that returns
            the loss of each token, (B, L), NaN where nothing is predicted.
        lengths: windows are cut into parts of these ascending lengths; None leaves them whole.
        texts: the text that each window is from. From 5 texts on, errors are those from text to
            text, else from window to window.
        train_length: tokens of the windows that the model was trained on, for RoPE settings that
            are computed from it; None takes the configuration's.
        save: file that keeps the state after each run of the model, to continue from.
        save_every: windows between two writes, at least.
        resume: continue from what ``save`` holds.
        overwrite: replace what ``save`` holds.
        advance: called after each run of the model with the tokens it read, the windows that are
            done with it, and whether it ran now.

    Returns:
        For each law the differences with standard errors and simultaneous 95 % intervals
        (Student's t with Bonferroni's correction), and a verdict: ``helps``, ``hurts``, ``mixed``
        or ``no difference found``.

    Raises:
        ApplyError: if a law changes nothing of the model.
        FileExistsError: if the file of ``save`` is there, and is neither resumed nor overwritten.
        LossError: if the model has no such loss, or a loss is not a number.
        TypeError: if an argument is of the wrong kind.
        ValueError: if there are fewer than two windows, a law is unknown, lengths are beyond the
            model's learned positions, or the state to resume is of another run.

    Warns:
        UserWarning: if lengths are beyond positions that are not learned.

    Example:
        >>> import acutance
        >>> from acutance.reproduce import decoder, texts
        >>> code = texts.read(texts.files("held out")).long()
        >>> windows = code[: 4 * 512].view(4, 512)  # trained on windows of 128
        >>> result = acutance.judge(decoder(), windows, "clip_log_n:train_length=128")
        >>> result.laws[0].delta < 0
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    batches = batches_by_length(windows.split(1) if isinstance(windows, Tensor) else windows)
    turns = (
        whole_turns(batches) if lengths is None else cut(batches, check_lengths(lengths, batches))
    )
    rows = sum(turn.groups.numel() for turn in whole_turns(batches)) if 0 in batches else 0
    groups = 1 + max(int(turn.groups.max()) for turn in turns)
    found = Windows(tuple(turns), "window" if groups == rows or not rows else "part of the text")
    if texts is not None:
        if len(texts) != groups:
            raise ValueError(
                f"texts must name the text of each window, got {len(texts)} names for "
                f"{groups} windows"
            )
        found = found.by_text(texts)
    changes = for_train_length(model, as_changes(laws), train_length)
    saving = Saving.to(
        save, resume=resume, overwrite=overwrite, save_every=save_every, tables={"": COMPARISON}
    )
    return judge_windows(
        model, found, changes, choose_loss(model, loss), saving=saving, advance=advance
    )


def judge_windows(
    model: torch.nn.Module,
    windows: Windows,
    changes: Sequence[Change],
    loss: Loss,
    *,
    saving: Saving,
    given: Mapping[str, Any] | None = None,
    advance: Advance | None = None,
) -> LossComparison:
    """:func:`judge` for windows with stated groups, changes and a loss that are ready to use.

    Args:
        model: as for :func:`judge`.
        windows: the windows in batches, with the groups between which errors are estimated.
        changes: changes of the model to compare with the unchanged model.
        loss: the loss.
        saving: where what is measured is kept.
        given: options that decide about ``changes``, which a resumed run must share.
        advance: as for :func:`judge`.
    """
    groups, lengths = windows.groups, windows.lengths
    if len(groups.unique()) < 2:
        raise ValueError(
            f"a comparison needs at least 2 windows of {lengths[-1]} tokens, got "
            f"{len(groups.unique())}: give more text, or shorter windows"
        )
    check_positions(model, lengths)
    check_fit(model, changes)
    ranges = octaves(lengths[-1])
    settings = {
        "model": model_digest(model),
        "text": digest(windows.turns),
        "laws": [one.words for one in changes],
        "loss": loss.words,
        "lengths": list(lengths),
        "windows": windows.count,
        "weights": str(next((part.dtype for part in model.parameters()), None)),
        "attention": str(getattr(getattr(model, "config", None), "_attn_implementation", "")),
        **(given or {}),
        "shown": {"laws": [one.name for one in changes]},
    }
    rows = [turn.groups.numel() for turn in windows.turns]
    runs: list[tuple[str, Change | None]] = [("", None)]
    runs += [(numbered_change(number, one.words), one) for number, one in enumerate(changes, 1)]
    readings: list[list[Reading]] = [[] for _ in runs]
    device = next((part.device for part in model.parameters()), None)
    with (
        LossTable(settings, saving, rows) as table,
        evaluating(model),
        torch.inference_mode(),
    ):
        if len(table.readings) < len(runs) * len(rows):
            loss.check(model, windows.turns[0].inputs(device))
        for index, turn in enumerate(windows.turns):
            for number, (words, change) in enumerate(runs):
                before = readings[0][index] if number else None
                measure = partial(
                    measure_batch, model, loss, turn.inputs(device), change, ranges, before
                )
                done = rows[index] if number == len(changes) else 0  # windows, after this law
                known = (words, index) in table.readings
                readings[number].append(table.get(words, index, measure, done))
                if advance is not None:
                    advance(turn.tokens, done, not known)
    sums = torch.stack([torch.cat([one.loss for one in batches]) for batches in readings])
    counts = torch.cat([one.count for one in readings[0]])
    return LossComparison(
        laws=compare_losses([one.name for one in changes], sums, counts, groups, ranges),
        loss=loss.words,
        mean_loss=float(sums[0].sum() / counts.sum()),
        windows=windows.count,
        tokens=windows.tokens,
        lengths=lengths,
        groups=len(groups.unique()),
        unit=windows.unit,
    )


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
