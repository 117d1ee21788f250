"""Losses of windows under remedies, each measured once and written to a file to go on from."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.losses import Loss, LossError
from acutance.extending.by_head import head_slopes, law_part, mixed, with_temperature
from acutance.extending.prefix import Prefix
from acutance.files import tidy, write_bytes
from acutance.judging.remedies import Remedy
from acutance.summary.files import parse, read, sealed
from acutance.summary.settings import check_settings

__all__ = ["Runs"]

SCHEMA = "acutance.extension_state/1"


class Runs:
    """Sums of the loss by window, change of the model and range of n, saved in a file.

    n is the number of tokens that a prediction could read.

    Args:
        model: the model.
        windows: tokens, (windows, L) int64.
        loss: the loss.
        ranges: first and last n of each range, both included.
        train_length: where a range ends; changes that begin beyond it are run from there on.
        settings: everything that decides the numbers apart from the change.
        save: the file; None saves nothing.

    Attributes:
        seconds: time of all runs, including those read from the file.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        windows: Tensor,
        loss: Loss,
        ranges: Sequence[tuple[int, int]],
        train_length: int,
        settings: Mapping[str, Any],
        save: str | os.PathLike[str] | None,
    ) -> None:
        self._model, self._windows, self._loss, self.ranges = model, windows, loss, ranges
        self._settings, self._save = dict(settings), save
        self._prefix = Prefix(model, loss, train_length)
        self._sums: dict[tuple[str, int], Tensor] = {}
        self._counts: dict[int, Tensor] = {}
        self._took: dict[tuple[str, int], float] = {}
        self._slopes: dict[str, dict[str, Tensor]] = {}
        self._slopes_took = 0.0

    @property
    def seconds(self) -> float:
        """Time of all runs so far."""
        return sum(self._took.values()) + self._slopes_took

    def longest(self, words: str | None = None) -> float:
        """Seconds of the longest run.

        Args:
            words: ``words`` of a remedy, whose runs are considered; None considers all runs.

        Returns:
            The seconds; 0 before the first run.
        """
        found = [took for (one, _), took in self._took.items() if words in (None, one)]
        return max(found, default=0.0)

    def done(self, remedy: Remedy | None, window: int) -> bool:
        """Whether the loss of a window under a remedy (None: the unchanged model) is known."""
        return (_words(remedy), window) in self._sums

    def measure(self, remedy: Remedy | None, window: int) -> None:
        """Run the model on a window under a remedy (None: unchanged), unless that was done before.

        Tokens up to the trained length are not run under a remedy that begins beyond it: their
        losses are those of the unchanged model, which is then measured first.

        Raises:
            LossError: if a loss is not a number.
        """
        place = _words(remedy), window
        if place in self._sums:
            return
        ids = self.ids(window)
        batch, past = {"input_ids": ids}, 0
        if remedy is not None and self._prefix.serves(remedy, ids):
            self.measure(None, window)
            batch, past = self._prefix.after(window, ids), self._prefix.length
        started = time.monotonic()
        with nullcontext() if remedy is None else remedy.applied(self._model):
            scored = self._loss.score(self._model, batch)
        known, n = ~scored.loss.isnan(), scored.n + past
        sums, counts = [], []
        for index, (first, last) in enumerate(self.ranges):
            if last <= past:
                sums.append(self._sums["", window][index])
                counts.append(self._counts[window][index])
                continue
            here = known & (n >= (0 if first == 1 else first)) & (n <= last)
            sums.append(torch.where(here, scored.loss, 0.0).sum())
            counts.append(here.sum())
        count = torch.stack(counts).double()
        if not bool(torch.stack(sums).isfinite().all()):
            raise LossError(
                f"the loss of window {window} is infinite under {_name(remedy)}; load the model "
                "in a wider dtype, such as float32"
            )
        if not torch.equal(self._counts.setdefault(window, count), count):
            raise LossError(
                f"the loss of window {window} is NaN for some tokens under {_name(remedy)} only; "
                "load the model in a wider dtype, such as float32"
            )
        self._sums[place] = torch.stack(sums)
        self._took[place] = time.monotonic() - started
        self.write()

    def ids(self, window: int) -> Tensor:
        """The tokens of a window, (1, L), on the model's device."""
        device = next((part.device for part in self._model.parameters()), None)
        return self._windows[window : window + 1].to(device)

    def mixes(
        self,
        best: Remedy,
        others: Sequence[Remedy],
        away: Sequence[float],
        window: int,
        to: int,
    ) -> list[Remedy]:
        """Laws by head, from one backward pass on a window, unless that was done before.

        There are none if the heads have nothing to choose from.

        Args:
            best: a window for all heads, or a scaling and a window.
            others: what heads may have instead, likewise.
            away: measured differences of the loss, if all heads have one of ``others``.
            window: index of the window.
            to: tokens that the model is to read.

        Raises:
            ValueError: if the model's attention does not allow it.
        """
        own, train_length = law_part(best), self._prefix.length
        assert own is not None
        parts = [part for part in map(law_part, others) if part is not None]
        warm = with_temperature(own, train_length, to)
        parts += [] if warm is None else [warm]
        if not parts:
            return []
        key = json.dumps([str(own), [str(part) for part in parts], window])
        if key not in self._slopes:
            started, ids = time.monotonic(), self.ids(window)
            batch = {"input_ids": ids}
            if all(self._prefix.serves(one, ids) for one in (best, *others)):
                batch = self._prefix.after(window, ids)
            self._slopes[key] = head_slopes(self._model, self._loss, batch, own, parts)
            self._slopes_took += time.monotonic() - started
            self.write()
        return [*mixed(self._model, own, parts, self._slopes[key], away, train_length, to)]

    def table(self, remedies: Sequence[Remedy | None], windows: Sequence[int]) -> Tensor:
        """Sums of the losses of measured windows, (remedies, windows, ranges) float64."""
        rows = [
            torch.stack([self._sums[_words(remedy), window] for window in windows])
            for remedy in remedies
        ]
        return torch.stack(rows)

    def counts(self, windows: Sequence[int]) -> Tensor:
        """Number of predictions, (windows, ranges) float64."""
        return torch.stack([self._counts[window] for window in windows])

    # -- the file ---------------------------------------------------------------------------------

    def write(self) -> None:
        """Write everything as one safetensors file, whole or not at all."""
        if self._save is None or not self._sums:
            return
        from safetensors.torch import save

        places = list(self._sums)
        tensors = {
            "loss": torch.stack([self._sums[place] for place in places]),
            "count": torch.stack([self._counts[window] for _, window in places]),
        }
        runs = [[words, window, self._took[words, window]] for words, window in places]
        names: list[tuple[str, str]] = []
        for key, by_layer in self._slopes.items():
            for layer, part in by_layer.items():
                tensors[f"slopes.{len(names)}"] = part
                names.append((key, layer))
        header = {
            "schema": SCHEMA,
            "settings": json.dumps(self._settings),
            "runs": json.dumps(runs),
            "slopes": json.dumps([names, self._slopes_took]),
        }
        write_bytes(self._save, save(tensors, metadata=sealed(header, tensors)))

    def resume(self) -> None:
        """Replace these sums by those of the file; no effect if the file does not exist.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not such a state, or has other settings, which the message names.
        """
        if self._save is None or not os.path.exists(self._save):
            return
        name = os.fspath(self._save)
        try:
            header, tensors = read(self._save, SCHEMA, "state of acutance extend")
            before, runs = parse(header, "settings"), parse(header, "runs", list)
            names, slopes_took = parse(header, "slopes", list) if "slopes" in header else ([], 0.0)
            slopes = [tensors[f"slopes.{index}"] for index in range(len(names))]
            loss, count = tensors["loss"], tensors["count"]
        except (KeyError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{name} contains no search to resume: {reason}") from error
        check_settings(name, before, self._settings)
        shape = (len(runs), len(self.ranges))
        fine = loss.shape == count.shape == shape and bool((loss.isfinite() & (count >= 0)).all())
        if not fine:
            raise ValueError(
                f"{name} contains no search to resume: its losses have a wrong shape or value"
            )
        for (words, window, took), sums, counts in zip(runs, loss, count, strict=True):
            self._sums[words, window] = sums.double()
            self._counts[window] = counts.double()
            self._took[words, window] = float(took)
        for (key, layer), part in zip(names, slopes, strict=True):
            self._slopes.setdefault(key, {})[layer] = part
        self._slopes_took = float(slopes_took)
        tidy(self._save)


def _words(remedy: Remedy | None) -> str:
    """What identifies a remedy in the file; None stands for the unchanged model."""
    return "" if remedy is None else remedy.words


def _name(remedy: Remedy | None) -> str:
    """Name of a remedy for messages; None stands for the unchanged model."""
    return "no change" if remedy is None else remedy.name
