"""Rotary positions as a configuration's ``rope_parameters`` state them, in float64.

Frequencies follow the published formulas, not transformers' code, which is among what is verified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rope", "configured_rope", "entry_of", "rotated"]

_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer.

    Attributes:
        kind: ``rope_type`` of transformers.
        theta: the base.
        width: number of components of a head that are rotated.
        parameters: other entries of ``rope_parameters``.
        longest: ``max_position_embeddings``.

    Example:
        >>> Rope("linear", 100.0, 4, {"factor": 2.0}).frequencies(8)
        tensor([0.5000, 0.0500], dtype=torch.float64)
    """

    kind: str
    theta: float
    width: int
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    longest: int | None = None

    @property
    def scaled(self) -> bool:
        """Whether it is another than the default."""
        return self.kind != "default"

    def plain(self) -> Rope:
        """The same base and width without scaling."""
        return replace(self, kind="default", parameters={})

    def frequencies(self, length: int) -> Tensor:
        """Radians per position of each pair of components, float64 (width / 2,).

        Args:
            length: number of positions that are read, on which some kinds depend.
        """
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64) / self.width
        plain: Tensor = self.theta**-exponents
        of_kind: dict[str, Callable[[], Tensor]] = {
            "default": lambda: plain,
            "linear": lambda: plain / self._factor,
            "dynamic": lambda: self._dynamic(exponents, length),
            "yarn": lambda: self._yarn(plain),
            "llama3": lambda: self._llama3(plain),
            "longrope": lambda: self._longrope(plain, length),
        }
        return of_kind[self.kind]()

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and keys, as YaRN and LongRoPE have it."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        given = self.parameters.get("attention_factor")
        if given is not None:
            return float(given)
        factor = self._factor
        if self.kind == "longrope":
            return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self._trained))
        over, under = (self.parameters.get(name) for name in ("mscale", "mscale_all_dim"))
        if over and under:
            return _mscale(factor, over) / _mscale(factor, under)
        return _mscale(factor, 1.0)

    @property
    def _trained(self) -> float:
        """Number of positions that the model was trained on."""
        return float(self.parameters.get("original_max_position_embeddings") or self.longest or 1)

    @property
    def _factor(self) -> float:
        """By how much the context is stretched."""
        factor = self.parameters.get("factor")
        return float(factor) if factor is not None else float(self.longest or 1) / self._trained

    def _dynamic(self, exponents: Tensor, length: int) -> Tensor:
        """NTK scaling of the base beyond the trained length."""
        trained = self._trained
        stretched = max(length, trained) * self._factor / trained - (self._factor - 1)
        base = self.theta * stretched ** (self.width / (self.width - 2))
        powers: Tensor = base**-exponents
        return powers

    def _yarn(self, plain: Tensor) -> Tensor:
        """Interpolate slow frequencies, keep fast ones, and blend between."""
        given, width = self.parameters, self.width

        def turns(count: float) -> float:
            """Index of the frequency that turns ``count`` times within the trained length."""
            ratio = self._trained / (count * 2 * math.pi)
            return width * math.log(ratio) / (2 * math.log(self.theta))

        low = turns(given.get("beta_fast") or 32)
        high = turns(given.get("beta_slow") or 1)
        if given.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high += 0.001 if low == high else 0
        index = torch.arange(width // 2, dtype=torch.float64)
        interpolated = ((index - low) / (high - low)).clamp(0, 1)
        return plain / self._factor * interpolated + plain * (1 - interpolated)

    def _llama3(self, plain: Tensor) -> Tensor:
        """Llama 3.1: slow frequencies divided by the factor, fast ones as they are."""
        low, high = (float(self.parameters[f"{name}_freq_factor"]) for name in ("low", "high"))
        turns = self._trained * plain / (2 * math.pi)
        fast = ((turns - low) / (high - low)).clamp(0, 1)
        return plain * fast + plain / self._factor * (1 - fast)

    def _longrope(self, plain: Tensor, length: int) -> Tensor:
        """LongRoPE: each frequency has its factor, for short and for long texts."""
        name = "long_factor" if length > self._trained else "short_factor"
        return plain / torch.tensor(self.parameters[name], dtype=torch.float64)


def _mscale(factor: float, weight: float) -> float:
    """YaRN's growth of the attention logits with the context."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def entry_of(config: Any, name: str) -> Any:
    """An entry of a configuration; None if it has none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # layers have values of their own, says the configuration
        return None


def configured_rope(config: Any, layer_type: str | None, width: int) -> Rope | None:
    """Rotary positions that a configuration states for a layer; None if it states none.

    Args:
        config: a configuration of transformers.
        layer_type: the layer's entry in ``layer_types``; None if it has none.
        width: components of a head.

    Raises:
        ValueError: for a type of RoPE that is not known.
    """
    entries = getattr(config, "rope_parameters", None)
    if not isinstance(entries, Mapping) or not entries:
        return None
    if any(isinstance(value, Mapping) for value in entries.values()):
        entries = entries.get(layer_type)
        if not isinstance(entries, Mapping):
            return None
    kind = entries.get("rope_type", "default")
    if kind not in _KINDS or "rope_theta" not in entries:
        raise ValueError(f"RoPE of type {kind!r} is not known to verify")
    size = entry_of(config, "head_dim") or width
    rotated_width = int(size * float(entries.get("partial_rotary_factor") or 1.0))
    longest = entry_of(config, "max_position_embeddings")
    rest = {name: value for name, value in entries.items() if name != "rope_theta"}
    return Rope(kind, float(entries["rope_theta"]), rotated_width, rest, longest)


def rotated(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    *,
    factor: float = 1.0,
    start: int = 0,
    interleaved: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate queries or keys in float64.

    Args:
        x: (B, H, L, E).
        positions: (B or 1, L).
        frequencies: radians per position, (R / 2,), for R rotated components.
        factor: of the rotated components.
        start: index of the first rotated component.
        interleaved: whether pairs are adjacent components; else halves are paired.
        dtype: dtype to round positions and frequencies to; None for none.
    """
    width = 2 * frequencies.numel()
    before, turned, after = x.double().split([start, width, x.shape[-1] - start - width], -1)
    if dtype is not None:
        positions, frequencies = positions.to(dtype), frequencies.to(dtype)
        angle = (positions[:, None, :, None] * frequencies).double()
    else:
        angle = positions[:, None, :, None].double() * frequencies.to(x.device)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = a * cos - b * sin, b * cos + a * sin
    done = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([before, done, after], -1)
