"""Law: which scaling and window each head of one model has; a small JSON file holds it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch

from acutance.calibration.head_laws import HeadLaws, LawPart, part_record, read_part
from acutance.calibration.identity import Identity, longest, positions_are_learned
from acutance.capture.find_layers import attention_layers
from acutance.capture.head_axis import heads_of
from acutance.capture.layer_choice import choose_layers
from acutance.capture.module_names import named_modules, unwrap
from acutance.files import as_json, write_text
from acutance.from_json import read_json, sealed_json
from acutance.scaling import Scaling, Window
from acutance.scaling.learned import LearnedScaling
from acutance.shapes import check_count
from acutance.summary.layer import NOT_LOADED

__all__ = ["Law", "LawError"]

SCHEMA = "acutance.law/1"
_JUDGED = "judged"
_UNTRAINED = "untrained"

#: Layers by block number, range, name or pattern, as
#: :class:`acutance.capture.layer_choice.LayerChoice` reads them.
LayerName: TypeAlias = int | str
#: One scaling, window or pair of them for all, or one for each layer or head.
AnyLaw: TypeAlias = "LawPart | Law | Mapping[Any, LawPart]"


_T_co = TypeVar("_T_co", covariant=True)


@runtime_checkable
class Change(Protocol[_T_co]):
    """A change of a model that applies itself, such as a plan for its cache."""

    def applied(self, model: torch.nn.Module) -> _T_co:
        """Change the model; what is returned is a context manager whose end restores it."""


class LawError(ValueError):
    """A law file cannot be read, or does not fit the model."""


@dataclass(frozen=True, repr=False)
class Law:
    """The scalings and windows of one model's heads, and which model that is.

    Attributes:
        model: the model's identity.
        everywhere: the scaling of layers that ``layers`` does not name; None leaves them alone.
        layers: module name, and the scalings and windows of its heads.
        lengths: lengths at which it was fitted, none if it was not.
        target: what was held constant, None if nothing was.
        weights_not_loaded: which weights of the model it was fitted to were random, None if none.
        judged: what it does to the loss of held-out text, a record as
            :meth:`acutance.judging.LawComparison.to_dict` gives; None if that was not measured.
        window: the window of layers that ``layers`` does not name; None if they have none.
        untrained: whether the weights that it was fitted to look untrained.

    Example:
        >>> from acutance import scaling
        >>> model = torch.nn.TransformerEncoderLayer(8, 2)
        >>> law = Law.of(model, {(0, 1): scaling.LogN(train_length=64)})
        >>> name, laws = law.layers[0]
        >>> name, laws.heads[0][1].train_length
        ('self_attn', 64)
    """

    model: Identity
    everywhere: Scaling | None = None
    layers: tuple[tuple[str, HeadLaws], ...] = ()
    lengths: tuple[int, ...] = ()
    target: str | None = None
    weights_not_loaded: str | None = None
    judged: Mapping[str, Any] | None = field(default=None, hash=False)
    window: Window | None = None
    untrained: bool = False

    def __repr__(self) -> str:
        fitted = f", fitted at {', '.join(map(str, self.lengths))} tokens" if self.lengths else ""
        judged = "" if self.judged is None else f", {self.judged.get('verdict')}"
        layers = len(self.layers) or self.model.layers
        plural = "s" * (layers != 1)
        return (
            f"<{type(self).__name__} for {self.model.architecture}: {layers} layer{plural}"
            f"{fitted}{judged}>"
        )

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        law: AnyLaw,
        *,
        lengths: Sequence[int] = (),
        target: str | None = None,
    ) -> Law:
        """The record of a law for a model; learned scalings are stored with their current values.

        Args:
            model: the model it is for.
            law: as in :func:`acutance.apply`.
            lengths: lengths at which it was fitted, rising.
            target: what was held constant.

        Raises:
            ValueError: if the law does not fit the model, or a length is beyond its learned
                positions.

        Warns:
            UserWarning: if a length is beyond positions that are not learned: the model runs, at
                lengths it was not made for.
        """
        if isinstance(law, Law):
            return law.check(model)
        places = tuple(check_count("lengths", n, 1) for n in lengths)
        limit = longest(model)
        if limit is not None and places and max(places) > limit:
            text = f"lengths reach {max(places)}, but the model has {limit} positions"
            if positions_are_learned(model):
                raise ValueError(text)
            warnings.warn(text, stacklevel=2)
        everywhere, layers = by_layer(model, law)
        rest = HeadLaws() if everywhere is None else everywhere.constant()
        assert rest.whole is None or isinstance(rest.whole, Scaling)
        return cls(
            model=Identity.of(model),
            everywhere=rest.whole,
            layers=tuple((name, one.constant()) for name, one in layers.items()),
            lengths=places,
            target=target,
            window=rest.window,
        )

    def check(self, model: torch.nn.Module) -> Law:
        """This law, after checking that it is for this model.

        Raises:
            LawError: if it is for another model; the message names the first difference.
        """
        difference = self.model.difference(Identity.of(model))
        if difference is not None:
            raise LawError(f"this law is for another model: it has {difference}")
        self.placed(model)
        return self

    def placed(self, model: torch.nn.Module) -> dict[str, HeadLaws]:
        """The scalings and windows by the names that the layers have in a model.

        A transformers model with a head on it has its layers under a prefix, which the law of the
        model alone lacks.

        Raises:
            LawError: if a layer is not a module of the model.
        """
        found = {}
        for (name, laws), place in zip(
            self.layers, names_in(model, [name for name, _ in self.layers]).values(), strict=True
        ):
            try:
                places = choose_layers(model, name if place is None else place, "layer")
            except ValueError as error:
                raise LawError(f"this law does not match the model: {error}") from error
            found.update(dict.fromkeys(places, laws))
        return found

    def record(self) -> dict[str, Any]:
        """The law as JSON-serialisable values."""
        optional = {
            NOT_LOADED: self.weights_not_loaded,
            _JUDGED: self.judged,
            _UNTRAINED: self.untrained or None,
        }
        return {
            "schema": SCHEMA,
            "model": self.model.to_dict(),
            "everywhere": part_record(self.everywhere, self.window) or None,
            "layers": {name: one.to_dict() for name, one in self.layers},
            "lengths": list(self.lengths),
            "target": self.target,
        } | {name: part for name, part in optional.items() if part is not None}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON with a digest of itself, whole or not at all."""
        write_text(path, as_json(sealed_json(self.record()), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Law:
        """Load a law from a file that :meth:`save` wrote.

        Raises:
            LawError: if the file is not a law, has another schema version, or has an invalid
                field; the message names the file and the field.
            OSError: if it cannot be opened.
        """
        try:
            return cls._read(read_json(path))
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:400]
            raise LawError(f"{os.fspath(path)} contains no law: {reason}") from error

    @classmethod
    def _read(cls, record: object) -> Law:
        """A law from the JSON values of a file."""
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            found = record.get("schema") if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"its schema must be {SCHEMA!r}, got {found!r:.60}")
        known = {"schema", "model", "everywhere", "layers", "lengths", "target"}
        if wrong := sorted((set(record) - {NOT_LOADED, _JUDGED, _UNTRAINED}) ^ known):
            raise ValueError(
                f"it must have the fields {', '.join(sorted(known))} and no others; missing or "
                f"unknown: {', '.join(wrong):.60}"
            )
        everywhere, layers, lengths, target = (
            record[part] for part in ("everywhere", "layers", "lengths", "target")
        )
        if not isinstance(layers, dict) or not isinstance(lengths, list):
            raise ValueError("'layers' must be a JSON object and 'lengths' a list")
        if target is not None and not isinstance(target, str):
            raise ValueError(f"'target' must be a string or null, got {type(target).__name__}")
        random = record.get(NOT_LOADED)
        if random is not None and not isinstance(random, str):
            raise ValueError(f"{NOT_LOADED!r} must be a string, got {type(random).__name__}")
        judged = record.get(_JUDGED)
        if judged is not None and not (isinstance(judged, dict) and "verdict" in judged):
            raise ValueError(
                f"{_JUDGED!r} must be a JSON object with a 'verdict', got {judged!r:.60}"
            )
        rest = HeadLaws()
        if everywhere is not None:
            rest = rest.with_part("everywhere", None, read_part("everywhere", everywhere))
        assert rest.whole is None or isinstance(rest.whole, Scaling)
        return cls(
            model=Identity.from_dict(record["model"]),
            everywhere=rest.whole,
            layers=tuple((name, HeadLaws.from_dict(name, part)) for name, part in layers.items()),
            lengths=tuple(check_count("lengths", n, 1) for n in lengths),
            target=target,
            weights_not_loaded=random,
            judged=judged,
            window=rest.window,
            untrained=record.get(_UNTRAINED) is True,
        )


def names_in(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str | None]:
    """The names that layers of a saved record have in a model; None for one that is not there.

    A transformers model with a head on it has its layers under a prefix, which those of the model
    alone lack.
    """
    known = {name for name, _ in named_modules(model)}
    prefix = getattr(unwrap(model), "base_model_prefix", None)
    found: dict[str, str | None] = {}
    for name in names:
        places = [name]
        if isinstance(prefix, str) and prefix:
            places += [f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]
        found[name] = next((one for one in places if one in known), None)
    return found


def by_layer(model: torch.nn.Module, law: AnyLaw) -> tuple[HeadLaws | None, dict[str, HeadLaws]]:
    """Resolve a law to the modules of a model.

    Returns:
        The law of all layers that it does not name (None if there is none), and the laws of the
        others by module name.

    Raises:
        TypeError: if it is not a law, or a key of a mapping is neither a layer nor (layer, head).
        ValueError: if a layer, head or scaling does not exist.
    """
    if isinstance(law, Law):
        rest = HeadLaws(law.check(model).everywhere, window=law.window)
        return (rest if rest != HeadLaws() else None), law.placed(model)
    if not isinstance(law, Mapping):
        if not isinstance(law, str | Scaling | LearnedScaling | Window | tuple):
            raise TypeError(
                "law must be a scaling or its name, a Window, a pair of both, a Law, or a mapping "
                f"from layer or (layer, head) to these, got {type(law).__name__}"
            )
        return HeadLaws().with_part("every layer", None, law), {}
    if not law:
        raise ValueError("law must have at least one layer, got an empty mapping")
    found: dict[str, HeadLaws] = {}
    modules = attention_layers(model)
    for place, given in law.items():
        pair = isinstance(place, tuple) and len(place) == 2
        layer, head = place if pair else (place, None)
        if isinstance(layer, bool) or not isinstance(layer, int | str | range):
            raise TypeError(
                "a law's layer must be a number, a range or the name of a module, got "
                f"{layer!r:.60}"
            )
        if head is not None and (isinstance(head, bool) or not isinstance(head, int) or head < 0):
            raise ValueError(f"head must be a non-negative whole number, got {head!r}")
        for name in choose_layers(model, layer, "layer"):
            if head is not None:
                check_head(name, modules.get(name), head)
            found[name] = found.get(name, HeadLaws()).with_part(name, head, given)
    return None, found


def check_head(name: str, module: torch.nn.Module | None, head: int) -> None:
    """Raise ValueError if an attention layer says how many heads it has, and lacks this one.

    Args:
        name: name of the layer, for the message.
        module: the layer; None is not checked.
        head: index of the head.

    Example:
        >>> check_head("attention", torch.nn.MultiheadAttention(8, 2), 2)
        Traceback (most recent call last):
            ...
        ValueError: there is no head 2: attention has heads 0 to 1
    """
    heads = heads_of(module)
    if heads is not None and head >= heads:
        raise ValueError(f"there is no head {head}: {name} has heads 0 to {heads - 1}")
