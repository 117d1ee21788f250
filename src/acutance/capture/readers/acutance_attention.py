"""Read calls of :func:`acutance.attention`, and those reported with :func:`acutance.tap`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance import scaling as scalings
from acutance import scores
from acutance import weights as weightings
from acutance.attend import DEFAULTS, attention
from acutance.capture.attention_call import AttentionCall
from acutance.masks import check_masking
from acutance.scaling import NoScaling
from acutance.scores import DotScore
from acutance.shapes import check_inputs
from acutance.weights import Softmax, SoftmaxOne

ACUTANCE = attention
_SIGNATURE = inspect.signature(attention)
_DEFAULTS = (
    "attn_mask",
    "is_causal",
    "scale",
    "dropout_p",
    "query_offset",
    "window",
    "key_mask",
    "cu_seqlens",
    "bias",
    "softcap",
    "sinks",
)
_MASKS = (
    "attn_mask",
    "is_causal",
    "query_offset",
    "window",
    "key_mask",
    "document_ids",
    "cu_seqlens",
    "bias",
    "alibi_slopes",
)


def call_from_arguments(arguments: Mapping[str, Any], name: str, source: str) -> AttentionCall:
    """An :class:`AttentionCall` from query, key, value and options.

    Raises:
        TypeError: as :func:`acutance.attention`.
        ValueError: as :func:`acutance.attention`.
    """
    query, key, value = arguments["query"], arguments["key"], arguments.get("value")
    if value is None:
        value = key[..., :0]
    check_inputs(query, key, value, True)
    check_masking(
        query, key, **{name: arguments[name] for name in _MASKS if arguments.get(name) is not None}
    )
    options = {
        option: arguments[option] for option in _DEFAULTS if arguments.get(option) is not None
    }
    cross = query.shape[-2] != key.shape[-2]
    return AttentionCall(name, source, query, key, value, **options, cross=cross)


def acutance_call(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> AttentionCall:
    """Read a call of :func:`acutance.attention`.

    Raises:
        ValueError: if it is not a softmax of dot products, or has a scaling.

    Example:
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> acutance_call((x, x, x), {"score": "cosine"}, "layer").source
        'acutance.attention'
        >>> acutance_call((x, x, x), {"weights": "relu2"}, "layer")
        Traceback (most recent call last):
            ...
        ValueError: acutance.attention with weights='relu2': return_stats=True reads it
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = {**DEFAULTS, **bound.arguments, **bound.arguments["options"]}
    score, weighting = scores.get(arguments["score"]), weightings.get(arguments["weights"])
    law, query, key = scalings.get(arguments["scaling"]), arguments["query"], arguments["key"]
    other = []
    if not isinstance(score, DotScore):
        other.append(f"score={arguments['score']!r}")
    if isinstance(weighting, SoftmaxOne):
        arguments["sinks"] = query.new_zeros(query.shape[1])
    elif weighting != Softmax():
        other.append(f"weights={arguments['weights']!r}")
    if not isinstance(law, NoScaling):
        other.append("a scaling")
    if arguments["document_ids"] is not None:
        other.append("document_ids")
    if other or not isinstance(score, DotScore):
        reason = "return_stats=True reads it"
        raise ValueError(f"acutance.attention with {', '.join(other)}: {reason}")
    scale = arguments["scale"]
    query, key, score_scale = score.transform(query.detach(), key.detach())
    arguments |= {"query": query, "key": key, "scale": score_scale if scale is None else scale}
    if arguments["alibi_slopes"] is not None:
        far = _distances(query.shape[2], key.shape[2], arguments["query_offset"], query.device)
        bias = -arguments["alibi_slopes"].detach().view(-1, 1, 1) * far
        arguments["bias"] = bias if arguments["bias"] is None else arguments["bias"] + bias
        arguments["alibi_slopes"] = None
    return call_from_arguments(arguments, name, "acutance.attention")


def _distances(queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    """Positions of queries minus positions of keys, (L, S)."""
    rows = torch.arange(queries, device=device).unsqueeze(1) + offset
    return (rows - torch.arange(keys, device=device)).abs()
