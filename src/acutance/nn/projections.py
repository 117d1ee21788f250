"""Projections of ``nn.MultiheadAttention`` to queries and keys, rotary embedding and ALiBi."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from acutance.mechanisms import alibi_decays
from acutance.nn.recording import Recorded, Recording
from acutance.shapes import check_number, check_tensor

__all__ = [
    "Alibi",
    "Positions",
    "Projected",
    "Rotary",
    "find_positions",
    "join_heads",
    "rotate",
    "split_heads",
]


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (B, L, heads · E) to (B, heads, L, E)."""
    split: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return split


def join_heads(x: Tensor) -> Tensor:
    """Reshape (B, heads, L, E) to (B, L, heads · E)."""
    return x.transpose(1, 2).flatten(2)


class Projected(Recorded):
    """Query, key, value and output projections, with PyTorch's names, shapes and initialisation.

    If all three inputs have the module's width there is one packed ``in_proj_weight``, otherwise
    ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``. A state dict of either form loads
    into the packed one.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        kv_width: int,
        *,
        bias: bool,
        add_bias_kv: bool,
        kdim: int,
        vdim: int,
        statistics: Recording,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(statistics)
        self.embed_dim, self.kdim, self.vdim = embed_dim, kdim, vdim
        self.kv_width = kv_width

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        widths = (embed_dim, kv_width, kv_width)
        self.packed = kdim == vdim == embed_dim
        self.register_parameter(
            "in_proj_weight", parameter(sum(widths), embed_dim) if self.packed else None
        )
        for name, width, inputs in zip(_SEPARATE, widths, (embed_dim, kdim, vdim), strict=True):
            self.register_parameter(name, None if self.packed else parameter(width, inputs))
        self.register_parameter("in_proj_bias", parameter(sum(widths)) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.register_parameter("bias_k", parameter(1, 1, kv_width) if add_bias_kv else None)
        self.register_parameter("bias_v", parameter(1, 1, kv_width) if add_bias_kv else None)
        self.register_load_state_dict_pre_hook(_pack)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise the input projections like ``nn.MultiheadAttention``; zero the biases."""
        for name in ("in_proj_weight", *_SEPARATE):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def _project(self, index: int, x: Tensor) -> Tensor:
        """Project x (..., inputs) to query (index 0), key (1) or value (2)."""
        widths = [self.embed_dim, self.kv_width, self.kv_width]
        if self.in_proj_weight is not None:
            weight = self.in_proj_weight.split(widths)[index]
        else:
            weight = getattr(self, _SEPARATE[index])
        bias = None if self.in_proj_bias is None else self.in_proj_bias.split(widths)[index]
        return linear(x, weight, bias)


def _pack(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *_: object) -> None:
    """State-dict hook: concatenate separate projections if the module has a packed one."""
    if getattr(module, "in_proj_weight", None) is None:
        return
    names = [prefix + name for name in _SEPARATE]
    if all(name in state_dict for name in names):
        state_dict[prefix + "in_proj_weight"] = torch.cat([state_dict.pop(name) for name in names])


def rotate(x: Tensor, offset: int = 0, *, base: float = 10_000.0) -> Tensor:
    r"""Rotary position embedding: rotate pairs of components by angles proportional to position.

    Component i is paired with component :math:`i + E/2` and rotated by :math:`p \, b^{-2i/E}` at
    position p: the half rotation of GPT-NeoX and Hugging Face's Llama. The original paper pairs
    neighbours :math:`(2i, 2i+1)`, which differs only in the order of components.

    Args:
        x: (..., L, E), E even.
        offset: position of the first row.
        base: b, positive; larger bases rotate more slowly.

    Returns:
        The rotated vectors, in the dtype of ``x``. Angles are computed in float64, the rotation in
        float32 or float64.

    Raises:
        TypeError: if x is not a Tensor.
        ValueError: if E is odd or the base not positive.

    Example:
        A dot product of two turned vectors depends on their distance alone:

        >>> q, k = torch.randn(2, 1, 8, dtype=torch.float64)
        >>> near = rotate(q, 7) @ rotate(k, 4).mT
        >>> far = rotate(q, 1007) @ rotate(k, 1004).mT
        >>> torch.allclose(near, far)
        True

    Source:
        Su et al. (2021), arXiv:2104.09864.
    """
    width = check_tensor("x", x).shape[-1]
    if x.dim() < 2 or width % 2:
        raise ValueError(
            f"rotary embedding needs shape (..., L, E) with E even, got {tuple(x.shape)}"
        )
    check_number("base", base, above=0.0)
    half = width // 2
    exact = torch.float32 if x.device.type == "mps" else torch.float64  # Metal has no float64
    places = torch.arange(x.shape[-2], dtype=exact, device=x.device) + offset
    speeds = base ** (torch.arange(half, dtype=exact, device=x.device) / -half)
    angle = places[:, None] * speeds
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    a, b = x.to(dtype).split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions, as an option of a module: see :func:`rotate`.

    Args:
        base: base of the angular frequencies.

    Example:
        >>> Rotary(base=500_000.0)(torch.ones(1, 4, 2)).shape
        torch.Size([1, 4, 2])
    """

    base: float = 10_000.0

    def __post_init__(self) -> None:
        check_number("base", self.base, above=0.0)

    def __call__(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotate vectors (..., L, E)."""
        return rotate(x, offset, base=self.base)


@dataclass(frozen=True)
class Alibi:
    r"""A bias that decreases with distance, :math:`-m_h |i - j|`, as an option of a module.

    Args:
        slopes: m for each query head; None for ALiBi's, :math:`2^{-8(h+1)/H}`.

    Example:
        >>> Alibi().of(heads=4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])

    Source:
        Press, Smith & Lewis (2021), arXiv:2108.12409.
    """

    slopes: Sequence[float] | None = None

    def of(
        self,
        heads: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """The slopes for a number of query heads, (Hq,)."""
        if self.slopes is None:
            return -torch.log(alibi_decays(heads, dtype=torch.float64)).to(dtype).to(device)
        slopes = torch.tensor([check_number("slopes", m) for m in self.slopes], dtype=torch.float64)
        if slopes.shape != (heads,):
            raise ValueError(
                f"slopes must have one number for each of {heads} heads, got {len(slopes)}"
            )
        return slopes.to(dtype).to(device)


#: How a module knows positions: not at all, by rotation, or by a bias.
Positions: TypeAlias = str | Rotary | Alibi | None


def find_positions(positions: Positions, *, alibi: bool = True) -> Rotary | Alibi | None:
    """The positions for a name, or the given ones.

    Raises:
        ValueError: if the name is unknown, or ALiBi is not supported here.
        TypeError: if it is neither a name nor a record.

    Example:
        >>> find_positions("rotary")
        Rotary(base=10000.0)
    """
    known = "None, 'rotary' or 'alibi'" if alibi else "None or 'rotary'"
    if isinstance(positions, str):
        if positions not in ("rotary", "alibi"):
            raise ValueError(f"positions must be {known}, got {positions!r}")
        positions = Rotary() if positions == "rotary" else Alibi()
    if isinstance(positions, Alibi) and not alibi:
        raise ValueError(
            f"positions must be {known}, got 'alibi': these weights do not support a bias"
        )
    if positions is not None and not isinstance(positions, Rotary | Alibi):
        raise TypeError(f"positions must be {known}, got {type(positions).__name__}")
    return positions
