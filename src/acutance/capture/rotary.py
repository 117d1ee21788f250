"""Rotary positions of a model's layers: found, tried, and used to move queries and keys.

Attention receives queries and keys that are rotated already. Rotations add up, so a vector moves to
another position when it is rotated by the difference. Which frequencies a layer has, and which
components it pairs, is tried on the model itself: four tokens are read at two places, and the
candidate that carries the first queries and keys into the second is the layer's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.capture.find_layers import attributes, class_name, unwrap
from acutance.capture.readers import huggingface
from acutance.capture.readers.huggingface import InterfaceCall

_TOKENS, _SHIFT = 4, 997
_OUT_OF_USE = "original_inv_freq", "long_inv_freq"  # frequencies that a model keeps for later
_VARYING = {"dynamic", "longrope"}  # their frequencies depend on the length of the text
#: Relative error of a rotation that rounding explains; a wrong one is off by more than a half.
_TOLERANCE = 0.03


class RotaryError(ValueError):
    """A layer's keys cannot be moved to other positions."""


@dataclass(frozen=True)
class Rotary:
    """How one layer encodes positions: it rotates pairs of components of queries and keys.

    The angle of a pair is the position times the frequency of the pair.

    Attributes:
        holder: module that holds the frequencies; None for a layer without positions, where
            moving a key changes nothing.
        buffer: name of the tensor of frequencies, in radians per position, in ``holder``; it is
            read whenever it is needed.
        start: index of the first rotated component.
        interleaved: True if the pairs are components (0, 1), (2, 3), …; False if component i of the
            first half is paired with component i of the second half.
    """

    holder: torch.nn.Module | None = None
    buffer: str = ""
    start: int = 0
    interleaved: bool = False

    def moved(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotate queries or keys from their positions to other ones.

        Args:
            x: (B, H, L, E), already rotated for their present positions.
            by: new position minus present position, (B or 1, H or 1, L).

        Returns:
            The rotated tensor, shaped and typed as ``x``; ``x`` itself if the layer has no
            positions.

        Example:
            >>> holder = torch.nn.Module()
            >>> holder.inv_freq = torch.tensor([torch.pi / 2])
            >>> x = torch.tensor([[[[1.0, 0.0]]]])
            >>> Rotary(holder, "inv_freq").moved(x, torch.tensor([[[1]]])).round()
            tensor([[[[-0.,  1.]]]])
        """
        if self.holder is None:
            return x
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.no_grad():
            rates = getattr(self.holder, self.buffer).to(x.device, torch.float64)
            angle = by.unsqueeze(-1) * rates
            cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        return rotated(x, cos, sin, self.start, interleaved=self.interleaved)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, start: int = 0, *, interleaved: bool) -> Tensor:
    """Rotate pairs of components of ``x`` from component ``start`` on, by one angle a pair.

    Args:
        x: (..., E).
        cos: cosines of the angles, (..., pairs); the rotation is computed in their dtype.
        sin: sines.
        start: index of the first rotated component.
        interleaved: as for :class:`Rotary`.
    """
    width = 2 * cos.shape[-1]
    before, turned, after = x.split([start, width, x.shape[-1] - start - width], dim=-1)
    pairs = turned.to(cos.dtype)
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    parts = a * cos - b * sin, b * cos + a * sin
    done = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([before, done.to(x.dtype), after], dim=-1)


def find_rotary(model: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> list[Rotary]:
    """Determine the rotary embedding of layers that use transformers' attention interface.

    A copy of the model that shares its tensors reads four tokens twice, at different positions,
    without gradients. For each layer, the frequencies and the pairing of components are those that
    turn the queries and keys of the first run into those of the second.

    Args:
        model: a transformers model, or one that takes ``input_ids`` and ``position_ids`` as they
            do.
        layers: attention modules of the model.

    Returns:
        One :class:`Rotary` for each layer, in their order.

    Raises:
        RotaryError: if the model has no rotary frequencies or cannot be run at given positions, a
            layer rotates in no known way, or its frequencies depend on the length of the text.
    """
    name = class_name(model)
    known = [
        (holder, buffer)
        for holder in model.modules()
        for buffer, rates in {**vars(holder), **holder._buffers}.items()
        if buffer.endswith("inv_freq") and not buffer.endswith(_OUT_OF_USE)
        if isinstance(rates, Tensor) and rates.dim() == 1
    ]
    if not known:
        raise RotaryError(f"{name} has no rotary position embedding (no inv_freq)")
    config: Any = getattr(unwrap(model), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    limit, shift = getattr(config, "max_position_embeddings", None), _SHIFT
    if isinstance(limit, int) and limit > 0:
        shift = min(shift, max(1, limit - _TOKENS))
    first, second = (_read(model, start) for start in (0, shift))
    return [_of_layer(name, layer, known, shift, first, second) for layer in layers]


def _of_layer(
    name: str,
    layer: torch.nn.Module,
    known: list[tuple[torch.nn.Module, str]],
    shift: int,
    first: _Calls,
    second: _Calls,
) -> Rotary:
    """How a layer rotates its queries and keys, from two passes with shifted positions.

    Args:
        name: name of the layer, for messages.
        layer: the attention module.
        known: modules and the names of their buffers of rotary frequencies.
        shift: difference of the positions in the two passes.
        first: query and key of each layer in the first pass.
        second: the same in the second pass.

    Raises:
        RotaryError: if no known form of rotary embedding fits.
    """
    if layer not in first or layer not in second:
        raise RotaryError(f"a layer of {name} does not use transformers' attention interface")
    before, after = first[layer], second[layer]
    if _error(Rotary(), before, after, shift) <= _TOLERANCE:
        return Rotary()
    width = before[0].shape[-1]
    candidates = []
    for holder, buffer in known:
        pairs = 2 * getattr(holder, buffer).numel()
        for start in sorted({0, width - pairs} if pairs <= width else ()):
            for interleaved in (False, True):
                rotary = Rotary(holder, buffer, start, interleaved)
                candidates.append((_error(rotary, before, after, shift), rotary))
    error, best = min(candidates, key=lambda each: each[0], default=(torch.inf, Rotary()))
    if error > _TOLERANCE or best.holder is None:
        raise RotaryError(
            f"the queries and keys of {name} are not rotated by their positions in a known way "
            "(rotary position embedding, in halves or in pairs)"
        )
    (kind,) = attributes(best.holder, "rope_type")
    if isinstance(kind, dict):
        kind = kind.get(best.buffer.removesuffix("_inv_freq"))
    if kind in _VARYING:
        raise RotaryError(
            f"{name} has RoPE of type {kind!r}, whose frequencies depend on the length of the text"
        )
    return best


def _error(rotary: Rotary, before: _Pair, after: _Pair, shift: int) -> float:
    """How far a rotary embedding is from explaining the second of two runs, as a relative error.

    The first run's queries and keys are rotated by ``shift`` positions and compared with the second
    run's.

    Args:
        rotary: the embedding to test.
        before: query and key of the layer in the first run.
        after: query and key of the layer in the second run, ``shift`` positions later.
        shift: difference of the positions.

    Returns:
        Norm of the difference over the norm of the second run's tensor, the larger of that for
        queries and that for keys; inf if either is NaN.
    """
    errors = []
    for one, other in zip(before, after, strict=True):
        by = torch.full((1, 1, one.shape[2]), shift, device=one.device)
        difference = rotary.moved(one.float(), by) - other.float()
        errors.append(float(difference.norm() / other.float().norm()))
    return torch.inf if any(error != error for error in errors) else max(errors)


_Pair = tuple[Tensor, Tensor]
_Calls = dict[torch.nn.Module, _Pair]


def _read(model: torch.nn.Module, start: int) -> _Calls:
    """Query and key of each attention module when four tokens are read at ``start`` and after.

    A copy of the modules with the same tensors runs, so that hooks on the model are not called.

    Raises:
        RotaryError: if the model cannot be run with ``input_ids`` and ``position_ids``.
    """
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    places = torch.arange(_TOKENS, device=device)[None]
    inputs: dict[str, Any] = {"input_ids": places, "position_ids": places + start}
    forward = getattr(unwrap(model), "forward", model.forward)
    if "use_cache" in inspect.signature(forward).parameters:
        inputs["use_cache"] = False
    calls: _Calls = {}

    def note(call: InterfaceCall, run: Callable[[], Any]) -> Any:
        calls.setdefault(call.module, (call.query.detach(), call.key.detach()))
        return run()

    try:
        shared = {id(one): one for one in (*model.parameters(), *model.buffers())}
        twin = copy.deepcopy(unwrap(model), shared).eval()
        with torch.no_grad(), huggingface.intercept(note):
            twin(**inputs)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RotaryError(
            f"{class_name(model)} does not read input_ids at given position_ids, by which its "
            f"rotary positions are tried: {reason}"
        ) from error
    pairs = zip(unwrap(model).modules(), twin.modules(), strict=True)
    return {one: calls[other] for one, other in pairs if other in calls}
