"""CachePlan: what each key head of a model keeps in its cache; its files, ours and other tools'."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from acutance.caching.head_plan import (
    FULL,
    HeadPlan,
    Kind,
    LayerShape,
    PlanError,
    cache_shapes,
    check_model,
)
from acutance.calibration.apply_law import Change
from acutance.calibration.law import Identity, names_in
from acutance.capture.find_layers import choose_layers, class_name
from acutance.escapes import ranges
from acutance.files import as_json, check_regular, write_text
from acutance.from_json import checked, read_json, sealed_json
from acutance.scaling import Window
from acutance.shapes import check_count

if TYPE_CHECKING:
    from acutance.caching.run_plan import AppliedPlan


SCHEMA = "acutance.cache_plan/1"
#: Of files that :meth:`acutance.caching.Budget.to_json` writes, with a plan inside.
BUDGET_SCHEMA = "acutance.budget/1"


@dataclass(frozen=True, repr=False)
class CachePlan(Change):
    """What each key head of a model keeps in the key-value cache, and which model that is.

    :func:`acutance.apply` runs a model under a plan, :func:`acutance.judge` measures its loss.
    Quantised keys have one scale per channel and group of ``group`` tokens, values one per token
    and group of ``group`` channels. A row with n visible keys reads the first
    ⌊(n − residual) / group⌋ groups quantised, and the rest, its newest keys, as they are.

    Attributes:
        model: the model's identity.
        shapes: heads and widths of each layer, by module name.
        layers: what each key head keeps, by module name.
        group: tokens, or channels, that share a scale; a multiple of 8.
        residual: newest tokens that are never quantised.
        search: what :func:`acutance.budget` measured of it: ``n`` tokens of its windows, the full
            cache's ``mean_loss``, the change ``delta`` with its ``error``, and ``recall`` of
            planted spans by cache. None if it was not searched for. No part of the plan's identity.
        title: its name in tables, instead of what its heads keep; no part of its identity either.

    Raises:
        PlanError: if layers and shapes do not fit each other.
        TypeError: if a number is not an integer.
        ValueError: if a number is too small.

    Example:
        >>> from acutance.reproduce import decoder
        >>> plan = CachePlan.of(decoder(), {(0, 1): HeadPlan("streaming", first=4, recent=60)})
        >>> plan.share(512) < 1
        True
    """

    model: Identity
    shapes: Mapping[str, LayerShape]
    layers: Mapping[str, tuple[HeadPlan, ...]]
    group: int = 32
    residual: int = 32
    search: Mapping[str, Any] | None = field(default=None, compare=False)
    title: str = field(default="", compare=False, kw_only=True)

    def __repr__(self) -> str:
        heads = Counter(head.kind for layer in self.layers.values() for head in layer)
        kinds = ", ".join(f"{count} {kind}" for kind, count in heads.items())
        return f"<CachePlan for {self.model.architecture}: {kinds} key heads>"

    def __post_init__(self) -> None:
        if check_count("group", self.group, 8) % 8:
            raise ValueError(f"group must be a multiple of 8, got {self.group}")
        check_count("residual", self.residual, 0)
        if not self.layers or set(self.layers) != set(self.shapes):
            raise PlanError(
                f"layers and shapes must name the same layers, got {len(self.layers)} and "
                f"{len(self.shapes)} of them"
            )
        for name, heads in self.layers.items():
            if len(heads) != self.shapes[name].heads:
                raise PlanError(
                    f"{name} has {self.shapes[name].heads} key heads, but the plan has {len(heads)}"
                )

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        heads: Mapping[Any, HeadPlan] | HeadPlan | None = None,
        *,
        rest: HeadPlan | None = None,
        group: int = 32,
        residual: int = 32,
    ) -> CachePlan:
        """A plan for a model, whose cache is looked at in a forward pass of one token.

        Args:
            model: a causal language model of transformers.
            heads: what key heads keep: a mapping from layer or (layer, key head), with layers
                named as for :func:`acutance.apply`, or one :class:`HeadPlan` for all heads.
            rest: what the heads left out keep; None keeps them full.
            group: tokens, or channels, that share a scale; a multiple of 8.
            residual: newest tokens that are never quantised.

        Raises:
            PlanError: if the model has no cache that a plan can describe.
            TypeError: if ``heads`` has another form.
            ValueError: if a layer or head does not exist.
        """
        shapes = cache_shapes(model)
        rest = FULL if rest is None else rest
        if isinstance(heads, HeadPlan):
            rest, heads = heads, None
        layers = {name: [rest] * shape.heads for name, shape in shapes.items()}
        for place, kept in (heads or {}).items():
            layer, head = place if isinstance(place, tuple) and len(place) == 2 else (place, None)
            if not isinstance(kept, HeadPlan):
                raise TypeError(f"a plan's heads must be HeadPlan, got {type(kept).__name__}")
            for name in choose_layers(model, layer, "layer"):
                if name not in shapes:
                    raise ValueError(f"{name} has no key-value cache")
                count = shapes[name].heads
                if head is None:
                    layers[name] = [kept] * count
                elif check_count("head", head, 0) >= count:
                    raise ValueError(f"there is no key head {head}: {name} has {count} key heads")
                else:
                    layers[name][head] = kept
        frozen = {name: tuple(kept) for name, kept in layers.items()}
        return cls(Identity.of(model), shapes, frozen, group, residual)

    # -- bytes ------------------------------------------------------------------------------------

    def bytes(self, n: int, itemsize: int = 2) -> int:
        """Bytes of the cache of one sequence of n tokens, scales and zero points included.

        Args:
            n: tokens in the cache.
            itemsize: bytes of a number that is not quantised: 2 in 16-bit dtypes, 4 in float32.
        """
        return sum(
            count * self.head_bytes(name, head, n, itemsize)
            for name, heads in self.layers.items()
            for head, count in Counter(heads).items()
        )

    def head_bytes(self, module: str, head: HeadPlan, n: int, itemsize: int = 2) -> int:
        """Bytes of a key head of a layer after n tokens, if it keeps what ``head`` says."""
        shape = self.shapes[module]
        return head.bytes(n, shape, group=self.group, residual=self.residual, itemsize=itemsize)

    def head_share(self, module: str, head: HeadPlan, n: int) -> float:
        """:meth:`head_bytes` as a share of the full 16-bit cache of such a head."""
        return self.head_bytes(module, head, n) / self.head_bytes(module, FULL, n)

    def full_bytes(self, n: int, itemsize: int = 2) -> int:
        """Bytes of the full cache, not quantised, of n tokens."""
        return sum(
            count * shape.heads * FULL.bytes(n, shape, itemsize=itemsize)
            for shape, count in Counter(self.shapes.values()).items()
        )

    def share(self, n: int) -> float:
        """Bytes of the cache of n tokens as a share of the full 16-bit cache."""
        check_count("n", n, 1)
        return self.bytes(n) / self.full_bytes(n)

    # -- the same plan as a mask ------------------------------------------------------------------

    def law(self) -> dict[tuple[str, int], Window]:
        """The windows of the streaming heads, by module name and query head.

        :func:`acutance.apply` takes this mapping as a law, which hides keys and stores them all; it
        is empty if no head streams.

        Raises:
            ValueError: if heads are dropped or quantised, which no window can express.
        """
        windows = {}
        for name, heads in self.layers.items():
            share = self.shapes[name].queries_per_key
            for head, kept in enumerate(heads):
                if kept.kind == "dropped" or kept.quantised:
                    what = "dropped" if kept.kind == "dropped" else "quantised"
                    raise ValueError(
                        f"key head {head} of {name} is {what}, which a window cannot express; "
                        "apply the plan itself"
                    )
                if kept.kind == "streaming":
                    window = Window(kept.recent, sinks=kept.first)
                    windows.update({(name, head * share + i): window for i in range(share)})
        return windows

    # -- what judge and apply ask for -------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name in tables: its title, or how many of its key heads keep what.

        Full heads in fewer than 16 bits are counted by their bits, keys before values.
        """
        if self.title:
            return self.title
        heads = [head for layer in self.layers.values() for head in layer]
        rounded = Counter(head.symbol for head in heads if head.quantised)
        kinds = Counter(head.kind for head in heads if not head.quantised)
        counts = [f"{kinds['full']} full"] if kinds["full"] else []
        counts += [f"{rounded[bits]} in {bits}s" for bits in sorted(rounded, reverse=True)]
        counts += [f"{kinds[kind]} {kind}" for kind in get_args(Kind)[1:] if kinds[kind]]
        return f"cache plan ({', '.join(counts)})"

    @property
    def words(self) -> str:
        """A text with a digest of the plan; different plans have different ones."""
        text = json.dumps(replace(self, search=None).record(), sort_keys=True)
        return f"cache plan {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def titled(self, name: str) -> CachePlan:
        """The same plan under another name."""
        return replace(self, title=name)

    def on(self, model: torch.nn.Module) -> AppliedPlan:
        """Run a model under the plan, as ``acutance.apply(model, plan)`` does.

        Every forward pass and every ``generate`` that brings no cache gets a
        :class:`~acutance.caching.PlannedCache`. Rows read the same keys in one pass, in chunks and
        in decoding.

        Returns:
            What is in force at once and until ``restore()``, or as a context manager until it ends.

        Raises:
            PlanError: if the plan is for another model, or the model's cache cannot be planned.
        """
        check_model(model)
        from acutance.caching.run_plan import AppliedPlan

        return AppliedPlan(model, self.check(model))

    def check(self, model: torch.nn.Module) -> CachePlan:
        """This plan with the layer names of a model, after checking that it is for this model.

        Raises:
            PlanError: if it is for another model; the message names the first difference.
        """
        difference = self.model.difference(Identity.of(model))
        if difference is not None:
            raise PlanError(
                f"this plan is for another model, {self.model.architecture}, not for this "
                f"{Identity.of(model).architecture}: it has {difference}"
            )
        places = names_in(model, self.layers)
        if missing := [name for name, place in places.items() if place is None]:
            raise PlanError(
                f"this plan does not match the model, which has no module {missing[0]!r:.60}"
            )
        return replace(
            self,
            shapes={str(places[name]): shape for name, shape in self.shapes.items()},
            layers={str(places[name]): heads for name, heads in self.layers.items()},
        )

    # -- files ------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """The plan as JSON-serialisable values."""
        return {
            "schema": SCHEMA,
            "model": self.model.to_dict(),
            "group": self.group,
            "residual": self.residual,
            "layers": {
                name: asdict(self.shapes[name]) | {"plan": [asdict(one) for one in heads]}
                for name, heads in self.layers.items()
            },
        } | ({} if self.search is None else {"search": dict(self.search)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON with a digest of itself, whole or not at all."""
        write_text(path, as_json(sealed_json(self.record()), indent=1) + "\n")

    def export(self, name: str, path: str | os.PathLike[str]) -> tuple[str, ...]:
        """Write the plan for another tool: ``kvpress``, ``duo_attention`` or ``layer_types``.

        See :func:`acutance.caching.export_plan`, which returns what the format cannot express.
        """
        return export_plan(self, name, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CachePlan:
        """Load a plan from a file that :meth:`save` or ``acutance budget --json`` wrote.

        :func:`acutance.caching.import_plan` reads those of other tools.

        Raises:
            PlanError: if the file is not a plan, has another schema version, or has an invalid
                field; the message names the file and the field.
            OSError: if it cannot be opened.
        """
        try:
            record = read_json(path)
            is_budget = str(record.get("schema")).startswith("acutance.budget/")
            inside = record.get("plan")
            return cls._read(inside if is_budget and isinstance(inside, dict) else record)
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:400]
            raise PlanError(f"{os.fspath(path)} contains no cache plan: {reason}") from error

    @classmethod
    def _read(cls, record: dict[str, Any]) -> CachePlan:
        """A plan from the JSON values of a file."""
        if record.get("schema") != SCHEMA:
            raise ValueError(f"its schema must be {SCHEMA!r}, got {record.get('schema')!r:.60}")
        known = {"schema", "model", "group", "residual", "layers"}
        if wrong := sorted((set(record) - {"search"}) ^ known):
            raise ValueError(
                f"it must have {', '.join(sorted(known))}; wrong is {', '.join(wrong):.60}"
            )
        if not isinstance(record["layers"], dict):
            raise ValueError("layers must be an object")
        search = record.get("search")
        if search is not None:
            if not isinstance(search, dict):
                raise ValueError("search must be an object")
            check_count("search.n", search.get("n", 0), 1)
        shapes, layers = {}, {}
        for name, layer in record["layers"].items():
            place = f"layer {name!r:.60}"
            if not isinstance(layer, dict) or not isinstance(layer.get("plan"), list):
                raise ValueError(f"{place} must have a list under 'plan'")
            shape = {part: value for part, value in layer.items() if part != "plan"}
            shapes[name] = checked(LayerShape, shape, place)
            layers[name] = tuple(
                checked(HeadPlan, one, f"head {head} of {place}")
                for head, one in enumerate(layer["plan"])
            )
        return cls(
            Identity.from_dict(record["model"]), shapes, layers, record["group"],
            record["residual"], search,
        )  # fmt: skip


#: Files of a folder that DuoAttention loads.
TABLE, SETTINGS = "full_attention_heads.tsv", "config.json"


#: Picks key heads of a plan, by the module name of their layer and what they keep.
_Pick = Callable[[str, HeadPlan], bool]
#: Text by file name ("" for the path itself), and what is lost.
_Export = tuple[dict[str, str], list[str]]


def export_plan(plan: CachePlan, name: str, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write a plan in another tool's format.

    Args:
        plan: to write.
        name: of the format, one of :data:`EXPORTS`.
        path: the file to write; for ``duo_attention`` a directory, which is made if it is missing.

    Returns:
        What the format cannot express, one sentence for each kind of loss, with the heads as
        LAYER.HEAD; empty if it expresses the whole plan.

    Raises:
        OSError: if the file cannot be written.
        PlanError: if the format has no place for a plan of this shape.
        ValueError: if there is no such format.
    """
    check_export(name)
    files, lost = EXPORTS[name](plan)
    target = Path(path)
    if "" not in files:
        target.mkdir(exist_ok=True)
    for part, text in files.items():
        write_text(target / part if part else target, text)
    return tuple(lost)


def check_export(name: str) -> None:
    """Raise ValueError unless there is an export format of this name."""
    if name not in EXPORTS:
        known = ", ".join(EXPORTS)
        raise ValueError(f"export: there is no format {name!r:.60}; the formats are {known}")


# -- heads as text ---------------------------------------------------------------------------------


def places(plan: CachePlan, pick: _Pick) -> str:
    """The key heads for which ``pick`` is true, in words, as LAYER.HEAD; "" if it is for none.

    Example:
        >>> from acutance import CachePlan
        >>> from acutance.reproduce import decoder
        >>> plan = CachePlan.of(decoder(), {0: HeadPlan("dropped"), (1, 1): HeadPlan("dropped")})
        >>> places(plan, lambda layer, head: head.kind == "dropped")
        'Key heads 1.1 and all of layer 0'
    """
    layers: list[int] = []
    single: list[str] = []
    for layer, (name, heads) in enumerate(plan.layers.items()):
        picked = [index for index, head in enumerate(heads) if pick(name, head)]
        if len(picked) == len(heads):
            layers.append(layer)
        else:
            single += [f"{layer}.{index}" for index in picked]
    heads_of = f"Key heads {', '.join(single)}"
    all_of = f"of {ranges(layers, 'layer')}"
    if not layers or not single:
        return heads_of if single else f"All key heads {all_of}" if layers else ""
    return f"{heads_of} and all {all_of}"


def _lost(plan: CachePlan, reasons: Mapping[str, _Pick]) -> list[str]:
    """For each reason why heads lose something, a sentence with the heads, if there are any."""
    heads = {reason: places(plan, pick) for reason, pick in reasons.items()}
    return [f"{where} {reason}." for reason, where in heads.items() if where]


def _quantised(_: str, head: HeadPlan) -> bool:
    return head.quantised


def _dropped(_: str, head: HeadPlan) -> bool:
    return head.kind == "dropped"


# -- formats ---------------------------------------------------------------------------------------


def _export_kvpress(plan: CachePlan) -> _Export:
    """A Python file with a press for kvpress."""

    def kept(head: HeadPlan) -> str:
        return "None" if head.kind == "full" else f"({head.first}, {head.recent})"

    rows = [f"    [{', '.join(map(kept, heads))}]," for heads in plan.layers.values()]
    lost = _lost(
        plan,
        {
            "keep 16 bits, as kvpress does not round single heads": _quantised,
            "read the row's own key and value instead of nothing": _dropped,
        },
    )
    lost.append(
        "kvpress reads the prompt with full attention, and masks the keys that heads drop instead "
        "of removing them, so the cache keeps its size."
    )
    return {"": _PRESS.replace("    # heads", "\n".join(rows))}, lost


def _export_duo_attention(plan: CachePlan) -> _Export:
    """DuoAttention's table of full-attention heads, with the sizes of streaming heads."""
    counts = {len(heads) for heads in plan.layers.values()}
    if len(counts) > 1:
        raise PlanError(
            "DuoAttention's table needs the same number of key heads in all layers, and this "
            f"plan's layers have {_either(counts)}"
        )
    first = max(head.first for heads in plan.layers.values() for head in heads)
    recent = max(1, *(head.recent for heads in plan.layers.values() for head in heads))
    table = "".join(
        "\t".join("1.0" if head.kind == "full" else "0.0" for head in heads) + "\n"
        for heads in plan.layers.values()
    )
    kept = f"keep {first} first and {recent} recent keys"
    lost = {
        "keep 16 bits, as the table has no precisions": _quantised,
        f"{kept} instead of nothing": _dropped,
        f"{kept}, more than planned, as the table has one size for all streaming heads": (
            lambda _, head: (
                head.kind == "streaming" and (head.first, head.recent) != (first, recent)
            )
        ),
    }
    sizes = as_json({"sink_size": first, "recent_size": recent})
    return {TABLE: table, SETTINGS: f"{sizes}\n"}, _lost(plan, lost)


def _export_layer_types(plan: CachePlan) -> _Export:
    """``layer_types`` and ``sliding_window`` of a transformers configuration, as JSON."""
    sliding = {
        name
        for name, heads in plan.layers.items()
        if all(head.kind == "streaming" for head in heads)
    }
    recent = max((head.recent for name in sliding for head in plan.layers[name]), default=1)
    types = ["sliding_attention" if name in sliding else "full_attention" for name in plan.layers]
    record = {
        "layer_types": types,
        "sliding_window": recent if sliding else None,
        "use_sliding_window": bool(sliding),
    }
    lost = {
        "keep 16 bits, as layer_types has no precisions": _quantised,
        "keep all keys, as layer_types drops no heads": _dropped,
        "keep all keys, as layer_types lets only whole layers stream": (
            lambda name, head: head.kind == "streaming" and name not in sliding
        ),
        "lose their first keys, as a sliding window keeps only recent ones": (
            lambda name, head: name in sliding and head.first > 0
        ),
        f"keep {recent} recent keys, more than planned, as there is one sliding_window": (
            lambda name, head: name in sliding and head.recent != recent
        ),
    }
    text = as_json(record, indent=1) + "\n"
    return {"": text}, _lost(plan, lost) + _ignored(plan.model.architecture)


def _ignored(architecture: str) -> list[str]:
    """A sentence if the installed transformers does not read layer_types for this class."""
    import transformers

    kind = getattr(transformers, architecture, None)
    source = None if kind is None else inspect.getsourcefile(kind)
    if source is None or "layer_types" in Path(source).read_text(encoding="utf-8"):
        return []
    return [
        f"{architecture} of transformers {transformers.__version__} ignores layer_types: the file "
        "is of use only for a class that reads it, such as Qwen2ForCausalLM."
    ]


#: Formats by name: what makes the texts of their files, and the sentences about what is lost.
EXPORTS: dict[str, Callable[[CachePlan], _Export]] = {
    "kvpress": _export_kvpress,
    "duo_attention": _export_duo_attention,
    "layer_types": _export_layer_types,
}

_PRESS = '''"""A cache plan as a press for kvpress (written for 0.5.5).

Enter the press around the whole generation, for one sequence without padding:

    with press(model):
        model.generate(...)

kvpress's pipeline enters it for the prompt alone; then heads also keep every key generated later.
"""

import torch
from kvpress import BasePress

#: First and recent keys that each key head of each layer keeps; None is all of them.
HEADS = [
    # heads
]


class CachePlanPress(BasePress):
    """Masks the keys that heads drop, for every token after the prompt."""

    def post_init_from_model(self, model):
        """Refuse a model with other layers or key heads."""
        config = model.config
        layers = config.num_hidden_layers
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if layers != len(HEADS) or any(heads != len(layer) for layer in HEADS):
            raise ValueError(
                f"the plan has {len(HEADS)} layers of {len(HEADS[0])} key heads, but "
                f"{type(model).__name__} has {layers} of {heads}"
            )
        if config._attn_implementation == "eager":
            raise ValueError("kvpress masks no keys of single heads in eager attention")

    def forward_hook(self, module, input, kwargs, output):
        """After a layer has run, mask what its next token does not read."""
        cache = kwargs["cache" if "cache" in kwargs else "past_key_values"]
        keys = cache.layers[module.layer_idx].keys
        stored = keys.shape[2]
        masked = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        for head, kept in enumerate(HEADS[module.layer_idx]):
            if kept is not None:
                first, recent = kept  # the next token's own key is one of the recent ones
                masked[:, head, first : max(first, stored - max(recent - 1, 0))] = True
        module.masked_key_indices = torch.nonzero(masked, as_tuple=True)
        return output


press = CachePlanPress()
'''


#: Bytes of a table.
_LARGEST = 16 << 20
_OPTION = re.compile(r",(threshold|sparsity|first|recent)=([^,=]*)$")


@dataclass(frozen=True)
class ForeignPlan(Change):
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
            asdict(kept) if isinstance(kept, HeadPlan) else [asdict(head) for head in kept]
            for kept in self.layers
        ]
        return f"imported plan {hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]}"

    def plan(self, model: torch.nn.Module) -> CachePlan:
        """The plan for a model.

        Raises:
            PlanError: if the model has other layers or key heads, or no cache to plan.
        """
        full = CachePlan.of(model)
        layers = {
            name: (kept,) * len(heads) if isinstance(kept, HeadPlan) else kept
            for (name, heads), kept in zip(full.layers.items(), self.layers, strict=False)
        }
        counts = [len(heads) for heads in full.layers.values()]
        if len(self.layers) != len(counts) or counts != [*map(len, layers.values())]:
            named = [len(kept) for kept in self.layers if not isinstance(kept, HeadPlan)]
            mine = f" of {_either(named)} key heads" if named else ""
            theirs = f" of {_either(counts)}" if named else ""
            raise PlanError(
                f"{self.name} is for a model of {len(self.layers)} layers{mine}, but "
                f"{class_name(model)} has {len(counts)} layers{theirs}"
            )
        return replace(full, layers=layers)

    def titled(self, name: str) -> ForeignPlan:
        """The same plan under another name."""
        return replace(self, name=name)

    def on(self, model: torch.nn.Module) -> AppliedPlan:
        """Run a model under the plan, see :meth:`acutance.CachePlan.on`."""
        return self.plan(model).on(model)


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
    while match := _OPTION.search(path):
        path = path[: match.start()]
        options[match[1]] = match[2]
    try:
        return ForeignPlan(text, IMPORTS[name](Path(path), options))
    except PlanError as error:
        raise PlanError(f"{text}: {error}") from error


_Layers = tuple[tuple[HeadPlan, ...] | HeadPlan, ...]


def _import_duo_attention(path: Path, options: dict[str, str]) -> _Layers:
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
        sizes = {name: record.get(name) if size is None else size for name, size in sizes.items()}
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
            f"of {_either(len(row) for row in rows) or 'none'}"
        )
    values = np.array(rows)
    if not np.isfinite(values).all():
        raise PlanError(f"{path.name} must have finite numbers")
    return values


def _import_layer_types(path: Path, options: dict[str, str]) -> _Layers:
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
    "duo_attention": _import_duo_attention,
    "layer_types": _import_layer_types,
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


def _either(numbers: Iterable[int]) -> str:
    """``2 or 3``."""
    return " or ".join(map(str, sorted(set(numbers))))
