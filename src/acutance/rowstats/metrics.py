"""METRICS: every statistic of an attention row, each a function of its :class:`RowState`.

:class:`RowStatistics` has them as attributes that are computed when read.

The probe, reports, command line and documentation iterate over this table. Descriptions that need
no PyTorch are in :mod:`acutance.rowstats.descriptions`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.rowstats.coverage import GapStatistics
from acutance.rowstats.descriptions import DESCRIPTIONS, Description
from acutance.rowstats.gaussian import expected_entropy
from acutance.rowstats.state import (
    DEEPEST,
    RowState,
    has_gaps,
    has_noise,
    has_sink,
    merge,
    ratio,
    without_place,
)
from acutance.shapes import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Metric(Description):
    """One statistic of an attention row, as in :data:`METRICS`.

    Attributes:
        compute: function of the state; NaN for rows with no visible key unless stated otherwise.
    """

    compute: Callable[[RowState], Tensor]


def _where_any(state: RowState, values: Tensor, otherwise: float = torch.nan) -> Tensor:
    """``values`` in rows with a visible key, ``otherwise`` elsewhere."""
    return torch.where(state.n == 0, otherwise, values)


def _count(state: RowState) -> Tensor:
    """Number of visible keys in the dtype of the sums; NaN for rows without keys."""
    return _where_any(state, state.n.to(state.Z.dtype))


def _with_sink(state: RowState) -> RowState:
    """The sums with the sink as one more outcome of the distribution; unchanged without a sink."""
    if state.sink.dim() != state.Z.dim():  # the sink is absent
        return state._replace(m=state.m.detach())
    m, sink = state.m.detach(), state.sink
    none = sink == -torch.inf
    top = torch.maximum(m, sink.detach())
    top = top.clamp(min=torch.finfo(top.dtype).min)
    drop = torch.where(none, 0.0, (m - top).clamp(min=DEEPEST))
    decay = torch.exp(drop)
    t = torch.where(none, 0.0, (sink - top).clamp(min=DEEPEST))
    e = torch.where(none, 0.0, torch.exp(t))
    key_Z, key_U = state.Z * decay, (state.U + drop * state.Z) * decay
    Z = key_Z + e
    safe = torch.where(Z == 0, 1.0, Z)
    key_mean = drop + ratio(state.U, state.Z)
    gap = t - key_mean
    return state._replace(
        m=torch.where(none, m, top),
        Z=Z,
        U=key_U + e * t,
        W=state.W * decay + gap.square() * key_Z * e / safe,
        Q=state.Q * decay.square() + e.square(),
    )


def n_keys(state: RowState) -> Tensor:
    """Number of visible keys, int64; 0 for a row with none.

    Example:
        >>> from acutance.rowstats import observe
        >>> n_keys(observe(torch.tensor([[1.0, -torch.inf], [1.0, 2.0]])))
        tensor([1, 2])
    """
    return state.n


def max_logit(state: RowState) -> Tensor:
    """Largest visible score; −inf for a row with no visible key."""
    return state.m


def lse(state: RowState) -> Tensor:
    r"""Logarithm of the normaliser, :math:`m + \log Z`, sink included; −inf for an empty row."""
    full = _with_sink(state)
    empty = state.n == 0
    return torch.where(empty, -torch.inf, full.m + torch.log(torch.where(empty, 1.0, full.Z)))


def entropy(state: RowState) -> Tensor:
    r"""Shannon entropy of each attention row, in nats.

    .. math:: H = \log Z - U / Z, \qquad 0 \le H \le \log n

    With a sink it is the entropy of the whole distribution, the sink being one more outcome.

    Args:
        state: Row statistics of any number of merged key blocks, fields of shape (...).

    Returns:
        Entropy in nats, shape (...). NaN for a row with no visible key.

    Example:
        Four equal scores spread a row evenly, so H = log 4, read whole or in two blocks:

        >>> from acutance.rowstats import merge, observe
        >>> left, right = observe(torch.zeros(1, 2)), observe(torch.zeros(1, 2))
        >>> entropy(merge(left, right))
        tensor([1.3863])

    Source:
        Milakov & Gimelshein (2018), arXiv:1805.02867, for the running (m, Z) pair.
    """
    full = _with_sink(state)
    Z = torch.where(state.n == 0, 1.0, full.Z)
    return _where_any(state, torch.log(Z) - full.U / Z)


def information(state: RowState) -> Tensor:
    r""":math:`\log n - H`, in nats: how far the entropy is below that of uniform weights."""
    return torch.log(_count(state)) - entropy(state)


def normalized_entropy(state: RowState) -> Tensor:
    r""":math:`H / \log n`; NaN for a single key, where both are 0. A sink can lift it above 1."""
    n = _count(state)
    several = n > 1
    ratio = entropy(state) / torch.log(torch.where(several, n, 2.0))
    return torch.where(several, ratio, torch.nan)


def varentropy(state: RowState) -> Tensor:
    r"""Variance of the score (or of :math:`\log p`) under the row's own weights, in nat².

    Example:
        >>> from acutance.rowstats import observe
        >>> varentropy(observe(torch.tensor([0.0, 0.0, 0.0])))
        tensor(0.)
    """
    full = _with_sink(state)
    return _where_any(state, full.W / torch.where(state.n == 0, 1.0, full.Z))


def entropy_slope(state: RowState) -> Tensor:
    r""":math:`dH/d\log\lambda = -\mathrm{Var}_p(s)` for scores multiplied by λ, at λ = 1.

    Exact without additive bias and sink, since λ does not multiply those.
    """
    return -varentropy(state)


def collision(state: RowState) -> Tensor:
    r""":math:`\sum_j p_j^2`, the probability that two draws from the row agree (sink included)."""
    full = _with_sink(state)
    return _where_any(state, full.Q / torch.where(state.n == 0, 1.0, full.Z).square())


def effective_keys(state: RowState) -> Tensor:
    r""":math:`1 / \sum_j p_j^2`: number of equal weights with the same collision probability.

    Example:
        >>> from acutance.rowstats import observe
        >>> effective_keys(observe(torch.tensor([0.0, 0.0, -100.0])))
        tensor(2.)
    """
    return 1.0 / collision(state)


def sparsity(state: RowState) -> Tensor:
    r""":math:`S = E|a| / \sqrt{E[a^2]} = 1/\sqrt{n \sum_j p_j^2}`; small is sparse."""
    return torch.rsqrt(_count(state) * collision(state))


def top_weight(state: RowState) -> Tensor:
    """The largest key's weight."""
    full = _with_sink(state)
    above = state.m - torch.where(state.n == 0, 0.0, full.m.detach())
    weight = torch.exp(torch.where(state.n == 0, 0.0, above))
    return _where_any(state, weight / torch.where(state.n == 0, 1.0, full.Z))


def first_weight(state: RowState) -> Tensor:
    """Weight of the first visible key, often an attention sink."""
    full = _with_sink(state)
    above = torch.where(state.n == 0, 0.0, state.first - full.m.detach())
    return _where_any(state, torch.exp(above) / torch.where(state.n == 0, 1.0, full.Z))


def logit_mean(state: RowState) -> Tensor:
    """Unweighted mean of the visible scores."""
    return _where_any(state, state.mean)


def logit_std(state: RowState) -> Tensor:
    r"""Unweighted standard deviation of visible scores, :math:`\sqrt{M_2 / n}`; 0 for one key."""
    n = _count(state)
    variance = state.M2 / n
    spread = variance > 0
    root = torch.sqrt(torch.where(spread, variance, 1.0))
    return _where_any(state, torch.where(spread, root, variance))


def mean_field_entropy(state: RowState) -> Tensor:
    r""":math:`\log n - (s_\max - \bar s)`: a lower bound on the entropy H; may be negative.

    :math:`H = H_{mf} + J + G` exactly, with :func:`jensen_gap` J and :func:`max_gap` G. With
    a sink the identity holds but the bound does not.
    """
    return torch.log(_count(state)) - (_moving(state.m) + state.depth)


def jensen_gap(state: RowState) -> Tensor:
    r""":math:`J = \log\frac1n\sum_j e^{s_j} - \bar s \ge 0`, the gap of logsumexp over the mean."""
    full = _with_sink(state)
    empty = state.n == 0
    n = _count(state)
    above = torch.where(empty, 0.0, full.m.detach() - state.m.detach())  # of a sink, if any
    return _where_any(state, torch.log(torch.where(empty, 1.0, full.Z) / n) + (above + state.depth))


def _moving(m: Tensor) -> Tensor:
    """A zero with the gradient of the row maximum, which the state treats as a constant."""
    top = torch.where(m == -torch.inf, 0.0, m)
    return top - top.detach()


def max_gap(state: RowState) -> Tensor:
    r""":math:`G = s_\max - \sum_j p_j s_j \ge 0`, the gap of the maximum over the weighted mean."""
    full = _with_sink(state)
    empty = state.n == 0
    above = torch.where(empty, 0.0, state.m) - torch.where(empty, 0.0, full.m.detach())
    return _where_any(state, above - full.U / torch.where(empty, 1.0, full.Z))


def gaussian_entropy(state: RowState) -> Tensor:
    """Expected entropy of n independent normal scores with this row's ``logit_std``, in nats."""
    n = _where_any(state, state.n.to(state.Z.dtype), 2.0)
    spread = torch.where(state.n == 0, 1.0, logit_std(state))
    return _where_any(state, expected_entropy(n, spread))


def first_gap(state: RowState) -> Tensor:
    r""":math:`s_1 - \log\sum_{j>1} e^{s_j}`: log-odds of the first visible key against all others.

    NaN for a single key. If the first key has all the weight up to rounding, the gap is capped at
    −log eps of the sums' dtype: 15.9 in float32.

    Example:
        >>> from acutance.rowstats import observe
        >>> first_gap(observe(torch.tensor([6.0, 1.0, 2.0]).log()))  # log(6 / 3)
        tensor(0.6931)
    """
    several, first, rest = _first_and_rest(state)
    return torch.where(several, first - torch.log(rest), torch.nan)


def rest_logit_std(state: RowState) -> Tensor:
    r"""Unweighted standard deviation of all visible scores but the first; NaN for a single key."""
    several, first, _ = _first_and_rest(state)
    n = torch.where(several, _count(state), 2.0)
    step = first + torch.where(several, state.depth, 0.0)  # first - mean, without their rounding
    squares = state.M2 - step.square() * n / (n - 1)
    variance = squares / (n - 1)
    # one other key has no spread, and less than this is rounding
    spread = (state.n > 2) & (squares > 8 * torch.finfo(n.dtype).eps * state.M2)
    root = torch.sqrt(torch.where(spread, variance, 1.0))
    return torch.where(several, torch.where(spread, root, 0.0 * squares), torch.nan)


def rest_jensen_gap(state: RowState) -> Tensor:
    r"""Jensen gap of all visible scores but the first; NaN for a single key.

    :math:`\log\frac{1}{n-1}\sum_{j>1} e^{s_j} - \bar s_{j>1}`.
    """
    several, first, rest = _first_and_rest(state)
    n = torch.where(several, _count(state), 2.0)
    step = first + torch.where(several, state.depth, 0.0)  # first - mean, without their rounding
    gap = torch.log(rest / (n - 1)) + (state.depth + step / (n - 1))
    return torch.where(several, gap.clamp(min=0.0), torch.nan)


def _first_and_rest(state: RowState) -> tuple[Tensor, Tensor, Tensor]:
    """Whether there are other keys, the first key's score, and the others' sum, relative to m."""
    several = state.n > 1
    first = torch.where(several, state.first - state.m.detach(), 0.0)
    Z = torch.where(several, state.Z, 2.0)
    return several, first, (Z - torch.exp(first)).clamp(min=torch.finfo(Z.dtype).eps)


def jacobian_trace(state: RowState) -> Tensor:
    r""":math:`1 - \sum_j p_j^2`, the trace of the softmax Jacobian diag p − p pᵀ."""
    return 1.0 - collision(state)


def sink_mass(state: RowState) -> Tensor:
    """Weight of the sink, which is in the normaliser but not a key; 0 without a sink."""
    if not has_sink(state):
        return _where_any(state, torch.zeros_like(state.Z))
    full = _with_sink(state)
    none = (state.sink == -torch.inf) | (state.n == 0)
    mass = torch.exp(torch.where(none, 0.0, state.sink - full.m)) / torch.where(none, 1.0, full.Z)
    return _where_any(state, torch.where(none, 0.0, mass))


def noise_gain(state: RowState) -> Tensor:
    r""":math:`\sum_j p_j^2 \lVert v_j - o \rVert^2`, how far noise in the logits moves the output.

    For iid logit noise of variance ν, :math:`E\lVert\tilde o - o\rVert^2 \approx \nu` times this.
    It has no gradient, since the kernel provides none for the values' moments.
    """
    if not has_noise(state):
        raise ValueError("noise_gain needs values: pass value=... and noise=True")
    state = RowState(*(part.detach() for part in state))
    full = _with_sink(state)
    empty = state.n == 0
    scale = torch.where(empty, 1.0, full.Z)
    drop = torch.where(empty, 0.0, state.m - full.m)
    decay = torch.exp(drop)
    output = state.O * (decay / scale).unsqueeze(-1)
    away = (state.R1 - output).square().sum(-1)
    total = state.R2 + state.Q * away
    return _where_any(state, total * (decay / scale).square())


def keys_50(state: RowState) -> Tensor:
    """Smallest number of keys that hold half of a row's weight; needs the gap histogram."""
    return RowStatistics(state).keys_holding(0.5)


def keys_90(state: RowState) -> Tensor:
    """Smallest number of keys that hold 90 % of a row's weight; needs the gap histogram."""
    return RowStatistics(state).keys_holding(0.9)


def keys_95(state: RowState) -> Tensor:
    """Smallest number of keys that hold 95 % of a row's weight; needs the gap histogram."""
    return RowStatistics(state).keys_holding(0.95)


def keys_99(state: RowState) -> Tensor:
    """Smallest number of keys that hold 99 % of a row's weight; needs the gap histogram."""
    return RowStatistics(state).keys_holding(0.99)


class _Metrics(dict[str, Metric]):
    """Metrics by name, shown as a table of name, unit and meaning."""

    def __repr__(self) -> str:
        rows = [(each.name, each.unit, each.meaning) for each in self.values()]
        wide = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{a:{wide[0]}}  {b:{wide[1]}}  {c}" for a, b, c in rows)


#: Every metric by name, in the order reports show them.
METRICS: dict[str, Metric] = _Metrics(
    (name, Metric(**vars(entry), compute=globals()[name])) for name, entry in DESCRIPTIONS.items()
)


def metric_names(*, noise: bool = False, gaps: bool = False) -> tuple[str, ...]:
    """Names of the metrics that statistics have, in the table's order.

    Args:
        noise: whether they were requested with ``noise=True``.
        gaps: whether they were requested with ``gaps=True``.

    Example:
        >>> sorted(set(metric_names(gaps=True)) - set(metric_names()))
        ['keys_50', 'keys_90', 'keys_95', 'keys_99']
    """
    names = [
        name
        for name, entry in METRICS.items()
        if (noise or not entry.needs_values) and (gaps or not entry.needs_gaps)
    ]
    return tuple(names)


def metric(name: str) -> Metric:
    """Look up a metric by name.

    Raises:
        ValueError: if there is none; the message names the nearest.

    Example:
        >>> metric("entropy").unit
        'nat'
    """
    if name not in METRICS:
        hint = did_you_mean(name, METRICS, f": choose from {', '.join(METRICS)}")
        raise ValueError(f"there is no metric named {name!r}{hint}")
    return METRICS[name]


def _metric_property(entry: Metric) -> property:
    """An attribute that computes a metric when it is read."""
    name = entry.name  # alone: torch.compile cannot trace the entry itself

    def value(self: NamedMetrics) -> Tensor:
        return self[name]

    return property(value, doc=f"{entry.meaning}; unit {entry.unit}, range {entry.range}.")


class NamedMetrics(ABC):
    """The metrics of :data:`~acutance.rowstats.METRICS` as attributes, computed when read."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...

    @abstractmethod
    def __getitem__(self, name: str) -> Tensor:
        """The metric of a name, for each row."""

    @property
    @abstractmethod
    def available(self) -> tuple[str, ...]:
        """Names of the metrics defined for this result, in the order of METRICS."""

    def __repr__(self) -> str:
        return (
            f"statistics of rows {tuple(self['n_keys'].shape)}: {len(self.available)} metrics as "
            "attributes (effective_keys, ...), all of them in as_dict()"
        )

    def __dir__(self) -> list[str]:
        """Attribute names without the metrics that these rows lack."""
        missing = METRICS.keys() - set(self.available)
        return [name for name in super().__dir__() if name not in missing]

    def as_dict(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """All available metrics by name, or the named ones; faster than reading them one by one.

        Raises:
            ValueError: if there is no metric of a given name.
        """
        return {name: self[name] for name in (self.available if names is None else names)}


for _name, _entry in METRICS.items():
    setattr(NamedMetrics, _name, _metric_property(_entry))


@dataclass(frozen=True, repr=False)
class RowStatistics(NamedMetrics, GapStatistics):
    """Every metric of :data:`~acutance.rowstats.METRICS` for each row, as attributes.

    A metric is computed from :attr:`state` when read, so unread ones cost nothing; gradients pass
    through.

    Attributes:
        state: the mergeable sums; each field has one entry per row, (B, Hq, L) for attention.
        backend: name of the kernel that computed them; None if no kernel did.

    Example:
        >>> from acutance.rowstats import observe
        >>> import torch
        >>> stats = RowStatistics(observe(torch.zeros(2, 8)))
        >>> stats.effective_keys
        tensor([8., 8.])
        >>> stats["entropy"].shape
        torch.Size([2])
    """

    state: RowState
    backend: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        return metric(name).compute(self.state)

    @property
    def available(self) -> tuple[str, ...]:
        """Names of the metrics that are defined for this result, in the table's order."""
        return metric_names(noise=has_noise(self.state), gaps=has_gaps(self.state))

    def merge(self, other: RowStatistics) -> RowStatistics:
        """Statistics of the same rows over both sets of keys (:func:`~acutance.rowstats.merge`).

        The other's keys come after these: ``first_weight`` is that of the first key visible here,
        or of the first one there in rows that see none here.

        Raises:
            TypeError: if ``other`` is not a :class:`RowStatistics`.
        """
        if not isinstance(other, RowStatistics):
            raise TypeError(
                f"RowStatistics can be merged only with RowStatistics, got {type(other).__name__}"
            )
        return RowStatistics(merge(without_place(self.state), without_place(other.state)))
