"""Windows and temperatures for each head, chosen from one backward pass for all heads at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from acutance.calibration.apply_law import query_factor
from acutance.calibration.gradients import OutputGradients, prepared
from acutance.calibration.law import HeadLaws, Law, LawPart, scaling_and_window
from acutance.calibration.losses import Loss
from acutance.calibration.read_window import VisibleKeys, WindowedCall
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import attention_layers, uses_interface
from acutance.capture.readers import huggingface
from acutance.capture.rotary import Rotary, find_rotary
from acutance.judging.changes import Change, LawRemedy
from acutance.scaling import HeadTable, Window

#: Temperatures that are tried: 1 ± this times ln(n / T), as YaRN's 1 + 0.1 ln factor.
_TEMPERATURE = 0.1
#: Parts of the rows; from part to part a derivative has its error.
_PIECES = 16


def law_part(change: Change | None) -> LawPart | None:
    """The window of a change, or its pair of scaling and window, for all heads; else None."""
    if not isinstance(change, LawRemedy) or change.windowed:
        return None
    law: Any = change.law
    is_pair = isinstance(law, tuple) and len(law) == 2 and isinstance(law[1], Window)
    return law if is_pair or isinstance(law, Window) else None


def head_slopes(
    model: torch.nn.Module,
    loss: Loss,
    batch: Mapping[str, Any],
    best: LawPart,
    others: Sequence[LawPart],
) -> dict[str, Tensor]:
    r"""Change of the mean loss to first order, if one head has another law than all the others.

    With :math:`o` the output of a head under ``best``, :math:`o'` that under another law and
    :math:`g` the derivative of the loss by :math:`o`, it is :math:`g \cdot (o' - o)`, summed over
    rows. One backward pass gives :math:`g` for all heads.

    Args:
        model: the model, without a law.
        loss: the loss.
        batch: a window, as for the loss.
        best: the window, or scaling and window, of all heads.
        others: what each head may have instead.

    Returns:
        For each layer (others, heads, 16 parts of the rows) float64, nats a token.

    Raises:
        ValueError: if a layer does not use transformers' attention interface.

    Example:
        >>> from acutance.calibration.losses import NextToken
        >>> from acutance.reproduce import decoder
        >>> batch = {"input_ids": torch.arange(256)[None]}
        >>> windows = Window(64, beyond=128), Window(96, beyond=128)
        >>> slopes = head_slopes(decoder(), NextToken(), batch, windows[0], windows[1:])
        >>> [part.shape for part in slopes.values()]
        [torch.Size([1, 4, 16]), torch.Size([1, 4, 16]), torch.Size([1, 4, 16])]
    """
    layers = attention_layers(model)
    if wrong := next((name for name, one in layers.items() if not uses_interface(one)), None):
        raise ValueError(f"{wrong} does not run through transformers' attention interface")
    windows = [scaling_and_window(one)[1] for one in (best, *others)]
    moving = any(window is not None and window.moves for window in windows)
    rotary = find_rotary(model, layers.values()) if moving else [None] * len(layers)
    comparison = _Comparison(dict(zip(layers, rotary, strict=True)), others)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        prepared(model),
        LawRemedy("", best).applied(model),
        huggingface.intercept(OutputGradients(layers, comparison.add), outermost=True),
        set_checkpoint_early_stop(False),
    ):
        scored = loss.backward(model, batch)
    count = int((~scored.loss.isnan()).sum())
    return {name: comparison.sums[name] / count for name in layers}


class _Comparison:
    """Compares what heads return with what they would under other laws.

    Args:
        rotary: rotary embedding of each layer by name; None where no window moves keys.
        others: the other laws.

    Attributes:
        sums: for each layer the derivative of the summed loss, (others, heads, pieces).
    """

    def __init__(self, rotary: Mapping[str, Rotary | None], others: Sequence[LawPart]) -> None:
        self._rotary, self._others = rotary, others
        self._keys: tuple[Any, VisibleKeys] | None = None
        self.sums: dict[str, Tensor] = {}

    def add(self, call: AttentionCall, output: Tensor, gradient: Tensor) -> None:
        """Add the derivatives of one call, whose output and gradient are (B, H, L, E)."""
        place = call.attn_mask, call.query.shape, call.key.shape
        if self._keys is None or self._keys[0][0] is not place[0] or self._keys[0][1:] != place[1:]:
            self._keys = place, VisibleKeys.of(call)
        keys, rotary, parts = self._keys[1], self._rotary[call.module], []
        for other in self._others:
            away = _through(call, other, rotary, keys) - output
            by_row = (gradient.float() * away.float()).sum((0, 3))  # (H, L)
            pieces = by_row.double().tensor_split(_PIECES, 1)
            parts.append(torch.stack([piece.sum(1) for piece in pieces], 1))
        self.sums[call.module] = self.sums.get(call.module, 0.0) + torch.stack(parts).cpu()


def _through(
    call: AttentionCall, part: LawPart, rotary: Rotary | None, keys: VisibleKeys
) -> Tensor:
    """The output of a call whose heads all have one law, (B, H, L, E)."""
    scaling, window = scaling_and_window(part)
    heads = call.query.shape[1]
    if scaling is not None:
        laws = HeadLaws(scaling, window=window)
        factor = query_factor(laws, keys.count, heads, call.query.dtype)
        call = replace(call, query=call.query * factor.unsqueeze(-1))
    windowed = WindowedCall.of(call, [window] * heads, rotary, keys)
    return windowed.through(lambda: call.rebuild(False)[0])


def with_temperature(best: LawPart, train_length: int, to: int) -> LawPart | None:
    """A window with factors of 1 up to the trained length, and 1 + 0.1 ln(n / T) beyond.

    None if ``best`` has a scaling already, or drops keys: factors count the keys that a row reads.
    """
    return _warm(best, 1.0, train_length, to) if _is_whole(best) else None


def mixed(
    model: torch.nn.Module,
    best: LawPart,
    others: Sequence[LawPart],
    slopes: Mapping[str, Tensor],
    away: Sequence[float],
    train_length: int,
    to: int,
) -> list[LawRemedy]:
    """Laws that give each head what should lower the loss.

    Derivatives are drawn towards the mean of all heads, the more the larger their errors are, and
    those of a window are shifted so that their sum is what it was measured to do in all heads. The
    first law gives each head the window with the lowest one, the second also a temperature where
    its derivative is beyond its error and the window drops no keys.

    Args:
        model: the model.
        best: as in :func:`head_slopes`.
        others: as in :func:`head_slopes`; the last one is that of :func:`with_temperature` where
            there is one.
        slopes: what :func:`head_slopes` returned.
        away: measured differences of the loss, if all heads have one of the other windows.
        train_length: tokens of the windows that it was trained on.
        to: tokens that it is to read.

    Returns:
        The laws that differ from ``best``: none, one or two.
    """
    places = [(name, head) for name, part in slopes.items() for head in range(part.shape[1])]
    value, error = _shrunk(torch.cat(list(slopes.values()), 1))
    warm = with_temperature(best, train_length, to)
    windows = [one for one in others if one != warm]
    own, sums = value[: len(windows)], torch.tensor(away, dtype=value.dtype)
    own = own + ((sums - own.sum(1)) / len(places))[:, None]
    least = torch.cat([torch.zeros_like(value[:1]), own]).argmin(0).tolist()
    chosen = dict(zip(places, ([best, *windows][index] for index in least), strict=True))
    counts = {_words([best, *windows][index]): least.count(index) for index in sorted({*least})}
    name = "by head: " + ", ".join(f"{one} in {count} heads" for one, count in counts.items())
    laws = {name: chosen} if any(least) else {}
    if warm is not None:
        known = torch.tensor([_is_whole(part) for part in chosen.values()])
        signs = torch.where(known & (value[-1].abs() > error[-1]), -value[-1].sign(), 0.0).tolist()
        if any(signs):
            name += f"; sharper in {signs.count(1.0)}, softer in {signs.count(-1.0)}"
            laws[name] = {
                place: _warm(part, sign, train_length, to) if sign and _is_whole(part) else part
                for (place, part), sign in zip(chosen.items(), signs, strict=True)
            }
    return [LawRemedy(name, Law.of(model, law)) for name, law in laws.items()]


def _is_whole(part: LawPart) -> TypeGuard[Window]:
    """Whether it is a window, without a scaling, through which rows read all visible keys."""
    return isinstance(part, Window) and part.far != "drop"


def _warm(window: Window, sign: float, train_length: int, to: int) -> LawPart:
    """A window with factors of 1 ± 0.1 ln(n / T) beyond the trained length T."""
    last = 1 + sign * _TEMPERATURE * math.log(to / train_length)
    return HeadTable([[1.0, last]], lengths=[train_length, to]), window


def _words(part: LawPart) -> str:
    """A window in words, with what differs from the defaults."""
    if not isinstance(part, Window):
        return str(part)
    group = part.group if part.far != "group" else None
    plain = Window(part.size).to_dict() | {"size": None, "group": group}
    own = part.to_dict().items()
    return ",".join(f"{name}={value}" for name, value in own if value != plain[name])


def _shrunk(slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over parts of the rows, (others, heads), drawn towards their mean, and their errors.

    The sums are taken for normally distributed around a true value, and that around the mean.
    """
    parts = slopes.shape[-1]
    value, noise = slopes.sum(-1), parts * slopes.var(-1)
    mean = value.mean(-1, keepdim=True)
    spread = (value.var(-1, keepdim=True) - noise.mean(-1, keepdim=True)).clamp(min=0)
    weight = spread / (spread + noise).clamp(min=torch.finfo(slopes.dtype).tiny)
    return mean + weight * (value - mean), (weight * noise).sqrt()
