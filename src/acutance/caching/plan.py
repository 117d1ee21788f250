"""CachePlan: what each key head of one model keeps in its key-value cache; a JSON file holds it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

from acutance.caching.layer_shapes import LayerShape, PlanError, cache_shapes
from acutance.calibration.identity import Identity
from acutance.calibration.law import names_in
from acutance.capture.layer_choice import choose_layers
from acutance.files import as_json, write_text
from acutance.from_json import checked, read_json, sealed_json
from acutance.scaling import Window
from acutance.shapes import check_count

__all__ = ["SCHEMA", "Bits", "CachePlan", "HeadPlan", "Kind"]

SCHEMA = "acutance.cache_plan/1"

Kind = Literal["full", "streaming", "dropped"]
Bits = Literal[16, 8, 4, 2]
#: Bytes of the scale and the zero point of a group, both float16.
_SCALE_AND_ZERO = 4


@dataclass(frozen=True)
class HeadPlan:
    """What one key head keeps.

    * ``"full"``: every key and value;
    * ``"streaming"``: the first ``first`` and the newest ``recent``, the row's own key included;
    * ``"dropped"``: nothing. The output of its query heads is zero.

    A precision of 16 bits means not quantised: keys or values stay in the model's dtype. Only full
    heads can be quantised; the few keys of a streaming head stay as they are.

    Attributes:
        kind: full, streaming or dropped.
        first: how many of the first keys a streaming head keeps.
        recent: how many of the newest keys a streaming head keeps.
        key_bits: precision of the keys.
        value_bits: precision of the values.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if a field is unknown or does not fit the kind.

    Example:
        >>> HeadPlan("streaming", first=4, recent=124).keys(4096)
        128
    """

    kind: Kind = "full"
    first: int = 0
    recent: int = 0
    key_bits: Bits = 16
    value_bits: Bits = 16

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be {', '.join(get_args(Kind))}, got {self.kind!r:.60}")
        streams = self.kind == "streaming"
        check_count("first", self.first, 0)
        check_count("recent", self.recent, 1 if streams else 0)
        if not streams and (self.first or self.recent):
            raise ValueError(
                f"only a streaming head has first and recent keys, got first={self.first} and "
                f"recent={self.recent} for a {self.kind} head"
            )
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            if type(bits) is not int or bits not in get_args(Bits):
                known = ", ".join(map(str, get_args(Bits)))
                raise ValueError(f"{name} must be {known}, got {bits!r:.60}")
            if bits < 16 and self.kind != "full":
                raise ValueError(
                    f"only full heads are quantised, got {name}={bits} for {self.kind}"
                )

    @property
    def quantised(self) -> bool:
        """Whether keys or values have less than 16 bits."""
        return self.key_bits < 16 or self.value_bits < 16

    def keys(self, n: int) -> int:
        """Number of keys that it keeps of n tokens."""
        if self.kind == "full":
            return n
        return min(n, self.first + self.recent)

    def bytes(
        self, n: int, shape: LayerShape, *, group: int = 32, residual: int = 32, itemsize: int = 2
    ) -> int:
        """Bytes of its keys and values for n tokens; scales and zero points count.

        Args:
            n: tokens in the cache.
            shape: of its layer.
            group: tokens that share the scale of a key channel, channels that share the scale of a
                value.
            residual: newest tokens that are never quantised.
            itemsize: bytes of a number that is not quantised.

        Example:
            >>> shape = LayerShape(heads=3, query_heads=9, key_width=64, value_width=64)
            >>> [HeadPlan(key_bits=bits, value_bits=bits).bytes(4096, shape) for bits in (16, 8, 4)]
            [1048576, 593408, 333312]
        """
        check_count("n", n, 0)
        if not self.quantised:
            return self.keys(n) * (shape.key_width + shape.value_width) * itemsize
        groups = quantised_groups(n, group, residual)
        packed = groups * group
        plain = (n - packed) * itemsize

        def part(width: int, bits: int, scales: int) -> int:
            if bits == 16:
                return n * width * itemsize
            return packed * width * bits // 8 + scales * _SCALE_AND_ZERO + plain * width

        return part(shape.key_width, self.key_bits, groups * shape.key_width) + part(
            shape.value_width, self.value_bits, packed * value_groups(shape.value_width, group)
        )


def quantised_groups(n: int, group: int, residual: int) -> int:
    """Number of whole groups of tokens that are quantised when a cache holds n tokens.

    Example:
        >>> [quantised_groups(n, 32, 32) for n in (63, 64, 96)]
        [0, 1, 2]
    """
    return max(0, n - residual) // group


def value_groups(width: int, group: int) -> int:
    """Number of scales of one token's value: groups of channels, or one if they do not divide."""
    return width // group if width % group == 0 else 1


@dataclass(frozen=True)
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

    Raises:
        PlanError: if layers and shapes do not fit each other.
        TypeError: if a number is not an integer.
        ValueError: if a number is too small.

    Example:
        >>> from acutance.experiments.models.trained import decoder
        >>> plan = CachePlan.of(decoder(), {(0, 1): HeadPlan("streaming", first=4, recent=60)})
        >>> plan.share(512) < 1
        True
    """

    model: Identity
    shapes: Mapping[str, LayerShape]
    layers: Mapping[str, tuple[HeadPlan, ...]]
    group: int = 32
    residual: int = 32

    def __post_init__(self) -> None:
        if check_count("group", self.group, 8) % 8:
            raise ValueError(f"group must be a multiple of 8, got {self.group}")
        check_count("residual", self.residual, 0)
        if not self.layers or set(self.layers) != set(self.shapes):
            raise PlanError(
                f"a plan needs the same layers in layers and shapes, got {len(self.layers)} and "
                f"{len(self.shapes)}"
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
        rest = HeadPlan() if rest is None else rest
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
        return sum(
            one.bytes(
                n, self.shapes[name], group=self.group, residual=self.residual, itemsize=itemsize
            )
            for name, heads in self.layers.items()
            for one in heads
        )

    def full_bytes(self, n: int, itemsize: int = 2) -> int:
        """Bytes of the full cache, not quantised, of n tokens."""
        return sum(
            shape.heads * HeadPlan().bytes(n, shape, itemsize=itemsize)
            for shape in self.shapes.values()
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
        """Its name in tables: how many of its key heads are full, streaming and dropped."""
        kinds = [one.kind for heads in self.layers.values() for one in heads]
        counts = [f"{kinds.count(kind)} {kind}" for kind in get_args(Kind) if kind in kinds]
        return f"cache plan ({', '.join(counts)})"

    @property
    def words(self) -> str:
        """A text with a digest of the plan; different plans have different ones."""
        text = json.dumps(self.record(), sort_keys=True)
        return f"cache plan {hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def applied(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context in which a model runs under the plan; the same as ``acutance.apply``."""
        raise NotImplementedError("running a model under a plan is not implemented yet")

    def check(self, model: torch.nn.Module) -> CachePlan:
        """This plan with the layer names of a model, after checking that it is for this model.

        Raises:
            PlanError: if it is for another model; the message names the first difference.
        """
        difference = self.model.difference(Identity.of(model))
        if difference is not None:
            raise PlanError(f"this plan is for another model: it has {difference}")
        places = names_in(model, self.layers)
        if missing := [name for name, place in places.items() if place is None]:
            raise PlanError(f"this plan does not fit: the model has no module {missing[0]!r:.60}")
        return type(self)(
            self.model,
            {str(places[name]): shape for name, shape in self.shapes.items()},
            {str(places[name]): heads for name, heads in self.layers.items()},
            self.group,
            self.residual,
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
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON with a digest of itself, whole or not at all."""
        write_text(path, as_json(sealed_json(self.record()), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CachePlan:
        """Load a plan from a file that :meth:`save` wrote.

        Raises:
            PlanError: if the file is not a plan, has another schema version, or has an invalid
                field; the message names the file and the field.
            OSError: if it cannot be opened.
        """
        try:
            return cls._read(read_json(path))
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:400]
            raise PlanError(f"{os.fspath(path)} contains no cache plan: {reason}") from error

    @classmethod
    def _read(cls, record: dict[str, Any]) -> CachePlan:
        """A plan from the JSON values of a file."""
        if record.get("schema") != SCHEMA:
            raise ValueError(f"its schema must be {SCHEMA!r}, got {record.get('schema')!r:.60}")
        known = {"schema", "model", "group", "residual", "layers"}
        if wrong := sorted(set(record) ^ known):
            raise ValueError(
                f"it must have {', '.join(sorted(known))}; wrong is {', '.join(wrong):.60}"
            )
        if not isinstance(record["layers"], dict):
            raise ValueError("layers must be an object")
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
            Identity.from_dict(record["model"]), shapes, layers, record["group"], record["residual"]
        )
