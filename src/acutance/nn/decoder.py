"""DecoderBlock: causal self-attention, attention to an encoder's memory, and an MLP."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from acutance.nn.attention import MultiheadAttention
from acutance.nn.call import Score
from acutance.nn.gated import check_sequence
from acutance.nn.memory import KeyValues
from acutance.nn.projections import Positions
from acutance.nn.recording import Recording
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.scaling import AnyScaling
from acutance.shapes import check_count, check_number
from acutance.weights import Weighting

__all__ = ["DecoderBlock", "DecoderState"]


class DecoderState(NamedTuple):
    """What a :class:`DecoderBlock` stores between steps.

    Attributes:
        memory: projected keys and values of the encoder's output.
        memory_padding_mask: (B, S), True hides, or None.
        past: keys and values of the tokens so far; None before the first.
    """

    memory: KeyValues
    memory_padding_mask: Tensor | None
    past: KeyValues | None


class DecoderBlock(nn.Module):
    r"""A decoder block that attends to an encoder's memory with additive (Bahdanau) scores.

    .. math::
        x \leftarrow x + \mathrm{self}(\mathrm{norm}(x)), \quad
        x \leftarrow x + \mathrm{cross}(\mathrm{norm}(x), m), \quad
        x \leftarrow x + W_2 \, \mathrm{gelu}(W_1 \mathrm{norm}(x))

    The scores of the cross-attention are :math:`v^\top \tanh(W_q q + W_k k)`, with parameters for
    each head; ``score`` selects others. Norms come first (pre-norm). It is a transformer's decoder
    layer, not Bahdanau's recurrent network.

    Args:
        embed_dim: width of input and output.
        num_heads: number of heads of both attentions; must divide ``embed_dim``.
        memory_dim: width of the memory; None for ``embed_dim``.
        hidden: width of the feed-forward network; None for ``4 · embed_dim``.
        score: score of the cross-attention, see :class:`MultiheadAttention`.
        weights: weighting of the cross-attention.
        scaling: scaling of the cross-attention.
        positions: positions of the self-attention.
        dropout: dropout of weights and of each branch, in training.
        statistics: of both attentions, see :class:`Recorded`.
        device, dtype: of the parameters.

    Attributes:
        self_attention: a causal :class:`MultiheadAttention`.
        cross_attention: a :class:`MultiheadAttention` to the memory.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> block = DecoderBlock(16, 4, memory_dim=12)
        >>> x, memory = torch.randn(2, 5, 16), torch.randn(2, 9, 12)
        >>> padding = torch.arange(9).expand(2, 9) >= 7  # True hides
        >>> whole = block(x, memory, padding)
        >>> block.last_statistics.n_keys.unique()
        tensor([7])

        Token by token it gives the same:

        >>> state, outs = block.start(memory, padding), []
        >>> for token in x.split(1, 1):
        ...     out, state = block.step(token, state)
        ...     outs.append(out)
        >>> torch.allclose(torch.cat(outs, 1), whole, atol=1e-5)
        True

    Source:
        Bahdanau et al. (2015), arXiv:1409.0473, for the scores; Vaswani et al. (2017),
        arXiv:1706.03762, for the block; Xiong et al. (2020), arXiv:2002.04745, for its norms.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        memory_dim: int | None = None,
        hidden: int | None = None,
        score: str | Score = "additive",
        weights: str | Weighting = "softmax",
        scaling: str | AnyScaling | None = None,
        positions: Positions = None,
        dropout: float = 0.0,
        statistics: Recording = "detached",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_number("dropout", dropout, above=0.0, below=1.0, including=True)
        self.embed_dim = check_count("embed_dim", embed_dim, 1)
        self.memory_dim = embed_dim if memory_dim is None else memory_dim
        check_count("memory_dim", self.memory_dim, 1)
        wide = 4 * embed_dim if hidden is None else check_count("hidden", hidden, 1)
        self.self_attention = MultiheadAttention(
            embed_dim,
            num_heads,
            dropout,
            batch_first=True,
            device=device,
            dtype=dtype,
            positions=positions,
            statistics=statistics,
        )
        self.cross_attention = MultiheadAttention(
            embed_dim,
            num_heads,
            dropout,
            kdim=self.memory_dim,
            vdim=self.memory_dim,
            batch_first=True,
            device=device,
            dtype=dtype,
            score=score,
            weights=weights,
            scaling=scaling,
            statistics=statistics,
        )
        self.network = nn.Sequential(
            nn.Linear(embed_dim, wide, device=device, dtype=dtype),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(wide, embed_dim, device=device, dtype=dtype),
        )
        self.norms = nn.ModuleList(
            nn.LayerNorm(embed_dim, device=device, dtype=dtype) for _ in range(3)
        )
        self.drop = nn.Dropout(dropout)

    @property
    def last_statistics(self) -> RowStatistics | WeightStatistics | None:
        """Statistics of the cross-attention's last forward or step, fields (B, Hq, L)."""
        return self.cross_attention.last_statistics

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_padding_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the block over a whole target sequence.

        Args:
            x: (B, L, embed_dim).
            memory: output of the encoder, (B, S, memory_dim).
            memory_padding_mask: (B, S), **True hides**.
            key_padding_mask: (B, L), of the target, **True hides**.

        Returns:
            (B, L, embed_dim).
        """
        check_sequence(x, self.embed_dim)
        normal = self.norms[0](x)
        attended, _ = self.self_attention(normal, normal, normal, key_padding_mask, is_causal=True)
        state = self.start(memory, memory_padding_mask)
        return self._read(x + self.drop(attended), state)

    def start(self, memory: Tensor, memory_padding_mask: Tensor | None = None) -> DecoderState:
        """Project the memory once for all steps.

        Args:
            memory: (B, S, memory_dim).
            memory_padding_mask: (B, S), **True hides**.
        """
        return DecoderState(
            self.cross_attention.remember(memory, memory), memory_padding_mask, None
        )

    def step(self, x: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Run the block over the next tokens.

        Args:
            x: (B, L, embed_dim), one or more tokens.
            state: from :meth:`start` or the previous step.

        Returns:
            (B, L, embed_dim), and the new state.
        """
        check_sequence(x, self.embed_dim)
        attended, past = self.self_attention.step(self.norms[0](x), state.past)
        return self._read(x + self.drop(attended), state), state._replace(past=past)

    def _read(self, x: Tensor, state: DecoderState) -> Tensor:
        """The part after self-attention: attend to the memory, then the feed-forward network."""
        read_memory = self.cross_attention.recall(
            self.norms[1](x), state.memory, state.memory_padding_mask
        )
        x = x + self.drop(read_memory)
        changed: Tensor = self.drop(self.network(self.norms[2](x)))
        return x + changed
