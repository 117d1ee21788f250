"""Linear attention as a module: parallel over a sequence, or token by token from a state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from acutance.mechanisms import (
    FeatureMap,
    LinearState,
    decay_attention,
    linear_attention,
    linear_state,
    linear_step,
)
from acutance.mechanisms import (
    feature_map as find_map,
)
from acutance.mechanisms.state import keeps_squares
from acutance.nn.call import key_mask
from acutance.nn.gated import check_sequence
from acutance.nn.projections import Rotary, join_heads, split_heads
from acutance.nn.recording import Recorded, Recording
from acutance.shapes import check_count, check_flag, check_number

__all__ = ["LinearAttention", "LinearHeads"]


class LinearHeads(Recorded):
    """Base of linear attention modules: projections, heads, parallel and step form."""

    positions: Rotary | None = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None,
        value_dim: int,
        feature_map: str | FeatureMap,
        normalize: bool | None,
        scale: float,
        bias: bool,
        rows: Literal["sums", "blockwise"],
        statistics: Recording,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(statistics)
        check_count("embed_dim", embed_dim, 1)
        check_count("num_heads", num_heads, 1)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_count("num_kv_heads", kv_heads, 1)
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {kv_heads}")
        for name, width in (("embed_dim", embed_dim), ("value_dim", value_dim)):
            if width % num_heads:
                raise ValueError(f"num_heads={num_heads} must divide {name}, got {width}")
        if rows not in ("sums", "blockwise"):
            raise ValueError(f"rows must be 'sums' or 'blockwise', got {rows!r}")
        self.embed_dim, self.value_dim = embed_dim, value_dim
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.feature_map = find_map(feature_map)
        self.normalize, self.scale = normalize, check_number("scale", scale)
        self.rows: Literal["sums", "blockwise"] = rows
        check_flag("bias", bias)

        def layer(inputs: int, outputs: int) -> nn.Linear:
            linear = nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
            return linear

        self.q_proj = layer(embed_dim, embed_dim)
        self.k_proj = layer(embed_dim, kv_heads * self.head_dim)
        self.v_proj = layer(embed_dim, kv_heads * (value_dim // num_heads))
        self.out_proj = layer(value_dim, embed_dim)

    def decay(self) -> Tensor | None:
        """Decay factor λ per position of each head, (Hq,); None if the mechanism has no decay."""
        return None

    def step(
        self,
        x: Tensor,
        state: LinearState | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, LinearState]:
        """Causal attention of new tokens after a state of fixed size.

        Steps of any lengths give the same outputs as one causal forward.

        Args:
            x: the next tokens, (B, L, embed_dim).
            state: from the previous step; None at the first.
            key_padding_mask: boolean (B, L) of these tokens, **True hides**.

        Returns:
            The output (B, L, embed_dim) and the new state. Statistics always come from sums,
            whatever ``rows`` is, and are recorded if the first step recorded them.
        """
        seen = key_mask(key_padding_mask, *check_sequence(x, self.embed_dim).shape[:2])
        offset = 0 if state is None else int(state.position)
        q, k, v = self._heads(x, offset)
        decay = self.decay()
        if state is None:
            state = linear_state(
                k[:, :, :0],
                v[:, :, :0],
                feature_map=self.feature_map,
                decay=decay,
                statistics=self.statistics != "off",
            )
        records = self.statistics != "off" and keeps_squares(state)
        run: Callable[..., Any] = linear_step
        out, state, *stats = run(
            state,
            q,
            k,
            v,
            feature_map=self.feature_map,
            decay=decay,
            normalize=self.normalize,
            scale=self.scale,
            key_mask=seen,
            enable_gqa=True,
            return_stats=records,
        )
        self._record(stats[0] if records else None)
        return self._finish(x, out), state

    def extra_repr(self) -> str:
        """The sizes and the feature map, for ``print``."""
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"feature_map={self.feature_map.name!r}"
        )

    def _parallel(self, x: Tensor, key_padding_mask: Tensor | None, is_causal: bool) -> Tensor:
        """The whole sequence at once."""
        seen = key_mask(key_padding_mask, *check_sequence(x, self.embed_dim).shape[:2])
        check_flag("is_causal", is_causal)
        q, k, v = self._heads(x, 0)
        decay = self.decay()
        run: Callable[..., Any] = linear_attention
        if decay is not None:
            run = partial(decay_attention, decay=decay)
        records = self.statistics != "off"
        result = run(
            q,
            k,
            v,
            feature_map=self.feature_map,
            is_causal=is_causal,
            normalize=self.normalize,
            scale=self.scale,
            key_mask=seen,
            enable_gqa=True,
            return_stats=records,
            rows=self.rows,
        )
        self._record(result[1] if records else None)
        return self._finish(x, result[0] if records else result)

    def _heads(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, Hq, L, E), keys and values (B, H, L, ...) of tokens from ``offset`` on."""
        q = split_heads(self.q_proj(x), self.num_heads)
        k = split_heads(self.k_proj(x), self.num_kv_heads)
        if self.positions is not None:
            q, k = self.positions(q, offset), self.positions(k, offset)
        return q, k, split_heads(self.v_proj(x), self.num_kv_heads)

    def _finish(self, x: Tensor, out: Tensor) -> Tensor:
        """The module's output from the heads' outputs (B, Hq, L, Ev)."""
        joined: Tensor = self.out_proj(join_heads(out))
        return joined


class LinearAttention(LinearHeads):
    r"""Multi-head linear self-attention in O(n).

    .. math:: o_i = \frac{\sum_j \phi(q_i) \cdot \phi(k_j) \, v_j}
              {\sum_j \phi(q_i) \cdot \phi(k_j)}

    Args:
        embed_dim: width of input and output.
        num_heads: number of query heads, Hq; must divide ``embed_dim``.
        num_kv_heads: number of key heads, H, which query heads share; None for ``num_heads``.
        value_dim: total width of all heads' values; None for ``embed_dim``.
        feature_map: φ, a name of :data:`~acutance.mechanisms.FEATURE_MAPS` or a FeatureMap.
        normalize: divide by the sum of the weights; None to do so if the feature map has no
            negative weights.
        scale: factor of the weights.
        bias: add a bias to the projections.
        rows: source of the statistics: ``"sums"`` in O(n), without entropy, and for signed weights
            only the number of keys; ``"blockwise"`` has all of them, in O(n²) time.
        statistics: ``"detached"``, ``"graph"`` or ``"off"``, see :class:`Recorded`; off saves the
            sums of squares.
        device, dtype: of the parameters.

    Attributes:
        last_statistics: statistics of the last forward or step, fields (B, Hq, L).

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> module = LinearAttention(16, 4, feature_map="relu")
        >>> x = torch.randn(2, 10, 16)
        >>> whole = module(x, is_causal=True)
        >>> first, state = module.step(x[:, :9])
        >>> last, state = module.step(x[:, 9:], state)
        >>> torch.allclose(torch.cat([first, last], 1), whole, atol=1e-6)
        True

    Source:
        Katharopoulos et al. (2020), arXiv:2006.16236.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        feature_map: str | FeatureMap = "elu1",
        normalize: bool | None = None,
        scale: float = 1.0,
        bias: bool = True,
        rows: Literal["sums", "blockwise"] = "sums",
        statistics: Recording = "detached",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            value_dim=embed_dim if value_dim is None else check_count("value_dim", value_dim, 1),
            feature_map=feature_map,
            normalize=normalize,
            scale=scale,
            bias=bias,
            rows=rows,
            statistics=statistics,
            device=device,
            dtype=dtype,
        )

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Compute linear attention.

        Args:
            x: (B, L, embed_dim).
            key_padding_mask: boolean (B, L), **True hides**.
            is_causal: row i sees rows up to i.

        Returns:
            (B, L, embed_dim).
        """
        return self._parallel(x, key_padding_mask, is_causal)
