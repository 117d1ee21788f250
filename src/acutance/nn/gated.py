"""The gated attention unit: one attention head whose output is gated by the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from acutance import scaling as scalings
from acutance.attend import Score, attention
from acutance.nn.options import HeldWeights, hold_score, key_mask
from acutance.nn.positions import Positions, Rotary, find_positions
from acutance.nn.recording import Recorded, Recording
from acutance.scaling import AnyScaling
from acutance.shapes import check_count, check_flag, check_number, check_tensor
from acutance.weights import Weighting


class GatedAttentionUnit(Recorded):
    r"""A gated attention unit (GAU): attention and gated linear unit in one.

    .. math::
        u, v, z = \mathrm{silu}(x W_u), \mathrm{silu}(x W_v), \mathrm{silu}(x W_z), \qquad
        q = \gamma_q \odot z + \beta_q, \quad k = \gamma_k \odot z + \beta_k, \\
        a_{ij} = \tfrac{1}{n_i} \mathrm{relu}(q_i \cdot k_j / \sqrt{s})^2, \qquad
        o_i = \Bigl(u_i \odot \textstyle\sum_j a_{ij} v_j\Bigr) W_o

    Query and key share one narrow z, each with a scale and an offset per component. The norm before
    the unit and the residual sum are not part of the module: ``x + unit(norm(x))``.

    The articles differ in constants. Su divides by :math:`n s`, as here. The first article's code
    has :math:`\mathrm{relu}(q \cdot k / n)^2`, 1/n² in all, and a relative bias instead of rotary
    positions. Here n is the number of keys that the row sees, not the padded length.

    Args:
        embed_dim: width of input and output, d.
        key_dim: width of z, s.
        expansion: u and v have width ``expansion · embed_dim``.
        bias: add a bias to the projections.
        weights: ``"relu2"`` as in the articles; ``"softmax"`` with ``scaling=LogN(train_length=512,
            n_min=1)`` is Su's softmax plus; any other weighting of :mod:`acutance.weights`.
        score: a name or score of :mod:`acutance.scores`.
        scaling: a name or law of :mod:`acutance.scaling`.
        positions: None, ``"rotary"`` or a :class:`Rotary`.
        dropout: probability of dropping a weight in training.
        statistics: ``"detached"``, ``"graph"`` or ``"off"``, see :class:`Recorded`.
        device, dtype: of the parameters.

    Attributes:
        last_statistics: statistics of the last forward, fields (B, 1, L).

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit.

    Example:
        >>> unit = GatedAttentionUnit(16, key_dim=8, positions="rotary")
        >>> unit(torch.randn(2, 10, 16), is_causal=True).shape
        torch.Size([2, 10, 16])
        >>> unit.last_statistics.sparsity.shape
        torch.Size([2, 1, 10])

        >>> from acutance.scaling import LogN
        >>> law = LogN(train_length=512, n_min=1)
        >>> plus = GatedAttentionUnit(16, weights="softmax", scaling=law)

    Source:
        Hua et al. (2022), arXiv:2202.10447; Su Jianlin, kexue.fm articles 8934 and 9019 (softmax
        plus).
    """

    def __init__(
        self,
        embed_dim: int,
        key_dim: int = 128,
        expansion: int = 2,
        *,
        bias: bool = True,
        weights: str | Weighting = "relu2",
        score: str | Score = "scaled_dot",
        scaling: str | AnyScaling | None = None,
        positions: Positions = None,
        dropout: float = 0.0,
        statistics: Recording = "detached",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(statistics)
        self.embed_dim = check_count("embed_dim", embed_dim, 1)
        self.key_dim = check_count("key_dim", key_dim, 1)
        self.hidden = check_count("expansion", expansion, 1) * embed_dim
        self.positions = find_positions(positions, alibi=False)
        if self.positions is not None and key_dim % 2:
            raise ValueError(f"positions='rotary' needs an even key_dim, got {key_dim}")
        self.dropout = check_number("dropout", dropout, above=0.0, below=1.0, including=True)
        check_flag("bias", bias)
        wide = 2 * self.hidden + key_dim
        self.in_proj = nn.Linear(embed_dim, wide, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(self.hidden, embed_dim, bias=bias, device=device, dtype=dtype)
        self.gamma = nn.Parameter(torch.empty(2, key_dim, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.empty(2, key_dim, device=device, dtype=dtype))
        self.score = hold_score(score, key_dim, 1, 1, device=device, dtype=dtype)
        self.weights = HeldWeights(weights, 1, device=device, dtype=dtype)
        self.scaling = scalings.get(scaling)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as published: Glorot projections, zero biases, γ ~ N(0, 0.02²), β = 0."""
        for layer in (self.in_proj, self.out_proj):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """The unit's output, before the residual sum.

        Args:
            x: (B, L, embed_dim), already normalised.
            key_padding_mask: boolean (B, L), **True hides**.
            is_causal: row i sees rows up to i.

        Returns:
            (B, L, embed_dim).
        """
        if check_tensor("x", x).dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(
                f"x must have shape (B, L, embed_dim={self.embed_dim}), got {tuple(x.shape)}"
            )
        wide = silu(self.in_proj(x))
        u, v, z = wide.split([self.hidden, self.hidden, self.key_dim], -1)
        q, k = (z.unsqueeze(-2) * self.gamma + self.beta).unsqueeze(1).unbind(-2)
        if isinstance(self.positions, Rotary):
            q, k = self.positions(q), self.positions(k)
        out, stats = attention(
            q,
            k,
            v.unsqueeze(1),
            is_causal=check_flag("is_causal", is_causal),
            key_mask=key_mask(key_padding_mask, x.shape[0], x.shape[1]),
            dropout_p=self.dropout if self.training else 0.0,
            score=self.score,
            weights=self.weights(),
            scaling=self.scaling,
            return_stats=True,
        )
        self._record(stats)
        gated: Tensor = self.out_proj(u * out.squeeze(1))
        return gated

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return (
            f"{self.embed_dim}, key_dim={self.key_dim}, hidden={self.hidden}, "
            f"scaling={self.scaling}, positions={self.positions}"
        )
