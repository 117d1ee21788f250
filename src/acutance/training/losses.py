"""Losses and reparametrisations: entropy, z-loss, InfoNCE; spectral norm, bounds, first scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import gammaincinv
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus
from torch.nn.utils import parametrize

from acutance import theory
from acutance.attend import row_statistics
from acutance.kernels.call import accumulate_dtype
from acutance.rowstats import RowStatistics, merge
from acutance.rowstats.gaussian import expected_entropy
from acutance.scaling import HeadTable, LearnedTemperature, newton_step
from acutance.scaling.laws import Rows
from acutance.shapes import FLOATS, check_count, check_flag, check_number, check_tensor
from acutance.training.across_ranks import gather_rows, ranks
from acutance.training.watch import AttentionWatch, WatchedRows

#: What a loss on statistics takes: a watch, its rows, or statistics of one call or several.
WatchedOrRead: TypeAlias = AttentionWatch | RowStatistics | Iterable[WatchedRows | RowStatistics]
Unit = Literal["nats", "fraction"]
Score = Literal["dot", "cosine"]
Temperature = Literal["fixed", "learned", "log_n", "entropy_target"]
_LARGEST = 1000.0  # of 1/τ in InfoNCE: cosines are sharper than anything there
#: What a report averages over both directions.
_AVERAGED = "loss", "negative_entropy", "effective_negatives", "positive_weight", "accuracy"
_ITERATIONS = 30  # of SigmaReparam's power iteration before the first forward
_NODES = 64  # of the quadrature over norms of queries in initial_scale


def _check_choice(name: str, value: object, choices: Any) -> None:
    """Check that an argument is one of the values of a ``Literal``."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


class EntropyRegularizer(nn.Module):
    r"""Squared distance of the rows' entropy from a target, or from a floor if below it.

    .. math:: \ell = w \cdot \frac{1}{R} \sum_r \delta_r^2, \qquad
              \delta_r = H_r - \min(H^*, \log n_r)
              \quad\text{or}\quad \max(0, \min(H^*, \log n_r) - H_r)

    The target of a row of n keys is at most log n nats, its largest possible entropy. The mean is
    over the rows of each call, then over calls. Distances up to ``margin`` cost nothing.

    Args:
        target: desired entropy of the rows; or
        floor: lower limit of their entropy. Give exactly one of the two.
        weight: factor of the loss, w.
        unit: of target, floor and margin: ``"nats"``, or ``"fraction"`` of each row's log n.
        margin: distance without cost.

    Attributes:
        entropy: mean entropy of the rows at the last call, in nats, detached; None before.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, or neither or both of target and floor are given.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> watch, regularizer = AttentionWatch(model), EntropyRegularizer(floor=2.0, weight=0.1)
        >>> with watch:
        ...     out = model(9 * torch.randn(2, 10, 16))
        >>> loss = out.square().mean() + regularizer(watch)
        >>> loss.backward()

        Statistics that a module or :func:`acutance.attention` gave are taken as well:

        >>> import acutance
        >>> query = torch.randn(1, 2, 8, 4, requires_grad=True)
        >>> regularizer(acutance.row_statistics(query, query)).requires_grad
        True

    Source:
        Zhai et al. (2023), arXiv:2303.06296 (entropy collapse); Jha & Reagen (2025),
        arXiv:2501.03489 (a squared penalty outside a margin).
    """

    def __init__(
        self,
        *,
        target: float | None = None,
        floor: float | None = None,
        weight: float = 0.01,
        unit: Unit = "nats",
        margin: float = 0.0,
    ) -> None:
        super().__init__()
        if (target is None) == (floor is None):
            raise ValueError(f"pass either target or floor, got target={target!r}, floor={floor!r}")
        _check_choice("unit", unit, Unit)
        name, value = ("target", target) if target is not None else ("floor", floor)
        self.aim = check_number(name, value, above=0.0, including=True)  # type: ignore[arg-type]
        if unit == "fraction" and self.aim > 1:
            raise ValueError(f"{name} must be a fraction of log n, at most 1, got {value!r}")
        self.is_floor, self.unit = floor is not None, unit
        self.weight = check_number("weight", weight, above=0.0, including=True)
        self.margin = check_number("margin", margin, above=0.0, including=True)
        self.entropy: float | None = None

    def forward(self, rows: WatchedOrRead) -> Tensor:
        """The loss, a scalar.

        Args:
            rows: an :class:`AttentionWatch` after its context, or statistics with their graph.

        Raises:
            TypeError: if it is not one of these.
            ValueError: if there is no row, or no gradient although gradients are enabled.
        """
        losses, means = [], []
        for statistics, counted in read_rows(rows):
            entropy = statistics.entropy[counted]
            largest = statistics.n_keys[counted].to(entropy.dtype).log()
            nats = self.unit == "nats"
            aim = largest.clamp(max=self.aim) if nats else self.aim * largest
            margin = self.margin if nats else self.margin * largest
            distance = aim - entropy if self.is_floor else (aim - entropy).abs()
            losses.append((distance - margin).clamp(min=0.0).square().mean())
            means.append(float(entropy.detach().mean()))
        self.entropy = sum(means) / len(means)
        return self.weight * torch.stack(losses).mean()

    def extra_repr(self) -> str:
        """The target and the weight, for ``print``."""
        kind = "floor" if self.is_floor else "target"
        return f"{kind}={self.aim:g} {self.unit}, weight={self.weight:g}, margin={self.margin:g}"


def read_rows(rows: WatchedOrRead) -> list[tuple[RowStatistics, Tensor]]:
    """Pairs of statistics and a boolean (B, Hq, L) mask of the rows to count.

    Raises:
        TypeError: if it is not one of :data:`WatchedOrRead`.
        ValueError: if there is no row, or no gradient although gradients are enabled.
    """
    if isinstance(rows, AttentionWatch):
        rows = rows.rows
    counted_rows = []
    for of_call in [rows] if isinstance(rows, RowStatistics) else rows:
        if isinstance(of_call, WatchedRows):
            statistics, counted = of_call.statistics, of_call.kept
        elif isinstance(of_call, RowStatistics):
            statistics, counted = of_call, of_call.state.n > 0
        else:
            raise TypeError(
                "rows must be an AttentionWatch, WatchedRows or RowStatistics, got "
                f"{type(of_call).__name__}"
            )
        if bool(counted.any()):
            counted_rows.append((statistics, counted))
    if not counted_rows:
        raise ValueError("every row of rows is fully masked: at least one row must see a key")
    has_gradient = any(statistics.state.Z.requires_grad for statistics, _ in counted_rows)
    if torch.is_grad_enabled() and not has_gradient:
        raise ValueError(
            "rows have no gradient: run the model with gradients enabled, watch it with "
            "gradients=True, and without reentrant checkpointing"
        )
    return counted_rows


class ZLoss(nn.Module):
    r"""Mean squared logsumexp of the rows.

    .. math:: \ell = w \cdot \frac{1}{R} \sum_r \Bigl(\log \sum_j e^{s_{rj}}\Bigr)^2

    Softmax ignores a common shift of a row's logits; this loss fixes the shift and so bounds the
    largest logit, which is at most the logsumexp. It is 0 for a row of n logits equal to −log n.

    Args:
        weight: factor of the loss, w.

    Raises:
        TypeError: if ``weight`` is not a number.
        ValueError: if it is negative.

    Example:
        >>> import acutance
        >>> query = torch.zeros(1, 1, 1, 2, requires_grad=True)
        >>> key = torch.zeros(1, 1, 3, 2)
        >>> ZLoss(weight=1.0)(acutance.row_statistics(query, key)).item()  # (log 3)²
        1.2069

    Source:
        Zoph et al. (2022), arXiv:2202.08906, for a router's logits, with weight 0.001; Chowdhery
        et al. (2022), arXiv:2204.02311, for output logits, with 0.0001.
    """

    def __init__(self, weight: float = 1e-3) -> None:
        super().__init__()
        self.weight = check_number("weight", weight, above=0.0, including=True)

    def forward(self, rows: WatchedOrRead) -> Tensor:
        """The loss, a scalar.

        Args:
            rows: as for :class:`EntropyRegularizer`.

        Raises:
            TypeError: if it is not one of these.
            ValueError: if there is no row, or no gradient although gradients are enabled.
        """
        losses = [stats.lse[counted].square().mean() for stats, counted in read_rows(rows)]
        return self.weight * torch.stack(losses).mean()

    def extra_repr(self) -> str:
        """The weight, for ``print``."""
        return f"weight={self.weight:g}"


@dataclass(frozen=True)
class ContrastiveReport:
    """Means over the rows of one contrastive loss, over both directions if symmetric.

    Attributes:
        loss: the loss, in nats.
        temperature: τ that was used.
        negatives: number of negatives per row (in the first direction).
        negative_entropy: entropy in nats of the weights among the negatives alone.
        effective_negatives: 1/Σp² of the same weights, the effective number of negatives.
        positive_weight: weight of the positive among all candidates.
        accuracy: share of rows whose positive exceeds every negative, by more than rounding.
    """

    loss: float
    temperature: float
    negatives: int
    negative_entropy: float
    effective_negatives: float
    positive_weight: float
    accuracy: float


class InfoNCE(nn.Module):
    r"""Contrastive loss: each anchor is classified among all positives by cosine over temperature.

    .. math:: \ell = -\frac{1}{B} \sum_i \log
              \frac{e^{s_{ii}}}{\sum_j e^{s_{ij}} + \sum_m e^{s_{im}}}, \qquad
              s_{ij} = \cos(a_i, b_j) / \tau

    j runs over the batch, m over the extra negatives. The sums are computed tile by tile like those
    of attention rows: memory is O(B) instead of B², also in the backward pass. Embeddings narrower
    than float32 are converted to it.

    ==================  ===========================================================================
    ``temperature``     1/τ
    ==================  ===========================================================================
    ``fixed``           1/``tau``
    ``learned``         trained as its logarithm, from 1/``tau``, at most 1/``minimum``
    ``log_n``           ``coefficient`` · log n, n the number of candidates of a row
    ``entropy_target``  after each training forward, one Newton step towards a measured entropy
                        of the negatives of ``target`` · log of their number; kept between 0.001
                        and 1000
    ==================  ===========================================================================

    Args:
        temperature: one of the four.
        tau: τ, or its initial value.
        minimum: lowest τ of ``learned``.
        coefficient: coefficient of ``log_n``.
        target: target of ``entropy_target``, between 0 and 1.
        symmetric: average with the loss in which the two sides are exchanged. Extra negatives are
            used only in the first.
        gather: use the other ranks' positives as negatives too; every rank must have the same
            number of pairs.
        group: process group of ``gather``.

    Attributes:
        report: :class:`ContrastiveReport` of the last forward; None before.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> anchor, positive = torch.randn(2, 64, 32)
        >>> criterion = InfoNCE("fixed", tau=0.1)
        >>> loss = criterion(anchor, anchor + positive)
        >>> report = criterion.report
        >>> print(f"{loss:.2f} {report.negatives} {report.effective_negatives:.0f}")
        0.22 63 12

    Source:
        van den Oord et al. (2018), arXiv:1807.03748; Radford et al. (2021), arXiv:2103.00020
        (symmetric, learned, 1/τ at most 100); Su (2023), https://kexue.fm/archives/9593 (a
        temperature that follows from n).
    """

    log_scale: Tensor

    def __init__(
        self,
        temperature: Temperature = "learned",
        *,
        tau: float = 0.07,
        minimum: float = 0.01,
        coefficient: float = 4.0,
        target: float = 0.5,
        symmetric: bool = False,
        gather: bool = False,
        group: Any = None,
    ) -> None:
        super().__init__()
        _check_choice("temperature", temperature, Temperature)
        self.temperature = temperature
        start = -math.log(check_number("tau", tau, above=1 / _LARGEST, including=True))
        self.minimum = check_number("minimum", minimum, above=1 / _LARGEST, including=True)
        if temperature == "learned" and tau < minimum:
            raise ValueError(f"tau must be at least minimum={minimum!r}, got {tau!r}")
        self.coefficient = check_number("coefficient", coefficient, above=0.0)
        self.target = check_number("target", target, above=0.0, below=1.0)
        self.symmetric = check_flag("symmetric", symmetric)
        self.gather = check_flag("gather", gather)
        self.group = group
        self.report: ContrastiveReport | None = None
        if temperature == "learned":
            self.log_scale = nn.Parameter(torch.tensor(start))
        else:
            self.register_buffer("log_scale", torch.tensor(start))

    def scale(self, candidates: int) -> Tensor:
        """1/τ for rows of a given number of candidates; differentiable if learned."""
        if self.temperature == "log_n":
            return (self.coefficient * torch.log(self.log_scale.new_tensor(candidates))).detach()
        if self.temperature == "learned":
            return clamp_inward(self.log_scale, -math.inf, -math.log(self.minimum)).exp()
        return self.log_scale.exp()

    def forward(self, anchor: Tensor, positive: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss, a scalar, in nats.

        Args:
            anchor: (B, d), of any norm. A row of zeros has cosine 0 with all, and no gradient.
            positive: (B, d); row i belongs to anchor i.
            negatives: (M, d), further negatives of every anchor.

        Raises:
            TypeError: if an input is not a floating-point tensor.
            ValueError: if shapes do not fit, or there is no negative at all.
        """
        _check(anchor, positive, negatives)
        with torch.autocast(anchor.device.type, enabled=False):
            first, second = _unit(anchor), _unit(positive)
            extra = None if negatives is None else _unit(negatives)
            pairs = self._ranks[1] * len(first)
            if pairs + (0 if extra is None else len(extra)) < 2:
                raise ValueError(
                    "a row must have at least one negative: pass two or more pairs, or "
                    f"negatives, got anchor {tuple(anchor.shape)}"
                )
            if self.symmetric and pairs < 2:
                raise ValueError("symmetric needs at least two pairs, got one")
            sides = [self._side(first, second, extra)]
            if self.symmetric:
                sides.append(self._side(second, first, None))
            losses, statistics, reports = zip(*sides, strict=True)
            if self.temperature == "entropy_target" and self.training:
                self._follow(statistics)  # both directions had the same τ
        means = {
            name: sum(getattr(report, name) for report in reports) / len(reports)
            for name in _AVERAGED
        }
        self.report = replace(reports[0], **means)
        return torch.stack(losses).mean()

    @property
    def _ranks(self) -> tuple[int, int]:
        """This rank and the number of ranks whose pairs are gathered."""
        return ranks(self.group) if self.gather else (0, 1)

    def _side(
        self, query: Tensor, key: Tensor, extra: Tensor | None
    ) -> tuple[Tensor, RowStatistics, ContrastiveReport]:
        """Each query against all keys and the extra negatives.

        Returns:
            The loss; statistics of each row's negatives, (1, 1, B); the report.
        """
        keys = gather_rows(key, self.group) if self.gather else key
        candidates = len(keys) + (0 if extra is None else len(extra))
        scale = self.scale(candidates).to(query)
        scaled = query * scale
        others = _statistics_of_others(scaled, keys, self._ranks[0] * len(query))
        if extra is not None:
            further = row_statistics(scaled[None, None], extra[None, None], scale=1.0)
            others = RowStatistics(merge(others.state, further.state))
        match = (scaled * key).sum(-1)
        loss = softplus(others.lse[0, 0] - match).mean()
        with torch.no_grad():
            rounding = 8 * torch.finfo(match.dtype).eps * scale
            rows = (
                others.entropy,
                others.effective_keys,
                torch.sigmoid(match - others.lse[0, 0]),
                match - others.max_logit[0, 0] > rounding,
            )
            means = [float(values.double().mean()) for values in rows]
            negatives = int(others.n_keys[0, 0, 0])
            report = ContrastiveReport(float(loss), 1 / float(scale), negatives, *means)
        return loss, others, report

    @torch.no_grad()
    def _follow(self, sides: Sequence[RowStatistics]) -> None:
        """Move 1/τ by one Newton step towards the target entropy, averaged over rows and ranks.

        ``sides`` are the statistics of the rows of anchors and, if symmetric, of positives.
        """
        of_sides = []
        for side in sides:
            log_counts = side.n_keys.to(side.entropy.dtype).log()
            of_sides.append([side.entropy.mean(), side.varentropy.mean(), log_counts.mean()])
        means = torch.stack([torch.stack(of_side) for of_side in of_sides]).mean(0)
        if self._ranks[1] > 1:
            torch.distributed.all_reduce(means, group=self.group)
            means /= self._ranks[1]  # the aim's too: extra negatives are each rank's own
        aim = self.target * means[2]
        moved = newton_step(self.log_scale.exp().to(means), means[0], means[1], aim)
        self.log_scale.copy_(moved.clamp(1e-3, _LARGEST).log())

    def extra_repr(self) -> str:
        """The kind of temperature, for ``print``."""
        return f"{self.temperature!r}, symmetric={self.symmetric}, gather={self.gather}"


def _statistics_of_others(query: Tensor, key: Tensor, offset: int) -> RowStatistics:
    """Statistics of row i over all keys except ``offset + i``, (1, 1, B).

    Earlier keys form a causal row, and later keys one in reversed order; the two merge exactly.
    Subtracting one key from the sums over all would cancel if it has most of the weight.
    """
    before = row_statistics(
        query[None, None], key[None, None], is_causal=True, scale=1.0, query_offset=offset - 1
    )
    behind = row_statistics(
        query.flip(0)[None, None],
        key.flip(0)[None, None],
        is_causal=True,
        scale=1.0,
        query_offset=len(key) - offset - len(query) - 1,
    )
    turned = type(behind.state)(*(part.flip(2) for part in behind.state))
    return RowStatistics(merge(before.state, turned))


def _unit(rows: Tensor) -> Tensor:
    """Normalise rows to norm 1; rows of zeros stay zero, without gradient."""
    wide = rows if rows.dtype == torch.float64 else rows.float()
    largest = wide.detach().abs().amax(-1, keepdim=True)  # squares of 1e25 would overflow
    nonzero = largest > 0
    return normalize(wide * nonzero / torch.where(nonzero, largest, 1.0), dim=-1)


def _check(anchor: Tensor, positive: Tensor, negatives: Tensor | None) -> None:
    """Check dtypes, devices and shapes of the embeddings."""
    arguments = {"anchor": anchor, "positive": positive}
    if negatives is not None:
        arguments["negatives"] = negatives
    for name, part in arguments.items():
        if check_tensor(name, part).dtype not in FLOATS:
            raise TypeError(f"{name} must be a floating-point tensor, got {part.dtype}")
        if part.dim() != 2 or part.shape[1] != anchor.shape[-1] or part.shape[1] == 0:
            raise ValueError(
                f"{name} must have shape (rows, d) with the same d as anchor "
                f"{tuple(anchor.shape)}, got {tuple(part.shape)}"
            )
        if part.dtype != anchor.dtype or part.device != anchor.device:
            raise TypeError(
                f"{name} must have the dtype and device of anchor, {anchor.dtype} on "
                f"{anchor.device}, got {part.dtype} on {part.device}"
            )
    if len(anchor) != len(positive) or len(anchor) == 0:
        raise ValueError(
            "anchor and positive must contain at least one pair, got anchor "
            f"{tuple(anchor.shape)}, positive {tuple(positive.shape)}"
        )


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
        for _ in range(_ITERATIONS):
            self._iterate(blocks)
        if gamma is None:
            first = self._sigma(blocks)
        else:
            first = torch.full((parts,), check_number("gamma", gamma, above=0.0)).to(blocks)
        self.gamma = nn.Parameter(first.to(weight.dtype))

    def _blocks(self, weight: Tensor) -> Tensor:
        """The weight as (parts, m, k), in float32 at least."""
        wide = weight.to(accumulate_dtype(weight.dtype))
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


class _ClampInward(torch.autograd.Function):
    """Clamp, with a gradient that is zero only where a descent step would go further outside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (low, high), (grad,) = ctx.saved_tensors, ctx.bounds, grads
        outward = ((x >= high) & (grad < 0)) | ((x <= low) & (grad > 0))
        return grad.masked_fill(outward, 0.0), None, None


def clamp_inward(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp, with a gradient that is zero only where a descent step would go further outside.

    Example:
        >>> x = torch.tensor([2.0, 2.0], requires_grad=True)
        >>> (clamp_inward(x, -1.0, 1.0) * torch.tensor([1.0, -1.0])).sum().backward()
        >>> x.grad
        tensor([1., 0.])
    """
    clamped: Tensor = _ClampInward.apply(x, low, high)  # type: ignore[no-untyped-call]
    return clamped


class ClampedTemperature(LearnedTemperature):
    """:class:`~acutance.scaling.LearnedTemperature` with bounds: a learned factor for each head.

    It is a scaling for ``scaling=`` of :class:`acutance.nn.MultiheadAttention` or
    :func:`acutance.attention`. At a bound, gradients that point inward still apply, so heads do not
    get stuck as with ``clamp``.

    Args:
        num_heads: number of heads, Hq.
        start: initial factor.
        minimum: lowest factor, above 0.
        maximum: highest factor, at least ``minimum``.
        device, dtype: of the parameters.

    Raises:
        TypeError: if a bound is not a number.
        ValueError: if the bounds are not in order, or do not contain ``start``.

    Example:
        >>> law = ClampedTemperature(num_heads=2, start=1.0, maximum=4.0)
        >>> with torch.no_grad():
        ...     law.log_factor += 5.0
        >>> law.record()
        HeadTable(factors=(4.0, 4.0), lengths=None)

    Source:
        Liu et al. (2022), arXiv:2111.09883, for a bounded temperature of each head.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        start: float = 1.0,
        minimum: float = 0.1,
        maximum: float = 10.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_heads, start=start, device=device, dtype=dtype)
        self.minimum = check_number("minimum", minimum, above=0.0)
        self.maximum = check_number("maximum", maximum, above=0.0)
        if not self.minimum <= start <= self.maximum:
            raise ValueError(
                f"minimum ≤ start ≤ maximum must hold, got minimum={minimum!r}, "
                f"start={start!r}, maximum={maximum!r}"
            )

    def law(self, rows: Rows) -> Tensor:
        """The learned factor, the same for every n."""
        return self._column(self._clamped(), rows).exp() * torch.ones_like(rows.n)

    def record(self) -> HeadTable:
        """The current factors as a constant scaling."""
        return HeadTable(self._clamped().detach().exp())

    def _clamped(self) -> Tensor:
        """The logarithm of the factors, within the bounds."""
        return clamp_inward(self.log_factor, math.log(self.minimum), math.log(self.maximum))

    def extra_repr(self) -> str:
        """The heads and bounds, for ``print``."""
        return f"num_heads={self.num_heads}, minimum={self.minimum:g}, maximum={self.maximum:g}"


def initial_scale(
    d: int, n: int, target: float, *, unit: Unit = "nats", score: Score = "dot"
) -> float:
    r"""Factor λ on the scores that gives rows of n keys a target mean entropy at initialisation.

    .. math:: E\, H(\mathrm{softmax}(\lambda\, q \cdot k_j)) = H^*, \qquad q, k_j \sim N(0, I_d)

    Given its query, a row's logits are Gaussian with standard deviation :math:`\lambda \lVert q
    \rVert`; the mean is also over the norm of the query. The usual scale 1/√d gives about log n − ½
    nats for any d. For cosine scores, directions are uniform.

    Args:
        d: width of a head.
        n: number of visible keys, at least 2.
        target: mean entropy H* of a row, above 0 and below log n; with ``unit="fraction"``, its
            share of log n.
        unit: ``"nats"`` or ``"fraction"``.
        score: ``"dot"`` for q · k, ``"cosine"`` for their cosine.

    Returns:
        λ, for ``scale=``. For a layer with a fixed 1/√d, multiply its query projection by λ√d once.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range.

    Example:
        >>> scale = initial_scale(64, 1024, 4.0)
        >>> round(scale * 64**0.5, 3)
        2.632
        >>> import acutance
        >>> _ = torch.manual_seed(0)
        >>> query, key = torch.randn(2, 64, 1, 1024, 64)
        >>> acutance.row_statistics(query[:, :, :32], key, scale=scale).entropy.mean()
        tensor(4.0)

    Source:
        Derrida (1981), Phys. Rev. B 24, 2613, for entropy along the scale, exact at finite n
        (:func:`acutance.theory.expected_entropy`).
    """
    check_count("d", d, 2 if score == "cosine" else 1)
    check_count("n", n, 2)
    _check_choice("unit", unit, Unit)
    _check_choice("score", score, Score)
    aim = check_number("target", target, above=0.0)
    entropy = aim * math.log(n) if unit == "fraction" else aim
    if entropy >= math.log(n):
        most = "1" if unit == "fraction" else f"log n = {math.log(n):.6g} nats"
        raise ValueError(
            f"target must be below {most}, which is the entropy of scale 0, got {target!r}"
        )
    if score == "cosine":
        try:
            return float(theory.scale_for_entropy(n, entropy, "cosine", d=d))
        except ValueError:
            raise ValueError(
                "target must be larger: float64 cannot resolve cosines at the scale that it "
                f"needs, got {target!r} for n={n} and d={d}"
            ) from None
    fixed = float(theory.scale_for_entropy(n, entropy)) / math.sqrt(d)
    keys = torch.full((_NODES,), float(n), dtype=torch.float64)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    lengths = np.sqrt(2 * gammaincinv(d / 2, (nodes + 1) / 2))  # of a standard normal vector

    def excess(log_scale: float) -> float:
        stds = torch.from_numpy(lengths * math.exp(log_scale))
        return float(expected_entropy(keys, stds).numpy() @ (weights / 2)) - entropy

    low = high = math.log(fixed)
    while excess(low) < 0:
        low -= 0.5
    while excess(high) > 0:
        high += 0.5
    return math.exp(brentq(excess, low, high, xtol=1e-10)) if low < high else fixed
