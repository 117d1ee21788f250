"""Description of every row metric: name, symbol, unit, range, meaning, source. Needs no PyTorch.

The table is in the order of reports. :data:`acutance.rowstats.METRICS` adds the function that
computes each metric.
"""

from __future__ import annotations

from dataclasses import dataclass

MILAKOV = "Milakov & Gimelshein (2018), arXiv:1805.02867"
SU_ROBUST = "Su Jianlin, kexue.fm article 9593"
SU_INVARIANCE = "Su Jianlin, kexue.fm articles 8823 and 9034"
SU_SPARSITY = "Su Jianlin, kexue.fm article 9889"


@dataclass(frozen=True)
class Description:
    """Description of one metric of an attention row.

    Attributes:
        name: as in the table that lists it, and on the statistics that have it.
        symbol: LaTeX.
        unit: "nat", "nat²", "keys", "logit", "value²" or "1" (a pure number).
        range: the possible values, for n visible keys.
        meaning: one line.
        source: article or textbook.
        needs_values: whether it requires values and ``noise=True``.
        needs_gaps: whether it requires the gap histogram.
    """

    name: str
    symbol: str
    unit: str
    range: str
    meaning: str
    source: str
    needs_values: bool = False
    needs_gaps: bool = False


#: Every metric by name, in the order reports show them.
DESCRIPTIONS: dict[str, Description] = {
    entry.name: entry
    for entry in (
        Description("n_keys", "n", "keys", "0, 1, 2, …", "visible keys of the row", MILAKOV),
        Description("entropy", "H", "nat", "[0, log n]",
            "Shannon entropy of the weights", SU_ROBUST),
        Description("normalized_entropy", r"H / \log n", "1", "[0, 1]",
            "entropy divided by its maximum, log n; 0 is one key, 1 is uniform weights", SU_ROBUST),
        Description("information", r"\log n - H", "nat", "[0, log n]",
            "how far the entropy is below that of uniform weights", SU_ROBUST),
        Description("effective_keys", r"N_\mathrm{eff} = 1/\sum_j p_j^2", "keys", "[1, n]",
            "number of equally weighted keys that the row is equivalent to", SU_SPARSITY),
        Description("sparsity", r"S = 1/\sqrt{n \sum_j p_j^2}", "1", "[1/√n, 1]",
            "l1/l2 sparsity of the weights; small is sparse", SU_SPARSITY),
        Description("collision", r"\sum_j p_j^2", "1", "[1/n, 1]",
            "probability that two draws from the row are the same key",
            "Rényi (1961), the exponential of the order-2 entropy"),
        Description("top_weight", r"\max_j p_j", "1", "[1/n, 1]",
            "weight of the largest key", MILAKOV),
        Description("first_weight", "p_1", "1", "[0, 1]",
            "weight of the first visible key: attention-sink mass",
            "Xiao et al. (2023), arXiv:2309.17453"),
        Description("sink_mass", r"p_\mathrm{sink}", "1", "[0, 1]",
            "weight on a sink outside the keys", "gpt-oss model card (2025), arXiv:2508.10925"),
        Description("max_logit", r"s_\max", "logit", "real", "largest visible score", MILAKOV),
        Description("lse", r"\log\sum_j e^{s_j}", "logit", "real",
            "logarithm of the normaliser", MILAKOV),
        Description("logit_mean", r"\bar s", "logit", "real",
            "unweighted mean of the scores",
            "Chan, Golub & LeVeque (1983), The American Statistician 37:242"),
        Description("logit_std", r"\sigma_s", "logit", "[0, ∞)",
            "unweighted standard deviation of the scores",
            "Chan, Golub & LeVeque (1983), The American Statistician 37:242"),
        Description("varentropy", r"\mathrm{Var}_p(s)", "nat²", "[0, ∞)",
            "variance of the scores under the row's own weights",
            "Kontoyiannis & Verdú (2014), IEEE Trans. Inf. Theory 60:777"),
        Description("entropy_slope", r"dH/d\log\lambda", "nat", "(−∞, 0]",
            "derivative of the entropy with respect to the log of the scale", SU_INVARIANCE),
        Description("mean_field_entropy", r"\log n - (s_\max - \bar s)", "nat", "(−∞, H]",
            "lower bound on the entropy from maximum and mean alone", SU_INVARIANCE),
        Description("jensen_gap", "J", "nat", "[0, ∞)",
            "error of the bound from replacing the logsumexp by the mean", SU_INVARIANCE),
        Description("max_gap", "G", "nat", "[0, ∞)",
            "error of the bound from replacing the weighted mean by the maximum", SU_INVARIANCE),
        Description("gaussian_entropy", r"E\,H(n, \sigma_s)", "nat", "[0, log n]",
            "expected entropy of n normal scores with the same standard deviation",
            "Derrida (1981), Phys. Rev. B 24:2613; exact quadrature at finite n"),
        Description("first_gap", r"s_1 - \log\sum_{j>1} e^{s_j}", "logit", "real",
            "log-odds of the first visible key's weight against all others'",
            "Xiao et al. (2023), arXiv:2309.17453, for the sink it measures"),
        Description("rest_logit_std", r"\sigma_{j>1}", "logit", "[0, ∞)",
            "unweighted standard deviation of the scores without the first visible key's",
            "Chan, Golub & LeVeque (1983), The American Statistician 37:242"),
        Description("rest_jensen_gap", r"J_{j>1}", "nat", "[0, ∞)",
            "logsumexp minus log(n − 1) minus mean of the scores without the first visible key's",
            SU_INVARIANCE),
        Description("jacobian_trace", r"1 - \sum_j p_j^2", "1", "[0, 1 − 1/n]",
            "gradient health: trace of the softmax Jacobian", SU_ROBUST),
        Description("noise_gain", r"\sum_j p_j^2 \lVert v_j - o\rVert^2", "value²", "[0, ∞)",
            "squared output error per unit of relative logit-noise variance",
            SU_ROBUST, needs_values=True),
        *(
            Description(f"keys_{percent}", rf"k_{{{percent}}}", "keys", "[1, n]",
                f"fewest keys that hold {percent} % of the weight on keys",
                "counts of keys by logit gap, bins of 1/4 nat", needs_gaps=True)
            for percent in (50, 90, 95, 99)
        ),
    )
}  # fmt: skip
