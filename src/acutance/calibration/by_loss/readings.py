"""Readings of a fit in a file: a resumed run takes the same decisions from the same readings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from acutance.calibration.by_loss.gradients import Reading
from acutance.corpus.probe_corpus import tidy
from acutance.files import write_bytes
from acutance.summary.files import parse, read, sealed
from acutance.summary.settings import check_settings

__all__ = ["Readings"]

SCHEMA = "acutance.loss_calibration/1"


class Readings:
    """All readings so far, in the order in which they were made.

    Every decision of a fit follows from earlier readings, so a run that is resumed makes the same
    ones, and reads again only what is not in the file.

    Args:
        settings: everything that decides the numbers, in the order in which it is compared.
        path: file to write them to; None writes none.
        every: windows between two writes, at least.
    """

    def __init__(
        self, settings: Mapping[str, Any], path: str | os.PathLike[str] | None, every: int
    ) -> None:
        self._settings, self._path, self._every = settings, path, every
        self._made: list[Reading] = []
        self._next, self._unsaved = 0, 0

    def __len__(self) -> int:
        return len(self._made)

    def get(self, make: Callable[[], Reading]) -> Reading:
        """The next reading: from the file if it is stored, else from ``make()``."""
        if self._next == len(self._made):
            self._made.append(make())
            self._unsaved += 1
            if self._unsaved >= self._every:
                self.save()
        self._next += 1
        return self._made[self._next - 1]

    def save(self) -> None:
        """Write everything as one safetensors file, whole or not at all."""
        from safetensors.torch import save

        if self._path is None or not self._unsaved:
            return
        tensors = {
            "loss": torch.tensor([one.loss for one in self._made], dtype=torch.float64),
            "count": torch.tensor([one.count for one in self._made]),
            "gradient": torch.stack([one.gradient for one in self._made]),
        }
        header = {"schema": SCHEMA, "settings": json.dumps(dict(self._settings))}
        write_bytes(self._path, save(tensors, metadata=sealed(header, tensors)))
        self._unsaved = 0

    def resume(self) -> None:
        """Replace these readings by those of the file; no effect if the file does not exist.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not such a state, or has other settings, which the message names.
        """
        if self._path is None or not os.path.exists(self._path):
            return
        name = os.fspath(self._path)
        try:
            header, tensors = read(self._path, SCHEMA, "state of a fit to the loss")
            before = parse(header, "settings")
            loss, count, gradient = (tensors[part] for part in ("loss", "count", "gradient"))
            shapes = loss.dim() == count.dim() == 1 and gradient.dim() == 2
            if not shapes or not len(loss) == len(count) == len(gradient):
                raise ValueError("its readings differ in number")
            if not bool(loss.isfinite().all() and gradient.isfinite().all() and (count > 0).all()):
                raise ValueError("a reading is not a number")
        except (KeyError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{name} contains no fit to the loss that can be resumed: {reason}"
            ) from error
        check_settings(name, before, self._settings)
        self._made = [
            Reading(float(one), int(number), part)
            for one, number, part in zip(loss, count, gradient.double(), strict=True)
        ]
        tidy(self._path)
