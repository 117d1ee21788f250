"""What a search for a longer context found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from acutance.calibration.law import Law
from acutance.files import as_json, finite, write_text
from acutance.judging.paired import Part
from acutance.judging.remedies import HeadsOff, LawRemedy, Remedy
from acutance.judging.rope import RopeRemedy

__all__ = ["METHOD", "Extension", "Final", "Tried"]

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
    chosen: Remedy | None
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
            "search_windows": self.search_windows,
            "final_windows": self.final_windows,
            "max_cost": self.max_cost,
            "complete": self.complete,
            "seconds": self.seconds,
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
        name = "config.json" if isinstance(self.chosen, RopeRemedy) else "law.json"
        path = os.path.join(os.fspath(folder), name)
        if isinstance(self.chosen, RopeRemedy):
            config: Any = getattr(model, "config")  # noqa: B009
            entries = config.to_dict() | self.chosen.configuration(model, self.to)
            write_text(path, as_json(entries, indent=2) + "\n")
        elif isinstance(self.chosen, LawRemedy):
            law = self.chosen.law
            (law if isinstance(law, Law) else Law.of(model, law)).save(path)
        else:
            raise TypeError(f"chosen is a {type(self.chosen).__name__}, which has no file")
        return name
