"""What a law does to the calls of a module: the factor of each row, and what it multiplies."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.head_laws import HeadLaws
from acutance.calibration.law import AnyLaw, by_layer
from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import is_softmax, is_windowed_inside
from acutance.capture.head_axis import fold
from acutance.capture.intercept import ModuleStack
from acutance.capture.module_names import class_name
from acutance.capture.readers.interface_call import InterfaceCall
from acutance.masks import check_masking, hidden_scores, hides, shallow_mask
from acutance.scaling import AnyScaling, Scaling, Window, visible_keys

__all__ = [
    "KnownFactors",
    "Plan",
    "Plans",
    "as_query",
    "count",
    "entropy_of",
    "factor_of_call",
    "query_factor",
    "scaled_scores",
    "situation_of",
    "warn_of_shallow_mask",
]


def count(query: Tensor, key: Tensor, masks: dict[str, Any]) -> Tensor:
    """Visible keys of each row, (B or 1, Hq or 1, L) of int64.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        masks: the fields of an :class:`AttentionCall` that hide keys; those left out hide none.

    Example:
        >>> query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
        >>> count(query, key, {"is_causal": True, "query_offset": 2})
        tensor([[[3, 4, 5]]])
    """
    given = {name: value for name, value in masks.items() if value is not None}
    queries, keys = query.shape[2], key.shape[2]
    mask: Tensor | None = given.get("attn_mask")
    if mask is not None and not given.get("is_causal") and set(given) <= _PLAIN:
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        seen: Tensor = mask if mask.dtype == torch.bool else torch.logical_not(hides(mask))
        if seen.shape[3] == 1:
            seen = seen.expand(-1, -1, -1, keys)
        return seen.sum(-1)
    if mask is None and set(given) <= _PLAIN:
        if not given.get("is_causal"):
            return torch.full((1, 1, queries), keys, device=query.device)
        position = torch.arange(1, queries + 1, device=query.device)
        offset = int(given.get("query_offset", 0))
        return (position + offset).clamp(min=0, max=keys)[None, None]
    masking = check_masking(query, key, **given)
    return visible_keys(masking)


_PLAIN = {"attn_mask", "is_causal", "query_offset"}
_MASKS = (*sorted(_PLAIN), "window", "key_mask", "cu_seqlens", "bias")


def query_factor(
    laws: HeadLaws, n: Tensor, heads: int, dtype: torch.dtype, entropy: Tensor | None = None
) -> Tensor:
    """Factor that multiplies the query of each row, (B or 1, Hq or 1, L).

    Args:
        laws: calibrated laws of the layer's heads.
        n: number of visible keys, (B or 1, Hq or 1, L), before a law's window hides any; this
            function subtracts those that the window hides.
        heads: number of query heads of the call.
        dtype: of the query and the result. Factors of float16 and bfloat16 queries are computed in
            float32 and rounded at the end.
        entropy: of the unscaled rows, (B, Hq, L), if a law needs it.

    Raises:
        ValueError: if a law has parameters or entries for heads that the call does not have.

    Example:
        >>> from acutance import scaling
        >>> laws = HeadLaws(heads=((1, scaling.SSMax(s=1.0)),))
        >>> query_factor(laws, torch.tensor([[[8]]]), 2, torch.float32)[0]
        tensor([[1.0000],
                [2.0794]])
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if laws.scalings():
        n = _read(laws, n, heads)

    def of(scaling: AnyScaling) -> Tensor:
        factor = scaling.factor(n, entropy=entropy, dtype=wide)
        if factor.dim() < 3 or factor.shape[-2] not in (1, heads):
            raise ValueError(
                f"the scaling has parameters for {factor.shape[-2]} heads, but the call has {heads}"
            )
        return factor

    if laws.whole is not None:
        return of(laws.whole).to(dtype)
    wrong = [head for head, _ in laws.heads if head >= heads]
    if wrong:
        raise ValueError(f"the law has head {wrong[0]}, but the call has {heads} heads")
    own = dict(laws.heads)
    made = {scaling: of(scaling) for scaling in set(own.values())}
    columns = []
    for head in range(heads):
        if head not in own:
            columns.append(torch.ones_like(n[:, 0], dtype=wide))
            continue
        factor = made[own[head]]
        columns.append(factor[:, head if factor.shape[1] > 1 else 0])
    batch = max(column.shape[0] for column in columns)
    return torch.stack([c.expand(batch, -1) for c in columns], 1).to(dtype)


def _read(laws: HeadLaws, n: Tensor, heads: int) -> Tensor:
    """Number of keys that each row reads, of its n visible ones: those in the window of its head.

    It is all n for a head without a window. Shaped as ``n``, or (B or 1, heads, L) if windows
    differ between heads.
    """
    if laws.window is not None:
        return laws.window.keys_read(n)
    if not laws.windows:
        return n
    columns = n.expand(-1, heads, -1).unbind(1)
    windows = laws.windows_by_head(heads)
    pairs = zip(windows, columns, strict=True)
    return torch.stack([n if window is None else window.keys_read(n) for window, n in pairs], 1)


def scaled_scores(scores: Tensor, laws: HeadLaws, heads: int | None, narrow: torch.dtype) -> Tensor:
    """Scores multiplied by a law's factor of each row; those of hidden keys stay as they are.

    Args:
        scores: what a softmax over the last dimension is about to take, two dimensions or more.
        laws: of the layer.
        heads: how many there are, None if unknown.
        narrow: a key is hidden by a score that hides in this dtype.

    Raises:
        ValueError: if heads cannot be determined, or a law is for others.

    Example:
        >>> from acutance import scaling
        >>> scores = torch.tensor([[[4.0, 1.0], [2.0, -torch.inf]]])
        >>> scaled_scores(scores, HeadLaws(scaling.HeadTable([2.0])), 1, torch.float32)
        tensor([[[8., 2.],
                 [4., -inf]]])
    """
    if scores.dim() == 2:  # rows of one query each
        return scaled_scores(scores[:, None], laws, heads, narrow).squeeze(1)
    with torch._C.DisableTorchFunction():
        factor, hidden = _factor(scores, laws, heads, narrow)
    # seen by what is around this: another law follows these to the softmax too
    products = scores.masked_fill(hidden, 0.0).to(factor.dtype)
    return scores + (products * (factor - 1)).to(scores.dtype)


def warn_of_shallow_mask(name: str, scores: Tensor, narrow: torch.dtype) -> None:
    """Warn if keys seem hidden by a number that does not count as hiding, such as −1e4.

    Args:
        name: of the module.
        scores: (..., S).
        narrow: as for :func:`scaled_scores`.

    Example:
        >>> scores = torch.tensor([[0.0, -1e4, -1e4], [0.0, 0.0, -1e4]])
        >>> warn_of_shallow_mask("attn", scores * 1e6, scores.dtype)  # −1e10 hides
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error")
        ...     warn_of_shallow_mask("attn", scores, scores.dtype)
        Traceback (most recent call last):
            ...
        UserWarning: attn hides keys with a number above -1e9, ...
    """
    with torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            shallow = shallow_mask(scores, dtype=narrow) is not None
        except RuntimeError:  # under vmap, which has no numbers to ask
            return
    if shallow:
        warnings.warn(
            f"{name} hides keys with a number above -1e9, which the law counts as visible keys, so "
            "its n is too large; mask with -inf or torch.finfo(dtype).min",
            stacklevel=3,
        )


def _factor(
    scores: Tensor, laws: HeadLaws, heads: int | None, narrow: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Factor of each row of scores (..., L, S), of shape (..., L, 1), and which keys are hidden."""
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    hidden = hidden_scores(scores, narrow)
    with torch.no_grad():
        count = torch.logical_not(hidden).sum(-1, keepdim=True)
        n = fold(count, heads).squeeze(-1)
        entropy = None
        if laws.needs_entropy:
            weights = scores.detach().to(wide).masked_fill(hidden, -torch.inf).softmax(-1)
            entropy = fold(torch.special.entr(weights).sum(-1, keepdim=True).nan_to_num(), heads)
            entropy = entropy.squeeze(-1)
        places = torch.arange(count.numel(), device=scores.device)
        order = fold(places.view(count.shape), heads).flatten()
    factor = query_factor(laws, n, n.shape[1], wide, entropy).expand(n.shape)
    row = torch.empty_like(order)
    row[order] = places  # where each row of the scores lies among the folded ones
    return factor.flatten()[row].view(count.shape), hidden


def as_query(factor: Tensor, query: Tensor, four: Tensor) -> Tensor:
    """A factor (B or 1, Hq or 1, L), reshaped to multiply a query of any rank."""
    if query.dim() == 4:
        return factor.unsqueeze(-1)
    if query.dim() == 3:
        return factor.squeeze(1).unsqueeze(-1)
    if query.dim() == 2:
        return factor[0, 0].unsqueeze(-1)
    whole = factor.expand(four.shape[:3])
    return whole.reshape(*query.shape[:-3], *four.shape[1:3]).unsqueeze(-1)


def factor_of_call(laws: HeadLaws, call: AttentionCall) -> Tensor:
    """:func:`query_factor` of a captured call, (B or 1, Hq or 1, L)."""
    n = count(call.query, call.key, {name: getattr(call, name) for name in _MASKS})
    entropy = entropy_of(call) if laws.needs_entropy else None
    return query_factor(laws, n, call.query.shape[1], call.query.dtype, entropy)


def entropy_of(call: AttentionCall) -> Tensor:
    """Entropy of each row of a call without a law, in nats, (B, Hq, L)."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        entropy: Tensor = call.statistics(False).entropy
        return entropy


_MOST_KNOWN = 8  # factors that a thread remembers


class KnownFactors:
    """Values that a thread computed from masks, for later layers with the same masks."""

    def __init__(self) -> None:
        #: by situation, what is known; its mask, held so that no other gets its identity; and what
        #: was in the mask, where writing to it leaves no trace
        self._known: dict[tuple[Any, ...], tuple[Any, Tensor | None, Tensor | None]] = {}

    def get(self, situation: tuple[Any, ...]) -> Any:
        """The value of a :func:`situation_of`; None if there is none or its mask changed."""
        known = self._known.get(situation)
        if known is None:
            return None
        value, mask, before = known
        if mask is not None and before is not None and not torch.equal(mask, before):
            return None
        return value

    def put(self, situation: tuple[Any, ...], mask: Tensor | None, value: Any) -> None:
        """Store the value of a situation that has this mask."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        before = mask.clone() if mask is not None and mask.is_inference() else None
        self._known[situation] = value, mask, before

    def forget_masks(self) -> None:
        """Drop references to the masks of a pass."""
        self._known = {key: each for key, each in self._known.items() if each[1] is None}


def situation_of(laws: HeadLaws, call: InterfaceCall) -> tuple[Any, ...] | None:
    """Everything that the factors of a call depend on, as a dictionary key; None if undecidable.

    It is undecidable with a cache object, packed documents, vmap, tensor subclasses, or a mask on
    a GPU in inference mode, whose comparison would make the host wait.
    """
    module, query, key, _, mask = call.positional()
    if type(query) is not Tensor or torch._C._functorch.maybe_current_level() is not None:
        return None
    given = call.kwargs
    if given.get("cache") is not None or given.get("cu_seq_lens_k") is not None:
        return None
    written = None
    if mask is not None:
        if type(mask) is not Tensor or (mask.is_inference() and mask.device.type != "cpu"):
            return None
        written = id(mask), None if mask.is_inference() else mask._version
    return (
        id(laws),
        call.implementation,
        query.shape,
        key.shape[2],
        query.dtype,
        query.device,
        written,
        given.get("is_causal"),
        getattr(module, "is_causal", None),
        given.get("sliding_window"),
        torch.is_inference_mode_enabled(),
    )


@dataclass(frozen=True)
class Plan:
    """What a law does to the calls of one module.

    Attributes:
        name: name of the attention module: the parent if the module itself is only a softmax.
        laws: scalings and windows of its heads; None if the law does not change it.
        windowed: whether the layer has a sliding window of its own.
        by_count: whether factors are constants that depend only on the number of visible keys.
        scales: whether the law scales it, rather than only giving it windows.
    """

    name: str
    laws: HeadLaws | None
    windowed: bool
    by_count: bool
    scales: bool


class Plans:
    """The :class:`Plan` of each module of a model under a law, computed at first use."""

    def __init__(self, modules: ModuleStack, law: AnyLaw) -> None:
        self._known: dict[str, Plan] = {}
        self._elsewhere, self._layers = by_layer(modules.model, law)
        self._modules, self._top = modules, class_name(modules.model)

    def windows(self) -> list[Window]:
        """Every window of the law."""
        laws = [*self._layers.values(), *([self._elsewhere] if self._elsewhere else [])]
        return [window for one in laws for window in one.all_windows()]

    def of(self, full: str) -> Plan:
        """The plan of a module with this name."""
        if (known := self._known.get(full)) is not None:
            return known
        module, above = self._modules.module_of(full), full.rpartition(".")[0]
        assert module is not None
        name = full
        if is_softmax(module):
            name = above or self._top
            module, above = self._modules.module_of(name) or module, name.rpartition(".")[0]
        windowed = is_windowed_inside(module, self._modules.module_of(above or self._top))
        laws = self._of_layer(name)
        by_count = laws is not None and not laws.needs_entropy
        scalings = [] if laws is None else laws.scalings()
        by_count = by_count and all(isinstance(one, Scaling) for one in scalings)
        plan = self._known[full] = Plan(name, laws, windowed, by_count, bool(scalings))
        return plan

    def _of_layer(self, name: str) -> HeadLaws | None:
        """The law of a module or the closest one around it that has one, else of all others."""
        while name and name not in self._layers:
            name = name.rpartition(".")[0]
        return self._layers.get(name) or self._elsewhere
