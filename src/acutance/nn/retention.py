r"""Linear attention whose weights decay with distance, and retention as in RetNet."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from acutance.mechanisms import FeatureMap, alibi_decays, retnet_decays
from acutance.nn.linear import LinearHeads
from acutance.nn.projections import Positions, Rotary, find_positions, join_heads
from acutance.nn.recording import Recording
from acutance.shapes import check_count, check_flag, check_number

__all__ = ["DecayAttention", "Retention"]

_PRESETS = {"retnet": retnet_decays, "alibi": alibi_decays}


def _decays(decay: str | float | Tensor, heads: int) -> Tensor:
    """λ of each head in float64, (Hq,), from a name, a number or a tensor."""
    if isinstance(decay, str):
        if decay not in _PRESETS:
            raise ValueError(
                f"decay must be a number, a Tensor, 'retnet' or 'alibi', got {decay!r}"
            )
        return _PRESETS[decay](heads, dtype=torch.float64)
    if isinstance(decay, Tensor):
        if tuple(decay.shape) not in ((), (heads,)):
            raise ValueError(
                f"decay must be one number or have shape (Hq,) = ({heads},), got "
                f"{tuple(decay.shape)}"
            )
        values = decay.detach().double()
    else:
        values = torch.tensor(check_number("decay", decay), dtype=torch.float64)
    values = values.expand(heads).clone()
    outside = ~((values > 0) & (values <= 1))
    if bool(outside.any()):
        raise ValueError(f"decay must be in (0, 1], got {values[outside][0].item():g}")
    return values


class DecayAttention(LinearHeads):
    r"""Multi-head linear attention whose weights decay with distance, in O(n).

    .. math:: a_{ij} = \lambda_h^{|i - j|} \, \phi(q_i) \cdot \phi(k_j)

    Apart from the content factor, a head has at most :math:`(1 + \lambda)/(1 - \lambda)` effective
    keys, for any length.

    Args:
        embed_dim: width of input and output.
        num_heads: number of query heads, Hq; must divide ``embed_dim``.
        decay: λ in (0, 1]: ``"retnet"``, :math:`1 - 2^{-5-h}`; ``"alibi"``, :math:`e^{-m_h}` of
            ALiBi's slopes; a number, or a Tensor (Hq,).
        learned: train λ from this value, as :math:`e^{-e^{\nu}}`, which stays inside (0, 1). The
            initial λ must be below 1.
        positions: None, ``"rotary"`` or a :class:`Rotary`, for feature maps with signed features.
        num_kv_heads: this and the options below as in :class:`LinearAttention`.
        value_dim: total width of all heads' values.
        feature_map: φ.
        normalize: divide by the sum of the weights.
        scale: factor of the weights; None for 1/√E.
        bias: add a bias to the projections.
        rows: source of the statistics.
        statistics: which statistics are stored.
        device, dtype: of the parameters.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit.

    Example:
        >>> module = DecayAttention(16, 4, feature_map="elu1", learned=True)
        >>> module.decay().detach()
        tensor([0.9688, 0.9844, 0.9922, 0.9961])
        >>> module(torch.randn(2, 10, 16)).shape
        torch.Size([2, 10, 16])

    Source:
        Qin et al. (2022), arXiv:2210.10340; Sun et al. (2023), arXiv:2307.08621.
    """

    nu: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        decay: str | float | Tensor = "retnet",
        learned: bool = False,
        positions: Positions = None,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        feature_map: str | FeatureMap = "identity",
        normalize: bool | None = None,
        scale: float | None = None,
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
            scale=1.0 if scale is None else scale,
            bias=bias,
            rows=rows,
            statistics=statistics,
            device=device,
            dtype=dtype,
        )
        if scale is None:
            self.scale = self.head_dim**-0.5
        rotary = find_positions(positions, alibi=False)
        if isinstance(rotary, Rotary) and self.head_dim % 2:
            raise ValueError(f"positions='rotary' needs an even head width, got {self.head_dim}")
        self.positions = rotary if isinstance(rotary, Rotary) else None
        start = _decays(decay, num_heads)
        # numbers, not a buffer: a module cast to bfloat16 would round 1 − 2⁻¹⁰ to 1
        self._fixed = tuple(start.tolist())
        if check_flag("learned", learned):
            if max(self._fixed) >= 1:
                raise ValueError("learned decays must start below 1, got 1")
            nu = torch.log(-torch.log(start))
            self.nu = nn.Parameter(nu.to(device=device, dtype=dtype or torch.get_default_dtype()))
        else:
            self.register_parameter("nu", None)

    def decay(self) -> Tensor:
        """Decay factor λ per position of each head, (Hq,), in float32 at least."""
        weight = self.q_proj.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        if self.nu is None:
            return torch.tensor(self._fixed, dtype=dtype, device=weight.device)
        lam = torch.exp(-torch.exp(self.nu.to(dtype)))
        return lam.clamp(min=torch.finfo(dtype).tiny)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = True
    ) -> Tensor:
        """Compute decay attention.

        Args:
            x: (B, L, embed_dim).
            key_padding_mask: boolean (B, L), **True hides**; hidden keys count as distance.
            is_causal: row i sees rows up to i; otherwise weights decay on both sides.

        Returns:
            (B, L, embed_dim).
        """
        return self._parallel(x, key_padding_mask, is_causal)


class Retention(DecayAttention):
    r"""Multi-scale retention, as in RetNet: decaying heads, each normalised, then gated.

    .. math::
        \mathrm{head}_h = \Bigl(\tfrac{1}{\sqrt E} Q K^\top \odot D\Bigr) V, \quad
        D_{ij} = \gamma_h^{i - j} [j \le i], \qquad
        y = \bigl(\mathrm{swish}(x W_G) \odot \mathrm{GroupNorm}_h(\mathrm{head})\bigr) W_O

    The published divisions of each row by a sum or a norm are left out: GroupNorm, which knows no
    scale, undoes them up to its ``eps``.

    Args:
        embed_dim: d, width of input and output.
        num_heads: h.
        expansion: V and the gate are ``expansion · embed_dim`` wide.
        decay: γ of each head, ``"retnet"`` being :math:`1 - 2^{-5-h}`; see :class:`DecayAttention`.
        learned: train γ.
        positions: ``"rotary"``, as published; None leaves the rotation out. Components are paired
            by halves (see :func:`rotate`); the released code pairs neighbours and has slightly
            other speeds.
        eps: of the norm.
        bias: add a bias to the projections; published without.
        rows: where statistics come from; the weights have both signs, so ``"sums"`` counts keys and
            nothing else, and ``"blockwise"`` has them all in O(n²) time.
        statistics: what is kept of them.
        device, dtype: of the parameters.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> module = Retention(16, 2, rows="blockwise")
        >>> x = torch.randn(1, 100, 16)
        >>> whole = module(x)
        >>> keys = module.last_statistics.effective_keys[0, :, -1]
        >>> first, state = module.step(x[:, :60])
        >>> last, state = module.step(x[:, 60:], state)
        >>> torch.allclose(torch.cat([first, last], 1), whole, atol=1e-4)
        True

    Source:
        Sun et al. (2023), arXiv:2307.08621, equations 5 to 8.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        expansion: int = 2,
        decay: str | float | Tensor = "retnet",
        learned: bool = False,
        positions: Positions = "rotary",
        eps: float = 1e-5,
        bias: bool = False,
        rows: Literal["sums", "blockwise"] = "sums",
        statistics: Recording = "detached",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("embed_dim", embed_dim, 1)
        super().__init__(
            embed_dim,
            num_heads,
            decay=decay,
            learned=learned,
            positions=positions,
            value_dim=check_count("expansion", expansion, 1) * embed_dim,
            bias=bias,
            rows=rows,
            statistics=statistics,
            device=device,
            dtype=dtype,
        )
        wide = self.value_dim
        self.gate = nn.Linear(embed_dim, wide, bias=bias, device=device, dtype=dtype)
        self.norm = nn.GroupNorm(num_heads, wide, eps=eps, device=device, dtype=dtype)
        nn.init.xavier_uniform_(self.gate.weight)
        if bias:
            nn.init.zeros_(self.gate.bias)

    def _finish(self, x: Tensor, out: Tensor) -> Tensor:
        """Normalise each head of each token, gate, project."""
        joined = join_heads(out)
        normal = self.norm(joined.flatten(0, 1)).view_as(joined)
        gated: Tensor = self.out_proj(silu(self.gate(x)) * normal)
        return gated
