"""The linear recurrent unit: a diagonal recurrence whose decays lie on a ring."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from acutance.mechanisms.recurrent import CHUNK, STRETCH, diagonal_recurrence
from acutance.shapes import check_count, check_number, check_tensor

__all__ = ["LRUParameters", "linear_recurrent_unit", "lru_decays", "lru_parameters"]


class LRUParameters(NamedTuple):
    r"""Parameters of a linear recurrent unit of N states, H inputs and M outputs.

    Attributes:
        nu_log: (N,), ν with :math:`|\lambda| = e^{-e^{\nu}}`: stable for any value.
        theta_log: (N,), θ; the angle of λ is :math:`e^{\theta}`.
        gamma_log: (N,), logarithm of the inputs' scale, initially :math:`\sqrt{1 - |\lambda|^2}`.
        B: (N, H), complex.
        C: (M, N), complex.
        D: (M, H), a skip connection; if M = H, a vector (H,) is its diagonal.
    """

    nu_log: Tensor
    theta_log: Tensor
    gamma_log: Tensor
    B: Tensor
    C: Tensor
    D: Tensor


def lru_decays(nu_log: Tensor, theta_log: Tensor) -> Tensor:
    r""":math:`\lambda = e^{-e^\nu + i e^\theta}`, (N,), complex, always inside the unit circle.

    Example:
        >>> lru_decays(torch.tensor([-2.0]), torch.tensor([0.0])).abs()
        tensor([0.8734])

    Source:
        Orvieto et al. (2023), arXiv:2303.06349.
    """
    return torch.polar(torch.exp(-torch.exp(nu_log)), torch.exp(theta_log))


def lru_parameters(
    states: int,
    inputs: int,
    outputs: int | None = None,
    *,
    r_min: float = 0.0,
    r_max: float = 1.0,
    max_phase: float = 2 * math.pi,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> LRUParameters:
    r"""Parameters with the published initialisation: λ uniform on a ring in the complex plane.

    Args:
        states: number of states, N.
        inputs: number of inputs, H.
        outputs: number of outputs, M; None for H, with a diagonal D.
        r_min: inner radius, in [0, r_max).
        r_max: outer radius, in (r_min, 1].
        max_phase: largest angle, in (0, 2π].
        dtype: dtype of the real parameters, float32 or float64.
        device: device of the parameters.
        generator: random generator.

    Returns:
        The parameters, without ``requires_grad``.

    Raises:
        ValueError: if a size is not positive, or radii or phase are out of range.

    Example:
        >>> p = lru_parameters(256, 8, r_min=0.9, r_max=0.999)
        >>> radius = lru_decays(p.nu_log, p.theta_log).abs()
        >>> bool(((radius >= 0.9) & (radius <= 0.999)).all())
        True

    Source:
        Orvieto et al. (2023), arXiv:2303.06349, appendix A.
    """
    check_count("states", states, 1)
    check_count("inputs", inputs, 1)
    if outputs is not None:
        check_count("outputs", outputs, 1)
    if not 0 <= r_min < r_max <= 1:
        raise ValueError(
            f"r_min and r_max must satisfy 0 <= r_min < r_max <= 1, got r_min={r_min!r}, "
            f"r_max={r_max!r}"
        )
    if not 0 < check_number("max_phase", max_phase) <= 2 * math.pi:
        raise ValueError(f"max_phase must be in (0, 2π], got {max_phase!r}")
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"dtype must be float32 or float64, got {dtype}")

    def uniform() -> Tensor:  # in (0, 1]: its logarithm is taken
        draw = torch.rand(states, generator=generator, dtype=torch.float64, device=device)
        return 1 - draw

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    # an area between circles, not their radii, is divided evenly
    nu = -0.5 * torch.log(uniform() * (r_max**2 - r_min**2) + r_min**2)
    nu = nu.clamp(min=torch.finfo(dtype).tiny)  # a draw of 1 with r_max = 1 is λ = 1
    theta = max_phase * uniform()
    rows = inputs if outputs is None else outputs
    D = normal(inputs) if outputs is None else normal(rows, inputs) / math.sqrt(inputs)
    return LRUParameters(
        nu_log=nu.log().to(dtype),
        theta_log=theta.log().to(dtype),
        gamma_log=(0.5 * torch.log(-torch.expm1(-2 * nu))).to(dtype),
        B=torch.complex(normal(states, inputs), normal(states, inputs)) / math.sqrt(2 * inputs),
        C=torch.complex(normal(rows, states), normal(rows, states)) / math.sqrt(states),
        D=D,
    )


def linear_recurrent_unit(
    inputs: Tensor, parameters: LRUParameters, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Run a linear recurrent unit over a sequence, or a piece of one.

    .. math:: h_t = \lambda h_{t-1} + e^\gamma B u_t, \qquad y_t = \mathrm{Re}(C h_t) + D u_t

    Args:
        inputs: u, (..., L, H), float32 or float64.
        parameters: from :func:`lru_parameters`, possibly trained.
        state: h before the first input, (..., N), complex; None for 0.

    Raises:
        TypeError: if inputs are not a real tensor of single or double precision.
        ValueError: if widths do not fit.

    Returns:
        y, (..., L, M), and the state after the last input, (..., N).

    Example:
        >>> p = lru_parameters(16, 4)
        >>> u = torch.randn(10, 4)
        >>> whole, _ = linear_recurrent_unit(u, p)
        >>> first, state = linear_recurrent_unit(u[:7], p)
        >>> last, _ = linear_recurrent_unit(u[7:], p, state)
        >>> torch.allclose(whole, torch.cat([first, last]), atol=1e-5)
        True

    Source:
        Orvieto et al. (2023), arXiv:2303.06349.
    """
    if check_tensor("inputs", inputs).dtype not in (torch.float32, torch.float64):
        raise TypeError(f"inputs must be float32 or float64, got {inputs.dtype}")
    if inputs.dim() < 2 or inputs.shape[-1] != parameters.B.shape[-1]:
        raise ValueError(
            f"inputs must have shape (..., L, H) with H={parameters.B.shape[-1]}, since B is "
            f"{tuple(parameters.B.shape)}, got {tuple(inputs.shape)}"
        )
    if inputs.shape[-2] == 0:
        raise ValueError(f"inputs must have a length of at least 1, got {tuple(inputs.shape)}")
    into = parameters.B * torch.exp(parameters.gamma_log).unsqueeze(-1)
    decay = lru_decays(parameters.nu_log, parameters.theta_log)
    D = parameters.D
    width = inputs[..., :1, 0].numel() * max(parameters.B.shape)
    size = CHUNK * max(1, 4 * STRETCH // (CHUNK * max(1, width)))
    outputs_so_far = []
    for u in inputs.split(size, -2):  # complex states of a stretch at a time
        h = diagonal_recurrence(u.to(into.dtype) @ into.mT, decay, state)
        state = h[..., -1, :]
        skip = D * u if D.dim() == 1 else u @ D.mT
        outputs_so_far.append((h @ parameters.C.mT).real + skip)
    assert state is not None
    return torch.cat(outputs_so_far, -2), state
