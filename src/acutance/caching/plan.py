"""CachePlan: what each key head of one model keeps in its key-value cache; a JSON file holds it."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

import torch

from acutance.caching.head_plan import FULL, HeadPlan, Kind
from acutance.caching.layer_shapes import LayerShape, PlanError, cache_shapes, check_model
from acutance.calibration.law import Identity, names_in
from acutance.capture.layer_choice import choose_layers
from acutance.files import as_json, write_text
from acutance.from_json import checked, read_json, sealed_json
from acutance.scaling import Window
from acutance.shapes import check_count

if TYPE_CHECKING:
    from acutance.caching.run_plan import AppliedPlan

__all__ = ["CachePlan"]

SCHEMA = "acutance.cache_plan/1"
#: Of files that :meth:`acutance.caching.Budget.to_json` writes, with a plan inside.
BUDGET_SCHEMA = "acutance.budget/1"


@dataclass(frozen=True, repr=False)
class CachePlan:
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
        found = {name: [rest] * shape.heads for name, shape in shapes.items()}
        for place, one in ({} if heads is None else heads).items():
            pair = isinstance(place, tuple) and len(place) == 2
            layer, head = place if pair else (place, None)
            if not isinstance(one, HeadPlan):
                raise TypeError(f"a plan's heads must be HeadPlan, got {type(one).__name__}")
            for name in choose_layers(model, layer, "layer"):
                if name not in shapes:
                    raise ValueError(f"{name} has no key-value cache")
                count = shapes[name].heads
                if head is not None and check_count("head", head, 0) >= count:
                    raise ValueError(f"there is no key head {head}: {name} has {count} key heads")
                for index in range(count) if head is None else [head]:
                    found[name][index] = one
        layers = {name: tuple(kept) for name, kept in found.items()}
        return cls(Identity.of(model), shapes, layers, group, residual)

    # -- bytes ------------------------------------------------------------------------------------

    def bytes(self, n: int, itemsize: int = 2) -> int:
        """Bytes of the cache of one sequence of n tokens, scales and zero points included.

        Args:
            n: tokens in the cache.
            itemsize: bytes of a number that is not quantised: 2 in 16-bit dtypes, 4 in float32.
        """
        total = 0
        for name, heads in self.layers.items():
            for head, count in Counter(heads).items():
                total += count * self.head_bytes(name, head, n, itemsize)
        return total

    def head_bytes(self, module: str, head: HeadPlan, n: int, itemsize: int = 2) -> int:
        """Bytes of a key head of a layer after n tokens, if it keeps what ``head`` says."""
        shape = self.shapes[module]
        return head.bytes(n, shape, group=self.group, residual=self.residual, itemsize=itemsize)

    def head_share(self, module: str, head: HeadPlan, n: int) -> float:
        """:meth:`head_bytes` as a share of the full 16-bit cache of such a head."""
        return self.head_bytes(module, head, n) / self.head_bytes(module, FULL, n)

    def full_bytes(self, n: int, itemsize: int = 2) -> int:
        """Bytes of the full cache, not quantised, of n tokens."""
        shapes = Counter(self.shapes.values())
        return sum(
            count * shape.heads * FULL.bytes(n, shape, itemsize=itemsize)
            for shape, count in shapes.items()
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
        found = {}
        for name, heads in self.layers.items():
            share = self.shapes[name].queries_per_key
            for head, one in enumerate(heads):
                if one.kind == "dropped" or one.quantised:
                    what = "dropped" if one.kind == "dropped" else "quantised"
                    raise ValueError(
                        f"key head {head} of {name} is {what}, which a window cannot express; "
                        "apply the plan itself"
                    )
                if one.kind == "streaming":
                    window = Window(one.recent, sinks=one.first)
                    found.update({(name, head * share + i): window for i in range(share)})
        return found

    # -- what judge and apply ask for -------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name in tables: its title, or how many of its key heads keep what.

        Full heads in fewer than 16 bits are counted by their bits, keys before values.
        """
        if self.title:
            return self.title
        heads = [one for some in self.layers.values() for one in some]
        rounded = Counter(one.symbol for one in heads if one.quantised)
        kinds = Counter(one.kind for one in heads if not one.quantised)
        counts = [f"{kinds['full']} full"] if kinds["full"] else []
        counts += [f"{rounded[bits]} in {bits}s" for bits in sorted(rounded, reverse=True)]
        counts += [f"{kinds[kind]} {kind}" for kind in get_args(Kind)[1:] if kinds[kind]]
        return f"cache plan ({', '.join(counts)})"

    @property
    def words(self) -> str:
        """A text with a digest of the plan; different plans have different ones."""
        text = json.dumps(replace(self, search=None).record(), sort_keys=True)
        return f"cache plan {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def applied(self, model: torch.nn.Module) -> AppliedPlan:
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
        from acutance.caching.export_plan import export_plan

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
