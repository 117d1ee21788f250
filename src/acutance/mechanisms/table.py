"""``MECHANISMS``: every mechanism by name, with its formula, its theory and a way to run it.

``acutance compare`` and the documentation use this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from acutance import scaling, scores, weights
from acutance.mechanisms.entry import (
    Decay,
    Form,
    Gated,
    Law,
    Linear,
    Mechanism,
    Options,
    Recurrence,
    Rows,
    Theory,
)
from acutance.mechanisms.features import FEATURE_MAPS, alibi_decays, retnet_decays
from acutance.theory import tau_for_information

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
