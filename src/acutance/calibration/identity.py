"""The identity of a model, by which a law refuses another model."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from acutance.capture.find_layers import attention_layers, class_name, module_name, unwrap

__all__ = ["Identity"]

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
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            return cls(
                name,
                len(layers),
                _number(text, _HEADS),
                _number(text, _WIDTH),
                _number(text, ("vocab_size",)),
                _digest(_lasting(config.to_dict())),
            )
        plain = [one for one in layers.values() if isinstance(one, torch.nn.MultiheadAttention)]
        return cls(
            name,
            len(layers),
            plain[0].num_heads if plain else 0,
            plain[0].embed_dim if plain else 0,
            0,
            _digest(_parameters(model)),
        )

    def difference(self, other: Identity) -> str | None:
        """The first property in which two models differ, in words; None if they are the same.

        If the configurations are the same, the class and the number of attention layers are not
        compared: the same model may have another head on it, or none.
        """
        if replace(self, architecture="", layers=0) == replace(other, architecture="", layers=0):
            return None
        for part in fields(self):
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            if mine != theirs:
                what = "configuration digest" if part.name == "digest" else part.name
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
        kinds = {part.name: (str if part.type == "str" else int) for part in fields(cls)}
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
    config: Any = getattr(unwrap(model), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    found = _number(config, _LONGEST)
    return found if found > 0 else None


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
