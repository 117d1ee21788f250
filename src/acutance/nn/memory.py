"""Multi-head attention after the projections: key-value caches, extra keys, masks and the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from acutance.nn.call import HeadCall, HeldWeights, Score, translate
from acutance.nn.projections import Alibi, Projected, Rotary, join_heads, split_heads
from acutance.scaling import AnyScaling
from acutance.scores import QKNorm
from acutance.shapes import check_flag, check_tensor, describe

__all__ = ["KeyValues", "Remembering"]


class KeyValues(NamedTuple):
    """Projected keys and values, with rotary positions applied.

    Attributes:
        key: (B, H, S, E).
        value: (B, H, S, E).
    """

    key: Tensor
    value: Tensor


class Remembering(Projected):
    """Base of :class:`MultiheadAttention`: attention with key-value caches, for checked options."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    positions: Rotary | Alibi | None
    score: Score
    weights: HeldWeights
    scaling: AnyScaling

    def remember(self, key: Tensor, value: Tensor, *, offset: int = 0) -> KeyValues:
        """Project keys and values once, so that :meth:`recall` can attend to them many times.

        Args:
            key: (S, B, kdim), (B, S, kdim) with ``batch_first``, or (S, kdim).
            value: (S, B, vdim), like the key.
            offset: position of the first key.
        """
        for name, tensor in (("key", key), ("value", value)):
            if check_tensor(name, tensor).dim() not in (2, 3) or tensor.dim() != key.dim():
                raise ValueError(
                    "key and value must have three dimensions, or two without a batch, got "
                    f"{describe(key=key, value=value)}"
                )
        batched = key.dim() == 3
        return self._remember(
            self._batch_first(key, batched), self._batch_first(value, batched), offset
        )

    def recall(
        self,
        query: Tensor,
        memory: KeyValues,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_offset: int = 0,
    ) -> Tensor:
        """Attend to keys projected by :meth:`remember`; same output as :meth:`forward`.

        Args:
            query: this and the arguments below as in :meth:`forward`.
            memory: result of :meth:`remember`.
            key_padding_mask: (B, S). Boolean: **True hides**.
            attn_mask: (L, S) or (B · Hq, L, S). Boolean: **True hides**.
            is_causal: row i sees keys j ≤ i + query_offset.
            query_offset: position of query 0 among the keys.
        """
        if check_tensor("query", query).dim() not in (2, 3):
            raise ValueError(f"query must have two or three dimensions, got {tuple(query.shape)}")
        batched = query.dim() == 3
        out, _ = self._attend(
            self._batch_first(query, batched),
            memory,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            query_offset=query_offset,
            need_weights=False,
        )
        return self._as_given(out, batched)

    def step(self, x: Tensor, past: KeyValues | None = None) -> tuple[Tensor, KeyValues]:
        """Causal self-attention of new tokens after those in ``past``: decoding with a cache.

        Steps of any lengths give the same outputs as one causal forward.

        Args:
            x: the next tokens, shaped as the query of :meth:`forward`.
            past: keys and values from the previous step; None at the first.

        Returns:
            The output, and the keys and values including the new ones.

        Raises:
            ValueError: if the module has other widths for key and value, or shapes do not fit.

        Example:
            >>> from acutance.nn import MultiheadAttention
            >>> module = MultiheadAttention(8, 2, batch_first=True, positions="rotary")
            >>> x, past, outs = torch.randn(1, 5, 8), None, []
            >>> for token in x.split(1, 1):
            ...     out, past = module.step(token, past)
            ...     outs.append(out)
            >>> whole, _ = module(x, x, x, is_causal=True)
            >>> torch.allclose(torch.cat(outs, 1), whole, atol=1e-6)
            True
        """
        if not self.packed:
            raise ValueError(
                "step() needs self-attention with kdim = vdim = embed_dim, got "
                f"embed_dim={self.embed_dim}, kdim={self.kdim}, vdim={self.vdim}"
            )
        offset = 0 if past is None else past.key.shape[2]
        new = self.remember(x, x, offset=offset)
        if past is not None:
            if past.key.shape[0] != new.key.shape[0]:
                raise ValueError(
                    f"past has batch size {past.key.shape[0]}, but x has {new.key.shape[0]}"
                )
            new = KeyValues(*(torch.cat(pair, 2) for pair in zip(past, new, strict=True)))
        return self.recall(x, new, is_causal=True, query_offset=offset), new

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        """An input as (B, L, E)."""
        if not batched:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _as_given(self, out: Tensor, batched: bool) -> Tensor:
        """An output in the layout of the inputs."""
        if not batched:
            return out.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1)

    def _remember(self, key: Tensor, value: Tensor, offset: int) -> KeyValues:
        """Project keys and values, split heads and apply positions from ``offset`` on."""
        self._check_width("key", key, self.kdim)
        self._check_width("value", value, self.vdim)
        if key.shape[:2] != value.shape[:2]:
            raise ValueError(
                "key and value must have the same batch size and source length, got "
                f"{describe(key=key, value=value)}"
            )
        k = split_heads(self._project(1, key), self.num_kv_heads)
        v = split_heads(self._project(2, value), self.num_kv_heads)
        if isinstance(self.positions, Rotary):
            if isinstance(self.score, QKNorm):
                _, k = self.score(k.new_empty(k.shape[0], self.num_heads, 0, k.shape[3]), k)
            k = self.positions(k, offset)
        return KeyValues(k, v)

    def _check_width(self, name: str, x: Tensor, width: int) -> None:
        """Raise ValueError unless an input has this width."""
        if x.shape[-1] != width:
            raise ValueError(
                f"{name} must have the width {width}, got {x.shape[-1]} ({describe(**{name: x})})"
            )

    def _attend(
        self,
        rows: Tensor,
        memory: KeyValues,
        *,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        query_offset: int,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from new rows (B, L, embed_dim) to the remembered keys and values.

        Returns the output (B, L, embed_dim) and, if ``need_weights``, the weights (B, Hq, L, S).
        """
        check_flag("need_weights", need_weights)
        self._check_width("query", rows, self.embed_dim)
        keys, (k, v) = memory.key.shape[2], self._with_extra(memory)
        if rows.shape[0] != k.shape[0]:
            raise ValueError(
                f"query and key must have the same batch size: query has B={rows.shape[0]}, "
                f"key has B={k.shape[0]} ({describe(query=rows)})"
            )
        extra = k.shape[2] - keys
        masks = translate(
            attn_mask,
            key_padding_mask,
            batch=rows.shape[0],
            heads=self.num_heads,
            queries=rows.shape[1],
            keys=keys,
            is_causal=check_flag("is_causal", is_causal),
            extra=extra,
        )
        q, score = split_heads(self._project(0, rows), self.num_heads), self.score
        if isinstance(self.positions, Rotary):
            if isinstance(score, QKNorm):
                q, _ = score(q, k[:, :, :0])
                score = _Scaled(score.scale)
            q = self.positions(q, query_offset)
        drop = self.dropout if self.training else 0.0
        call = HeadCall(
            q,
            k,
            masks,
            is_causal,
            query_offset + extra,
            self._slopes(rows),
            score,
            self.weights(),
            self.scaling,
        )
        records = self.statistics != "off"
        if need_weights:
            self._record(call.statistics() if records else None)
            weights = dropout(call.dense(), drop).to(v.dtype)
            out = weights @ v.repeat_interleave(self.num_heads // self.num_kv_heads, 1)
            weights = torch.cat([weights[..., extra:], weights[..., :extra]], -1)
            return self.out_proj(join_heads(out)), weights
        out, stats = call.attend(v, dropout_p=drop, statistics=records)
        self._record(stats)
        return self.out_proj(join_heads(out)), None

    def _slopes(self, like: Tensor) -> Tensor | None:
        """ALiBi's slopes (Hq,); not a buffer, since casting the module would round them."""
        if not isinstance(self.positions, Alibi):
            return None
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return self.positions.of(self.num_heads, dtype=dtype, device=like.device)

    def _with_extra(self, memory: KeyValues) -> KeyValues:
        """Keys and values, preceded by those of ``add_bias_kv`` and ``add_zero_attn``."""
        keys, values = [memory.key], [memory.value]
        if self.add_zero_attn:
            for parts in (keys, values):
                parts.insert(0, parts[-1].new_zeros(*parts[-1].shape[:2], 1, self.head_dim))
        if self.bias_k is not None and self.bias_v is not None:
            for parts, bias in ((keys, self.bias_k), (values, self.bias_v)):
                row = split_heads(bias.to(parts[-1].dtype), self.num_kv_heads)
                parts.insert(0, row.expand(parts[-1].shape[0], -1, -1, -1))
        if len(keys) == 1:
            return memory
        return KeyValues(torch.cat(keys, 2), torch.cat(values, 2))


@dataclass(frozen=True)
class _Scaled:
    """A dot-product score of normalised vectors, with the scale of the original score."""

    scale: float

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query, key, self.scale
