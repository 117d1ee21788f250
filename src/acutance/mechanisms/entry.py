"""Entries of the table of mechanisms, and how each form of mechanism is run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from acutance.attend import attention
from acutance.mechanisms.features import FEATURE_MAPS, cosformer, decay_statistics
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.scores import Features
from acutance.shapes import check_count, check_flag, check_inputs
from acutance.weights import Identity, ReLU, Sink

Statistics: TypeAlias = RowStatistics | WeightStatistics
Result: TypeAlias = tuple[Tensor, Statistics]
#: A function from (..., E) to features (..., F).
FeatureMap: TypeAlias = Callable[[Tensor], Tensor]
#: The mechanism of ``acutance.theory.predict`` whose row it is.
Law = Literal["softmax", "cosine", "relu2", "identity", "linear", "decay"]
#: Options of ``acutance.attention``, or a function that returns them for a query and a key.
Options: TypeAlias = Mapping[str, Any] | Callable[[Tensor, Tensor], Mapping[str, Any]]


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
    """:func:`acutance.attention` with its statistics; query heads may share key heads."""
    out, stats = attention(query, key, value, enable_gqa=True, return_stats=True, **options)
    return out, stats


def _check_positions(mechanism: str, query: Tensor, key: Tensor, query_offset: int) -> None:
    """Raise ValueError unless every query has the position of a key."""
    rows, keys = query.shape[2], key.shape[2]
    if query_offset + rows > keys:
        raise ValueError(
            f"{mechanism} needs query_offset + L <= S, since each of its rows is at the "
            f"position of a key: got query_offset={query_offset}, L={rows}, S={keys}"
        )


@dataclass(frozen=True)
class Form(ABC):
    """How a mechanism computes output and statistics from query, key and value.

    Attributes:
        always_causal: whether rows never see later keys, regardless of ``is_causal``.
    """

    always_causal: ClassVar[bool] = False

    @abstractmethod
    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        """Output (B, Hq, L, Ev) and the statistics of its rows.

        The options are ``is_causal``, ``query_offset`` and ``noise`` of :func:`acutance.attention`.
        """


@dataclass(frozen=True)
class Rows(Form):
    """A mechanism defined by score, weighting and scaling, run by :func:`acutance.attention`.

    Args:
        given: the options of ``attention``, or a function that returns them for query and key.
        always_causal: whether rows never see later keys.
    """

    given: Options
    always_causal: bool = field(default=False, kw_only=True)  # type: ignore[misc]

    def options(self, *query_and_key: Tensor) -> dict[str, Any]:
        """Options of :func:`acutance.attention`, parameters on the query's device and dtype."""
        with torch.random.fork_rng(devices=[]):  # parameters are drawn on the CPU
            torch.manual_seed(0)
            options = self.given(*query_and_key) if callable(self.given) else self.given
        return {name: _placed(value, query_and_key[0]) for name, value in options.items()}

    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        """Attention with these options."""
        return _attend(query, key, value, **options, **self.options(query, key))


def _one(x: Tensor) -> Tensor:
    """A feature of 1 for each vector."""
    return torch.ones_like(x[..., :1])


_MAPS = {**FEATURE_MAPS, "one": _one}


@dataclass(frozen=True)
class Linear(Form):
    r"""Linear attention: rows of :math:`\phi(q) \cdot \phi(k)`, with or without decay.

    Args:
        feature_map: φ, a name of :data:`FEATURE_MAPS`, ``"cosformer"``, or ``"one"``: a feature of
            1 for each vector, so that only the distance counts.
        decays: returns λ of each query head, (Hq,); rows are then causal. None for no decay.
    """

    feature_map: str
    decays: Callable[[int], Tensor] | None = None

    @property
    def always_causal(self) -> bool:  # type: ignore[override]
        """True with decay."""
        return self.decays is not None

    def maps(self, keys: int, offset: int) -> tuple[FeatureMap, FeatureMap]:
        """The functions that map queries, the first of them at ``offset``, and keys."""
        if self.feature_map != "cosformer":
            return _MAPS[self.feature_map], _MAPS[self.feature_map]

        def from_position(start: int) -> FeatureMap:
            return lambda x: cosformer(
                x, torch.arange(start, start + x.shape[-2], device=x.device), max(1, keys)
            )

        return from_position(offset), from_position(0)

    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        r"""Attention with the weights :math:`\lambda^{i - j} \phi(q_i) \cdot \phi(k_j)`.

        They are divided by their sum unless they are signed; signed products with decay by √E.
        """
        query_map, key_map = self.maps(key.shape[2], options["query_offset"])
        signed = self.feature_map == "identity"
        log_gate: Callable[[Tensor], Tensor] | None = None
        if self.decays is not None:
            rates = self.decays(query.shape[1]).log()[:, None]  # 1 - 2**-9 is 1 in bfloat16
            _check_positions("a mechanism with decays", query, key, options["query_offset"])
            group = query.shape[1] // key.shape[1]  # heads that share keys decay differently
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            log_gate = lambda keys: rates.to(keys).expand(keys.shape[:3])  # noqa: E731
            if signed:
                query = query * query.shape[3] ** -0.5
        weights = Identity(normalize="none") if signed else ReLU(normalize="sum")
        score = Features(query_map, key_map, log_gate)
        out, stats = _attend(query, key, value, score=score, weights=weights, **options)
        assert isinstance(stats, WeightStatistics)
        return out, WeightStatistics(stats.sums)  # products of features are no scores


@dataclass(frozen=True)
class Decay(Form):
    """Weights that depend only on distance; query and key are ignored.

    Args:
        decays: returns λ of each query head, (Hq,).
    """

    always_causal: ClassVar[bool] = True
    decays: Callable[[int], Tensor]

    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        """Attention by distance, with statistics in closed form."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        decays = self.decays(query.shape[1]).to(query.device, dtype)
        out, _ = Linear("one", lambda heads: decays).run(query, key, value, **options)
        n = torch.arange(query.shape[2], device=query.device) + options["query_offset"] + 1
        return out, decay_statistics(n.expand(query.shape[:3]), decays[:, None])


@dataclass(frozen=True)
class Recurrence(Form):
    r"""A linear recurrent unit over the values; query and key are ignored.

    .. math:: h_t = \lambda h_{t-1} + e^\gamma B u_t, \qquad y_t = \mathrm{Re}(C h_t) + D u_t

    Its parameters have the published initialisation, with λ uniform on a ring in the complex plane.
    Each state counts as a row: fields of its statistics are (1, states, L).

    Args:
        states: number of states.
        radii: range of :math:`|\lambda|`.
    """

    always_causal: ClassVar[bool] = True
    states: int = 64
    radii: tuple[float, float] = (0.9, 0.999)

    def decays(self, like: Tensor) -> Tensor:
        r"""Decay :math:`|\lambda|` of each state per step, (states,), on the device of ``like``."""
        return self._parameters(1, like)[0].abs()

    def _parameters(self, width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""λ (N,), :math:`e^\gamma B` (N, width), C (width, N) and D (width,), from a fixed seed.

        They are of double precision if ``like`` is, on the device of ``like``.
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        draw = torch.Generator().manual_seed(0)
        low, high = self.radii

        def uniform() -> Tensor:
            return 1 - torch.rand(self.states, generator=draw, dtype=torch.float64)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

        # an area between circles, not their radii, is divided evenly
        nu = -0.5 * torch.log(uniform() * (high**2 - low**2) + low**2)
        theta = 2 * math.pi * uniform()
        gain = (0.5 * torch.log(-torch.expm1(-2 * nu))).to(dtype).exp()
        radius = torch.exp(-torch.exp(nu.log().to(dtype)))
        D, shape = normal(width), (self.states, width)
        B = torch.complex(normal(*shape), normal(*shape)) / math.sqrt(2 * width)
        C = torch.complex(normal(*shape[::-1]), normal(*shape[::-1])) / math.sqrt(self.states)
        decay, B = torch.polar(radius, theta.log().to(dtype).exp()), B * gain[:, None]
        return decay.to(like.device), B.to(like.device), C.to(like.device), D.to(like.device)

    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        """Run over the whole sequence; return outputs and statistics of the requested rows."""
        offset = options["query_offset"]
        _check_positions("a recurrence", query, key, offset)
        length, group = value.shape[2], query.shape[1] // value.shape[1]
        decay, B, C, D = self._parameters(value.shape[3], value)
        inputs = value.to(D.dtype)
        powers = decay.to(torch.complex128) ** torch.arange(length, device=decay.device)[:, None]
        kernel = torch.fft.fft(powers.to(decay.dtype), 2 * length, dim=0)

        def unit(u: Tensor) -> Tensor:  # the recurrence is a convolution with the powers of λ
            spectrum = torch.fft.fft(u.to(B.dtype) @ B.mT, 2 * length, dim=0) * kernel
            h: Tensor = torch.fft.ifft(spectrum, dim=0)[:length]
            return (h @ C.mT).real + D * u

        outputs = torch.stack([unit(u) for u in inputs.flatten(0, 1)]).view_as(inputs)
        out = outputs.repeat_interleave(group, 1).to(query.dtype)
        requested = torch.arange(query.shape[2], device=decay.device) + offset
        statistics = decay_statistics(requested + 1, decay.abs()[None, :, None])
        return out[:, :, requested], statistics


@dataclass(frozen=True)
class Gated(Form):
    r"""Squared ReLU between two affine maps of one sequence, as in a gated attention unit.

    The shared vectors z are the keys; of the query only its positions are used. The affine maps are
    drawn as published, :math:`\gamma \sim N(0, 0.02^2)`, with offset 0.
    """

    def run(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Result:
        """Attention between the two maps, before the gate."""
        offset = options["query_offset"]
        _check_positions("a gated attention unit", query, key, offset)
        draw = torch.Generator().manual_seed(0)
        gains = 0.02 * torch.randn(2, key.shape[3], generator=draw, dtype=torch.float64)
        gain_q, gain_k = gains.to(device=key.device, dtype=key.dtype)
        rows = key[:, :, offset : offset + query.shape[2]] * gain_q
        out, stats = _attend(rows, key * gain_k, value, weights="relu2", **options)
        return out.repeat_interleave(query.shape[1] // key.shape[1], 1), stats


@dataclass(frozen=True)
class Theory:
    """What theory predicts for a mechanism's rows.

    Attributes:
        functions: names of functions in :mod:`acutance.theory`.
        law: the mechanism's name in :func:`acutance.theory.predict`; None if there is none.
        how: a sentence that says how to call ``predict`` for it, or why that is not possible.
    """

    functions: tuple[str, ...]
    law: Law | None
    how: str


@dataclass(frozen=True)
class Mechanism:
    """A named mechanism: formula, source, theory, and how to run it.

    Attributes:
        name: as in :data:`~acutance.mechanisms.MECHANISMS`.
        title: a descriptive name.
        formula: LaTeX, the weight of key j in a row with scores :math:`s_j` over n keys.
        source: the publication.
        can_concentrate: a sentence on whether rows can concentrate on few keys, with the condition.
        theory: which theory predicts its rows.
        streaming: a sentence on the algorithm, its time and memory.
        code: a line of Python that computes its output from ``query``, ``key`` and ``value``.
        form: how it is run.
    """

    name: str
    title: str
    formula: str
    source: str
    can_concentrate: str
    theory: Theory
    streaming: str
    code: str
    form: Form

    @property
    def always_causal(self) -> bool:
        """Whether rows never see later keys, regardless of ``is_causal``."""
        return self.form.always_causal

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        query_offset: int = 0,
        noise: bool = False,
    ) -> tuple[Tensor, Statistics]:
        """Run the mechanism; its own parameters, if any, are drawn with a fixed seed.

        Args:
            query: (B, Hq, L, E).
            key: (B, H, S, E), Hq a multiple of H.
            value: (B, H, S, Ev).
            is_causal: row i sees keys j ≤ i + query_offset; recurrent mechanisms always do.
            query_offset: position of query 0 among the keys.
            noise: also compute ``noise_gain``, if the weights have one.

        Returns:
            The output (B, Hq, L, Ev) and the statistics of its rows, fields (B, Hq, L); (1, states,
            L) for a recurrence, (B, H, L) for a gated unit.

        Raises:
            TypeError: if an argument is of the wrong kind.
            ValueError: if shapes do not fit, or a query of a mechanism with decays, of a recurrence
                or of a gated unit is beyond the last key.
            ImportError: if the mechanism needs a library that is not installed.

        Example:
            >>> import torch
            >>> from acutance.mechanisms import MECHANISMS
            >>> query = key = value = torch.ones(1, 1, 4, 8)
            >>> out, stats = MECHANISMS["relu2"].run(query, key, value, is_causal=True)
            >>> stats.effective_keys
            tensor([[[1., 2., 3., 4.]]])
        """
        check_inputs(query, key, value, enable_gqa=True)
        check_flag("noise", noise)
        check_count("query_offset", query_offset, 0)
        causal = check_flag("is_causal", is_causal) or self.always_causal
        options = {"is_causal": causal, "query_offset": query_offset, "noise": noise}
        return self.form.run(query, key, value, **options)


def _placed(value: Any, like: Tensor) -> Any:
    """A parameter on the query's device, with its dtype and without gradients."""
    if isinstance(value, torch.nn.Module):
        return value.to(like).requires_grad_(False)
    return Sink(value.sinks.to(like)) if isinstance(value, Sink) else value
