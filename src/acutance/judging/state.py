"""The state of a comparison in a file: killed at any moment, it continues with no window twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.files import tidy, write_bytes
from acutance.summary.files import parse, read, sealed
from acutance.summary.settings import check_settings

__all__ = ["Sums"]

SCHEMA = "acutance.judgement_state/1"


@dataclass
class Sums:
    """Sums of the losses of a comparison so far, which can be saved and resumed.

    Attributes:
        settings: everything that decides the numbers, in the order in which it is compared.
        loss: sum of losses by run, window and octave of n, (1 + laws, windows, octaves) float64;
            run 0 is without a law.
        count: number of predictions, (windows, octaves) float64.
        done: which runs of which batches are included, boolean (batches, 1 + laws).
    """

    settings: Mapping[str, Any]
    loss: Tensor
    count: Tensor
    done: Tensor

    @classmethod
    def none(
        cls, settings: Mapping[str, Any], runs: int, batches: int, windows: int, parts: int
    ) -> Sums:
        """Sums of a comparison that has not begun: zeros, nothing done.

        Args:
            settings: everything that decides the numbers.
            runs: 1 + number of laws.
            batches: number of batches.
            windows: number of windows.
            parts: number of octaves of n.
        """
        return cls(
            settings,
            torch.zeros(runs, windows, parts, dtype=torch.float64),
            torch.zeros(windows, parts, dtype=torch.float64),
            torch.zeros(batches, runs, dtype=torch.bool),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file, atomically."""
        from safetensors.torch import save

        tensors = {"loss": self.loss, "count": self.count, "done": self.done}
        header = {"schema": SCHEMA, "settings": json.dumps(dict(self.settings))}
        write_bytes(path, save(tensors, metadata=sealed(header, tensors)))

    def resume(self, path: str | os.PathLike[str]) -> None:
        """Replace these sums by those of a file; no effect if the file does not exist.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not such a state, or has other settings, which the message names.
        """
        name = os.fspath(path)
        if not os.path.exists(path):
            return
        try:
            header, tensors = read(path, SCHEMA, "state of a comparison of losses")
            before = parse(header, "settings")
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{name} contains no comparison to resume: {reason}") from error
        check_settings(name, before, self.settings)
        mine_by_name = {"loss": self.loss, "count": self.count, "done": self.done}
        for key, mine in mine_by_name.items():
            theirs = tensors.get(key)
            if theirs is None or theirs.shape != mine.shape or theirs.dtype != mine.dtype:
                raise ValueError(f"{name} contains no comparison to resume: its {key} is wrong")
            if not bool(theirs.isfinite().all()) or bool((theirs < 0).any()):
                raise ValueError(f"{name} contains no comparison to resume: its {key} is wrong")
        self.loss, self.count, self.done = (tensors[key] for key in mine_by_name)
        tidy(path)
