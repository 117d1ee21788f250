"""RoPE settings as a change: other frequencies for a while, with transformers' own computation."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from acutance.calibration.apply_law import ApplyError, Change
from acutance.calibration.law import read_parameters
from acutance.capture.find_layers import class_name, unwrap
from acutance.shapes import check_number, did_you_mean

__all__ = ["RopeChange", "RopeRemedy"]

#: Types that other parameters than the base are needed for, and what Llama 3.1 has.
_DEFAULTS: dict[str, dict[str, float]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_ORIGINAL = "original_max_position_embeddings"
#: Types that know the trained length by the parameter above; the others read no such parameter.
_WITH_ORIGINAL = ("yarn", "llama3", "longrope")
#: What a type is computed from, and stays where the type changes.
_STAYS = ("rope_theta", "partial_rotary_factor", _ORIGINAL)
#: Layers that see all keys, where a configuration has settings by type of layer.
_GLOBAL = "full_attention"


@dataclass(frozen=True)
class RopeChange(Change):
    """Other rotary position embeddings, as transformers computes them from ``rope_parameters``.

    Every rotary module is replaced by a new one of its class for as long as the change is applied;
    weights and configuration stay. Where a configuration has settings by type of layer, those of
    layers with full attention change.

    Args:
        kind: transformers' ``rope_type``: ``default``, ``linear``, ``dynamic``, ``yarn``,
            ``llama3``, ``longrope`` or another that it knows.
        parameters: entries of ``rope_parameters``, such as ``factor``. The base stays unless
            ``rope_theta`` is given, and ``original_max_position_embeddings``, the trained length,
            is the configuration's longest unless it is given.

    Raises:
        ValueError: if transformers has no such type, or ``factor`` is below 1.

    Example:
        >>> RopeChange("yarn", {"factor": 2.0}).name
        'rope:yarn,factor=2.0'
    """

    kind: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        known = dict.fromkeys(["default", *ROPE_INIT_FUNCTIONS])
        if self.kind not in known:
            hint = did_you_mean(self.kind, known)
            raise ValueError(f"law: transformers has no RoPE type {self.kind!r}{hint}")
        if "factor" in self.parameters:
            check_number("factor", self.parameters["factor"], above=1.0, including=True)

    @property
    def name(self) -> str:
        """``rope:`` and the settings, as the command line accepts it."""
        given = [f"{key}={json.dumps(value)}" for key, value in self.parameters.items()]
        return ",".join([f"rope:{self.kind}", *given])

    @classmethod
    def named(cls, text: str) -> RopeChange:
        """The settings of a text ``TYPE,name=value,...``.

        Raises:
            ValueError: if transformers has no such type, a part is not of the form name=value, or a
                value is out of range.

        Example:
            >>> RopeChange.named("yarn,factor=2").parameters
            {'factor': 2}
        """
        kind, _, rest = (part.strip() for part in text.partition(","))
        if not kind or "=" in kind:
            raise ValueError(
                f"law: RoPE settings begin with a type, as rope:yarn,factor=2, got {text!r}"
            )
        return cls(kind, read_parameters(rest))

    def for_train_length(self, model: torch.nn.Module, train_length: int) -> RopeChange:
        """The settings for a stated trained length, where transformers computes them from it.

        They are the same if they state the trained length themselves, or their type reads none.

        Args:
            model: the model.
            train_length: tokens of the windows that it was trained on.

        Raises:
            ApplyError: if the model has no rotary module of transformers.

        Example:
            >>> from acutance.reproduce import decoder
            >>> RopeChange.named("yarn,factor=4").for_train_length(decoder(), 128).name
            'rope:yarn,factor=4,original_max_position_embeddings=128'
        """
        reads_it = self.kind in (*_WITH_ORIGINAL, "dynamic")
        if not reads_it or _ORIGINAL in self.parameters:
            return self
        config: Any = rope_modules(model)[0][2].config
        before = config.rope_parameters
        before = before.get(_GLOBAL, before)
        if train_length == (before.get(_ORIGINAL) or config.max_position_embeddings):
            return self
        return replace(self, parameters={**self.parameters, _ORIGINAL: train_length})

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Context with the settings; the model's rotary modules come back when it ends.

        Raises:
            ApplyError: if the model has no rotary module of transformers.
            ValueError: if a parameter that the type needs is lacking.
        """
        places = rope_modules(model)
        changed = [self._changed(module) for _, _, module in places]
        try:
            for (parent, name, _), module in zip(places, changed, strict=True):
                setattr(parent, name, module)
            yield
        finally:
            for parent, name, module in places:
                setattr(parent, name, module)

    def check(self, model: torch.nn.Module) -> None:
        """Raise the errors of :meth:`on`."""
        for _, _, module in rope_modules(model):
            self._changed(module)

    def configuration(self, model: torch.nn.Module, longest: int) -> dict[str, Any]:
        """Entries of ``config.json`` that make the settings permanent in a saved model.

        Args:
            model: the model.
            longest: number of tokens that the model is to read.

        Returns:
            New values of ``rope_parameters`` and ``max_position_embeddings``, under ``text_config``
            in a model with several parts.

        Raises:
            ApplyError: if the model has no rotary module of transformers.
            ValueError: as in :meth:`on`.
        """
        _, _, module = rope_modules(model)[0]
        config: Any = self._changed(module).config
        # dynamic computes from this entry: it is the trained length for it
        most = config.max_position_embeddings if self.kind == "dynamic" else longest
        entries = {"rope_parameters": config.rope_parameters, "max_position_embeddings": most}
        whole: Any = getattr(unwrap(model), "config", None)
        text = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
        return entries if text is whole else {"text_config": entries}

    def _changed(self, module: torch.nn.Module) -> torch.nn.Module:
        """A rotary module of the same class with these settings."""
        config: Any = copy.deepcopy(module.config)
        before = dict(config.rope_parameters)
        by_layer = isinstance(before.get(_GLOBAL), Mapping)
        entries = self._entries(dict(before[_GLOBAL]) if by_layer else before, config)
        if self.kind == "dynamic":
            config.max_position_embeddings = entries.pop(_ORIGINAL)
        config.rope_parameters = {**before, _GLOBAL: entries} if by_layer else entries
        kind: Any = type(module)
        try:
            found: torch.nn.Module = kind(config)
        except (KeyError, TypeError) as error:
            lacking = error.args[0] if isinstance(error, KeyError) else "a parameter"
            raise ValueError(f"{self.name} lacks {lacking}, which the type needs") from error
        return found.to(next(module.buffers()).device).train(module.training)

    def _entries(self, before: Mapping[str, Any], config: Any) -> dict[str, Any]:
        """New ``rope_parameters`` for one type of layers.

        Args:
            before: their present entries.
            config: the model's configuration.
        """
        same = before.get("rope_type", "default") == self.kind
        entries = {key: part for key, part in before.items() if same or key in _STAYS}
        trained = self.parameters.get(_ORIGINAL, entries.pop(_ORIGINAL, None))
        entries |= {"rope_type": self.kind, **_DEFAULTS.get(self.kind, {}), **self.parameters}
        entries.pop(_ORIGINAL, None)
        if isinstance(entries.get("attention_factor"), int):
            entries["attention_factor"] = float(entries["attention_factor"])  # as it is validated
        if self.kind in (*_WITH_ORIGINAL, "dynamic"):
            entries[_ORIGINAL] = trained or config.max_position_embeddings
        return entries


#: The earlier name of :class:`RopeChange`.
RopeRemedy = RopeChange


def rope_modules(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """The rotary modules of a transformers model, each with its parent and its name there.

    Raises:
        ApplyError: if there are none.

    Example:
        >>> from acutance.reproduce import decoder
        >>> [name for _, name, _ in rope_modules(decoder())]
        ['rotary_emb']
    """
    found = [
        (parent, name, module)
        for parent in model.modules()
        for name, module in parent.named_children()
        if isinstance(getattr(getattr(module, "config", None), "rope_parameters", None), Mapping)
        and any(key.endswith("inv_freq") for key, _ in module.named_buffers(recurse=False))
    ]
    if not found:
        raise ApplyError(
            f"{class_name(model)} has no rotary position embedding of transformers, so its RoPE "
            "settings cannot be changed"
        )
    return found
