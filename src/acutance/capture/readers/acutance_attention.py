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
from acutance.attend import attention
from acutance.capture.attention_call import AttentionCall
from acutance.check_masks import check_masking
from acutance.scaling import NoScaling
from acutance.scores import DotScore
from acutance.shapes import check_inputs
from acutance.weights import Softmax, SoftmaxOne

__all__ = ["OWN", "own_call", "plain_call"]

OWN = attention
_SIGNATURE = inspect.signature(attention)
_PLAIN = (
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


def plain_call(given: Mapping[str, Any], name: str, source: str) -> AttentionCall:
    """The call of query, key, value and options.

    Raises:
        TypeError: as :func:`acutance.attention`.
        ValueError: as :func:`acutance.attention`.
    """
    query, key, value = given["query"], given["key"], given.get("value")
    if value is None:
        value = key[..., :0]
    check_inputs(query, key, value, True)
    check_masking(
        query, key, **{name: given[name] for name in _MASKS if given.get(name) is not None}
    )
    options = {option: given[option] for option in _PLAIN if given.get(option) is not None}
    cross = query.shape[-2] != key.shape[-2]
    return AttentionCall(name, source, query, key, value, **options, cross=cross)


def own_call(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> AttentionCall:
    """The call of :func:`acutance.attention` with these arguments.

    Raises:
        ValueError: if it is not softmax of dot products, or has a scaling of its own.

    Example:
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> own_call((x, x, x), {"score": "cosine"}, "layer").source
        'acutance.attention'
        >>> own_call((x, x, x), {"weights": "relu2"}, "layer")
        Traceback (most recent call last):
            ...
        ValueError: acutance.attention with weights='relu2': return_stats=True reads it
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    score, weighting = scores.get(given["score"]), weightings.get(given["weights"])
    law, query, key = scalings.get(given["scaling"]), given["query"], given["key"]
    other = []
    if not isinstance(score, DotScore):
        other.append(f"score={given['score']!r}")
    if isinstance(weighting, SoftmaxOne):
        given["sinks"] = query.new_zeros(query.shape[1])
    elif weighting != Softmax():
        other.append(f"weights={given['weights']!r}")
    if not isinstance(law, NoScaling):
        other.append("a scaling")
    if given["document_ids"] is not None:
        other.append("document_ids")
    if other or not isinstance(score, DotScore):
        reason = "return_stats=True reads it"
        raise ValueError(f"acutance.attention with {', '.join(other)}: {reason}")
    scale = given["scale"]
    query, key, own = score.transform(query.detach(), key.detach())
    given |= {"query": query, "key": key, "scale": own if scale is None else scale}
    if given["alibi_slopes"] is not None:
        far = _distances(query.shape[2], key.shape[2], given["query_offset"], query.device)
        bias = -given["alibi_slopes"].detach().view(-1, 1, 1) * far
        given["bias"] = bias if given["bias"] is None else given["bias"] + bias
        given["alibi_slopes"] = None
    return plain_call(given, name, "acutance.attention")


def _distances(queries: int, keys: int, offset: int, device: torch.device) -> Tensor:
    rows = torch.arange(queries, device=device).unsqueeze(1) + offset
    return (rows - torch.arange(keys, device=device)).abs()
