r"""Statistics of weights other than softmax: signed, unnormalised, or known only by sums.

:class:`WeightSums` is for weights what :class:`~acutance.rowstats.RowState` is for scores: sums
over a row's visible keys that merge exactly. :class:`WeightStatistics` computes the metrics of
:data:`~acutance.rowstats.METRICS` from them, NaN where such weights have none. Relative sizes
:math:`p_j = |a_j| / \sum_k |a_k|` take the place of probabilities, so signs and units do not
matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.rowstats.metrics import METRICS, NamedMetrics, metric
from acutance.rowstats.state import (
    NO_KEY,
    RowState,
    check_state,
    joined_first,
    place_of,
    without_place,
)
from acutance.rowstats.state import merge as merge_scores
from acutance.shapes import check_tensor

__all__ = [
    "Slopes",
    "WeightStatistics",
    "WeightSums",
    "empty_weights",
    "merge_weights",
    "observe_weights",
]


class WeightSums(NamedTuple):
    r"""Sums over the visible keys of each row; every field has the rows' shape (...).

    Sums are in units of a reference size c, so that squares neither overflow nor underflow. An
    unknown field is (..., 0); a merge knows the fields that both sides know.

    Attributes:
        n: number of visible keys, int64.
        c: the reference size, a constant for autograd; 0 for a row without weight.
        T: :math:`\sum_j a_j / c`, with signs.
        A: :math:`\sum_j |a_j| / c`.
        Q: :math:`\sum_j a_j^2 / c^2`.
        X: :math:`\sum_j |a_j|/c \, \log(|a_j|/c)`, known only for rows that are distributions.
        top: :math:`\max_j |a_j|`.
        first: weight of the first visible key.
        first_index: position of that key among all keys, int64.
    """

    n: Tensor
    c: Tensor
    T: Tensor
    A: Tensor
    Q: Tensor
    X: Tensor
    top: Tensor
    first: Tensor
    first_index: Tensor


class Slopes(NamedTuple):
    r"""Derivatives of a row with respect to its scores; only for whole rows, so not merged.

    Attributes:
        trace: :math:`\sum_j \partial w_j / \partial s_j`, (...).
        noise: :math:`\sum_j \lVert \partial o / \partial s_j \rVert^2`, (...); no element,
            (..., 0), unless noise was requested.
    """

    trace: Tensor
    noise: Tensor


def unknown(like: Tensor) -> Tensor:
    """A placeholder for an unknown field, of the rows' shape."""
    return like.detach().unsqueeze(-1)[..., :0]


def _known(sums: WeightSums, field: Tensor) -> bool:
    """Whether a field of the sums is known, rather than empty."""
    return field.dim() == sums.n.dim()


def empty_weights(
    rows: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> WeightSums:
    """The sums of rows with no key: the identity of :func:`merge_weights`.

    Args:
        rows: shape of the rows.
        dtype: floating dtype of the sums.
        device: device of the sums.

    Example:
        >>> sums = observe_weights(torch.tensor([1.0, -3.0]))
        >>> merge_weights(empty_weights(()), sums).A == sums.A
        tensor(True)
    """
    zero = torch.zeros(rows, dtype=dtype, device=device)
    count = torch.zeros(rows, dtype=torch.int64, device=device)
    sums = dict.fromkeys(("c", "T", "A", "Q", "X", "top", "first"), zero)
    return WeightSums(n=count, first_index=torch.full_like(count, NO_KEY), **sums)


def observe_weights(
    weights: Tensor,
    mask: Tensor | None = None,
    *,
    distribution: bool = False,
    first_key: int | None = None,
) -> WeightSums:
    r"""The sums of rows of explicit weights: one block of keys, or all of them.

    Args:
        weights: (..., S), of either sign and any sum. float16 and bfloat16 are converted to
            float32.
        mask: boolean, broadcastable to ``weights``; True where the key takes part. Hidden weights
            may hold any value.
        distribution: whether whole rows, divided by their sum, are probability distributions, so
            that they have an entropy.
        first_key: position of column 0 among all keys; only needed for blocks merged out of order.

    Returns:
        The rows' sums, shape ``weights.shape[:-1]``.

    Example:
        >>> sums = observe_weights(torch.tensor([2.0, -2.0, 0.0]))
        >>> WeightStatistics(sums).effective_keys
        tensor(2.)
    """
    a = check_tensor("weights", weights)
    a = a.to(torch.float64 if a.dtype == torch.float64 else torch.float32)
    if mask is None:
        mask = torch.ones(a.shape[-1:], dtype=torch.bool, device=a.device)
    else:
        a = torch.where(mask, a, 0.0)
    size, empty = a.abs(), a.shape[-1] == 0
    top = size.sum(-1) if empty else size.amax(-1)
    c = top.detach()
    unit = torch.where(c > 0, c, 1.0).unsqueeze(-1)
    share = size / unit
    rows = mask.expand(*mask.shape[:-1], a.shape[-1])  # a mask that rows share is counted once
    n = rows.sum(-1).expand(c.shape)
    column, first = n, top
    if not empty:
        column = rows.to(torch.uint8).argmax(-1).expand(c.shape)
        first = a.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    T, A = (a / unit).sum(-1), share.sum(-1)
    Q = torch.linalg.vector_norm(share, dim=-1).square()
    X = _share_logs(share) if distribution else unknown(c)
    first_index = torch.where(n > 0, column + place_of(first_key), NO_KEY)
    return WeightSums(n, c, T, A, Q, X, top, first, first_index)


def _share_logs(share: Tensor) -> Tensor:
    """Σ x log x, where 0 log 0 = 0."""
    if not (torch.is_grad_enabled() and share.requires_grad):
        logs = share.clamp(min=torch.finfo(share.dtype).tiny).log_()
        return logs.mul_(share).sum(-1)
    positive = share > 0  # log 0 has no gradient
    return torch.where(positive, share * torch.log(torch.where(positive, share, 1.0)), 0.0).sum(-1)


def merge_weights(left: WeightSums, right: WeightSums) -> WeightSums:
    """The sums of two disjoint sets of keys of the same rows, exactly.

    Associative, with :func:`empty_weights` as identity, and commutative if both parts know the
    positions of their keys (``first_key``); otherwise ``left``'s come before ``right``'s. Both
    sides' weights must be on one scale: rows normalised block by block are not.

    Args:
        left: one set of keys.
        right: the other; its rows broadcast against ``left``'s.

    Returns:
        The joint sums; only fields that both sides know.

    Example:
        >>> a = torch.tensor([0.5, -1.0, 4.0])
        >>> parts = merge_weights(observe_weights(a[:1]), observe_weights(a[1:], first_key=1))
        >>> all(torch.allclose(x, y) for x, y in zip(parts, observe_weights(a, first_key=0)))
        True
    """
    check_state(left, WeightSums, "merge_weights", "sums")
    check_state(right, WeightSums, "merge_weights", "sums")
    c = torch.maximum(left.c, right.c)
    x, y = _rescaled(left, c), _rescaled(right, c)
    later, first_index = joined_first(left.first_index, right.first_index)

    def earlier(mine: Tensor, theirs: Tensor) -> Tensor:
        return torch.where(later, theirs, mine)

    joins: dict[str, Any] = dict.fromkeys(("T", "A", "Q", "X"), torch.add)
    joins |= {"top": torch.maximum, "first": earlier}
    merged = {"n": left.n + right.n, "c": c, "first_index": first_index}
    for name, join in joins.items():
        mine, theirs = getattr(x, name), getattr(y, name)
        known = _known(x, mine) and _known(y, theirs)
        merged[name] = join(mine, theirs) if known else unknown(c)
    return WeightSums(**merged)


def _rescaled(sums: WeightSums, c: Tensor) -> WeightSums:
    """The sums in units of a reference c at or above their own."""
    ratio = sums.c / torch.where(c > 0, c, 1.0)
    log_ratio = torch.log(torch.where(ratio > 0, ratio, 1.0))
    scaled = {}
    for name, factor in (("T", ratio), ("A", ratio), ("Q", ratio**2)):
        if _known(sums, field := getattr(sums, name)):
            scaled[name] = field * factor
    if _known(sums, sums.X):
        scaled["X"] = (sums.X + log_ratio * sums.A) * ratio
    return sums._replace(**scaled)


#: Metrics that are functions of the sums, and the fields each needs.
_NEEDS: dict[str, tuple[str, ...]] = {
    "n_keys": (),
    "entropy": ("A", "X"),
    "normalized_entropy": ("A", "X"),
    "information": ("A", "X"),
    "effective_keys": ("A", "Q"),
    "sparsity": ("A", "Q"),
    "collision": ("A", "Q"),
    "top_weight": ("A", "top"),
    "first_weight": ("A", "first"),
    "sink_mass": (),
}
#: Metrics that are of the scores, whatever weights are made of them.
_OF_SCORES = ("max_logit", "logit_mean", "logit_std")
#: Metrics of the weights' derivative, and the field of :class:`Slopes` each is.
_OF_SLOPES: dict[str, tuple[str, ...]] = {"jacobian_trace": ("trace",), "noise_gain": ("noise",)}


@dataclass(frozen=True, repr=False)
class WeightStatistics(NamedMetrics):
    r"""Every metric of :data:`~acutance.rowstats.METRICS` of weights that are not softmax.

    Sparsity :math:`S = \sum|a| / \sqrt{n \sum a^2}` and effective keys
    :math:`(\sum|a|)^2 / \sum a^2` exist for weights of any sign and sum; ``collision``,
    ``top_weight`` and ``first_weight`` are of the sizes :math:`|a_j| / \sum|a|`. Entropy exists
    where the sums know rows to be distributions. What belongs to softmax alone (``lse``,
    ``varentropy``, ``entropy_slope``, ``mean_field_entropy``, ``jensen_gap``, ``max_gap``,
    ``gaussian_entropy``) is NaN, and so is every ratio of a row whose weights are all 0.

    With :math:`\partial w_i / \partial s_j = g_i \delta_{ij} - l_i r_j`, which every weighting of
    :mod:`acutance.weights` has,

    .. math::

        \mathrm{jacobian\_trace} = \sum_j (g_j - l_j r_j), \qquad
        \mathrm{noise\_gain} = \sum_j \left\| \frac{\partial o}{\partial s_j} \right\|^2
        = \sum_j \left\| g_j v_j - r_j \sum_i l_i v_i \right\|^2 .

    For iid noise of variance ν on the scores, :math:`E\lVert\tilde o - o\rVert^2 \approx \nu` times
    the noise gain, to first order. It is :math:`\sum f'(s_j)^2 \lVert v_j \rVert^2` for weights
    :math:`f(s_j)`, :math:`\sum (f'_j / F)^2 \lVert v_j - o \rVert^2` for those divided by their sum
    F, and :math:`\sum g_j^2 \lVert v_j - \bar v_g \rVert^2` with :math:`g_j = p_j^{2 - \alpha}` on
    the support and :math:`\bar v_g = \sum g_j v_j / \sum g_j` for α-entmax. Both carry no gradient.
    They are NaN for weights that were not made of scores, and after a merge.

    Attributes:
        sums: the mergeable sums, fields (...).
        scores: the state of the scores the weights were made of, if there are any; it gives
            ``max_logit``, ``logit_mean`` and ``logit_std``.
        slopes: how the rows answer to their scores; it gives ``jacobian_trace`` and
            ``noise_gain``.
        backend: name of the kernel that summed them; None where none did.

    Example:
        >>> stats = WeightStatistics(observe_weights(torch.tensor([[3.0, -1.0, 0.0, 0.0]])))
        >>> stats.sparsity, stats.effective_keys, stats.entropy
        (tensor([0.6325]), tensor([1.6000]), tensor([nan]))
        >>> stats.available
        ('n_keys', 'effective_keys', 'sparsity', 'collision', 'top_weight', 'first_weight', 'sink_mass')

    Source:
        Su Jianlin, kexue.fm articles 9889 and 9593; Peters et al. (2019), arXiv:1905.05702,
        proposition 2, for entmax.
    """  # noqa: E501 (the doctest's output is one line)

    sums: WeightSums
    scores: RowState | None = None
    slopes: Slopes | None = None
    backend: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        entry = metric(name)
        if name not in self.available:
            return torch.full_like(self.sums.c, torch.nan)
        if name in _OF_SCORES and self.scores is not None:
            return entry.compute(self.scores)
        if name in _OF_SLOPES and self.slopes is not None:
            value: Tensor = getattr(self.slopes, *_OF_SLOPES[name])
            return torch.where(self.sums.n == 0, torch.nan, value)
        return _compute(name, self.sums)

    @property
    def available(self) -> tuple[str, ...]:
        """Names of the metrics these weights have, in the table's order; the others are NaN."""
        fields = self.sums._asdict() | ({} if self.slopes is None else self.slopes._asdict())
        known = {name for name, field in fields.items() if _known(self.sums, field)}
        names = {name for name, needs in (_NEEDS | _OF_SLOPES).items() if known.issuperset(needs)}
        if self.scores is not None:
            names.update(_OF_SCORES)
        return tuple(name for name in METRICS if name in names)

    def merge(self, other: WeightStatistics) -> WeightStatistics:
        """Statistics of the same rows over both sets of keys (:func:`merge_weights`).

        The other's keys come after these.

        Raises:
            TypeError: if ``other`` is no :class:`WeightStatistics`.
        """
        if not isinstance(other, WeightStatistics):
            raise TypeError(
                "WeightStatistics can be merged only with WeightStatistics, got "
                f"{type(other).__name__}"
            )
        sums = merge_weights(without_place(self.sums), without_place(other.sums))
        if self.scores is None or other.scores is None:
            return WeightStatistics(sums)
        scores = merge_scores(without_place(self.scores), without_place(other.scores))
        return WeightStatistics(sums, scores)


def _compute(name: str, sums: WeightSums) -> Tensor:
    """Compute a metric of :data:`_NEEDS` from known fields."""
    if name == "n_keys":
        return sums.n
    if name == "sink_mass":
        return torch.where(sums.n == 0, torch.nan, torch.zeros_like(sums.c))
    n = sums.n.to(sums.A.dtype)
    has_weight, several = (sums.n > 0) & (sums.A > 0), n > 1
    A = torch.where(has_weight, sums.A, 1.0)
    if name in ("top_weight", "first_weight"):
        size = sums.top if name == "top_weight" else sums.first.abs()
        values = size / (A * torch.where(has_weight, sums.c, 1.0))
    elif name in ("effective_keys", "sparsity", "collision"):
        Q = torch.where(has_weight, sums.Q, 1.0)
        values = A.square() / Q
        if name == "sparsity":
            values = A * torch.rsqrt(torch.where(has_weight, n, 1.0) * Q)
        elif name == "collision":
            values = 1.0 / values
    else:
        values, log_n = torch.log(A) - sums.X / A, torch.log(torch.where(several, n, 2.0))
        if name == "normalized_entropy":
            has_weight, values = has_weight & several, values / log_n
        elif name == "information":
            values = torch.where(several, log_n, 0.0) - values
    return torch.where(has_weight, values, torch.nan)
