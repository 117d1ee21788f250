"""What the report says about metrics, for a reader who has seen none of them.

The formula, unit and source of each are in :data:`acutance.METRICS`; here is what a low and a high
value look like in a model, in plain words, and in which group a list shows it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: Groups in the order in which lists show them.
GROUPS = ("Sharpness", "Where it looks", "Scores", "Predicted", "Gradient and noise", "Rows")


class Words(NamedTuple):
    """Plain words for a metric: its group, and what its two ends mean."""

    group: str
    low: str
    high: str


WORDS: dict[str, Words] = {
    "normalized_entropy": Words("Sharpness", "sharp: one token has all", "diffuse: spread evenly"),
    "entropy": Words("Sharpness", "sharp: few tokens", "diffuse: many tokens"),
    "effective_keys": Words("Sharpness", "as if looking at one token", "as if looking at many"),
    "top_weight": Words("Sharpness", "no token stands out", "one token has most"),
    "information": Words("Sharpness", "no choice made", "a sharp choice"),
    "sparsity": Words("Sharpness", "sharp: few tokens", "diffuse: many tokens"),
    "collision": Words("Sharpness", "diffuse: many tokens", "sharp: few tokens"),
    "first_weight": Words("Where it looks", "ignores the first token", "parks on the first token"),
    "sink_mass": Words("Where it looks", "all on tokens", "much on the sink"),
    "attention_distance": Words("Where it looks", "looks nearby", "looks far away"),
    "mass_self": Words("Where it looks", "looks elsewhere", "looks at itself"),
    "mass_previous": Words("Where it looks", "looks elsewhere", "looks at the token before"),
    "mass_same": Words("Where it looks", "looks elsewhere", "looks at its token's other places"),
    "mass_special": Words("Where it looks", "all on plain tokens", "all on special tokens"),
    "critical_ratio": Words("Scores", "the largest scores share", "the largest outweighs all"),
    "max_logit": Words("Scores", "small scores", "large scores"),
    "lse": Words("Scores", "small scores", "large scores"),
    "logit_mean": Words("Scores", "low on average", "high on average"),
    "logit_std": Words("Scores", "all scores alike", "scores far apart"),
    "varentropy": Words("Scores", "hard to sharpen or blur", "quick to sharpen or blur"),
    "entropy_slope": Words("Scores", "quick to sharpen", "hard to sharpen"),
    "gaussian_entropy": Words("Predicted", "sharp expected", "diffuse expected"),
    "mean_field_entropy": Words("Predicted", "low floor", "high floor"),
    "jensen_gap": Words("Predicted", "tight bound", "loose bound"),
    "max_gap": Words("Predicted", "tight bound", "loose bound"),
    "jacobian_trace": Words("Gradient and noise", "little gradient passes", "gradient passes"),
    "noise_gain": Words("Gradient and noise", "noise averages out", "noise comes through"),
    "n_keys": Words("Rows", "few tokens visible", "many tokens visible"),
}


def words(name: str) -> Words:
    """Plain words for a metric; plain "low" and "high" for one that has none.

    Example:
        >>> words("entropy").high
        'diffuse: many tokens'
        >>> words("something_new")
        Words(group='Where it looks', low='low', high='high')
    """
    return WORDS.get(name, Words("Where it looks", "low", "high"))


_CROSS = re.compile(r"cross|enc_?dec|encoder_attn|multihead_attn", re.IGNORECASE)


def crossing(module: str) -> str:
    """What follows a layer's number where its queries attend to another sequence; by its name.

    Example:
        >>> crossing("decoder.block.0.layer.1.EncDecAttention"), crossing("encoder.layer.0.attn")
        (' (cross-attention)', '')
    """
    return " (cross-attention)" if _CROSS.search(module) else ""
