"""Law: which scaling and window each head of one model has, by name, as an object or in a file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, TypeAlias, cast

import torch

from acutance.capture.find_layers import (
    attention_layers,
    choose_layers,
    class_name,
    heads_of,
    module_name,
    named_modules,
    unwrap,
)
from acutance.files import as_json, write_text
from acutance.from_json import read_json, sealed_json
from acutance.scaling import SCALINGS, AnyScaling, Scaling, Window, from_dict, get
from acutance.scaling.laws import LearnedScaling
from acutance.shapes import check_count, did_you_mean
from acutance.summary.layer import NOT_LOADED

#: Entries of a configuration that change without the model becoming another one.
_VOLATILE = {
    "_name_or_path",
    "_commit_hash",
    "_attn_implementation",
    "_attn_implementation_internal",
    "attn_implementation",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "gradient_checkpointing",
}
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True)
class Identity:
    """A model's shape and a digest of its configuration.

    Attributes:
        architecture: class of the model.
        layers: attention layers.
        heads: query heads of a layer, as configured; 0 where nothing says.
        width: of the hidden states; 0 where nothing says.
        vocabulary: tokens; 0 where there are none.
        digest: of the configuration, without what may change (names, dtype, implementation); of
            the names and shapes of all parameters where there is no configuration.
    """

    architecture: str
    layers: int
    heads: int
    width: int
    vocabulary: int
    digest: str

    @classmethod
    def of(cls, model: torch.nn.Module) -> Identity:
        """The identity of a model.

        Example:
            >>> one = Identity.of(torch.nn.MultiheadAttention(8, 2))
            >>> one.architecture, one.layers, one.heads, one.width
            ('MultiheadAttention', 1, 2, 8)
        """
        name, model = class_name(model), unwrap(model)
        layers = attention_layers(model)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_dict"):
            text, digest = _text_config(model), _digest(_lasting(config.to_dict()))
            heads, width = _number(text, _HEADS), _number(text, _WIDTH)
            return cls(name, len(layers), heads, width, _number(text, ("vocab_size",)), digest)
        kinds = (
            layer for layer in layers.values() if isinstance(layer, torch.nn.MultiheadAttention)
        )
        plain = next(kinds, None)
        heads, width = (0, 0) if plain is None else (plain.num_heads, plain.embed_dim)
        return cls(name, len(layers), heads, width, 0, _digest(_parameters(model)))

    def difference(self, other: Identity) -> str | None:
        """The first property in which two models differ, in words; None if they are the same.

        If the configurations are the same, the class and the number of attention layers are not
        compared: the same model may have another head on it, or none.
        """
        if replace(self, architecture="", layers=0) == replace(other, architecture="", layers=0):
            return None
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if mine != theirs:
                what = "configuration digest" if name == "digest" else name
                return f"{what} {mine!r}, but the model has {theirs!r}"
        return None

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: object) -> Identity:
        """What :meth:`to_dict` wrote.

        Raises:
            ValueError: if a field is missing, unknown or of the wrong type.
        """
        kinds = {field.name: (str if field.type == "str" else int) for field in fields(cls)}
        if not isinstance(record, dict) or set(record) != set(kinds):
            raise ValueError(f"'model' must have the fields {', '.join(kinds)} and no others")
        for name, kind in kinds.items():
            value = record[name]
            if type(value) is not kind or (isinstance(value, int) and value < 0):
                raise ValueError(f"{name!r} of 'model' must be {_KIND[kind]}, got {value!r:.60}")
        return cls(**record)


_KIND = {str: "a string", int: "a non-negative whole number"}


def longest(model: torch.nn.Module) -> int | None:
    """The number of positions in the model's configuration; None if it gives none."""
    found = _number(_text_config(model), _LONGEST)
    return found if found > 0 else None


def _text_config(model: torch.nn.Module) -> Any:
    """The configuration of a model, of several that for text; None if it has none."""
    config: Any = getattr(unwrap(model), "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def positions_are_learned(model: torch.nn.Module) -> bool:
    """Whether there is a table of position embeddings, beyond which the model cannot run."""
    return any(
        isinstance(module, torch.nn.Embedding)
        and any(part in name.lower().split(".")[-1] for part in ("position", "wpe", "pos_emb"))
        for name, module in model.named_modules()
    )


def check_positions(model: torch.nn.Module, lengths: Sequence[int], stacklevel: int = 3) -> None:
    """Raise ValueError if lengths exceed the model's learned positions.

    Warns:
        UserWarning: if they exceed positions that are not learned: the model runs, at lengths it
            was not made for.
    """
    limit = longest(model)
    if limit is None or max(lengths) <= limit:
        return
    said = f"lengths reach {max(lengths)}, but the model has {limit} positions"
    if positions_are_learned(model):
        raise ValueError(said)
    warnings.warn(said, stacklevel=stacklevel)


def _number(config: Any, names: tuple[str, ...]) -> int:
    """The first of these entries of a configuration that is an integer; 0 if none is."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _parameters(model: torch.nn.Module) -> list[list[Any]]:
    """Name and shape of every parameter, in model order, as they are where nothing is sharded."""
    flat: dict[int, list[tuple[str, torch.Size]]] = {}
    for module in model.modules():  # FullyShardedDataParallel holds its own of several modules
        whole = getattr(getattr(module, "_handle", None), "flat_param", None)
        if whole is not None:
            for part, shape in zip(whole._param_infos, whole._shapes, strict=True):
                flat.setdefault(id(part.module), []).append((part.param_name, shape))
    found, seen = [], set()
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        mine = [(last, part.shape) for last, part in own.items() if id(part) not in seen]
        seen |= {id(part) for part in own.values()}
        for last, shape in flat.get(id(module), mine):
            if last != "_flat_param":
                full = f"{name}.{last}" if name else last
                found.append([module_name(model, full), list(shape)])
    return found


def _lasting(value: Any) -> Any:
    """A configuration without the entries that may change for the same model."""
    if isinstance(value, dict):
        kept = {str(name): _lasting(part) for name, part in value.items()}
        return {name: part for name, part in kept.items() if name not in _VOLATILE}
    return [_lasting(part) for part in value] if isinstance(value, list | tuple) else value


def _digest(value: Any) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


#: What a law has for one head, one layer or all: a scaling or its name, a window, or both.
LawPart: TypeAlias = "str | AnyScaling | Window | tuple[str | AnyScaling, Window]"


@dataclass(frozen=True)
class HeadLaws:
    """The scalings and windows of one layer.

    Attributes:
        whole: the layer's scaling, None where heads have their own; it may hold parameters per
            head.
        heads: head and scaling; heads left out are not scaled.
        window: the layer's window, None where it has none or heads have their own.
        windows: head and window, by head; heads left out read all their keys.
        scalings: all scalings of the layer: its single one, or those of its heads.
        all_windows: all its windows, likewise.
        needs_entropy: whether a scaling reads the measured entropy of each row.
        by_count: whether factors are constants that depend on the number of visible keys alone.
        moves: whether a window reads some keys at other positions than their actual ones.
    """

    whole: AnyScaling | None = None
    heads: tuple[tuple[int, AnyScaling], ...] = ()
    window: Window | None = None
    windows: tuple[tuple[int, Window], ...] = ()
    scalings: tuple[AnyScaling, ...] = field(init=False, repr=False, compare=False)
    all_windows: tuple[Window, ...] = field(init=False, repr=False, compare=False)
    needs_entropy: bool = field(init=False, repr=False, compare=False)
    by_count: bool = field(init=False, repr=False, compare=False)
    moves: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        scalings = dict(self.heads).values() if self.whole is None else (self.whole,)
        windows = dict(self.windows).values() if self.window is None else (self.window,)
        needs_entropy = any(map(attrgetter("needs_entropy"), scalings))
        vars(self).update(
            scalings=tuple(scalings),
            all_windows=tuple(windows),
            needs_entropy=needs_entropy,
            by_count=not needs_entropy and all(map(attrgetter("constant"), scalings)),
            moves=any(map(attrgetter("moves"), windows)),
        )

    def windows_by_head(self, heads: int) -> list[Window | None]:
        """The window of each head; None for one that reads all its keys.

        Raises:
            ValueError: if there is a window for a head beyond ``heads``.

        Example:
            >>> HeadLaws(windows=((1, Window(8)),)).windows_by_head(2)[0] is None
            True
        """
        if self.window is not None:
            return [self.window] * heads
        for head, _ in self.windows:
            if head >= heads:
                raise ValueError(f"the law has head {head}, but the call has {heads} heads")
        by_head = dict(self.windows)
        return [by_head.get(head) for head in range(heads)]

    @classmethod
    def of(cls, name: str, parts: Iterable[tuple[int | None, LawPart]]) -> HeadLaws:
        """The laws of one layer; of several scalings or windows of a head the last one counts.

        Args:
            name: name of the layer, for error messages.
            parts: head, None for the whole layer, and a scaling, its name, a window, or a pair
                (scaling, window).

        Raises:
            TypeError: if a part is none of these.
            ValueError: if the layer would have one scaling (or window) and others for heads.
        """
        scalings: dict[Any, AnyScaling] = {}
        windows: dict[Any, Window] = {}
        for head, part in parts:
            scaling, window = scaling_and_window(part)
            if scaling is not None:
                scalings[head] = scaling
            if window is not None:
                windows[head] = window
        for what, given in (("scaling", scalings), ("window", windows)):
            if None in given and len(given) > 1:
                raise ValueError(f"{name} must have one {what} or one for each head, got both")
        whole, window = scalings.pop(None, None), windows.pop(None, None)
        laws = cls(whole, tuple(sorted(scalings.items())), window, tuple(sorted(windows.items())))
        if laws.all_windows and laws.needs_entropy:
            raise ValueError(
                f"{name} has a scaling that reads the entropy of rows, which its window changes"
            )
        return laws

    def constant(self) -> HeadLaws:
        """The same with learned scalings replaced by constants at their current values."""
        return replace(
            self,
            whole=None if self.whole is None else _constant(self.whole),
            heads=tuple((head, _constant(part)) for head, part in self.heads),
        )

    def to_dict(self) -> dict[str, Any]:
        """The laws as plain JSON values."""
        record: dict[str, Any] = {}
        if self.whole is not None or self.window is not None:
            record["whole"] = part_record(self.whole, self.window)
        scalings, windows = dict(self.heads), dict(self.windows)
        if heads := list(dict.fromkeys([*scalings, *windows])):
            record["heads"] = {
                str(head): part_record(scalings.get(head), windows.get(head)) for head in heads
            }
        return record

    @classmethod
    def from_dict(cls, name: str, record: object) -> HeadLaws:
        """Inverse of :meth:`to_dict`; ``name`` is the layer's, for error messages."""
        if not isinstance(record, dict) or not record or set(record) - {"whole", "heads"}:
            raise ValueError(
                f"layer {name!r:.60} must be a JSON object with 'whole', 'heads' or both"
            )
        heads = record.get("heads", {})
        if not isinstance(heads, dict) or ("heads" in record and not heads):
            raise ValueError(
                f"'heads' of layer {name!r:.60} must be a JSON object with at least one head"
            )
        if not all(head.isascii() and head.isdigit() and len(head) < 7 for head in heads):
            raise ValueError(f"the keys of 'heads' of layer {name!r:.60} must be head indices")
        parts = [(int(head), read_part(f"{name}, {head}", part)) for head, part in heads.items()]
        whole = [(None, read_part(name, record["whole"]))] if "whole" in record else []
        return cls.of(name, [*whole, *parts])


def scaling_and_window(part: LawPart) -> tuple[AnyScaling | None, Window | None]:
    """Split a part of a law into its scaling and its window; None for what it does not have.

    Raises:
        TypeError: if it is neither a scaling nor a window nor a pair of them.
        ValueError: if it is a string that names no scaling.

    Example:
        >>> scaling_and_window(("ssmax", Window(64)))[1].size
        64
    """
    if isinstance(part, Window):
        return None, part
    if isinstance(part, tuple):
        pair: tuple[Any, ...] = part
        if len(pair) != 2 or not isinstance(pair[1], Window) or isinstance(pair[0], Window):
            kinds = ", ".join(type(one).__name__ for one in pair)
            raise TypeError(f"a pair in a law must be (scaling, Window), got ({kinds})")
        return get(pair[0]), pair[1]
    return get(part), None


def part_record(scaling: AnyScaling | None, window: Window | None) -> Any:
    """A scaling, a window or both as JSON values; None for what there is not."""
    parts = [] if scaling is None else [_constant(scaling).to_dict()]
    parts += [] if window is None else [window.to_dict()]
    return parts[0] if len(parts) == 1 else parts


def read_part(place: str, record: object) -> LawPart:
    """Inverse of :func:`part_record`.

    Args:
        place: layer or head, for error messages.
        record: the JSON values.

    Raises:
        ValueError: if it is no such record.
    """
    if isinstance(record, list):
        pair: Any = tuple(read_part(place, part) for part in record)
        if len(pair) != 2 or not isinstance(pair[0], Scaling) or not isinstance(pair[1], Window):
            raise ValueError(
                f"the law of {place!r:.60} must be a JSON object or a list of two, which must be a "
                "scaling, then a window"
            )
        return cast(LawPart, pair)
    if not isinstance(record, dict):
        raise ValueError(f"the scaling of {place!r:.60} must be a JSON object")
    try:
        return _from_record(record)
    except (TypeError, ValueError) as error:
        kind = "window" if record.get("name") == Window.name else "scaling"
        raise ValueError(f"the {kind} of {place!r:.60} is invalid: {error}") from error


def _from_record(record: Mapping[str, Any]) -> Scaling | Window:
    """The scaling or window of a record with a name and parameters."""
    return Window.from_dict(record) if record.get("name") == Window.name else from_dict(record)


def _constant(scaling: AnyScaling) -> Scaling:
    """A scaling with constant parameters: itself, or the current values of a learned one."""
    return scaling.record() if isinstance(scaling, LearnedScaling) else scaling


SCHEMA = "acutance.law/1"
_JUDGED = "judged"
_UNTRAINED = "untrained"
#: Fields of a file with what they must be, in Python and in words.
_KINDS = (
    ("layers", dict, "a JSON object"),
    ("lengths", list, "a list"),
    ("target", str | None, "a string or null"),
    (NOT_LOADED, str | None, "a string"),
)

#: One scaling, window or pair of them for all, or one for each layer or head.
AnyLaw: TypeAlias = "LawPart | Law | Mapping[Any, LawPart]"


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
        if places:
            check_positions(model, places)
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
        placed: dict[str, HeadLaws] = {}
        names = names_in(model, [name for name, _ in self.layers])
        for name, laws in self.layers:
            try:
                layers = choose_layers(model, names[name] or name, "layer")
            except ValueError as error:
                raise LawError(f"this law does not match the model: {error}") from error
            placed.update(dict.fromkeys(layers, laws))
        return placed

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
    def _read(cls, record: dict[str, Any]) -> Law:
        """A law from the JSON values of a file."""
        if record.get("schema") != SCHEMA:
            raise ValueError(f"its schema must be {SCHEMA!r}, got {record.get('schema')!r:.60}")
        known = {"schema", "model", "everywhere", "layers", "lengths", "target"}
        if wrong := sorted((set(record) - {NOT_LOADED, _JUDGED, _UNTRAINED}) ^ known):
            raise ValueError(
                f"it must have the fields {', '.join(sorted(known))} and no others; missing or "
                f"unknown: {', '.join(wrong):.60}"
            )
        for name, kinds, words in _KINDS:
            if not isinstance(record.get(name), kinds):
                raise ValueError(f"{name!r} must be {words}, got {record[name]!r:.60}")
        judged = record.get(_JUDGED)
        if judged is not None and not (isinstance(judged, dict) and "verdict" in judged):
            raise ValueError(
                f"{_JUDGED!r} must be a JSON object with a 'verdict', got {judged!r:.60}"
            )
        rest = HeadLaws()
        if (everywhere := record["everywhere"]) is not None:
            rest = HeadLaws.of("everywhere", [(None, read_part("everywhere", everywhere))])
        assert rest.whole is None or isinstance(rest.whole, Scaling)
        return cls(
            model=Identity.from_dict(record["model"]),
            everywhere=rest.whole,
            layers=tuple(
                (name, HeadLaws.from_dict(name, laws)) for name, laws in record["layers"].items()
            ),
            lengths=tuple(check_count("lengths", n, 1) for n in record["lengths"]),
            target=record["target"],
            weights_not_loaded=record.get(NOT_LOADED),
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
        return HeadLaws.of("every layer", [(None, law)]), {}
    if not law:
        raise ValueError("law must have at least one layer, got an empty mapping")
    parts: dict[str, list[tuple[int | None, LawPart]]] = {}
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
            parts.setdefault(name, []).append((head, given))
    return None, {name: HeadLaws.of(name, of_layer) for name, of_layer in parts.items()}


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


#: Parameters of a window that are words.
_WORDS = ("sink_positions", "far")
#: What laws need that have no default, with an example.
_NEEDS = {
    "log_n": "parameters, for example log_n:train_length=512",
    "clip_log_n": "parameters, for example clip_log_n:train_length=512",
    "head_table": "parameters, for example head_table:factors=[1.0,1.2], one factor for each head",
    "window": "size, for example window:size=1024,sinks=4",
}
#: A plus sign between two laws of a text.
JOINED = re.compile(r"\+(?=[a-z])")


def named_law(text: str) -> AnyLaw:
    """A law from a file, or by name, as ``log_n:train_length=512`` or ``window:size=4096,sinks=4``.

    A scaling and a window are joined by a plus sign. Values are numbers or lists of numbers.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there is neither a file nor a law of that name, or a parameter is wrong.

    Example:
        >>> named_law("log_n:train_length=512")
        LogN(train_length=512, base=None, n_min=16)
        >>> named_law("head_table:factors=[1.0,1.2]").factors
        (1.0, 1.2)
        >>> named_law("ssmax+window:size=64,far=clamp")[1].far
        'clamp'
    """
    if os.path.isdir(text):
        raise ValueError(f"law: {text} is a directory; pass the file that calibrate -o wrote")
    if os.path.exists(text):
        return Law.load(text)
    laws = list(map(_from_parameters, JOINED.split(text)))
    if len(laws) == 1:
        return laws[0]
    scaling, window = sorted(laws[:2], key=lambda law: isinstance(law, Window))
    if len(laws) > 2 or not isinstance(scaling, Scaling) or not isinstance(window, Window):
        raise ValueError(f"law: a plus sign joins one scaling and one window, got {text!r}")
    return scaling, window


def _from_parameters(text: str) -> Scaling | Window:
    """A scaling or window from its name, or from its name and ``name=value,...``."""
    name, _, rest = text.partition(":")
    is_window = name == Window.name
    if name not in SCALINGS and not is_window:
        if os.sep in text or text.endswith(".json"):
            raise ValueError(f"law: there is no file {text}")
        hint = did_you_mean(name, (*SCALINGS, Window.name, "rope", "off")) or "."
        raise ValueError(
            f"law: {text!r} is neither a file nor a law{hint} A law is a file written by "
            "'calibrate -o', 'probe --write-law' or 'budget -o'; a cache plan of another tool, "
            "such as duo_attention:DIR; a scaling, "
            f"with parameters as in log_n:train_length=512 ({', '.join(SCALINGS)}); a window, such "
            "as window:size=1024,sinks=4; a scaling and a window joined by +; RoPE settings, such "
            "as rope:yarn,factor=2; or heads to switch off, such as off:3.1,4.0"
        )
    if not rest and name in _NEEDS:
        raise ValueError(f"law: {name} needs {_NEEDS[name]}")
    record = {"name": name} | read_parameters(rest, _WORDS if is_window else ())
    try:
        return _from_record(record)
    except (TypeError, ValueError) as error:
        said = str(error) if str(error).startswith(name) else f"{name}: {error}"
        more = "" if rest else f". Write {name}:name=value,..."
        raise ValueError(f"law: {said}{more}") from error


def read_parameters(text: str, words: Container[str] = ()) -> dict[str, Any]:
    """The values of a text ``name=value,...``: numbers, or lists of them in brackets.

    Args:
        text: the text; empty for no parameters.
        words: names of parameters whose values are words.

    Raises:
        ValueError: if a part is not of this form.

    Example:
        >>> read_parameters("size=64,far=clamp", words=["far"])
        {'size': 64, 'far': 'clamp'}
        >>> read_parameters("factors=[[1,2],[3,4]],lengths=[8,9]")
        {'factors': [[1, 2], [3, 4]], 'lengths': [8, 9]}
    """
    values: dict[str, Any] = {}
    # a comma within a list is not followed by another parameter
    for parameter in re.split(r",(?=\s*\w+\s*=)", text) if text else ():
        key, equals, value = map(str.strip, parameter.partition("="))
        if not equals:
            raise ValueError(f"law: parameters must be name=number, got {parameter!r}")
        try:
            values[key] = value if key in words else json.loads(value)
        except ValueError as error:
            raise ValueError(f"law: {key} must be a number, got {value!r}") from error
    return values
