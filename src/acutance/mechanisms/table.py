r"""``MECHANISMS``: every mechanism by name, with its formula, its theory and a way to run it.

First how each form of mechanism is run, then the table, which ``acutance compare`` and the
documentation use.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from acutance import scaling, scores, weights
from acutance.attend import attention
from acutance.mechanisms.features import (
    FEATURE_MAPS,
    alibi_decays,
    cosformer,
    decay_statistics,
    retnet_decays,
)
from acutance.rowstats import RowStatistics, WeightStatistics
from acutance.scores import Features
from acutance.shapes import check_count, check_flag, check_inputs
from acutance.theory import tau_for_information
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


_FUNCTIONS = {**FEATURE_MAPS, "one": _one}


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
            return _FUNCTIONS[self.feature_map], _FUNCTIONS[self.feature_map]

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


#: The fields of :class:`Theory`.
_Known: TypeAlias = tuple[tuple[str, ...], Law | None, str]

_STREAMED = (
    "In tiles of keys: O(n²) time like plain attention, O(n) memory; no whole row is stored."
)
_BLOCKS = (
    "In blocks of whole rows: O(n²) time, several times that of plain attention, and O(n) "
    "memory plus one block."
)
_SORTED = (
    "In blocks of whole rows, which are sorted: O(n² log n) time and O(n) memory plus one block."
)
_SOFTMAX = ("expected_entropy_gauss", "expected_effective_keys", "sparsity_exp")
_COSINE = ("information_range_limit", "cosine_entropy_lower_bound", "tau_for_information")
_ROW = (
    'predict("softmax", n, logit_std=γ), where γ is the standard deviation of the row\'s '
    "scores: the query's norm times the standard deviation of a key's component, times the "
    "scale"
)
_FLOOR = (
    "No: for Gaussian keys its sparsity is never below √(2/π) = 0.798, the value for scores of"
    " mean 0, whatever their scale."
)
_RELU2 = (
    "Only if the mean β of the scores is below 0; rows become sparser with a smaller standard "
    "deviation γ, as β/γ → −∞. For β ≥ 0 the sparsity is at least 1/√6 = 0.408, whatever the "
    "scale."
)
_NO_SINK = (
    'predict("softmax", n, logit_std=γ) is its limit for many keys; the score of a sink beside n'
    " keys has no finite-n form here."
)
_LUONG = "Luong et al. (2015), arXiv:1508.04025"
_SU = "Su Jianlin (2023), https://kexue.fm/archives/9889"
_IN_ROWS = (
    "In blocks of whole rows, with every statistic: O(n²) time and O(n) memory plus one block. Its"
    " output alone could be had from sums over keys in O(n)."
)
_SIGNED = (
    "In blocks of whole rows: O(n²) time and O(n) memory plus one block. Absolute values of signed"
    " weights are not sums over keys; the output alone is, and could be had in O(n)."
)
_CLOSED = (
    "Every statistic has a closed form in n and λ, at any length. Its output takes O(n) memory, and"
    " could be had in O(n) time, with one state of fixed size while decoding."
)
_MOMENTS = (
    'predict("linear", n, q=φ(q), mu=μ, Sigma=Σ), where μ and Σ are the mean and covariance of the '
    "key features, gives the sparsity S in the limit of many keys, and so the effective keys n S²."
)
_NOISY = (
    "Only if the key features have a low signal-to-noise ratio: S = (1 + "
    "q'ᵀΣq'/(q'·μ)²)^(−1/2), which is near 1 as soon as their mean is large compared with "
    "their standard deviation. With independent features a larger d makes rows less sparse, "
    "not more."
)
#: Of each feature map: title, formula, source, and a sentence to append.
_MAPS = {
    "elu1": (
        "elu + 1", r"\mathrm{elu}(x) + 1", "Katharopoulos et al. (2020), arXiv:2006.16236", ""
    ),
    "relu": ("ReLU", r"\max(x, 0)", "Kasai et al. (2021), arXiv:2103.13076", ""),
    "relu2": (
        "squared ReLU", r"\max(x, 0)^2",
        "Hua et al. (2022), arXiv:2202.10447, and Zhang et al. (2024), arXiv:2402.04347", "",
    ),
    "exp": (
        "exponential", r"e^x",
        "Su Jianlin, kexue.fm article 9889; Zhang et al. (2024), arXiv:2402.04347",
        " Features with a larger standard deviation are noisier and give sharper rows.",
    ),
    "softmax": (
        "softmax", r"\mathrm{softmax}(x)", "Shen et al. (2018), arXiv:1812.01243", ""
    ),
    "hedgehog": (
        "Hedgehog (softmax of x and −x)", r"\mathrm{softmax}([x, -x])",
        "Zhang et al. (2024), arXiv:2402.04347",
        " It is meant to be trained to imitate softmax; here its projection is the identity.",
    ),
}  # fmt: skip
_LATEST = (
    "Only on the latest keys: effective keys never exceed (1 + λ)/(1 − λ); sparsity falls to 0 as "
    "n grows only because the row gains zeros."
)
_THRESHOLD = "Its threshold depends on all scores at once; no function predicts it."
_BUT_FOR_A_FACTOR = (
    "Yes, without limit, like softmax: the weights differ from softmax only by a factor per row."
)
#: Theory of rows that several entries share.
_OF_EXP: _Known = (
    _SOFTMAX, "softmax", _ROW + "; sparsity and effective keys do not depend on that factor.",
)  # fmt: skip
_OF_RELU2: _Known = (
    ("sparsity_relu2",), "relu2", 'predict("relu2", n, logit_mean=β, logit_std=γ).',
)  # fmt: skip
_OF_IDENTITY: _Known = (
    ("sparsity_identity",), "identity", 'predict("identity", n, logit_mean=β, logit_std=γ).',
)  # fmt: skip
_OF_DECAY: _Known = (
    ("sparsity_decay", "effective_keys_decay"), "decay",
    'predict("decay", n, lam=λ), the same for every row.',
)  # fmt: skip
_BY_SUM = weights.ReLU(normalize="sum")
_ELU1 = FEATURE_MAPS["elu1"]


def _entry(
    name: str,
    title: str,
    formula: str,
    source: str,
    can_concentrate: str,
    theory: str | _Known,
    streaming: str,
    form: Form | Options,
    code: str = "",
) -> Mechanism:
    """An entry of the table, of the fields of :class:`Mechanism` but for two.

    ``theory`` may be only the reason why there is none. ``form`` may be the options with which
    ``acutance.attention`` runs it; ``code`` is then these options in Python, where they are more
    than names.
    """
    if not isinstance(form, Form):
        form = Rows(form)
        if isinstance(form.given, Mapping) and not code:
            code = ", ".join(f'{option}="{value}"' for option, value in form.given.items())
        code = f"acutance.attention(query, key, value{', ' if code else ''}{code})"
    elif code:
        code = f"acutance.attention(query, key, value, {code})"
    else:
        code = f'acutance.MECHANISMS["{name}"].run(query, key, value)[0]'
    known = Theory((), None, theory) if isinstance(theory, str) else Theory(*theory)
    return Mechanism(name, title, formula, source, can_concentrate, known, streaming, code, form)


def _half_tau(key: Tensor) -> float:
    """Temperature (divisor of cosines) at which log n − H is half of log n.

    The row has one key at cosine 1 among random ones.
    """
    d = max(2, key.shape[3])
    tau = tau_for_information(max(2, key.shape[2]), 0.5, setting="random_keys", d=d)
    return float(tau)


def _log_gate(key: Tensor) -> Tensor:
    """Compute log σ(w·k)/16 of each key, w of length 1 with equal components."""
    return logsigmoid(key.sum(-1) / key.shape[-1] ** 0.5) / 16


def _linear(name: str) -> Mechanism:
    """The table entry for linear attention with a feature map."""
    title, phi, source, more = _MAPS[name]
    phi_code = f'acutance.mechanisms.FEATURE_MAPS["{name}"]'
    return _entry(
        f"linear_{name}", f"Linear attention, {title} features",
        rf"p_j \propto \phi(q) \cdot \phi(k_j), \quad \phi(x) = {phi}", source, _NOISY + more,
        (("sparsity_linear", "sparsity_linear_iid"), "linear", _MOMENTS), _IN_ROWS, Linear(name),
        f"score=acutance.scores.Features({phi_code}, {phi_code}), "
        'weights=acutance.weights.ReLU(normalize="sum")',
    )  # fmt: skip


#: Entries in reading order.
_ENTRIES = (
    _entry(
        "scaled_dot", "Softmax of scaled dot products",
        r"p_j \propto e^{s_j}, \quad s_j = q \cdot k_j / \sqrt{d}",
        "Vaswani et al. (2017), arXiv:1706.03762",
        "Yes, without limit: for Gaussian scores with standard deviation γ the sparsity is "
        "exp(−γ²/2) as long as γ is well below √(log n / 2), and a larger scale always brings a "
        "row closer to a single key.",
        (_SOFTMAX, "softmax", _ROW + " d^(−1/2)."), _STREAMED, {},
    ),
    _entry(
        "dot", "Softmax of dot products", r"p_j \propto e^{s_j}, \quad s_j = q \cdot k_j", _LUONG,
        "Yes, even before training: with components of unit variance γ = √d, so rows have only a "
        "few effective keys if d > 2 log n.",
        (_SOFTMAX, "softmax", _ROW + " 1."), _STREAMED, {"score": "dot"},
    ),
    _entry(
        "cosine", "Softmax of cosines at temperature 1", r"p_j \propto e^{\cos(q, k_j)}",
        "Graves et al. (2014), arXiv:1410.5401",
        "No: a cosine lies in [−1, 1], so no row of any length has an entropy below log n − "
        "0.4745 nat.",
        (_COSINE, "cosine", 'predict("cosine", n, tau=1, d=d), for keys in uniform directions.'),
        _STREAMED, {"score": "cosine"},
    ),
    _entry(
        "cosine_tau", "Softmax of cosines at a temperature for half of log n",
        r"p_j \propto e^{\cos(q, k_j) / \tau}", "Henry et al. (2020), arXiv:2010.04245",
        "Yes, up to a limit set by its temperature: τ is chosen so that a row with one matching "
        "key among n random ones has half of the maximal information; rows without a match stay "
        "diffuse.",
        (_COSINE, "cosine", 'predict("cosine", n, tau=τ, d=d), for keys in uniform directions.'),
        _STREAMED, lambda _, key: {"score": scores.Cosine(_half_tau(key))},
        "score=acutance.scores.Cosine(acutance.theory.tau_for_information(key.shape[2], 0.5, "
        'setting="random_keys", d=key.shape[3]))',
    ),
    _entry(
        "general", "Softmax of bilinear scores", r"p_j \propto e^{s_j}, \quad s_j = q^\top W k_j",
        _LUONG,
        "Yes, like softmax of dot products with the query qᵀW: γ is its norm times the standard "
        "deviation of a key's component, and W can make it arbitrarily large.",
        (_SOFTMAX, "softmax", _ROW + " 1, the query being Wᵀq."), _STREAMED,
        lambda _, key: {"score": scores.GeneralScore(key.shape[3], init="paper")},
        'score=acutance.scores.GeneralScore(key.shape[3], init="paper")',
    ),
    _entry(
        "additive", "Softmax of additive scores",
        r"p_j \propto e^{s_j}, \quad s_j = v^\top \tanh(W_q q + W_k k_j)",
        "Bahdanau et al. (2015), arXiv:1409.0473",
        "Only up to a limit set by v: scores lie within ± Σ|v|, so no key has more than "
        "exp(2Σ|v|) times the weight of another.",
        (_SOFTMAX, "softmax",
         'predict("softmax", n, logit_std=γ) with the measured standard deviation γ of the scores, '
         "whose distribution is not known in general."),
        "In tiles, with the tanh of a few hidden units at a time: O(n² h) time for h hidden "
        "units, O(n) memory plus one block.",
        lambda _, key: {"score": scores.AdditiveScore(key.shape[3])},
        "score=acutance.scores.AdditiveScore(key.shape[3])",
    ),
    _entry(
        "location", "Softmax of scores by position", r"p_j \propto e^{s_j}, \quad s_j = (W q)_j",
        _LUONG,
        "Yes, on positions regardless of their content: it is softmax of dot products with the "
        "rows of W, sharp if those have large norms.",
        (_SOFTMAX, "softmax",
         'predict("softmax", n, logit_std=γ) with the measured deviation γ of the scores.'),
        _STREAMED + " The rows of W serve as keys.",
        lambda _, key: {"score": scores.LocationScore(key.shape[3], key.shape[2], init="paper")},
        'score=acutance.scores.LocationScore(key.shape[3], key.shape[2], init="paper")',
    ),
    _entry(
        "scale_invariant", "Softmax of scale-invariant scores",
        r"p_j \propto e^{a_t s_j + m_t}, \quad a_t^2 = 2 \log(t / \tau + 1) + 1, \quad"
        r" m_t = -2 \log(t / \tau + 1)",
        "Anson, Wang & Aitchison (2025), arXiv:2505.17083",
        "Yes: for standard normal scores, all keys at distances from t to 10 t have about the "
        "same total weight at every t, and a few of them hold most of it.",
        "Mean and deviation of a score depend on its distance t, so no function predicts a row.",
        _BLOCKS, {"score": "scale_invariant"},
    ),
    _entry(
        "softmax_one", "Softmax with one outcome that is no key",
        r"p_j = e^{s_j} \big/ \bigl(1 + \textstyle\sum_k e^{s_k}\bigr)",
        "Miller (2023), https://www.evanmiller.org/attention-is-off-by-one.html",
        "Yes, like softmax if the logsumexp of a row's scores is well above 0; well below 0 the "
        "row attends to almost nothing.",
        (_SOFTMAX, None, _NO_SINK), _STREAMED, {"weights": "softmax_one"},
    ),
    _entry(
        "sink", "Softmax with a learned sink",
        r"p_j = e^{s_j} \big/ \bigl(e^b + \textstyle\sum_k e^{s_k}\bigr)",
        "Agarwal et al. (2025), arXiv:2508.10925",
        "Yes, like softmax if the logsumexp of a row's scores is well above b; well below b the "
        "row attends to almost nothing.",
        (_SOFTMAX, None, _NO_SINK), _STREAMED,
        lambda query, _: {"weights": weights.Sink(torch.zeros(query.shape[1]))},
        "weights=acutance.weights.Sink(torch.zeros(query.shape[1]).to(query))",
    ),
    _entry(
        "topk_softmax", "Softmax of the 32 largest scores",
        r"p_j \propto e^{s_j} \, [s_j \text{ among the } k \text{ largest}]",
        "Gupta et al. (2021), arXiv:2106.06899",
        "Yes, by construction: a row never has more than k effective keys, whatever its scores.",
        "The largest of n scores are not independent draws, so no function predicts them.", _SORTED,
        {"weights": weights.TopKSoftmax(32)}, "weights=acutance.weights.TopKSoftmax(32)",
    ),
    _entry(
        "exp", "Exponentials as they are", "a_j = e^{s_j}", _SU,
        _BUT_FOR_A_FACTOR, _OF_EXP,
        _BLOCKS + " float32 overflows at scores above 88.", {"weights": "exp"},
    ),
    _entry(
        "exp_l2", "Exponentials over their l2 norm",
        r"a_j = e^{s_j} \big/ \sqrt{\textstyle\sum_k e^{2 s_k}}", _SU,
        _BUT_FOR_A_FACTOR, _OF_EXP,
        _BLOCKS, {"weights": weights.Exp(normalize="l2")},
        'weights=acutance.weights.Exp(normalize="l2")',
    ),
    _entry(
        "sigmoid", "Sigmoids with bias −log n", r"a_j = \sigma(s_j - \log n)",
        "Ramapuram et al. (2024), arXiv:2409.04431",
        "As softmax while scores stay below log n, where a ≈ exp(s)/n; keys above it saturate at "
        "1, so a very large scale spreads a row evenly over all keys with a score above 0.",
        (("sparsity_exp",), None,
         "Weights that are neither exponential nor saturated have no closed form here; for scores "
         'well below log n predict("softmax", n, logit_std=γ) is the limit.'),
        _BLOCKS, {"weights": "sigmoid"},
    ),
    _entry(
        "sparsemax", "Sparsemax", r"p = \operatorname*{argmin}_{p \in \Delta} \| p - s \|^2",
        "Martins & Astudillo (2016), arXiv:1602.02068",
        "Yes, with exact zeros: a key that leads by 1 has all the weight, and the number of keys "
        "with any weight falls as the scale grows.",
        _THRESHOLD, _SORTED,
        {"weights": "sparsemax"},
    ),
    _entry(
        "entmax15", "Entmax with α = 1.5", r"p_j = \bigl(\tfrac12 s_j - \tau(s)\bigr)_+^2",
        "Peters et al. (2019), arXiv:1905.05702",
        "Yes, with exact zeros: a key that leads by 2 has all the weight.",
        _THRESHOLD, _SORTED,
        {"weights": "entmax15"},
    ),
    _entry(
        "entmax", "Entmax with α = 1.25",
        r"p_j = \bigl((\alpha - 1) s_j - \tau(s)\bigr)_+^{1/(\alpha - 1)}",
        "Peters et al. (2019), arXiv:1905.05702",
        "Yes, with exact zeros: a key that leads by 1/(α − 1) = 4 has all the weight.",
        _THRESHOLD,
        "In blocks of whole rows, by bisection: O(n²) time with tens of passes over each block, "
        "and O(n) memory plus one block.",
        {"weights": weights.Entmax(alpha=1.25)}, "weights=acutance.weights.Entmax(alpha=1.25)",
    ),
    _entry(
        "relu", "Positive parts over n", "a_j = (s_j)_+ / n",
        "Wortsman et al. (2023), arXiv:2309.08586",
        "Only if the mean β of the scores is below 0, as β/γ → −∞. For β ≥ 0 the sparsity is at "
        "least 1/√π = 0.564 for Gaussian scores, whatever the scale.",
        "There is no function for the first power of positive parts.", _BLOCKS, {"weights": "relu"},
    ),
    _entry(
        "relu2", "Squared positive parts over n", "a_j = (s_j)_+^2 / n",
        "Hua et al. (2022), arXiv:2202.10447", _RELU2, _OF_RELU2, _BLOCKS, {"weights": "relu2"},
    ),
    _entry(
        "relu2_sum", "Squared positive parts over their sum",
        r"p_j = (s_j)_+^2 \big/ \textstyle\sum_k (s_k)_+^2",
        "Su Jianlin (2022), https://kexue.fm/archives/9019", _RELU2, _OF_RELU2, _BLOCKS,
        {"weights": weights.ReLU2(normalize="sum")},
        'weights=acutance.weights.ReLU2(normalize="sum")',
    ),
    _entry(
        "power", "Powers of a score's size over their sum",
        r"p_j = |s_j|^k \big/ \textstyle\sum_i |s_i|^k",
        "Su Jianlin (2022), https://kexue.fm/archives/9019",
        "Not by a scale, which cancels: for Gaussian scores and k = 2 sparsity is never below "
        "1/√3 = 0.577; a larger k lowers that floor.",
        "There is no function for powers of absolute values other than the first.", _BLOCKS,
        {"weights": "power"},
    ),
    _entry(
        "identity", "The scores themselves over n", "a_j = s_j / n", _SU, _FLOOR, _OF_IDENTITY,
        _BLOCKS, {"weights": "identity"},
    ),
    _entry(
        "l1", "Scores over their l1 norm", r"a_j = s_j \big/ \textstyle\sum_k |s_k|", _SU, _FLOOR,
        _OF_IDENTITY, _BLOCKS, {"weights": "l1"},
    ),
    _entry(
        "l2", "Scores over their l2 norm", r"a_j = s_j \big/ \sqrt{\textstyle\sum_k s_k^2}", _SU,
        _FLOOR, _OF_IDENTITY, _BLOCKS, {"weights": "l2"},
    ),
    _entry(
        "log_n", "Softmax scaled by log n, trained at 512",
        r"p_j \propto e^{(\log n / \log 512) \, s_j}",
        "Su Jianlin (2021), https://kexue.fm/archives/8823",
        "Yes, without limit, like softmax: the factor log n keeps a row concentrated as n grows "
        "if one key leads a narrow bulk; Gaussian scores need only √(log n).",
        (("scaling_exponent", *_SOFTMAX), "softmax", _ROW + " and the factor."), _STREAMED,
        {"scaling": scaling.LogN(train_length=512)},
        "scaling=acutance.scaling.LogN(train_length=512)",
    ),
    _entry(
        "ssmax", "Scalable softmax", r"p_j \propto n^{0.43 \, s_j}",
        "Nakanishi (2025), arXiv:2501.19399",
        "Yes, without limit, like softmax: a key that leads all others by more than 1/0.43 "
        "dominates the row at any n.",
        (("scaling_exponent", *_SOFTMAX), "softmax", _ROW + " and the factor 0.43 log n."),
        _STREAMED, {"scaling": "ssmax"},
    ),
    _entry(
        "yarn", "Softmax with YaRN's temperature, trained at 512",
        r"p_j \propto e^{(0.1 \log(n/512) + 1)^2 s_j}", "Peng et al. (2023), arXiv:2309.00071",
        "Yes, without limit, like softmax: its factor, 1.46 for 8 times as many keys, slows the "
        "spreading of rows but does not stop it.",
        (("scaling_exponent", *_SOFTMAX), "softmax", _ROW + " and the factor."), _STREAMED,
        {"scaling": scaling.Yarn(train_length=512)},
        "scaling=acutance.scaling.Yarn(train_length=512)",
    ),
    _entry(
        "gau", "Gated attention unit: squared ReLU between images of one sequence",
        r"a_{ij} = (q_i \cdot k_j)_+^2 / (n d), \quad q = \gamma_q \odot z + \beta_q,"
        r" \; k = \gamma_k \odot z + \beta_k",
        "Hua et al. (2022), arXiv:2202.10447", _RELU2,
        (("sparsity_relu2",), "relu2",
         'predict("relu2", n, logit_mean=β, logit_std=γ) with the measured mean and deviation of '
         "the scores: queries and keys come from one z."),
        _BLOCKS, Gated(),
    ),
    _entry(
        "linear_identity", "Linear attention without a feature map", r"a_j = q \cdot k_j",
        "Schmidhuber (1992), Neural Computation 4:131",
        "No: for Gaussian keys its sparsity is never below √(2/π) = 0.798, the value for keys of "
        "mean 0, whatever the scale.",
        _OF_IDENTITY, _SIGNED, Linear("identity"),
        'score="dot", weights=acutance.weights.Identity(normalize="none")',
    ),
    *(_linear(name) for name in _MAPS),
    _entry(
        "linear_two_maps", "Linear attention, exponential queries and ReLU keys",
        r"p_j \propto \phi_q(q) \cdot \phi_k(k_j), \quad \phi_q(x) = e^x, \;"
        r" \phi_k(x) = \max(x, 0)",
        "Su Jianlin (2023), https://kexue.fm/archives/9889",
        _NOISY
        + " Each map can be chosen for its part: φ_k for key features that are mostly near zero, "
        "φ_q for a query with few large ones.",
        (("sparsity_linear", "sparsity_linear_iid"), "linear",
         _MOMENTS.replace("q=φ(q)", "q=φ_q(q)").replace("key features", "key features φ_k(k)")),
        _IN_ROWS,
        {"score": scores.Features(torch.exp, torch.relu), "weights": _BY_SUM},
        "score=acutance.scores.Features(torch.exp, torch.relu), "
        'weights=acutance.weights.ReLU(normalize="sum")',
    ),
    _entry(
        "cosformer", "Linear attention, ReLU features weighted by distance",
        r"p_{ij} \propto \max(q_i, 0) \cdot \max(k_j, 0)"
        r" \, \cos\bigl(\tfrac{\pi}{2} \tfrac{i - j}{n}\bigr)",
        "Qin et al. (2022), arXiv:2202.08791",
        _NOISY
        + " The cosine of the distance alone leaves 8/π² = 81 % of the last row's keys effective.",
        (("sparsity_linear",), "linear",
         'predict("linear", n, q=φ(q), mu=μ, Sigma=Σ) with mean μ and covariance Σ of the features '
         "of all keys, positions included: exact for that row, not a prediction."),
        _IN_ROWS, Linear("cosformer"),
    ),
    _entry(
        "decay", "One decay, λ = 0.9", r"a_j = \lambda^{n - j}", _SU, _LATEST, _OF_DECAY, _CLOSED,
        Decay(lambda heads: torch.full((heads,), 0.9, dtype=torch.float64)),
    ),
    _entry(
        "alibi_decay", "ALiBi's slopes as decays",
        r"a_j = e^{-m_h (n - j)}, \quad m_h = 2^{-8(h+1)/H}",
        "Press, Smith & Lewis (2021), arXiv:2108.12409",
        _LATEST + " Here λ = exp(−m) in each head.", _OF_DECAY, _CLOSED,
        Decay(partial(alibi_decays, dtype=torch.float64)),
    ),
    _entry(
        "retention", "Retention: signed scores times RetNet's decays",
        r"a_{ij} = \lambda_h^{i - j} \, q_i \cdot k_j / \sqrt d, \quad \lambda_h = 1 - 2^{-5-h}",
        "Sun et al. (2023), arXiv:2307.08621",
        "Only on the latest keys: (1 + λ)/(1 − λ) of them in head h, times 2/π for signed "
        "Gaussian scores.",
        (("effective_keys_decay", "sparsity_identity"), None,
         'There is no function for decay and content together; predict("decay", n, lam=λ) gives '
         "the effect of the decay alone."),
        _SIGNED, Linear("identity", decays=partial(retnet_decays, dtype=torch.float64)),
    ),
    _entry(
        "linear_gated", "Linear attention, elu + 1 features, with a gate computed from each key",
        r"p_{ij} \propto \phi(q_i) \cdot \phi(k_j) \prod_{t=j+1}^{i} \lambda_t, \quad"
        r" \lambda_t = \sigma(w \cdot k_t)^{1/16}, \; \phi(x) = \mathrm{elu}(x) + 1",
        "Sun et al. (2024), arXiv:2405.05254 (the gate), and Katharopoulos et al. (2020), "
        "arXiv:2006.16236",
        "On the keys since the last small gates: about (1 + λ)/(1 − λ) of them for gates of mean "
        "λ, at any length; unlike with a constant decay, the data decide which.",
        (("effective_keys_decay", "sparsity_linear"), None,
         "For independent gates of mean m₁ and features of sparsity S, the means over rows of "
         "(Σa)² and Σa² have the ratio 1 + 2 m₁ S²/(1 − m₁); no function predicts the mean of "
         "(Σa)²/Σa² itself."),
        _IN_ROWS,
        Rows(
            {"score": scores.Features(_ELU1, _ELU1, _log_gate), "weights": _BY_SUM},
            always_causal=True,
        ),
        "is_causal=True, score=acutance.scores.Features(lambda x: torch.nn.functional.elu(x) + 1, "
        "lambda x: torch.nn.functional.elu(x) + 1, "
        "log_gate=lambda k: torch.nn.functional.logsigmoid(k.sum(-1) / k.shape[-1] ** 0.5) / 16), "
        'weights=acutance.weights.ReLU(normalize="sum")',
    ),
    _entry(
        "lru", "Linear recurrent unit: complex decays on a ring",
        r"a_j = \lambda^{n - j}, \quad \lambda = e^{-e^\nu + i e^\theta}",
        "Orvieto et al. (2023), arXiv:2303.06349",
        "Only on the latest keys, each state by its |λ|: effective keys never exceed"
        " (1 + |λ|)/(1 − |λ|).",
        (("sparsity_decay", "effective_keys_decay"), "decay",
         'predict("decay", n, lam=|λ|) for each state; the table holds their mean.'),
        _CLOSED, Recurrence(),
    ),
)  # fmt: skip

#: Every mechanism by its name, in reading order.
MECHANISMS: Mapping[str, Mechanism] = MappingProxyType({entry.name: entry for entry in _ENTRIES})

#: What others call entries of the table.
_ALSO = {
    "softmax": "scaled_dot", "sdpa": "scaled_dot", "attention": "scaled_dot", "luong": "general",
    "bahdanau": "additive", "linear": "linear_elu1", "retnet": "retention", "alibi": "alibi_decay",
}  # fmt: skip


def mechanism(name: str | Mechanism) -> Mechanism:
    """Look up a mechanism by name; an entry is returned as it is.

    Raises:
        ValueError: if the name is unknown; the message gives the nearest.
        TypeError: if it is neither a name nor a Mechanism.

    Example:
        >>> mechanism("relu2").can_concentrate[:42]
        'Only if the mean β of the scores is below '
        >>> mechanism("softmx")
        Traceback (most recent call last):
        ValueError: there is no mechanism named 'softmx'; did you mean 'scaled_dot'?
    """
    if isinstance(name, Mechanism):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a mechanism must be a name or a Mechanism, got {type(name).__name__}")
    if name not in MECHANISMS:
        close = difflib.get_close_matches(name, [*MECHANISMS, *_ALSO], n=1, cutoff=0.7)
        hint = f"choose from {', '.join(MECHANISMS)}"
        if close:
            hint = f"did you mean {_ALSO.get(close[0], close[0])!r}?"
        raise ValueError(f"there is no mechanism named {name!r}; {hint}")
    return MECHANISMS[name]
