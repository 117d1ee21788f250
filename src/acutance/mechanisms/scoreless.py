r"""Table entries of mechanisms without scores: feature maps, decays, gates and a recurrence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from acutance.mechanisms.decays import alibi_decays, retnet_decays
from acutance.mechanisms.entry import Decay, Linear, Mechanism, Recurrence, Rows, Theory
from acutance.mechanisms.feature_maps import FEATURE_MAPS
from acutance.scores import Features
from acutance.weights import ReLU

__all__ = ["SCORELESS"]

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


def _linear(name: str) -> Mechanism:
    """The table entry for linear attention with a feature map."""
    title, phi, source, more = _MAPS[name]
    phi_code = f'acutance.mechanisms.FEATURE_MAPS["{name}"]'
    return Mechanism(
        f"linear_{name}", f"Linear attention, {title} features",
        rf"p_j \propto \phi(q) \cdot \phi(k_j), \quad \phi(x) = {phi}", source, _NOISY + more,
        Theory(("sparsity_linear", "sparsity_linear_iid"), "linear", _MOMENTS), _IN_ROWS,
        "acutance.attention(query, key, value, score=acutance.scores.Features("
        f'{phi_code}, {phi_code}), weights=acutance.weights.ReLU(normalize="sum"))',
        Linear(name),
    )  # fmt: skip


def _decay(name: str, title: str, formula: str, source: str, more: str,
           of: Callable[[int], Tensor]) -> Mechanism:  # fmt: skip
    """The table entry of a mechanism whose weights λ^distance do not depend on the tokens.

    Args:
        name: name of the mechanism.
        title: title of its page.
        formula: formula in LaTeX.
        source: paper or article.
        more: a sentence to append on where it can concentrate; may be empty.
        of: returns the decays of a given number of heads, (heads,).
    """
    return Mechanism(
        name, title, formula, source,
        "Only on the latest keys: effective keys never exceed (1 + λ)/(1 − λ); sparsity "
        f"falls to 0 as n grows only because the row gains zeros.{more}",
        Theory(
            ("sparsity_decay", "effective_keys_decay"), "decay",
            'predict("decay", n, lam=λ), the same for every row.',
        ),
        _CLOSED,
        f'acutance.MECHANISMS["{name}"].run(query, key, value)[0]',
        Decay(of),
    )  # fmt: skip


_IDENTITY = Mechanism(
    "linear_identity", "Linear attention without a feature map", r"a_j = q \cdot k_j",
    "Schmidhuber (1992), Neural Computation 4:131",
    "No: for Gaussian keys its sparsity is never below √(2/π) = 0.798, the value for keys of mean"
    " 0, whatever the scale.",
    Theory(
        ("sparsity_identity",), "identity", 'predict("identity", n, logit_mean=β, logit_std=γ).'
    ),
    _SIGNED,
    'acutance.attention(query, key, value, score="dot",'
    ' weights=acutance.weights.Identity(normalize="none"))',
    Linear("identity"),
)  # fmt: skip

_COSFORMER = Mechanism(
    "cosformer", "Linear attention, ReLU features weighted by distance",
    r"p_{ij} \propto \max(q_i, 0) \cdot \max(k_j, 0)"
    r" \, \cos\bigl(\tfrac{\pi}{2} \tfrac{i - j}{n}\bigr)",
    "Qin et al. (2022), arXiv:2202.08791",
    _NOISY
    + " The cosine of the distance alone leaves 8/π² = 81 % of the last row's keys effective.",
    Theory(
        ("sparsity_linear",), "linear",
        'predict("linear", n, q=φ(q), mu=μ, Sigma=Σ) with mean μ and covariance Σ of the features'
        " of all keys, positions included: exact for that row, not a prediction.",
    ),
    _IN_ROWS,
    'acutance.MECHANISMS["cosformer"].run(query, key, value)[0]',
    Linear("cosformer"),
)  # fmt: skip

_TWO_MAPS = Mechanism(
    "linear_two_maps", "Linear attention, exponential queries and ReLU keys",
    r"p_j \propto \phi_q(q) \cdot \phi_k(k_j), \quad \phi_q(x) = e^x, \; \phi_k(x) = \max(x, 0)",
    "Su Jianlin (2023), https://kexue.fm/archives/9889",
    _NOISY + " Each map can be chosen for its part: φ_k for key features that are mostly near zero,"
    " φ_q for a query with few large ones.",
    Theory(
        ("sparsity_linear", "sparsity_linear_iid"), "linear",
        _MOMENTS.replace("q=φ(q)", "q=φ_q(q)").replace("key features", "key features φ_k(k)"),
    ),
    _IN_ROWS,
    "acutance.attention(query, key, value, score=acutance.scores.Features(torch.exp, torch.relu),"
    ' weights=acutance.weights.ReLU(normalize="sum"))',
    Rows(lambda sizes: {
        "score": Features(torch.exp, torch.relu), "weights": ReLU(normalize="sum")
    }),
)  # fmt: skip


def _log_gate(key: Tensor) -> Tensor:
    """Compute log σ(w·k)/16 of each key, w of length 1 with equal components."""
    return logsigmoid(key.sum(-1) / key.shape[-1] ** 0.5) / 16


_GATED = Mechanism(
    "linear_gated", "Linear attention, elu + 1 features, with a gate computed from each key",
    r"p_{ij} \propto \phi(q_i) \cdot \phi(k_j) \prod_{t=j+1}^{i} \lambda_t, \quad"
    r" \lambda_t = \sigma(w \cdot k_t)^{1/16}, \; \phi(x) = \mathrm{elu}(x) + 1",
    "Sun et al. (2024), arXiv:2405.05254 (the gate), and Katharopoulos et al. (2020),"
    " arXiv:2006.16236",
    "On the keys since the last small gates: about (1 + λ)/(1 − λ) of them for gates of mean λ, at"
    " any length; unlike with a constant decay, the data decide which.",
    Theory(
        ("effective_keys_decay", "sparsity_linear"), None,
        "For independent gates of mean m₁ and features of sparsity S, the means over rows of (Σa)²"
        " and Σa² have the ratio 1 + 2 m₁ S²/(1 − m₁); no function predicts the mean of (Σa)²/Σa²"
        " itself.",
    ),
    _IN_ROWS,
    "acutance.attention(query, key, value, is_causal=True, score=acutance.scores.Features("
    "lambda x: torch.nn.functional.elu(x) + 1, lambda x: torch.nn.functional.elu(x) + 1,"
    " log_gate=lambda k: torch.nn.functional.logsigmoid(k.sum(-1) / k.shape[-1] ** 0.5) / 16),"
    ' weights=acutance.weights.ReLU(normalize="sum"))',
    Rows(
        lambda sizes: {
            "score": Features(FEATURE_MAPS["elu1"], FEATURE_MAPS["elu1"], _log_gate),
            "weights": ReLU(normalize="sum"),
        },
        always_causal=True,
    ),
)  # fmt: skip

_RETENTION = Mechanism(
    "retention", "Retention: signed scores times RetNet's decays",
    r"a_{ij} = \lambda_h^{i - j} \, q_i \cdot k_j / \sqrt d, \quad \lambda_h = 1 - 2^{-5-h}",
    "Sun et al. (2023), arXiv:2307.08621",
    "Only on the latest keys: (1 + λ)/(1 − λ) of them in head h, times 2/π for signed Gaussian "
    "scores.",
    Theory(
        ("effective_keys_decay", "sparsity_identity"), None,
        'There is no function for decay and content together; predict("decay", n, lam=λ) '
        "gives the effect of the decay alone.",
    ),
    _SIGNED,
    'acutance.MECHANISMS["retention"].run(query, key, value)[0]',
    Linear("identity", decays=partial(retnet_decays, dtype=torch.float64)),
)  # fmt: skip

_LRU = Mechanism(
    "lru", "Linear recurrent unit: complex decays on a ring",
    r"a_j = \lambda^{n - j}, \quad \lambda = e^{-e^\nu + i e^\theta}",
    "Orvieto et al. (2023), arXiv:2303.06349",
    "Only on the latest keys, each state by its |λ|: effective keys never exceed (1 + "
    "|λ|)/(1 − |λ|).",
    Theory(
        ("sparsity_decay", "effective_keys_decay"), "decay",
        'predict("decay", n, lam=|λ|) for each state; the table holds their mean.',
    ),
    _CLOSED,
    'acutance.MECHANISMS["lru"].run(query, key, value)[0]',
    Recurrence(),
)  # fmt: skip

#: Entries in reading order.
SCORELESS: tuple[Mechanism, ...] = (
    _IDENTITY,
    *(_linear(name) for name in _MAPS),
    _TWO_MAPS,
    _COSFORMER,
    _decay(
        "decay", "One decay, λ = 0.9", r"a_j = \lambda^{n - j}",
        "Su Jianlin (2023), https://kexue.fm/archives/9889", "",
        lambda heads: torch.full((heads,), 0.9, dtype=torch.float64),
    ),
    _decay(
        "alibi_decay", "ALiBi's slopes as decays",
        r"a_j = e^{-m_h (n - j)}, \quad m_h = 2^{-8(h+1)/H}",
        "Press, Smith & Lewis (2021), arXiv:2108.12409", " Here λ = exp(−m) in each head.",
        partial(alibi_decays, dtype=torch.float64),
    ),
    _RETENTION,
    _GATED,
    _LRU,
)  # fmt: skip
