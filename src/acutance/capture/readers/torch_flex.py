"""Read FlexAttention: score_mod becomes a bias, BlockMask a boolean mask."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall

__all__ = ["FLEX", "flex_call"]

#: The operator that FlexAttention calls, whatever happens before; None where PyTorch has none.
FLEX: Any = None
with contextlib.suppress(ImportError):
    FLEX = importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention
_NAMES = (
    "query",
    "key",
    "value",
    "score_mod",
    "block_mask",
    "scale",
    "kernel_options",
    "score_mod_other_buffers",
    "mask_mod_other_buffers",
)
_AT_ONCE = 1 << 22  # scores


def flex_call(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> AttentionCall:
    """Read a call of the FlexAttention operator; ``name`` is that of the module.

    Uncompiled FlexAttention materialises all scores, so a mask and a bias of that size are
    affordable.
    """
    arguments = dict(zip(_NAMES, args, strict=False)) | dict(kwargs)
    query, key = arguments["query"].detach(), arguments["key"].detach()
    if query.shape[0] != key.shape[0]:  # a batch of one key set is shared
        key = key.expand(query.shape[0], -1, -1, -1)
    value = arguments["value"].detach().expand(key.shape[0], -1, -1, -1)
    scale = float(arguments["scale"])
    score_mod = _over_all(
        arguments["score_mod"], (0, *arguments.get("score_mod_other_buffers", ()))
    )
    mask_mod = _over_all(arguments["block_mask"][-1], arguments.get("mask_mod_other_buffers", ()))
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    places = [torch.arange(n, device=query.device) for n in (batch, heads, queries, keys)]
    rows = max(1, _AT_ONCE // max(1, batch * heads * keys))
    many = key.repeat_interleave(heads // key.shape[1], dim=1)
    visible, bias = [], []
    for start in range(0, queries, rows):
        b, h, i, j = places[0], places[1], places[2][start : start + rows], places[3]
        part = query[:, :, start : start + rows]
        scores = _accurate(part) @ _accurate(many).mT * scale
        modified = score_mod(scores, b, h, i, j).to(scores.dtype)
        seen = mask_mod(b, h, i, j).expand(scores.shape) & (modified > -torch.inf)
        visible.append(seen)
        bias.append(torch.where(seen, modified - scores, 0.0))
    return AttentionCall(
        module=name,
        source="flex_attention",
        query=query,
        key=key,
        value=value,
        attn_mask=torch.cat(visible, 2),
        bias=torch.cat(bias, 2),
        scale=scale,
    )


def _accurate(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _over_all(function: Callable[..., Tensor], buffers: Sequence[Any]) -> Callable[..., Tensor]:
    """Vectorise a function of single indices over all batches, heads, queries and keys.

    Args:
        function: takes (a score and) the indices of batch, head, query and key.
        buffers: further arguments, after a leading 0 if the first is a score.
    """
    scored = bool(buffers) and isinstance(buffers[0], int)
    rest = tuple(buffers[1:] if scored else buffers)
    none = (None,) * len(rest)
    lead = (0,) if scored else ()
    for place in (3, 2, 1, 0):
        takes = tuple(0 if place == other else None for other in range(4))
        function = torch.vmap(function, (*lead, *takes, *none), 0)

    def all_places(*arguments: Tensor) -> Tensor:
        return function(*arguments, *rest)

    return all_places
