"""A small transformer whose attention is PyTorch's own call, so that a probe and a law reach it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance.nn import rotate
from acutance.scaling import NoScaling, Scaling


class Attention(nn.Module):
    """Self-attention, with queries multiplied by a scaling law's factor for the number of tokens.

    Args:
        width: of tokens; a multiple of ``heads``.
        heads: number of heads.
        law: the scaling law.
        base: of rotary positions; None uses none.
        norm: makes the normalisation of queries, and that of keys.
        bias: whether the projections have biases.
        call: further arguments of PyTorch's attention, such as ``is_causal``.
    """

    def __init__(
        self, width: int, heads: int, *, law: Scaling | None = None, base: float | None = None,
        norm: Callable[[], nn.Module] = nn.Identity, bias: bool = True, **call: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.law, self.base, self.call = heads, law or NoScaling(), base, call
        self.inputs = nn.Linear(width, 3 * width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)
        self.norms = nn.ModuleList([norm(), norm()])

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, n, width) to queries, keys and values, (B, heads, n, head width) each.

        They are normalised and have their rotary positions; the law is not applied.
        """
        projected = self.inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = (norm(y) for norm, y in zip(self.norms, projected[:2], strict=True))
        if self.base is not None:
            query, key = rotate(query, base=self.base), rotate(key, base=self.base)
        return query, key, projected[2]

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """Self-attention.

        Args:
            x: (B, n, width).
            counts: (B, n), how many equal tokens each token stands for; the sum over n must be the
                same for all B. None: 1 each.

        Returns:
            (B, n, width).
        """
        query, key, value = self.queries_keys_values(x)
        seen = x.shape[1] if counts is None else int(counts[0].sum())
        query = query * self.law.factor(torch.tensor([seen])).unsqueeze(-1)
        mask = None if counts is None else counts.log().to(x.dtype)[:, None, None]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.call)
        return self.output(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A transformer encoder: embedded tokens, position embeddings, layers, and output logits.

    A layer is attention and a feed-forward network, with residual connections and layer norms.

    Args:
        symbols: size of the vocabulary.
        outputs: number of logits of each token.
        width: of tokens.
        heads: of each layer.
        hidden: of the feed-forward networks.
        layers: how many.
        kinds: number of position embeddings: the first ``kinds - 1`` positions have one each, all
            others share the last. 0 embeds no positions.
        norm_first: normalise the input of attention and network, not the sum after them.
        attention: further arguments of :class:`Attention`, such as ``law`` and ``base``.
    """

    def __init__(
        self, symbols: int, outputs: int, *, width: int, heads: int, hidden: int, layers: int,
        kinds: int = 0, norm_first: bool = False, **attention: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.kinds = nn.Embedding(kinds, width) if kinds else None
        self.layers = nn.ModuleList()
        for _ in range(layers):
            attend = Attention(width, heads, **attention)
            norms = nn.LayerNorm(width), nn.LayerNorm(width)
            network = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
            self.layers.append(nn.ModuleList([attend, network, *norms]))
        self.norm_first = norm_first
        self.norm = nn.LayerNorm(width) if norm_first else nn.Identity()
        self.output = nn.Linear(width, outputs)

    def embed(self, ids: Tensor) -> Tensor:
        """Embed tokens and positions: (B, n) to (B, n, width)."""
        x: Tensor = self.symbols(ids)
        if self.kinds is not None:
            places = torch.arange(ids.shape[-1]).clamp(max=self.kinds.num_embeddings - 1)
            x = x + self.kinds(places)
        return x

    def forward(self, ids: Tensor, counts: Tensor | None = None) -> Tensor:
        """Map tokens (B, n) to logits (B, n, outputs); ``counts`` as in :class:`Attention`."""
        x = self.embed(ids)
        for layer in self.layers:
            attention, network, first, second = cast("nn.ModuleList", layer)
            for step, norm in ((partial(attention, counts=counts), first), (network, second)):
                x = x + step(norm(x)) if self.norm_first else norm(x + step(x))
        return self.output(self.norm(x))  # type: ignore[no-any-return]
