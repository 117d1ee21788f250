"""Read the cache plans of other tools: DuoAttention's table, and ``layer_types``."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from acutance.caching.export_plan import SETTINGS, TABLE
from acutance.caching.head_plan import HeadPlan
from acutance.caching.layer_shapes import PlanError
from acutance.caching.plan import CachePlan
from acutance.capture.find_layers import class_name
from acutance.files import check_regular
from acutance.from_json import read_json
from acutance.shapes import check_count

if TYPE_CHECKING:
    from acutance.caching.run_plan import AppliedPlan

#: Bytes of a table.
_LARGEST = 16 << 20
_OPTION = re.compile(r"(threshold|sparsity|first|recent)=([^,=]*)")


@dataclass(frozen=True)
class ForeignPlan:
    """A plan of another tool, which fits any model with as many layers and key heads.

    Attributes:
        name: what it was read from, as ``duo_attention:DIR``.
        layers: what the key heads of each layer keep; one entry where all heads of it are the same.
    """

    name: str
    layers: tuple[tuple[HeadPlan, ...] | HeadPlan, ...]

    @property
    def words(self) -> str:
        """A text with a digest of the plan; different plans have different ones."""
        record = [
            asdict(part) if isinstance(part, HeadPlan) else [asdict(one) for one in part]
            for part in self.layers
        ]
        return f"imported plan {hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]}"

    def plan(self, model: torch.nn.Module) -> CachePlan:
        """The plan for a model.

        Raises:
            PlanError: if the model has other layers or key heads, or no cache to plan.
        """
        whole = CachePlan.of(model)
        counts = [len(heads) for heads in whole.layers.values()]
        fits = len(counts) == len(self.layers) and all(
            isinstance(part, HeadPlan) or len(part) == count
            for part, count in zip(self.layers, counts, strict=False)
        )
        if not fits:
            heads = sorted({len(part) for part in self.layers if not isinstance(part, HeadPlan)})
            mine = f" of {_either(heads)} key heads" if heads else ""
            theirs = f" of {_either(sorted(set(counts)))}" if heads else ""
            raise PlanError(
                f"{self.name} is for a model of {len(self.layers)} layers{mine}, but "
                f"{class_name(model)} has {len(counts)} layers{theirs}"
            )
        layers = {
            name: (part,) * len(heads) if isinstance(part, HeadPlan) else part
            for (name, heads), part in zip(whole.layers.items(), self.layers, strict=True)
        }
        return CachePlan(whole.model, whole.shapes, layers)

    def applied(self, model: torch.nn.Module) -> AppliedPlan:
        """Run a model under the plan, see :meth:`acutance.CachePlan.applied`."""
        return self.plan(model).applied(model)


def import_plan(source: str | os.PathLike[str], model: torch.nn.Module) -> CachePlan:
    """Read a plan for a model from a file of acutance or of another tool.

    Args:
        source: one of

            * a file that :meth:`acutance.CachePlan.save` wrote;
            * ``duo_attention:DIR``, a directory with DuoAttention's ``full_attention_heads.tsv``, a
              value in [0, 1] for each key head, and ``config.json``; or such a table, with
              ``,first=N,recent=N``. Heads above 0.5, or ``,threshold=X``, are full, and the rest
              stream; with ``,sparsity=X`` the share X of the heads with the least values streams;
            * ``layer_types:FILE``, the ``config.json`` of a transformers model: layers of
              ``sliding_attention`` stream with ``sliding_window`` recent keys.
        model: a causal language model of transformers.

    Raises:
        OSError: if a file cannot be read.
        PlanError: if a file is no plan, or is the plan of another model.
        ValueError: if an option is wrong.

    Example:
        >>> import tempfile
        >>> from acutance.reproduce import decoder
        >>> plan = CachePlan.of(decoder(), {1: HeadPlan("streaming", first=4, recent=60)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lost = plan.export("duo_attention", folder)
        ...     import_plan(f"duo_attention:{folder}", decoder()) == plan
        True
    """
    foreign = read_foreign(os.fspath(source))
    return CachePlan.load(source).check(model) if foreign is None else foreign.plan(model)


def read_foreign(text: str) -> ForeignPlan | None:
    """The plan of another tool that a text names; None if it begins with none of their names.

    Raises:
        OSError: if a file cannot be read.
        PlanError: if a file is no plan.
        ValueError: if an option is wrong.
    """
    name, colon, rest = text.partition(":")
    if not colon or name not in IMPORTS or os.path.exists(text):
        return None
    path, options = rest, {}
    while match := re.search(rf",{_OPTION.pattern}$", path):
        path = path[: match.start()]
        options[match[1]] = match[2]
    try:
        return ForeignPlan(text, IMPORTS[name](Path(path), options))
    except PlanError as error:
        raise PlanError(f"{text}: {error}") from error


_Layers = tuple[tuple[HeadPlan, ...] | HeadPlan, ...]


def _duo_attention(path: Path, options: dict[str, str]) -> _Layers:
    """The heads of DuoAttention's table."""
    if not path.exists():
        raise PlanError(f"there is no file or directory at {path}")
    folder = path.is_dir()
    table = path / TABLE if folder else path
    settings = (path if folder else path.parent) / SETTINGS
    sizes = {"sink_size": options.get("first"), "recent_size": options.get("recent")}
    if None in sizes.values():
        if not settings.is_file():
            raise PlanError(
                f"the table has no sizes of streaming heads and there is no {settings.name}: add "
                ",first=N,recent=N"
            )
        record = _json(settings)
        sizes = {part: record.get(part) if one is None else one for part, one in sizes.items()}
    first = check_count("first", _whole("first", sizes["sink_size"]), 0)
    recent = check_count("recent", _whole("recent", sizes["recent_size"]), 1)
    values = _values(table)
    if "threshold" in options and "sparsity" in options:
        raise ValueError("duo_attention: give threshold or sparsity, not both")
    if "sparsity" in options:
        share = _number("sparsity", options["sparsity"])
        count = round(share * values.size)
        order = np.argsort(values, axis=None, kind="stable")
        rank = np.argsort(order, kind="stable").reshape(values.shape)
        full: list[list[bool]] = (rank >= count).tolist()
    else:
        full = (values > _number("threshold", options.get("threshold", "0.5"))).tolist()
    streaming = HeadPlan("streaming", first=first, recent=recent)
    return tuple(tuple(HeadPlan() if one else streaming for one in row) for row in full)


def _values(path: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The numbers of a tab-separated table, one line for each layer."""
    check_regular(path)
    if path.stat().st_size > _LARGEST:
        raise PlanError(f"{path.name} is larger than {_LARGEST >> 20} MiB")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [[float(one) for one in line.split("\t")] for line in lines if line.strip()]
    except ValueError as error:
        raise PlanError(f"{path.name} must be numbers separated by tabs: {error}") from None
    if not rows or len({len(row) for row in rows}) > 1:
        raise PlanError(
            f"{path.name} must have one line for each layer, all of as many key heads, got lines "
            f"of {_either(sorted({len(row) for row in rows})) or 'none'}"
        )
    values = np.array(rows)
    if not np.isfinite(values).all():
        raise PlanError(f"{path.name} must have finite numbers")
    return values


def _layer_types(path: Path, options: dict[str, str]) -> _Layers:
    """The layers of a transformers configuration."""
    if options:
        raise ValueError(f"layer_types has no option {next(iter(options))}")
    record = _json(path)
    types, window = record.get("layer_types"), record.get("sliding_window") or 0
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or not types or not all(isinstance(one, str) for one in types):
        raise PlanError(f"{path.name} has no list layer_types")
    if unknown := sorted(set(types) - known):
        raise PlanError(f"a cache plan cannot express layers of {unknown[0]!r:.60}")
    slides = "sliding_attention" in types
    if slides and (type(window) is not int or window < 1):
        raise PlanError(f"sliding_window of {path.name} must be at least 1, got {window!r:.60}")
    streaming = HeadPlan("streaming", recent=window) if slides else HeadPlan()
    return tuple(streaming if one == "sliding_attention" else HeadPlan() for one in types)


#: Readers by the name before the colon.
IMPORTS: dict[str, Callable[[Path, dict[str, str]], _Layers]] = {
    "duo_attention": _duo_attention,
    "layer_types": _layer_types,
}


def _json(path: Path) -> dict[str, Any]:
    """The record of a JSON file."""
    try:
        return read_json(path)
    except ValueError as error:
        raise PlanError(f"{path.name}: {error}") from None


def _whole(name: str, value: object) -> int:
    """A whole number from an option or a file."""
    if type(value) is int:
        return value
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    raise PlanError(f"{name} must be a whole number, got {value!r:.60}")


def _number(name: str, text: str) -> float:
    """A number in [0, 1] from an option."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"duo_attention: {name} must be a number in [0, 1], got {text!r:.60}")
    return value


def _either(numbers: list[int]) -> str:
    """``2 or 3``."""
    return " or ".join(map(str, numbers))
