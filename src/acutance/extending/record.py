"""What a search for a longer context found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from acutance.calibration.apply_law import Change, LawChange
from acutance.calibration.law import Law
from acutance.files import as_json, finite, write_text
from acutance.judging.heads_off import HeadsOff
from acutance.judging.paired import Part
from acutance.judging.rope import RopeChange
from acutance.report.table import Column, Table, styled

#: What is written as it is.
_NUMBERS = ("search_windows", "final_windows", "max_cost", "complete", "seconds")
#: The name of the model without a change.
AS_IS = "as it is"
METHOD = (
    "means of paired differences of loss on the same windows; standard errors from window to "
    "window; an interval of 95 % by Student's t for each difference of the final windows, on which "
    "no choice was made"
)


@dataclass(frozen=True)
class Tried:
    """A change that was tried, on the windows of the search.

    Attributes:
        name: of the change.
        windows: windows that it was measured on.
        within: change of the mean loss up to the trained length, nats a token.
        beyond: change of the mean loss beyond it.
        error: standard error of ``beyond``; None for a single window.
        allowed: whether ``within`` is at most what was allowed.
        seconds: of its longest run.
    """

    name: str
    windows: int
    within: float
    beyond: float
    error: float | None
    allowed: bool
    seconds: float


@dataclass(frozen=True)
class Final:
    """A change on the final windows, against the model as it is.

    Attributes:
        name: of the change.
        within: the difference up to the trained length.
        beyond: the difference beyond it.
        loss: mean loss by position, nats, for the ranges of :attr:`Extension.ranges`.
        errors: standard errors of ``loss`` from window to window.
        entropy: n, mean entropy of all heads in nats, and its standard deviation from head to
            head, by octave of n, the keys that a row reads; empty where it was not measured.
    """

    name: str
    within: Part
    beyond: Part
    loss: tuple[float, ...]
    errors: tuple[float, ...]
    entropy: tuple[tuple[float, float, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "within": self.within.to_dict(),
            "beyond": self.beyond.to_dict(),
            "loss_by_position": [*self.loss],
            "error_by_position": [*self.errors],
            "entropy_by_n": [
                {"n": n, "mean": mean, "std": std} for n, mean, std in self.entropy
            ],
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class Extension:
    """What :func:`acutance.extend` found.

    Attributes:
        to: tokens that the model is to read.
        train_length: tokens of the windows that it was trained on.
        chosen: the change with the lowest loss beyond the trained length, among those that are
            allowed and better than the model as it is; None where there is none.
        finals: the model as it is, first, and changes on the final windows.
        gain: the difference of ``chosen`` to the best RoPE setting beyond the trained length, where
            ``chosen`` is none itself.
        tried: every change with what the search saw of it.
        ranges: first and last n of each part of the positions.
        search_windows: windows that the search had.
        final_windows: windows of the final numbers.
        max_cost: rise of the loss up to the trained length that was allowed.
        complete: whether the search ended before its budget.
        seconds: time of all runs.
        about: what else is known: model, texts, versions.
    """

    to: int
    train_length: int
    chosen: Change | None
    finals: tuple[Final, ...]
    gain: Part | None
    tried: tuple[Tried, ...]
    ranges: tuple[tuple[int, int], ...]
    search_windows: int
    final_windows: int
    max_cost: float
    complete: bool
    seconds: float
    about: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        chosen = "none" if self.chosen is None else self.chosen.name
        return (
            f"<Extension from {self.train_length:,} to {self.to:,} tokens: {len(self.tried)} "
            f"changes tried; chosen: {chosen}>"
        )

    def __getitem__(self, name: str) -> Final:
        """A change of the final windows by its name; ``"as it is"`` is the model without one."""
        for one in self.finals:
            if one.name == name:
                return one
        raise KeyError(f"there is no {name!r}, only {', '.join(one.name for one in self.finals)}")

    @property
    def helps(self) -> bool:
        """Whether the chosen change lowers the loss of the final windows beyond noise."""
        return self.chosen is not None and self[self.chosen.name].beyond.helps

    def table(self) -> Table:
        """Losses on the final windows, then the changes that were tried, then sentences."""
        names = ("loss up to", "loss beyond", "Δ up to", "Δ beyond")
        rows = []
        for final in self.finals:
            parts = (final.within, final.beyond)
            changes = [f"{part.delta:+.4f} ± {part.error:.4f}" for part in parts]
            losses = [part.loss + part.delta for part in parts]
            rows.append((final.name, *losses, *(changes if final.name != AS_IS else (None, None))))
        return Table(
            f"Reading {self.to:,} tokens: loss in nats a token, and its difference Δ from the "
            "model as it is",
            (
                Column("final windows", "words"),
                *(Column(f"{name} {self.train_length:,}", format=".4f") for name in names),
            ),
            rows,
            below=tried_table(self),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {
            "schema": "acutance.extension/1",
            "to": self.to,
            "train_length": self.train_length,
            "chosen": None if self.chosen is None else self.chosen.name,
            "helps": self.helps,
            "finals": [one.to_dict() for one in self.finals],
            "gain_over_rope": None if self.gain is None else self.gain.to_dict(),
            "tried": [finite(vars(one)) for one in self.tried],
            "ranges": [list(one) for one in self.ranges],
            **{name: getattr(self, name) for name in _NUMBERS},
            "method": METHOD,
            "about": dict(self.about),
        }

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict`, whole or not at all."""
        write_text(path, as_json(self.to_dict(), indent=1) + "\n")

    def save(self, folder: str | os.PathLike[str], model: torch.nn.Module) -> str | None:
        """Write what was chosen: ``config.json`` for RoPE settings, else ``law.json``.

        Args:
            folder: an existing directory.
            model: the model that was extended.

        Returns:
            The name of the file; None where none is written: nothing helps, or heads are switched
            off, which :func:`acutance.apply` takes by name.

        Raises:
            TypeError: if what was chosen is neither a law nor RoPE settings.
        """
        if not self.helps or isinstance(self.chosen, HeadsOff):
            return None
        if isinstance(self.chosen, RopeChange):
            path = os.path.join(os.fspath(folder), "config.json")
            config: Any = getattr(model, "config")  # noqa: B009
            entries = config.to_dict() | self.chosen.configuration(model, self.to)
            write_text(path, as_json(entries, indent=2) + "\n")
        elif isinstance(self.chosen, LawChange):
            path, law = os.path.join(os.fspath(folder), "law.json"), self.chosen.law
            (law if isinstance(law, Law) else Law.of(model, law)).save(path)
        else:
            raise TypeError(f"chosen is a {type(self.chosen).__name__}, which has no file")
        return os.path.basename(path)


def sentences(result: Extension) -> Iterator[str]:
    """The results of :func:`acutance.extend` as sentences, the most important first.

    Example:
        >>> import acutance
        >>> from acutance.reproduce import decoder, texts
        >>> windows = texts.read(texts.files("held out"))[: 4 * 256].long().view(4, 256)
        >>> law = "rope:linear,factor=2"
        >>> result = acutance.extend(decoder(), 256, windows, train_length=128, laws=law)
        >>> next(sentences(result))
        'Nothing that was tried lowers the loss beyond 128 tokens at a cost of at most 0.005 nat.'
    """
    if result.chosen is None:
        yield (
            f"Nothing that was tried lowers the loss beyond {result.train_length:,} tokens at a "
            f"cost of at most {result.max_cost:g} nat."
        )
    else:
        one = result[result.chosen.name]
        beyond = "It lowers the loss" if result.helps else "It is not shown to lower the loss"
        yield (
            f"Best: {one.name}. {beyond} beyond {result.train_length:,} tokens: "
            f"{_change(one.beyond)}, from {one.beyond.loss:.3f} nats a token."
        )
        cost = f"changes by {_change(one.within)}" if one.within.most > 2e-5 else "stays as it is"
        yield f"Up to {result.train_length:,} tokens the loss {cost}."
    if result.gain is not None:
        yield (
            f"Against {result.finals[-1].name}, the best RoPE setting of the search, it changes "
            f"the loss beyond {result.train_length:,} tokens by {_change(result.gain)}."
        )
    yield (
        f"These numbers are from {result.final_windows} windows of {result.to:,} tokens that no "
        f"choice was made on; the search had {result.search_windows} others. ± is a standard error "
        "from window to window, with an interval of 95 % by Student's t."
    )
    if not result.complete:
        yield "The budget ended the search before all rounds."


def tried_table(result: Extension) -> Table:
    """The changes that the search tried, with the difference of the loss from the model as it is.

    Columns are the change, the windows it was measured on, and the difference up to and beyond the
    trained length, in nats a token. A star marks a change that costs too much up to the trained
    length to be chosen.
    """
    rows = []
    for tried in result.tried:
        error = "" if tried.error is None else f" ± {tried.error:.3f}"
        within = f"{'' if tried.allowed else '*'}{tried.within:+.4f}"
        row = (tried.name, tried.windows, within, f"{tried.beyond:+.4f}{error}")
        rows.append(row if tried.allowed else styled(row, "dim"))
    star = (
        f"* not chosen: it raises the loss up to {result.train_length:,} tokens by more than "
        f"{result.max_cost:g} nat"
    )
    return Table(
        "Tried in the search: Δ in nats a token",
        (
            Column("change", "words"),
            Column("windows"),
            Column(f"up to {result.train_length:,}"),
            Column(f"beyond {result.train_length:,}"),
        ),
        rows,
        [*sentences(result)],
        notes=[] if all(tried.allowed for tried in result.tried) else [star],
    )


def _change(part: Part) -> str:
    """A difference of the loss with its standard error and its 95 % interval."""
    return (
        f"{part.delta:+.4f} ± {part.error:.4f} nat (between {part.low:+.3f} and {part.high:+.3f})"
    )
