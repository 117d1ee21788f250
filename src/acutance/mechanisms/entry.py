"""Entries of the table of mechanisms, and how each form of mechanism is run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from acutance.attend import attention
from acutance.mechanisms.decays import decay_statistics
from acutance.mechanisms.feature_maps import FeatureMap
from acutance.mechanisms.linear import decay_attention, linear_attention
from acutance.mechanisms.lru import (
    linear_recurrent_unit,
    lru_decays,
    lru_parameters,
)
from acutance.mechanisms.recurrent import recurrence_statistics
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.rowstats.weighted import WeightSums
from acutance.shapes import check_count, check_flag, check_inputs
from acutance.weights import Sink

__all__ = [
    "Call",
    "Decay",
    "Form",
    "Gated",
    "Law",
    "Linear",
    "Mechanism",
    "Recurrence",
    "Rows",
    "Sizes",
    "Theory",
]

Statistics: TypeAlias = RowStatistics | WeightStatistics
#: The mechanism of ``acutance.theory.predict`` whose row it is.
Law = Literal["softmax", "cosine", "relu2", "identity", "linear", "decay"]


class Sizes(NamedTuple):
    """Sizes on which a mechanism's parameters may depend: Hq, H, S, E."""

    heads: int
    kv_heads: int
    keys: int
    width: int


class Call(NamedTuple):
    """The arguments with which a mechanism is run."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    query_offset: int
    noise: bool
    rows: Literal["sums", "blockwise"]

    @property
    def sizes(self) -> Sizes:
        """Hq, H, S, E."""
        return Sizes(self.query.shape[1], self.key.shape[1], self.key.shape[2], self.key.shape[3])

    @property
    def grouped(self) -> bool:
        """Whether query heads share key heads."""
        return self.query.shape[1] != self.key.shape[1]


@dataclass(frozen=True)
class Form(ABC):
    """How a mechanism computes output and statistics from query, key and value.

    Attributes:
        kind: "rows", "linear", "decay", "recurrence" or "gated".
        always_causal: whether rows never see later keys, regardless of ``is_causal``.
    """

    kind: ClassVar[str]
    always_causal: ClassVar[bool] = False

    @abstractmethod
    def run(self, call: Call) -> tuple[Tensor, Statistics]:
        """Output (B, Hq, L, Ev) and the statistics of its rows."""


@dataclass(frozen=True)
class Rows(Form):
    """A mechanism defined by score, weighting and scaling, run by :func:`acutance.attention`.

    Args:
        options: returns the options of ``attention`` for given sizes.
        causal: whether rows never see later keys.
    """

    kind: ClassVar[str] = "rows"
    options: Callable[[Sizes], Mapping[str, Any]]
    causal: bool = False

    @property
    def always_causal(self) -> bool:  # type: ignore[override]
        """Whether rows never see later keys, regardless of ``is_causal``."""
        return self.causal

    def options_for(self, call: Call) -> dict[str, Any]:
        """Options of :func:`acutance.attention`, parameters on the query's device and dtype."""
        with torch.random.fork_rng(devices=[]):  # parameters are drawn on the CPU
            torch.manual_seed(0)
            options = self.options(call.sizes)
        return {name: _placed(value, call.query) for name, value in options.items()}

    def run(self, call: Call) -> tuple[Tensor, Statistics]:
        """Attention with these options."""
        query, key, value, is_causal, offset, noise, _ = call
        out, stats = attention(
            query, key, value, is_causal=is_causal, query_offset=offset, enable_gqa=call.grouped,
            return_stats=True, noise=noise, **self.options_for(call),
        )  # fmt: skip
        return out, stats


@dataclass(frozen=True)
class Linear(Form):
    """Linear attention: a feature map, with or without decay by distance.

    Args:
        feature_map: returns φ for given sizes.
        decays: returns λ of each query head, (Hq,); rows are then causal. None for no decay.
    """

    kind: ClassVar[str] = "linear"
    feature_map: Callable[[Sizes], str | FeatureMap]
    decays: Callable[[int], Tensor] | None = None

    @property
    def always_causal(self) -> bool:  # type: ignore[override]
        """True with decay."""
        return self.decays is not None

    def run(self, call: Call) -> tuple[Tensor, Statistics]:
        """Linear or decay attention."""
        query, key, value, is_causal, offset, _, rows = call
        phi = self.feature_map(call.sizes)
        if self.decays is None:
            return linear_attention(
                query, key, value, feature_map=phi, is_causal=is_causal, query_offset=offset,
                enable_gqa=call.grouped, return_stats=True, rows=rows,
            )  # fmt: skip
        return decay_attention(
            query, key, value, decay=self.decays(query.shape[1]).to(query), feature_map=phi,
            is_causal=is_causal, scale=query.shape[3] ** -0.5, query_offset=offset,
            enable_gqa=call.grouped, return_stats=True, rows=rows,
        )  # fmt: skip


@dataclass(frozen=True)
class Decay(Form):
    """Weights that depend only on distance; query and key are ignored.

    Args:
        decays: returns λ of each query head, (Hq,).
    """

    kind: ClassVar[str] = "decay"
    always_causal: ClassVar[bool] = True
    decays: Callable[[int], Tensor]

    def run(self, call: Call) -> tuple[Tensor, Statistics]:
        """Decay attention, with statistics in closed form."""
        query, key, value, _, offset, _, _ = call
        decays = self.decays(query.shape[1]).to(query)
        out = decay_attention(
            torch.ones_like(query[..., :1]), torch.ones_like(key[..., :1]), value, decay=decays,
            feature_map="relu", query_offset=offset, enable_gqa=call.grouped,
        )  # fmt: skip
        n = torch.arange(query.shape[2], device=query.device) + offset + 1
        n = n.clamp(min=0, max=key.shape[2]).expand(query.shape[:3])
        return out, decay_statistics(n, decays[:, None])


@dataclass(frozen=True)
class Recurrence(Form):
    r"""A linear recurrent unit over the values; query and key are ignored.

    Each state counts as a row: fields of its statistics are (1, states, L).

    Args:
        states: number of states.
        radii: range of :math:`|\lambda|`.
    """

    kind: ClassVar[str] = "recurrence"
    always_causal: ClassVar[bool] = True
    states: int = 64
    radii: tuple[float, float] = (0.9, 0.999)

    def decays(self, like: Tensor) -> Tensor:
        r"""Decay :math:`|\lambda|` of each state per step, (states,), on the device of ``like``."""
        parameters = self._parameters(1, like)
        return lru_decays(parameters.nu_log, parameters.theta_log).abs()

    def _parameters(self, width: int, like: Tensor) -> Any:
        """Parameters of a linear recurrent unit with ``width`` inputs, from a fixed seed.

        They are float64 if ``like`` is, else float32, on the device of ``like``.
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        drawn = lru_parameters(
            self.states, width, r_min=self.radii[0], r_max=self.radii[1], dtype=dtype,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return type(drawn)(*(part.to(like.device) for part in drawn))

    def run(self, call: Call) -> tuple[Tensor, Statistics]:
        """Run over the whole sequence; return outputs and statistics of the requested rows."""
        query, _, value, _, offset, _, _ = call
        parameters = self._parameters(value.shape[3], value)
        inputs = value.to(parameters.D.dtype)
        outputs, _ = linear_recurrent_unit(inputs, parameters)
        out = outputs.repeat_interleave(query.shape[1] // value.shape[1], 1).to(query.dtype)
        requested = slice(offset, offset + query.shape[2])
        decays = lru_decays(parameters.nu_log, parameters.theta_log)
        sums = recurrence_statistics(value.shape[2], decays).sums
        transposed = WeightSums(*(part.mT[None, :, requested] for part in sums))
        return out[:, :, requested], WeightStatistics(transposed)


@dataclass(frozen=True)
class Gated(Form):
    r"""Squared ReLU between two affine maps of one sequence, as in a gated attention unit.

    The shared vectors z are the keys; of the query only its positions are used. The affine maps are
    drawn as published, :math:`\gamma \sim N(0, 0.02^2)`, with offset 0.
    """

    kind: ClassVar[str] = "gated"

    def images(self, call: Call) -> tuple[Tensor, Tensor]:
        """Queries (B, H, L, E) and keys (B, H, S, E) from the sequence."""
        z, offset = call.key, call.query_offset
        draw = torch.Generator().manual_seed(0)
        gains = 0.02 * torch.randn(2, z.shape[3], generator=draw, dtype=torch.float64)
        gain_q, gain_k = gains.to(device=z.device, dtype=z.dtype)
        return z[:, :, offset : offset + call.query.shape[2]] * gain_q, z * gain_k

    def run(self, call: Call) -> tuple[Tensor, Statistics]:
        """Attention between the two maps, before the gate."""
        query, key = self.images(call)
        if query.shape[2] != call.query.shape[2]:
            raise ValueError(
                "a gated attention unit needs query_offset + L <= S, since its queries are "
                f"computed from its keys: got query_offset={call.query_offset}, "
                f"L={call.query.shape[2]}, S={call.key.shape[2]}"
            )
        out, stats = attention(
            query, key, call.value, is_causal=call.is_causal, query_offset=call.query_offset,
            weights="relu2", return_stats=True, noise=call.noise,
        )  # fmt: skip
        group = call.query.shape[1] // key.shape[1]
        return out.repeat_interleave(group, 1), stats


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
        rows: Literal["sums", "blockwise"] = "blockwise",
    ) -> tuple[Tensor, Statistics]:
        """Run the mechanism; its own parameters, if any, are drawn with a fixed seed.

        Args:
            query: (B, Hq, L, E).
            key: (B, H, S, E), Hq a multiple of H.
            value: (B, H, S, Ev).
            is_causal: row i sees keys j ≤ i + query_offset; recurrent mechanisms always do.
            query_offset: position of query 0 among the keys.
            noise: also compute ``noise_gain``, if the weights have one.
            rows: source of linear attention's statistics: "blockwise" gives all metrics, "sums" is
                O(n).

        Returns:
            The output (B, Hq, L, Ev) and the statistics of its rows, fields (B, Hq, L); (1, states,
            L) for a recurrence, (B, H, L) for a gated unit.

        Raises:
            TypeError: if an argument is of the wrong kind.
            ValueError: if shapes do not fit.
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
        return self.form.run(Call(query, key, value, causal, query_offset, noise, rows))


def _placed(value: Any, like: Tensor) -> Any:
    """A parameter on the query's device, with its dtype and without gradients."""
    if isinstance(value, torch.nn.Module):
        return value.to(like).requires_grad_(False)
    return Sink(value.sinks.to(like)) if isinstance(value, Sink) else value
