"""A small transformer whose attention is PyTorch's own call, so that a probe and a law reach it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acutance.nn import rotate
from acutance.scaling import NoScaling, Scaling


class Attention(nn.Module):
    """Self-attention over all n tokens, with queries multiplied by a scaling law's factor for n.

    Args:
        width: of tokens; a multiple of ``heads``.
        heads: number of heads.
        law: the scaling law.
        base: of rotary positions; None uses none.
    """

    def __init__(self, width: int, heads: int, law: Scaling, base: float | None) -> None:
        super().__init__()
        self.heads, self.law, self.base = heads, law, base
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def queries_keys_values(self, x: Tensor) -> Tensor:
        """Project (B, n, width) to queries, keys and values, (3, B, heads, n, head width).

        Rotary positions are applied, the law is not.
        """
        batch, n, width = x.shape
        projected = self.inputs(x).view(batch, n, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        if self.base is not None:
            query, key = rotate(query, base=self.base), rotate(key, base=self.base)
        return torch.stack([query, key, value])

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """Self-attention without a causal mask.

        Args:
            x: (B, n, width).
            counts: (B, n), how many equal tokens each token stands for; the sum over n must be the
                same for all B. None: 1 each.

        Returns:
            (B, n, width).
        """
        batch, n, width = x.shape
        query, key, value = self.queries_keys_values(x)
        seen = n if counts is None else int(counts[0].sum())
        query = query * self.law.factor(torch.tensor([seen])).unsqueeze(-1)
        mask = None if counts is None else counts.log().to(x.dtype)[:, None, None]
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(out.transpose(1, 2).reshape(batch, n, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward network with residual connections and layer norms.

    With ``norm_first`` the input of each is normalised, else the sum after each.
    """

    def __init__(self, attention: Attention, width: int, hidden: int, *, norm_first: bool) -> None:
        super().__init__()
        self.attention, self.norm_first = attention, norm_first
        self.feed_forward = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """Map (B, n, width) to (B, n, width); ``counts`` as in :meth:`Attention.forward`."""
        first, second = self.norms
        if self.norm_first:
            x = x + self.attention(first(x), counts)
            return x + self.feed_forward(second(x))  # type: ignore[no-any-return]
        x = first(x + self.attention(x, counts))
        return second(x + self.feed_forward(x))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """A transformer encoder: embedded tokens, position embeddings, blocks, and output logits.

    Args:
        symbols: size of the vocabulary.
        outputs: number of logits of each token.
        width: of tokens.
        heads: of each layer.
        hidden: of the feed-forward networks.
        layers: how many.
        law: the scaling law of all layers.
        base: of rotary positions; None has none.
        kinds: number of position embeddings: the first ``kinds - 1`` positions have one each, all
            others share the last. 0 embeds no positions.
        norm_first: normalise the input of attention and network, not the sum after them.
    """

    def __init__(
        self,
        symbols: int,
        outputs: int,
        *,
        width: int,
        heads: int,
        hidden: int,
        layers: int,
        law: Scaling = NoScaling(),  # noqa: B008 - a frozen record
        base: float | None = None,
        kinds: int = 0,
        norm_first: bool = False,
    ) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.kinds = nn.Embedding(kinds, width) if kinds else None
        self.blocks = nn.ModuleList(
            Block(Attention(width, heads, law, base), width, hidden, norm_first=norm_first)
            for _ in range(layers)
        )
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
        for block in self.blocks:
            x = block(x, counts)
        return self.output(self.norm(x))  # type: ignore[no-any-return]
