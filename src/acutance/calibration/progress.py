"""The state of a calibration in a file: killed at any moment, it goes on with no window twice."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.collect import SUMS, LayerSums
from acutance.calibration.passes import PassSums
from acutance.files import write_bytes
from acutance.probing.resume import tidy

__all__ = ["PassState", "Progress"]

SCHEMA = "acutance.calibration/1"
_TOLD = {"model": "another model", "text": "another text, or other windows of it"}


@dataclass
class PassState:
    """One pass: the factors in force and what was collected.

    Attributes:
        factors: by module name, (knots, heads); None without a law.
        family: whether the law in force is the family that fits these factors, not their table.
        found: what was collected.
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
        whole = save({n: t.contiguous() for n, t in tensors.items()}, metadata=header)
        write_bytes(path, whole)

    @classmethod
    def resume(cls, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> Progress:
        """What a file holds, or nothing where there is none yet.

        Raises:
            ValueError: if the file is no such state, or one of other settings, which it names.
        """
        name = os.fspath(path)
        if not Path(path).exists():
            return cls(settings)
        try:
            header, tensors = _read(path)
            had = json.loads(header["settings"])
            passes = json.loads(header["passes"])
            made = cls(settings, [_pass(p, one, tensors) for p, one in enumerate(passes)])
        except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise ValueError(f"{name} holds no calibration that can be resumed: {said}") from error
        for key, mine in settings.items():
            theirs = had.get(key) if isinstance(had, dict) else None
            if theirs != json.loads(json.dumps(mine)):
                if key in _TOLD:
                    what = f"it is of {_TOLD[key]}"
                else:
                    label = key.replace("_", " ")
                    what = f"its {label} is {theirs!r:.60}, this run's {mine!r:.60}"
                raise ValueError(f"{name} cannot be resumed with other settings: {what}")
        tidy(path)
        return made


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("schema") != SCHEMA:
                raise ValueError(f"its schema is {header.get('schema')!r:.60}, not {SCHEMA!r}")
            return header, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"it is not a whole safetensors file: {error}") from error


def _pass(p: int, one: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PassState:
    found = PassSums()
    found.done = int(one["done"])
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
        )
        if not fits:
            raise ValueError(f"the sums of {name!r:.60} are not what a calibration writes")
        found.layers[str(name)] = LayerSums(sums, top, longest)
    for i, (name, k) in enumerate(one["scales"]):
        found.scales[str(name), int(k)] = tensors[f"{p}/{i}/scales"]
    found.unread = tuple(map(str, one["unread"]))
    names = one["factors"]
    factors = None
    if names is not None:
        factors = {str(name): tensors[f"{p}/{i}/factors"] for i, name in enumerate(names)}
    return PassState(factors, bool(one["family"]), found)
