"""SigmaReparam: weights divided by their spectral norm, times a trained gain."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils import parametrize

from acutance.shapes import check_count, check_number, check_tensor

__all__ = ["SigmaReparam", "remove_sigma_reparam", "sigma_reparam"]

_START = 30  # power iterations before the first forward


class SigmaReparam(nn.Module):
    r"""The parametrization :math:`W \mapsto \gamma W / \sigma(W)`, σ the largest singular value.

    Each training forward does one step of power iteration for σ; its vectors are constants in the
    gradient, which for the exact vectors is the gradient of σ.

    Args:
        weight: the matrix at registration.
        gamma: initial γ; None for σ(W), which leaves the layer unchanged.
        parts: number of equal blocks of the matrix, each with its own σ and γ: 3 for packed
            queries, keys and values.
        dim: the dimension that ``parts`` divides: 0, or 1 for transformers' ``Conv1D``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if the weight is not a matrix, or a part of it is zero, or an option does not
            fit.

    Example:
        >>> weight = torch.diag(torch.tensor([4.0, 1.0]))
        >>> SigmaReparam(weight)(weight).detach()
        tensor([[1.0000, 0.0000],
                [0.0000, 0.2500]])

    Source:
        Zhai et al. (2023), arXiv:2303.06296.
    """

    u: Tensor
    v: Tensor

    def __init__(
        self, weight: Tensor, *, gamma: float | None = 1.0, parts: int = 1, dim: int = 0
    ) -> None:
        super().__init__()
        if check_tensor("weight", weight).dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                "weight must be a floating-point matrix, got "
                f"{tuple(weight.shape)} of {weight.dtype}"
            )
        if dim not in (0, 1):
            raise ValueError(f"dim must be 0 or 1, got {dim!r}")
        if weight.shape[dim] % check_count("parts", parts, 1):
            raise ValueError(f"parts must divide {weight.shape[dim]}, got {parts}")
        self.parts, self.dim = parts, dim
        blocks = self._blocks(weight.detach())
        if not bool(blocks.flatten(1).any(1).all()):
            raise ValueError(
                "weight must have a nonzero entry in each of its parts (such as the stacked query, "
                "key and value weights), since γ W / σ(W) is undefined if σ(W) is 0, got a part "
                f"of zeros in a weight of shape {tuple(weight.shape)} with parts={parts}"
            )
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(parts, blocks.shape[2], generator=generator).to(blocks)
        self.register_buffer("v", normalize(start, dim=1))
        self.register_buffer("u", blocks.new_zeros(parts, blocks.shape[1]))
        for _ in range(_START):
            self._iterate(blocks)
        if gamma is None:
            first = self._sigma(blocks)
        else:
            first = torch.full((parts,), check_number("gamma", gamma, above=0.0)).to(blocks)
        self.gamma = nn.Parameter(first.to(weight.dtype))

    def _blocks(self, weight: Tensor) -> Tensor:
        """The weight as (parts, m, k), in float32 at least."""
        wide = weight.to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
        rows = wide if self.dim == 0 else wide.T
        blocks: Tensor = rows.unflatten(0, (self.parts, -1))
        return blocks

    @torch.no_grad()
    def _iterate(self, blocks: Tensor) -> None:
        """One step of the power iteration."""
        # new tensors: an earlier forward's graph may still hold the old ones
        self.u = normalize(torch.einsum("pmk,pk->pm", blocks, self.v.to(blocks)), dim=1)
        self.v = normalize(torch.einsum("pmk,pm->pk", blocks, self.u), dim=1)

    def _sigma(self, blocks: Tensor) -> Tensor:
        """Largest singular value of each block, (parts,), from the iterated vectors."""
        # model.bfloat16() rounds the vectors too, and then they are no unit vectors
        left, right = (normalize(part.to(blocks), dim=1) for part in (self.u, self.v))
        return torch.einsum("pm,pmk,pk->p", left, blocks, right)

    @property
    def sigma(self) -> Tensor:
        """Spectral norm of each part of the weight that the layer uses, which is the gain γ."""
        return self.gamma.detach()

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the layer uses."""
        with torch.autocast(weight.device.type, enabled=False):
            blocks = self._blocks(weight)
            if self.training:
                self._iterate(blocks.detach())
            gain = self.gamma.to(blocks.dtype) / self._sigma(blocks)
            scaled = (blocks * gain[:, None, None]).flatten(0, 1)
        return (scaled if self.dim == 0 else scaled.T).to(weight.dtype)

    def extra_repr(self) -> str:
        """The number of parts, for ``print``."""
        return f"parts={self.parts}"


def sigma_reparam(
    module: nn.Module, name: str = "weight", *, gamma: float | None = 1.0, parts: int | None = None
) -> nn.Module:
    """Reparametrize one weight of a module.

    Args:
        module: such as ``nn.Linear``, transformers' ``Conv1D`` or ``nn.MultiheadAttention``.
        name: name of the weight; ``"in_proj_weight"`` for ``nn.MultiheadAttention``.
        gamma: initial γ; None leaves the layer unchanged.
        parts: as for :class:`SigmaReparam`; None for 3 with ``in_proj_weight``, else 1.

    Returns:
        The module.

    Raises:
        ValueError: if it has no such weight, or the weight is already reparametrized or all zeros.

    Example:
        >>> layer = sigma_reparam(nn.Linear(8, 8))
        >>> torch.linalg.matrix_norm(layer.weight, 2).item()
        1.00
        >>> _ = remove_sigma_reparam(layer)
        >>> type(layer.weight).__name__
        'Parameter'

    Source:
        Zhai et al. (2023), arXiv:2303.06296.
    """
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor):
        raise ValueError(f"{type(module).__name__} has no weight named {name!r}")
    if parametrize.is_parametrized(module, name):
        raise ValueError(f"{type(module).__name__}.{name} is already reparametrized")
    cut = parts if parts is not None else 3 if name == "in_proj_weight" else 1
    dim = 1 if type(module).__name__ == "Conv1D" else 0  # transformers' Conv1D is (in, out)
    chosen = SigmaReparam(weight, gamma=gamma, parts=cut, dim=dim).train(module.training)
    parametrize.register_parametrization(module, name, chosen)
    return module


def remove_sigma_reparam(
    module: nn.Module, name: str = "weight", *, keep: bool = True
) -> nn.Module:
    """Undo :func:`sigma_reparam`.

    Args:
        module: the module.
        name: name of the weight.
        keep: leave the effective weight γ W / σ(W); otherwise W itself.

    Returns:
        The module.

    Raises:
        ValueError: if the weight is not reparametrized.
    """
    if not parametrize.is_parametrized(module, name):
        raise ValueError(f"{type(module).__name__}.{name} is not reparametrized")
    training = module.training
    try:
        module.eval()  # reading the weight must not move the power iteration once more
        parametrize.remove_parametrizations(module, name, leave_parametrized=keep)
    finally:
        module.train(training)
    return module
