"""Save and resume a calibration; no window is counted twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.fit.collect import SUMS, LayerSums
from acutance.calibration.fit.passes import PassSums
from acutance.corpus.probe_corpus import tidy
from acutance.files import write_bytes
from acutance.summary.files import MOST, parse, read, sealed
from acutance.summary.settings import check_settings

__all__ = ["PassState", "Progress"]

SCHEMA = "acutance.calibration/1"


@dataclass
class PassState:
    """One pass over all windows: the law that is applied and what was collected.

    Attributes:
        factors: by module name, (knots, heads); None for the pass without a law.
        family: whether the law is the family fitted to these factors, rather than their table.
        found: what was collected so far.
    """

    factors: dict[str, Tensor] | None
    family: bool = False
    found: PassSums = field(default_factory=PassSums)


@dataclass
class Progress:
    """All passes so far, the last one perhaps unfinished.

    Attributes:
        settings: everything that decides the numbers, in the order in which it is compared.
        passes: the passes.
    """

    settings: Mapping[str, Any]
    passes: list[PassState] = field(default_factory=list)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as one safetensors file, whole or not at all."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        passes = []
        for p, one in enumerate(self.passes):
            names = list(one.found.layers)
            for i, name in enumerate(names):
                sums = one.found.layers[name]
                tensors[f"{p}/{i}/sums"] = sums.sums
                tensors[f"{p}/{i}/top"] = sums.top
                tensors[f"{p}/{i}/longest"] = sums.longest
            factors = one.factors or {}
            for i, name in enumerate(factors):
                tensors[f"{p}/{i}/factors"] = factors[name]
            places = list(one.found.scales)
            for i, place in enumerate(places):
                tensors[f"{p}/{i}/scales"] = one.found.scales[place]
            passes.append(
                {
                    "done": one.found.done,
                    "layers": names,
                    "factors": None if one.factors is None else list(factors),
                    "family": one.family,
                    "scales": [list(place) for place in places],
                    "unread": list(one.found.unread),
                }
            )
        header = {
            "schema": SCHEMA,
            "settings": json.dumps(dict(self.settings)),
            "passes": json.dumps(passes),
        }
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        whole = save(tensors, metadata=sealed(header, tensors))
        write_bytes(path, whole)

    @classmethod
    def resume(cls, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> Progress:
        """The saved progress of a file; an empty one if there is no file.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the file is not such a state, or one of other settings, which it names.
        """
        name = os.fspath(path)
        if not os.path.exists(path):
            return cls(settings)
        try:
            header, tensors = read(path, SCHEMA, "state of a calibration")
            had, passes = parse(header, "settings"), parse(header, "passes", list)
            made = cls(settings, [_pass(p, one, tensors) for p, one in enumerate(passes)])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{name} contains no calibration that can be resumed: {said}"
            ) from error
        check_settings(name, had, settings)
        tidy(path)
        return made


def _pass(p: int, one: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PassState:
    """The state of pass ``p`` from the header entry and the tensors of a file."""
    found = PassSums()
    if type(one["done"]) is not int or not 0 <= one["done"] <= MOST:
        raise ValueError(f"'done' of pass {p} must be a whole number, got {one['done']!r:.60}")
    found.done = one["done"]
    for i, name in enumerate(one["layers"]):
        sums, top, longest = (tensors[f"{p}/{i}/{part}"] for part in ("sums", "top", "longest"))
        fits = (
            sums.dtype == top.dtype == torch.float64
            and longest.dtype == torch.int64
            and sums.dim() == 4
            and sums.shape[3] == SUMS
            and top.shape == sums.shape[:3]
            and longest.shape == sums.shape[1:2]
            and bool(sums.isfinite().all())
            and bool((sums[..., 0] >= 0).all())
            and bool((top < torch.inf).all())
            and bool((longest >= 0).all())
        )
        if not fits:
            raise ValueError(f"the arrays of {name!r:.60} have a wrong shape, dtype or value")
        found.layers[str(name)] = LayerSums(sums, top, longest)
    for i, (name, k) in enumerate(one["scales"]):
        scales = tensors[f"{p}/{i}/scales"]
        if scales.dim() != 2 or not scales.is_floating_point() or bool((scales < 0).any()):
            raise ValueError(
                f"the scales of {name!r:.60} must be a matrix of numbers of at least 0"
            )
        found.scales[str(name), int(k)] = scales
    found.unread = tuple(map(str, one["unread"]))
    names = one["factors"]
    factors = None
    if names is not None:
        factors = {str(name): tensors[f"{p}/{i}/factors"] for i, name in enumerate(names)}
        for name, part in factors.items():
            if part.dim() != 2 or not bool(((part > 0) & part.isfinite()).all()):
                raise ValueError(
                    f"the factors of {name!r:.60} must be a matrix of finite numbers above 0"
                )
    return PassState(factors, bool(one["family"]), found)
