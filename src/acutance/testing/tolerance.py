r"""How far from the oracle a correct measurement can be: derived for each metric, not chosen.

Two things keep a correct sum from the oracle's value. The scores themselves are off by up to δ
(:func:`score_error`: a dot product of E terms in the sums' precision), and every sum of n terms
adds a relative error of its own. With u the unit roundoff, :math:`r = u(\sqrt n + 8)` and
:math:`\delta' = \delta + 4u(H + \sqrt V)` (the exponents' rounding, u · \|s − m\|, averaged under
p), a metric f may be off by

.. math:: 2 \, (\sup |df| / \delta' \cdot \delta' + \text{rounding of its last operations})

where the first factor is the metric's first-order response to any change of the scores by at most
δ':
:math:`\sqrt V` for the entropy, since :math:`dH = -\sum_j p_j w_j ds_j` and
:math:`\sum_j p_j |w_j| \le \sqrt V`; :math:`2V + 2\sqrt V` for the varentropy; and so on, one line
each in :func:`_tolerances`. The 2 in front is for the higher orders.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.rowstats import RowStatistics


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        metric: the metric whose error is the largest share of its tolerance.
        index: of the row with that error.
        measured: the measured value there.
        expected: the oracle's value there.
        tolerance: the largest error allowed there.
        ratios: largest error / tolerance of each metric; infinite if only one value is NaN.
    """

    metric: str
    index: tuple[int, ...]
    measured: float
    expected: float
    tolerance: float
    ratios: dict[str, float]

    @property
    def error(self) -> float:
        """Absolute error of the worst metric at its worst row."""
        both_nan = math.isnan(self.measured) and math.isnan(self.expected)
        same = self.measured == self.expected or both_nan
        return 0.0 if same else abs(self.measured - self.expected)

    @property
    def close(self) -> bool:
        """Whether every metric of every row is within its tolerance."""
        return all(ratio <= 1.0 for ratio in self.ratios.values())

    def __str__(self) -> str:
        verdict = "within" if self.close else "beyond"
        return (
            f"{self.metric} at row {self.index} is {self.measured:.9g}, expected "
            f"{self.expected:.9g}: error {self.error:.2e}, {verdict} tolerance {self.tolerance:.2e}"
        )


def score_error(
    query: Tensor, key: Tensor, scale: float | None = None, *, added: float = 0.0
) -> float:
    r"""Bound on the rounding error of a score computed in the precision of the sums.

    .. math:: \delta = u \left( (\sqrt E + 4) \, |scale| \, \max_i \lVert q_i\rVert
              \max_j \lVert k_j\rVert + 2 \cdot added \right)

    with u the unit roundoff. Rounding errors of a sum of E products go up as often as down, so that
    they add up to about √E u :math:`\lVert q\rVert \lVert k\rVert`; 4 more are for scale and
    softcap.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        scale: factor of the scores; None is 1/√E.
        added: largest size of what is added to the scores (bias, ALiBi).

    Returns:
        δ for sums in float64 where the query is float64, else in float32.

    Example:
        >>> score_error(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))  # 6 u · 2
        7.15e-07

    Source:
        Higham & Mary (2019), SIAM J. Sci. Comput. 41:A2815, for the √E.
    """
    width = int(query.shape[-1])
    factor = width**-0.5 if scale is None else abs(scale)
    longest = [
        float(torch.linalg.vector_norm(tensor.double(), dim=-1).amax()) if tensor.numel() else 0.0
        for tensor in (query, key)
    ]
    terms = (width**0.5 + 4) * factor * longest[0] * longest[1]
    sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    return float(torch.finfo(sums).eps / 2 * (terms + 2 * added))


def compare(
    measured: RowStatistics,
    oracle: dict[str, Tensor],
    *,
    score_error: float = 0.0,
    value_norm: float = 1.0,
) -> Comparison:
    """Compare every available metric with the oracle.

    Args:
        measured: statistics from :func:`acutance.attention` or from a mechanism to be tested.
        oracle: from :func:`acutance.rowstats.dense_statistics`, for the same input.
        score_error: bound on the error of the scores (:func:`score_error`); 0 if they are exact.
        value_norm: length of the longest value, for ``noise_gain``.

    Returns:
        The worst metric, and every metric's error as a share of its tolerance.

    Example:
        Scores that are exact in float32 leave only the sums' own rounding:

        >>> from acutance import row_statistics
        >>> from acutance.rowstats import dense_statistics
        >>> query, key = torch.ones(1, 1, 1, 1), torch.linspace(-8, 8, 100).view(1, 1, 100, 1)
        >>> compare(row_statistics(query, key), dense_statistics(query, key)).close
        True
        >>> found = compare(row_statistics(query, key), dense_statistics(query, 1.01 * key))
        >>> found.close, found.ratios["n_keys"]
        (False, 0.0)
    """
    tolerances = _tolerances(oracle, measured.state.Z.dtype, score_error, value_norm)
    ratios: dict[str, float] = {}
    worst = Comparison("n_keys", (), 0.0, 0.0, 0.0, ratios)
    for name in measured.available:
        expected, found = oracle[name].double(), measured[name].detach().double()
        if found.shape != expected.shape:
            raise ValueError(
                f"measured and oracle must have the same rows: {name} is {tuple(found.shape)}, the "
                f"oracle's {tuple(expected.shape)}"
            )
        tolerance = tolerances[name].nan_to_num(0.0, posinf=0.0)
        ratio = _ratio(found, expected, tolerance)
        largest = float(ratio.amax()) if ratio.numel() else 0.0
        if ratio.numel() and largest > max(ratios.values(), default=-1.0):
            index = tuple(map(int, torch.unravel_index(ratio.argmax(), ratio.shape)))
            here, should, most = (float(values[index]) for values in (found, expected, tolerance))
            worst = Comparison(name, index, here, should, most, ratios)
        ratios[name] = largest
    return worst


def assert_close_to_oracle(
    measured: RowStatistics,
    oracle: dict[str, Tensor],
    *,
    score_error: float = 0.0,
    value_norm: float = 1.0,
    name: str = "",
) -> Comparison:
    """Raise if a statistic differs from the oracle by more than its tolerance.

    The message names the worst metric and row.

    Args:
        measured: statistics from :func:`acutance.attention` or from a mechanism to be tested.
        oracle: from :func:`acutance.rowstats.dense_statistics`, for the same input.
        score_error: bound on the error of the scores.
        value_norm: length of the longest value, for ``noise_gain``.
        name: what was measured, for the message.

    Returns:
        What :func:`compare` found.

    Raises:
        AssertionError: if a metric of a row is beyond its tolerance.

    Example:
        >>> from acutance import row_statistics
        >>> from acutance.rowstats import dense_statistics
        >>> from acutance.testing import attention_case, score_error
        >>> case = attention_case(3, dtype=torch.float32)
        >>> delta = score_error(case.query, case.key)
        >>> stats = row_statistics(case.query, case.key, **case.options)
        >>> oracle = dense_statistics(case.query, case.key, **case.options)
        >>> assert_close_to_oracle(stats, oracle, score_error=delta).close
        True
    """
    found = compare(measured, oracle, score_error=score_error, value_norm=value_norm)
    if not found.close:
        raise AssertionError(f"{name}: {found}" if name else str(found))
    return found


def _ratio(found: Tensor, expected: Tensor, tolerance: Tensor) -> Tensor:
    """Error divided by the tolerance; 0 where both values are equal or both NaN."""
    same = (found == expected) | (found.isnan() & expected.isnan())
    error = (found - expected).abs()
    ratio = error / tolerance.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(same, 0.0, ratio.nan_to_num(torch.inf))


def _tolerances(
    oracle: dict[str, Tensor], dtype: torch.dtype, delta: float, value_norm: float
) -> dict[str, Tensor]:
    """The tolerance of each metric and row (see the module's text)."""
    u, tiny = torch.finfo(dtype).eps / 2, torch.finfo(dtype).tiny
    exact = torch.finfo(torch.float64).eps
    n = oracle["n_keys"].double()
    H, V = oracle["entropy"], oracle["varentropy"]
    C, std = oracle["collision"], oracle["logit_std"]
    root = V.sqrt()
    r = u * (n.sqrt() + 8)
    d = delta + 4 * u * (H + root)
    mean, top, lse = (oracle[name].abs() for name in ("logit_mean", "max_logit", "lse"))
    log_n = n.log()

    entropy = root * d + r * (1 + H)
    mean_error = delta + r * (mean + std)
    # a mean that is off by x turns the deviations' square σ² into σ² + x²
    spread = delta + r * std + torch.hypot(std, 4 * u * mean) - std
    # two stored logits, each rounded, are subtracted
    stored = 2 * delta + r * (mean + std) + 2 * u * (top + mean + log_n)
    collision = (4 * d + 2 * r) * C
    weight = 2 * d + r + 4 * u

    # the other keys' sum is what the first key's weight leaves: its error grows as 1 / left
    left, others = torch.sigmoid(-oracle["first_gap"]), (n - 1).clamp(min=1.0)
    of_rest = (2 * delta + 4 * d + 2 * r) / left
    of_rest = torch.where(of_rest > 0.1, 1e6, of_rest)  # nothing is known of them
    far = u * (2 * top + mean + n.sqrt() * std)  # the first score is at most so far out
    step = mean_error + delta + far  # of the first score's distance from the mean, <= sqrt(n) std
    variance = n / others * (2 * std * spread + spread.square() + r * std.square())
    variance = variance + (2 * n.sqrt() * std + step) * step / others
    rest_std = torch.minimum(variance.sqrt(), variance / oracle["rest_logit_std"])

    def share(name: str) -> Tensor:
        """Tolerance of a weight, whose relative error grows with its score's gap to the maximum."""
        p = oracle[name]
        return p * weight - 2 * u * torch.xlogy(p, p)

    found = {
        "n_keys": torch.zeros_like(n),
        "entropy": entropy,
        "normalized_entropy": entropy / log_n + u,
        "information": entropy + u * log_n,
        "effective_keys": (4 * d + 2 * r) / C,
        "sparsity": (2 * d + r + u) * oracle["sparsity"],
        "collision": collision,
        "top_weight": share("top_weight"),
        "first_weight": share("first_weight"),
        "sink_mass": share("sink_mass"),
        "max_logit": delta + u * top,
        "lse": delta + r + u * (lse + top),
        "logit_mean": mean_error,
        "logit_std": spread,
        "varentropy": (2 * V + 2 * root) * d + r * V,
        "entropy_slope": (2 * V + 2 * root) * d + r * V,
        "mean_field_entropy": stored,
        "jensen_gap": stored + r,
        "max_gap": (2 + root) * d + r * (1 + H),
        "gaussian_entropy": (2 + 2 * log_n).sqrt() * spread + 16 * u * (1 + log_n),
        "first_gap": of_rest + delta + far,
        "rest_logit_std": torch.where(rest_std.isnan(), variance.sqrt(), rest_std),
        "rest_jensen_gap": of_rest + stored + r + (step + r * n.sqrt() * std) / others,
        "jacobian_trace": collision + u + exact * n.sqrt(),  # Σp = 1 in the oracle, up to that
    }
    if "noise_gain" in oracle:
        gain, reach = oracle["noise_gain"], 2 * value_norm
        moved = (d + r) * reach  # how far the output may be off
        found["noise_gain"] = (
            (4 * d + 2 * r) * gain + 2 * moved * (C * gain).sqrt() + (moved**2 + r * reach**2) * C
        )
    found = {name: part + tiny for name, part in found.items()}  # what is smaller underflows
    return {name: 2 * part if name != "n_keys" else 0 * part for name, part in found.items()}
