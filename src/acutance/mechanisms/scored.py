r"""Table entries of mechanisms that compute scores: score × weighting × scaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from acutance import scaling, scores, weights
from acutance.mechanisms.entry import Gated, Law, Mechanism, Rows, Sizes, Theory
from acutance.theory import tau_for_information

__all__ = ["SCORED"]

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
_FREE = (
    "Yes, without limit: for Gaussian scores with standard deviation γ the sparsity is "
    "exp(−γ²/2) as long as γ is well below √(log n / 2), and a larger scale always brings a "
    "row closer to a single key."
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


def _entry(
    name: str,
    title: str,
    formula: str,
    source: str,
    can_concentrate: str,
    theory: tuple[tuple[str, ...], Law | None, str],
    streaming: str,
    options: str,
    run: Callable[[Sizes], Mapping[str, Any]],
) -> Mechanism:
    """A table entry for a mechanism that runs through ``acutance.attention``."""
    code = f"acutance.attention(query, key, value{', ' if options else ''}{options})"
    return Mechanism(
        name, title, formula, source, can_concentrate, Theory(*theory), streaming, code, Rows(run)
    )


def _half_tau(sizes: Sizes) -> float:
    """Temperature (divisor of cosines) at which log n − H is half of log n.

    The row has one key at cosine 1 among random ones.
    """
    d = max(2, sizes.width)
    tau = tau_for_information(max(2, sizes.keys), 0.5, setting="random_keys", d=d)
    return float(tau)


_VASWANI = "Vaswani et al. (2017), arXiv:1706.03762"
_LUONG = "Luong et al. (2015), arXiv:1508.04025"
_SU = "Su Jianlin (2023), https://kexue.fm/archives/9889"
_GRAVES = "Graves et al. (2014), arXiv:1410.5401"

_SCORES = (
    _entry(
        "scaled_dot", "Softmax of scaled dot products",
        r"p_j \propto e^{s_j}, \quad s_j = q \cdot k_j / \sqrt{d}", _VASWANI, _FREE,
        (_SOFTMAX, "softmax", _ROW + " d^(−1/2)."), _STREAMED, "", lambda s: {},
    ),
    _entry(
        "dot", "Softmax of dot products", r"p_j \propto e^{s_j}, \quad s_j = q \cdot k_j", _LUONG,
        "Yes, even before training: with components of unit variance γ = √d, so rows have "
        "only a few effective keys if d > 2 log n.",
        (_SOFTMAX, "softmax", _ROW + " 1."), _STREAMED, 'score="dot"',
        lambda s: {"score": "dot"},
    ),
    _entry(
        "cosine", "Softmax of cosines at temperature 1",
        r"p_j \propto e^{\cos(q, k_j)}", _GRAVES,
        "No: a cosine lies in [−1, 1], so no row of any length has an entropy below log n − 0.4745"
        " nat.",
        (_COSINE, "cosine", 'predict("cosine", n, tau=1, d=d), for keys in uniform directions.'),
        _STREAMED, 'score="cosine"', lambda s: {"score": "cosine"},
    ),
    _entry(
        "cosine_tau", "Softmax of cosines at a temperature for half of log n",
        r"p_j \propto e^{\cos(q, k_j) / \tau}", "Henry et al. (2020), arXiv:2010.04245",
        "Yes, up to a limit set by its temperature: τ is chosen so that a row with one "
        "matching key among n random ones has half of the maximal information; rows without "
        "a match stay diffuse.",
        (_COSINE, "cosine", 'predict("cosine", n, tau=τ, d=d), for keys in uniform directions.'),
        _STREAMED,
        "score=acutance.scores.Cosine(acutance.theory.tau_for_information("
        'key.shape[2], 0.5, setting="random_keys", d=key.shape[3]))',
        lambda s: {"score": scores.Cosine(_half_tau(s))},
    ),
    _entry(
        "general", "Softmax of bilinear scores",
        r"p_j \propto e^{s_j}, \quad s_j = q^\top W k_j", _LUONG,
        "Yes, like softmax of dot products with the query qᵀW: γ is its norm times the "
        "standard deviation of a key's component, and W can make it arbitrarily large.",
        (_SOFTMAX, "softmax", _ROW + " 1, the query being Wᵀq."), _STREAMED,
        'score=acutance.scores.GeneralScore(key.shape[3], init="paper")',
        lambda s: {"score": scores.GeneralScore(s.width, init="paper")},
    ),
    _entry(
        "additive", "Softmax of additive scores",
        r"p_j \propto e^{s_j}, \quad s_j = v^\top \tanh(W_q q + W_k k_j)",
        "Bahdanau et al. (2015), arXiv:1409.0473",
        "Only up to a limit set by v: scores lie within ± Σ|v|, so no key has more than "
        "exp(2Σ|v|) times the weight of another.",
        (_SOFTMAX, "softmax",
         'predict("softmax", n, logit_std=γ) with the measured standard deviation γ of the '
         "scores, whose distribution is not known in general."),
        "In tiles, with the tanh of a few hidden units at a time: O(n² h) time for h hidden "
        "units, O(n) memory plus one block.",
        "score=acutance.scores.AdditiveScore(key.shape[3])",
        lambda s: {"score": scores.AdditiveScore(s.width)},
    ),
    _entry(
        "location", "Softmax of scores by position",
        r"p_j \propto e^{s_j}, \quad s_j = (W q)_j", _LUONG,
        "Yes, on positions regardless of their content: it is softmax of dot products with "
        "the rows of W, sharp if those have large norms.",
        (_SOFTMAX, "softmax",
         'predict("softmax", n, logit_std=γ) with the measured deviation γ of the scores.'),
        _STREAMED + " The rows of W serve as keys.",
        'score=acutance.scores.LocationScore(key.shape[3], key.shape[2], init="paper")',
        lambda s: {"score": scores.LocationScore(s.width, s.keys, init="paper")},
    ),
    _entry(
        "scale_invariant", "Softmax of scale-invariant scores",
        r"p_j \propto e^{a_t s_j + m_t}, \quad a_t^2 = 2 \log(t / \tau + 1) + 1, \quad"
        r" m_t = -2 \log(t / \tau + 1)",
        "Anson, Wang & Aitchison (2025), arXiv:2505.17083",
        "Yes: for standard normal scores, all keys at distances from t to 10 t have about the same"
        " total weight at every t, and a few of them hold most of it.",
        ((), None, (
            "Mean and deviation of a score depend on its distance t, so no function predicts a row."
        )),
        _BLOCKS, 'score="scale_invariant"', lambda s: {"score": "scale_invariant"},
    ),
)  # fmt: skip

_NO_SINK = (
    'predict("softmax", n, logit_std=γ) is its limit for many keys; the score of a sink beside n'
    " keys has no finite-n form here."
)

_EXPONENTIAL = (
    _entry(
        "softmax_one", "Softmax with one outcome that is no key",
        r"p_j = e^{s_j} \big/ \bigl(1 + \textstyle\sum_k e^{s_k}\bigr)",
        "Miller (2023), https://www.evanmiller.org/attention-is-off-by-one.html",
        "Yes, like softmax if the logsumexp of a row's scores is well above 0; well below 0 "
        "the row attends to almost nothing.",
        (_SOFTMAX, None, _NO_SINK), _STREAMED, 'weights="softmax_one"',
        lambda s: {"weights": "softmax_one"},
    ),
    _entry(
        "sink", "Softmax with a learned sink",
        r"p_j = e^{s_j} \big/ \bigl(e^b + \textstyle\sum_k e^{s_k}\bigr)",
        "Agarwal et al. (2025), arXiv:2508.10925",
        "Yes, like softmax if the logsumexp of a row's scores is well above b; well below b "
        "the row attends to almost nothing.",
        (_SOFTMAX, None, _NO_SINK), _STREAMED,
        "weights=acutance.weights.Sink(torch.zeros(query.shape[1]).to(query))",
        lambda s: {"weights": weights.Sink(torch.zeros(s.heads))},
    ),
    _entry(
        "topk_softmax", "Softmax of the 32 largest scores",
        r"p_j \propto e^{s_j} \, [s_j \text{ among the } k \text{ largest}]",
        "Gupta et al. (2021), arXiv:2106.06899",
        "Yes, by construction: a row never has more than k effective keys, whatever its scores.",
        ((), None, (
            "The largest of n scores are not independent draws, so no function predicts them."
        )),
        _SORTED, "weights=acutance.weights.TopKSoftmax(32)",
        lambda s: {"weights": weights.TopKSoftmax(32)},
    ),
    _entry(
        "exp", "Exponentials as they are", r"a_j = e^{s_j}", _SU,
        "Yes, without limit, like softmax: the weights differ from softmax only by a factor "
        "per row.",
        (_SOFTMAX, "softmax", _ROW + "; sparsity and effective keys do not depend on that factor."),
        _BLOCKS + " float32 overflows at scores above 88.", 'weights="exp"',
        lambda s: {"weights": "exp"},
    ),
    _entry(
        "exp_l2", "Exponentials over their l2 norm",
        r"a_j = e^{s_j} \big/ \sqrt{\textstyle\sum_k e^{2 s_k}}", _SU,
        "Yes, without limit, like softmax: the weights differ from softmax only by a factor "
        "per row.",
        (_SOFTMAX, "softmax", _ROW + "; sparsity and effective keys do not depend on that factor."),
        _BLOCKS, 'weights=acutance.weights.Exp(normalize="l2")',
        lambda s: {"weights": weights.Exp(normalize="l2")},
    ),
    _entry(
        "sigmoid", "Sigmoids with bias −log n", r"a_j = \sigma(s_j - \log n)",
        "Ramapuram et al. (2024), arXiv:2409.04431",
        "As softmax while scores stay below log n, where a ≈ exp(s)/n; keys above it saturate at 1,"
        " so a very large scale spreads a row evenly over all keys with a score above 0.",
        (("sparsity_exp",), None,
         "Weights that are neither exponential nor saturated have no closed form here; for scores"
         ' well below log n predict("softmax", n, logit_std=γ) is the limit.'),
        _BLOCKS, 'weights="sigmoid"', lambda s: {"weights": "sigmoid"},
    ),
    _entry(
        "sparsemax", "Sparsemax",
        r"p = \operatorname*{argmin}_{p \in \Delta} \| p - s \|^2",
        "Martins & Astudillo (2016), arXiv:1602.02068",
        "Yes, with exact zeros: a key that leads by 1 has all the weight, and the number of "
        "keys with any weight falls as the scale grows.",
        ((), None, "Its threshold depends on all scores at once; no function predicts it."),
        _SORTED, 'weights="sparsemax"', lambda s: {"weights": "sparsemax"},
    ),
    _entry(
        "entmax15", "Entmax with α = 1.5",
        r"p_j = \bigl(\tfrac12 s_j - \tau(s)\bigr)_+^2", "Peters et al. (2019), arXiv:1905.05702",
        "Yes, with exact zeros: a key that leads by 2 has all the weight.",
        ((), None, "Its threshold depends on all scores at once; no function predicts it."),
        _SORTED, 'weights="entmax15"', lambda s: {"weights": "entmax15"},
    ),
    _entry(
        "entmax", "Entmax with α = 1.25",
        r"p_j = \bigl((\alpha - 1) s_j - \tau(s)\bigr)_+^{1/(\alpha - 1)}",
        "Peters et al. (2019), arXiv:1905.05702",
        "Yes, with exact zeros: a key that leads by 1/(α − 1) = 4 has all the weight.",
        ((), None, "Its threshold depends on all scores at once; no function predicts it."),
        "In blocks of whole rows, by bisection: O(n²) time with tens of passes over each "
        "block, and O(n) memory plus one block.",
        "weights=acutance.weights.Entmax(alpha=1.25)",
        lambda s: {"weights": weights.Entmax(alpha=1.25)},
    ),
)  # fmt: skip

_POINTWISE = (
    _entry(
        "relu", "Positive parts over n", r"a_j = (s_j)_+ / n",
        "Wortsman et al. (2023), arXiv:2309.08586",
        "Only if the mean β of the scores is below 0, as β/γ → −∞. For β ≥ 0 the sparsity is "
        "at least 1/√π = 0.564 for Gaussian scores, whatever the scale.",
        ((), None, "There is no function for the first power of positive parts."),
        _BLOCKS, 'weights="relu"', lambda s: {"weights": "relu"},
    ),
    _entry(
        "relu2", "Squared positive parts over n", r"a_j = (s_j)_+^2 / n",
        "Hua et al. (2022), arXiv:2202.10447", _RELU2,
        (("sparsity_relu2",), "relu2", 'predict("relu2", n, logit_mean=β, logit_std=γ).'),
        _BLOCKS, 'weights="relu2"', lambda s: {"weights": "relu2"},
    ),
    _entry(
        "relu2_sum", "Squared positive parts over their sum",
        r"p_j = (s_j)_+^2 \big/ \textstyle\sum_k (s_k)_+^2",
        "Su Jianlin (2022), https://kexue.fm/archives/9019", _RELU2,
        (("sparsity_relu2",), "relu2", 'predict("relu2", n, logit_mean=β, logit_std=γ).'),
        _BLOCKS, 'weights=acutance.weights.ReLU2(normalize="sum")',
        lambda s: {"weights": weights.ReLU2(normalize="sum")},
    ),
    _entry(
        "power", "Powers of a score's size over their sum",
        r"p_j = |s_j|^k \big/ \textstyle\sum_i |s_i|^k",
        "Su Jianlin (2022), https://kexue.fm/archives/9019",
        "Not by a scale, which cancels: for Gaussian scores and k = 2 sparsity is never below"
        " 1/√3 = 0.577; a larger k lowers that floor.",
        ((), None, "There is no function for powers of absolute values other than the first."),
        _BLOCKS, 'weights="power"', lambda s: {"weights": "power"},
    ),
    _entry(
        "identity", "The scores themselves over n", r"a_j = s_j / n", _SU, _FLOOR,
        (("sparsity_identity",), "identity", 'predict("identity", n, logit_mean=β, logit_std=γ).'),
        _BLOCKS, 'weights="identity"', lambda s: {"weights": "identity"},
    ),
    _entry(
        "l1", "Scores over their l1 norm", r"a_j = s_j \big/ \textstyle\sum_k |s_k|", _SU, _FLOOR,
        (("sparsity_identity",), "identity", 'predict("identity", n, logit_mean=β, logit_std=γ).'),
        _BLOCKS, 'weights="l1"', lambda s: {"weights": "l1"},
    ),
    _entry(
        "l2", "Scores over their l2 norm", r"a_j = s_j \big/ \sqrt{\textstyle\sum_k s_k^2}", _SU,
        _FLOOR,
        (("sparsity_identity",), "identity", 'predict("identity", n, logit_mean=β, logit_std=γ).'),
        _BLOCKS, 'weights="l2"', lambda s: {"weights": "l2"},
    ),
)  # fmt: skip

_SCALED = (
    _entry(
        "log_n", "Softmax scaled by log n, trained at 512",
        r"p_j \propto e^{(\log n / \log 512) \, s_j}",
        "Su Jianlin (2021), https://kexue.fm/archives/8823",
        "Yes, without limit, like softmax: the factor log n keeps a row concentrated as n "
        "grows if one key leads a narrow bulk; Gaussian scores need only √(log n).",
        (("scaling_exponent", *_SOFTMAX), "softmax", _ROW + " and the factor."),
        _STREAMED, "scaling=acutance.scaling.LogN(train_length=512)",
        lambda s: {"scaling": scaling.LogN(train_length=512)},
    ),
    _entry(
        "ssmax", "Scalable softmax", r"p_j \propto n^{0.43 \, s_j}",
        "Nakanishi (2025), arXiv:2501.19399",
        "Yes, without limit, like softmax: a key that leads all others by more than 1/0.43 "
        "dominates the row at any n.",
        (("scaling_exponent", *_SOFTMAX), "softmax", _ROW + " and the factor 0.43 log n."),
        _STREAMED, 'scaling="ssmax"', lambda s: {"scaling": "ssmax"},
    ),
    _entry(
        "yarn", "Softmax with YaRN's temperature, trained at 512",
        r"p_j \propto e^{(0.1 \log(n/512) + 1)^2 s_j}", "Peng et al. (2023), arXiv:2309.00071",
        "Yes, without limit, like softmax: its factor, 1.46 for 8 times as many keys, slows "
        "the spreading of rows but does not stop it.",
        (("scaling_exponent", *_SOFTMAX), "softmax", _ROW + " and the factor."),
        _STREAMED, "scaling=acutance.scaling.Yarn(train_length=512)",
        lambda s: {"scaling": scaling.Yarn(train_length=512)},
    ),
)  # fmt: skip

_GAU = Mechanism(
    "gau", "Gated attention unit: squared ReLU between images of one sequence",
    r"a_{ij} = (q_i \cdot k_j)_+^2 / (n d), \quad q = \gamma_q \odot z + \beta_q,"
    r" \; k = \gamma_k \odot z + \beta_k",
    "Hua et al. (2022), arXiv:2202.10447",
    _RELU2,
    Theory(
        ("sparsity_relu2",), "relu2",
        'predict("relu2", n, logit_mean=β, logit_std=γ) with the measured mean and deviation of the'
        " scores: queries and keys come from one z.",
    ),
    _BLOCKS,
    'acutance.MECHANISMS["gau"].run(query, key, value)[0]',
    Gated(),
)  # fmt: skip

#: Entries in reading order.
SCORED: tuple[Mechanism, ...] = (*_SCORES, *_EXPONENTIAL, *_POINTWISE, *_SCALED, _GAU)
