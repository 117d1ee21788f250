"""Predicted statistics of an attention row, from a few parameters of its scores.

NumPy and SciPy only: nothing here is shared with what measures. Names are those of the metrics.
"""

from __future__ import annotations

from acutance.theory.asymptotic import (
    asymptotic_collision_gauss,
    asymptotic_entropy_gauss,
    asymptotic_logsumexp_gauss,
    frozen_collision,
    frozen_entropy,
    frozen_jacobian_fro2,
    scale_gradmax_annealed,
)
from acutance.theory.bounds import (
    EntropyBounds,
    certificate,
    entropy_bounds,
    entropy_floor_from_spectral_norm,
    entropy_lower_bound,
    set_bound,
    tv_bound,
)
from acutance.theory.cosine import (
    cosine_best_count,
    cosine_entropy_lower_bound,
    information_range_limit,
)
from acutance.theory.cosine_temperature import tau_for_information
from acutance.theory.entropy import (
    jacobian_fro2,
    jacobian_trace,
    jensen_gap,
    max_gap,
    mean_field_entropy,
    onehot_entropy,
    softmax_entropy,
    uniform_entropy_drop,
)
from acutance.theory.extremes import expected_max, gauss_hazard_scale, hazard_scale
from acutance.theory.finite_n.gaussian import (
    expected_collision_gauss,
    expected_entropy_gauss,
    expected_logsumexp_gauss,
    expected_max_gauss,
)
from acutance.theory.finite_n.iid import (
    expected_collision,
    expected_entropy,
    expected_logsumexp,
    expected_power_sum,
    expected_weighted_mean,
)
from acutance.theory.finite_n.row_means import (
    expected_effective_keys,
    expected_jacobian_fro2,
    expected_sparsity,
    expected_varentropy,
)
from acutance.theory.finite_n.top_weight import expected_top_weight
from acutance.theory.inverse import (
    scale_for_effective_keys,
    scale_for_entropy,
    scale_for_information,
)
from acutance.theory.laws import ScalingLaw, scaling_exponent
from acutance.theory.linear_and_decay import (
    effective_keys_decay,
    log_sparsity_decay,
    log_sparsity_linear,
    log_sparsity_linear_iid,
    sparsity_decay,
    sparsity_linear,
    sparsity_linear_iid,
)
from acutance.theory.noise_error import (
    exact_noise_mse,
    first_order_bias,
    first_order_mse,
    second_order_mse,
)
from acutance.theory.noise_estimates import (
    NoiseSample,
    QuantizationNoise,
    asymptotic_noise_mse,
    monte_carlo_mse,
    noise_tail_rate,
    quantization_noise,
)
from acutance.theory.noise_laws import noise_central_moment, noise_variance_ratio
from acutance.theory.prediction import (
    KINDS,
    PREDICTED_MECHANISMS,
    MetricRecord,
    Prediction,
    predict,
)
from acutance.theory.rounding import RoundingError, rounding_error
from acutance.theory.scales import (
    critical_scale,
    gap_count,
    gauss_invariant_scale,
    match_dimension,
    needle_scale,
    needle_scale_for_entropy,
    retrieval_capacity,
)
from acutance.theory.sparsity import (
    effective_keys,
    log_sparsity_exp,
    log_sparsity_identity,
    log_sparsity_relu2,
    sparsity_exp,
    sparsity_identity,
    sparsity_relu2,
)
from acutance.theory.trained_heads import HeadMetrics, expected_head_metrics
from acutance.theory.von_mises_fisher import (
    vmf_entropy_drop,
)

__all__ = [
    "EntropyBounds",
    "HeadMetrics",
    "KINDS",
    "MetricRecord",
    "NoiseSample",
    "PREDICTED_MECHANISMS",
    "Prediction",
    "QuantizationNoise",
    "RoundingError",
    "ScalingLaw",
    "asymptotic_collision_gauss",
    "asymptotic_entropy_gauss",
    "asymptotic_logsumexp_gauss",
    "asymptotic_noise_mse",
    "certificate",
    "cosine_best_count",
    "cosine_entropy_lower_bound",
    "critical_scale",
    "effective_keys",
    "effective_keys_decay",
    "entropy_bounds",
    "entropy_floor_from_spectral_norm",
    "entropy_lower_bound",
    "exact_noise_mse",
    "expected_collision",
    "expected_collision_gauss",
    "expected_effective_keys",
    "expected_entropy",
    "expected_entropy_gauss",
    "expected_head_metrics",
    "expected_jacobian_fro2",
    "expected_logsumexp",
    "expected_logsumexp_gauss",
    "expected_max",
    "expected_max_gauss",
    "expected_power_sum",
    "expected_sparsity",
    "expected_top_weight",
    "expected_varentropy",
    "expected_weighted_mean",
    "first_order_bias",
    "first_order_mse",
    "frozen_collision",
    "frozen_entropy",
    "frozen_jacobian_fro2",
    "gap_count",
    "gauss_hazard_scale",
    "gauss_invariant_scale",
    "hazard_scale",
    "information_range_limit",
    "jacobian_fro2",
    "jacobian_trace",
    "jensen_gap",
    "log_sparsity_decay",
    "log_sparsity_exp",
    "log_sparsity_identity",
    "log_sparsity_linear",
    "log_sparsity_linear_iid",
    "log_sparsity_relu2",
    "match_dimension",
    "max_gap",
    "mean_field_entropy",
    "monte_carlo_mse",
    "needle_scale",
    "needle_scale_for_entropy",
    "noise_central_moment",
    "noise_tail_rate",
    "noise_variance_ratio",
    "onehot_entropy",
    "predict",
    "quantization_noise",
    "retrieval_capacity",
    "rounding_error",
    "scale_for_effective_keys",
    "scale_for_entropy",
    "scale_for_information",
    "scale_gradmax_annealed",
    "scaling_exponent",
    "second_order_mse",
    "set_bound",
    "softmax_entropy",
    "sparsity_decay",
    "sparsity_exp",
    "sparsity_identity",
    "sparsity_linear",
    "sparsity_linear_iid",
    "sparsity_relu2",
    "tau_for_information",
    "tv_bound",
    "uniform_entropy_drop",
    "vmf_entropy_drop",
]
