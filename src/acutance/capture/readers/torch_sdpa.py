"""Read the arguments of ``F.scaled_dot_product_attention``, of any rank, padded or nested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall

__all__ = ["restore_shape", "to_four_dims", "refusal", "sdpa_arguments", "sdpa_call"]

_NAMES = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)


def sdpa_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call of ``F.scaled_dot_product_attention`` by name."""
    return dict(zip(_NAMES, args, strict=False)) | dict(kwargs)


def sdpa_call(
    arguments: Mapping[str, Any], name: str, *, cross: bool = False, real: Tensor | None = None
) -> AttentionCall:
    """Read the arguments of ``F.scaled_dot_product_attention``, broadcasting as it does.

    Args:
        arguments: the arguments by name.
        name: name of the module.
        cross: whether queries and keys come from different sequences.
        real: boolean (B, L), False on padding queries; None if unknown.

    Raises:
        ValueError: if nested tensors have an unsupported layout.
    """
    parts = [arguments[part] for part in ("query", "key", "value")]
    if any(part.is_nested for part in parts):
        return _nested_call(arguments, name, cross=cross)
    rank = parts[0].dim()
    if rank == 3:  # (N, L, E) is one head each
        parts = [part.unsqueeze(1) for part in parts]
    elif rank == 2:
        parts = [part[None, None] for part in parts]
    batch = torch.broadcast_shapes(*(part.shape[:-3] for part in parts))
    heads: tuple[int, ...] = ()
    if not arguments.get("enable_gqa", False):
        heads = torch.broadcast_shapes(*(part.shape[-3:-2] for part in parts))
    query, key, value = (
        _fold_batch(part.expand(*batch, *(heads or part.shape[-3:-2]), *part.shape[-2:]))
        for part in parts
    )
    mask = arguments.get("attn_mask")
    causal, offset = bool(arguments.get("is_causal", False)), 0
    if mask is not None and type(mask) is not Tensor:
        from torch.nn.attention.bias import CausalBias, CausalVariant  # imports the compiler

        if isinstance(mask, CausalBias):  # no tensor of a mask: its own entries mean nothing
            causal = True
            if mask.variant == CausalVariant.LOWER_RIGHT:
                offset = mask.seq_len_kv - mask.seq_len_q
            mask = None
    if isinstance(mask, Tensor):
        if rank == 3 and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        elif rank > 4 and mask.dim() > 3:
            mask = _fold_batch(mask.expand(*batch, *mask.shape[-3:]))
    scale = arguments.get("scale")
    return AttentionCall(
        module=name,
        source="scaled_dot_product_attention",
        query=query,
        key=key,
        value=value,
        attn_mask=mask,
        is_causal=causal,
        query_offset=offset,
        scale=None if scale is None else float(scale),
        dropout_p=float(arguments.get("dropout_p") or 0.0),
        cross=cross,
        real=real,
    )


def _nested_call(arguments: Mapping[str, Any], name: str, *, cross: bool) -> AttentionCall:
    """Read a call with nested tensors: sequences are padded, and the padding is hidden."""
    if arguments.get("attn_mask") is not None:
        raise ValueError("nested tensors with an attn_mask are not read")
    (query, asks), (key, answers), (value, _) = (
        _padded(arguments[part]) for part in ("query", "key", "value")
    )
    scale = arguments.get("scale")
    return AttentionCall(
        module=name,
        source="scaled_dot_product_attention",
        query=query,
        key=key,
        value=value,
        is_causal=bool(arguments.get("is_causal", False)),
        scale=None if scale is None else float(scale),
        dropout_p=float(arguments.get("dropout_p") or 0.0),
        key_mask=answers,
        cross=cross,
        real=asks,
    )


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Pad a jagged tensor (B, H, l, E) with zeros, and boolean (B, L), True on tokens."""
    ragged = getattr(nested, "_ragged_idx", None)
    if not nested.is_nested or nested.layout is not torch.jagged or ragged != 2:
        raise ValueError("only jagged nested tensors are read, (B, H, lengths, E)")
    starts = nested.offsets()[:-1]  # type: ignore[attr-defined]
    lengths = nested.lengths()  # type: ignore[attr-defined]
    lengths = nested.offsets().diff() if lengths is None else lengths  # type: ignore[attr-defined]
    tokens = nested.values().detach().movedim(1, 0)  # (all tokens, H, E)
    positions = torch.arange(int(lengths.max()), device=tokens.device)
    is_token = positions < lengths.unsqueeze(1)
    rows = tokens.new_zeros(*is_token.shape, *tokens.shape[1:])
    rows[is_token] = tokens[(starts.unsqueeze(1) + positions)[is_token]]
    return rows.transpose(1, 2), is_token


def refusal(arguments: Mapping[str, Any]) -> str | None:
    """Why a call's output cannot be computed in place of the model; None if it can."""
    nested = any(arguments[part].is_nested for part in ("query", "key", "value"))
    return "its tensors are nested" if nested else None


def _fold_batch(tensor: Tensor) -> Tensor:
    """Fold all dimensions before the last three into one."""
    return tensor if tensor.dim() == 4 else tensor.flatten(0, tensor.dim() - 4)


def restore_shape(output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Reshape an output (B, Hq, L, Ev) to the shape that SDPA would return for these arguments."""
    parts = [arguments[part] for part in ("query", "key", "value")]
    rank = parts[0].dim()
    if rank == 4:
        return output
    if rank < 4:
        return output.squeeze(1) if rank == 3 else output[0, 0]
    batch = torch.broadcast_shapes(*(part.shape[:-3] for part in parts))
    shaped: Tensor = output.unflatten(0, batch)
    return shaped


def to_four_dims(tensor: Tensor) -> Tensor:
    """Reshape an output of SDPA to (B, Hq, L, Ev)."""
    if tensor.is_nested:
        return _padded(tensor)[0]
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor.unsqueeze(1) if tensor.dim() == 3 else _fold_batch(tensor)
