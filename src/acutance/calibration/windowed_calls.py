"""Attention calls of a model as a law with windows changes or replaces them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.factors import Plan
from acutance.calibration.head_laws import HeadLaws
from acutance.calibration.read_window import read_through, statistics_through
from acutance.calibration.visible_keys import VisibleKeys, seen_through
from acutance.capture.attention_call import AttentionCall
from acutance.capture.readers.interface_call import InterfaceCall
from acutance.capture.readers.torch_sdpa import restore_shape
from acutance.capture.rotary import Rotary, find_rotary
from acutance.masks import hidden_scores
from acutance.probing.read_call import MOVED
from acutance.rowstats import RowStatistics
from acutance.scaling import Window

__all__ = ["WindowedCall", "masked_arguments", "masked_scores", "rotary_of_layers"]


def rotary_of_layers(
    model: torch.nn.Module, plans: Mapping[torch.nn.Module, Plan]
) -> dict[torch.nn.Module, Rotary]:
    """The rotary embedding of each layer whose windows move keys; empty if there is none.

    Args:
        model: the model.
        plans: what the law does to each layer that uses transformers' interface.

    Raises:
        RotaryError: if a layer has no rotary embedding of a known form.
    """
    layers = [
        layer
        for layer, plan in plans.items()
        if plan.laws is not None and moves(plan.laws) and not plan.windowed
    ]
    if not layers:
        return {}
    return dict(zip(layers, find_rotary(model, layers), strict=True))


def moves(laws: HeadLaws) -> bool:
    """Whether a window of the layer reads some keys at other positions than their actual ones."""
    return any(window.moves for window in laws.all_windows())


@dataclass(frozen=True)
class MovedCall(AttentionCall):
    """A call whose rows read keys at other positions, as a probe receives it.

    Attributes:
        windows: window of each head, None for a head without.
        rotary: rotary embedding of the layer.
        keys: the keys that its rows see without windows.
    """

    windows: tuple[Window | None, ...] = ()
    rotary: Rotary | None = None
    keys: VisibleKeys | None = None

    def statistics(self, noise: bool, gaps: bool = False) -> RowStatistics:
        """Row statistics over the keys that rows read, at the positions where they read them.

        Args:
            noise: also compute ``noise_gain``.
            gaps: also compute the gap histogram.

        Raises:
            ValueError: if this is only some of the rows or heads of a call.
        """
        keys, rows = self.keys, self.query.shape[1:3]
        if keys is None or rows != (len(self.windows), keys.count.shape[2]):
            raise ValueError(MOVED)
        plain = AttentionCall(
            **{part.name: getattr(self, part.name) for part in fields(AttentionCall)}
        )
        return statistics_through(plain, self.windows, self.rotary, keys, noise=noise, gaps=gaps)

    def rebuild(self, noise: bool, gaps: bool = False) -> tuple[Tensor, RowStatistics]:
        """The output, without dropout, and the row statistics."""
        statistics = self.statistics(noise, gaps)

        def own() -> Tensor:
            plain = {part.name: getattr(self, part.name) for part in fields(AttentionCall)}
            return AttentionCall(**plain).rebuild(False)[0]

        call = replace(self, dropout_p=0.0)
        return read_through(call, self.windows, self.rotary, own, self.keys), statistics

    def as_eager(self) -> None:
        """None: there are no weights of one softmax to return."""

    def weight_on(self, groups: Tensor) -> Tensor:
        """Raises ValueError: the weight on groups of keys is not available for moved keys."""
        raise ValueError(MOVED)

    def uniform_weight_on(self, groups: Tensor) -> Tensor:
        """Raises ValueError: see :meth:`weight_on`."""
        raise ValueError(MOVED)


class WindowedCall:
    """One call of transformers' interface whose heads have windows.

    Args:
        call: the call, with its query already scaled.
        name: name of its module.
        laws: scalings and windows of the layer.
        rotary: rotary embedding of the layer; None if no window moves keys.
        refuse: returns the exception for a module name and the reason windows cannot be applied.
        known: the keys that its rows see without windows; None computes them.
    """

    def __init__(
        self,
        call: InterfaceCall,
        name: str,
        laws: HeadLaws,
        rotary: Rotary | None,
        refuse: Callable[[str, str], Exception],
        known: VisibleKeys | None = None,
    ) -> None:
        try:
            self._call = call.read(name)
            self._windows = laws.windows_by_head(self._call.query.shape[1])
            self._keys = VisibleKeys.of(self._call) if known is None else known
        except ValueError as error:
            raise refuse(name, str(error)) from error
        self._moves = moves(laws)
        self._rotary, self._refuse = rotary, refuse

    @property
    def keys(self) -> VisibleKeys:
        """The keys that its rows see without windows."""
        return self._keys

    def run(self, call: InterfaceCall) -> Any:
        """Compute the call with its windows, in place of the attention function.

        Args:
            call: the call as it is about to run.

        Returns:
            The output (B, L, Hq, Ev) and None for the weights; the function's result if no row is
            affected by a window.
        """
        self._call = replace(self._call, query=call["query"])  # which laws inside may have scaled
        results: list[Any] = []

        def own() -> Tensor:
            results.append(call.function(*call.args, **call.kwargs))
            return call.output(results[0])

        try:
            with torch._C.DisableTorchFunction():
                output = read_through(self._call, self._windows, self._rotary, own, self._keys)
        except ValueError as error:
            raise self._refuse(self._call.module, str(error)) from error
        if results and not self._changed:
            return results[0]
        return output.transpose(1, 2).contiguous(), None

    @property
    def _changed(self) -> bool:
        """Whether a window changes which keys, or at which positions, some row reads."""
        most = self._keys.most
        return any(window is not None and most > window.unchanged for window in self._windows)

    def read(self, name: str) -> AttentionCall:
        """The call for a probe: with the windows as a mask, or as a :class:`MovedCall`.

        It is the plain call if no row is affected by a window. ``name`` is the module's name.
        """
        call = replace(self._call, module=name)
        if not self._changed:
            return call
        if self._moves:
            parts = {part.name: getattr(call, part.name) for part in fields(call)}
            windows = tuple(self._windows)
            return MovedCall(
                **parts | {"moved": True}, windows=windows, rotary=self._rotary, keys=self._keys
            )
        return _masked(call, self._windows, self._keys)


def _masked(
    call: AttentionCall, windows: Iterable[Any], keys: VisibleKeys | None = None
) -> AttentionCall:
    """The call with windows that move no keys as its only mask.

    Args:
        call: the call.
        windows: window of each head, None for a head without.
        keys: the keys that its rows see; None computes them.
    """
    keys = VisibleKeys.of(call) if keys is None else keys
    different = list(dict.fromkeys(windows))
    windows = different if len(different) == 1 else windows
    with torch.no_grad():
        read = seen_through(list(windows), keys, call.key.shape[2])
        mask = call.attn_mask
        if mask is not None and mask.dtype != torch.bool:
            read = mask.masked_fill(torch.logical_not(read), -torch.inf)
    return replace(
        call, attn_mask=read, is_causal=False, query_offset=0, key_mask=None, cu_seqlens=None
    )


def masked_arguments(laws: HeadLaws, call: AttentionCall, given: dict[str, Any]) -> dict[str, Any]:
    """SDPA's arguments with the masks of a layer's windows.

    Args:
        laws: of the layer.
        call: what ``given`` says, read.
        given: the arguments.

    Raises:
        ValueError: if a window moves keys, which only transformers' interface can, or there is a
            head that the call does not have.
    """
    if any(given[part].is_nested for part in ("query", "key", "value")):
        raise ValueError("its tensors are nested, and a window applies only to dense tensors")
    windows = laws.windows_by_head(call.query.shape[1])
    keys = VisibleKeys.of(call)
    if all(window is None or keys.most <= window.unchanged for window in windows):
        return given
    _refuse_moves(laws)
    mask = _masked(call, windows, keys).attn_mask
    assert mask is not None
    if given["query"].dim() != 4:
        mask = restore_shape(mask.expand(*call.query.shape[:3], -1), given)
    return {**given, "attn_mask": mask, "is_causal": False}


def masked_scores(laws: HeadLaws, scores: Tensor, heads: int | None, narrow: torch.dtype) -> Tensor:
    """The scores of a hand-written softmax with the keys hidden that a window does not read.

    Args:
        laws: of the layer.
        scores: (..., L, S).
        heads: how many the layer has, None if unknown.
        narrow: a key is hidden by a score that hides in this dtype.

    Raises:
        ValueError: if a window moves keys, or heads that differ are not the third last.
    """
    _refuse_moves(laws)
    if scores.dim() == 2:
        return masked_scores(laws, scores[:, None], heads, narrow)[:, 0]
    windows = [laws.window] if laws.window is not None else laws.windows_by_head(heads or 0)
    if laws.window is None and (scores.dim() < 4 or scores.shape[-3] != heads):
        raise ValueError(
            f"windows that differ between heads need scores (..., {heads or 'heads'}, L, S), but "
            f"its scores have shape {tuple(scores.shape)}"
        )
    with torch.no_grad(), torch._C.DisableTorchFunction():
        seen = torch.logical_not(hidden_scores(scores.detach(), narrow))
        four = seen.flatten(0, -4) if seen.dim() > 3 else seen[None]
        if laws.window is not None:
            four = four.flatten(0, 1)[:, None]
        like = torch.empty(*four.shape[:3], 0, device=scores.device)
        call = AttentionCall("", "", like, torch.empty(*four.shape[:2], four.shape[3], 0), like)
        read = seen_through(windows, VisibleKeys.of(replace(call, attn_mask=four)), four.shape[3])
        hidden = torch.logical_not(read).reshape(scores.shape)
    return scores.masked_fill(hidden, -torch.inf)


def _refuse_moves(laws: HeadLaws) -> None:
    """Raise ValueError if a window moves keys, which only transformers' interface allows."""
    if moves(laws):
        raise ValueError(
            "a window that moves keys to other positions needs a model that uses transformers' "
            "attention interface: use far='drop' and sink_positions='keep', which move none"
        )
