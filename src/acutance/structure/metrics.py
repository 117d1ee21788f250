"""STRUCTURE: metrics of where a row's weight lies, as METRICS describe how concentrated it is."""

from __future__ import annotations

from acutance.rowstats import METRICS
from acutance.rowstats.descriptions import Description
from acutance.shapes import did_you_mean


class StructureMetric(Description):
    """One metric of where a row's weight lies, an entry of :data:`STRUCTURE`."""


_CLARK = "Clark et al. (2019), arXiv:1906.04341"

#: Every structure metric by name, in the order in which reports show them.
STRUCTURE: dict[str, StructureMetric] = {
    entry.name: entry
    for entry in (
        StructureMetric("attention_distance", r"\sum_j p_j |i - j|", "keys", "[0, ∞)",
            "mean distance to the attended keys, in positions",
            "Vig & Belinkov (2019), arXiv:1906.04284"),
        StructureMetric("mass_self", "p_i", "1", "[0, 1]",
            "weight on the query's own position", _CLARK),
        StructureMetric("mass_previous", "p_{i-1}", "1", "[0, 1]",
            "weight on the previous position", _CLARK),
        StructureMetric("mass_same", r"\sum_{j \ne i,\ t_j = t_i} p_j", "1", "[0, 1]",
            "weight on other positions with the query's token",
            "Wang et al. (2022), arXiv:2211.00593"),
        StructureMetric("mass_special", r"\sum_{j \in \text{special}} p_j", "1", "[0, 1]",
            "weight on special tokens such as [CLS] and [SEP]", _CLARK),
        StructureMetric("critical_ratio", r"\beta / \Lambda", "1", "[0, ∞)",
            "scale divided by the scale above which the largest score dominates",
            "Hayase & Karakida (2026), arXiv:2605.12697"),
    )
}  # fmt: skip


def describe(name: str) -> Description:
    """Look up an entry of :data:`acutance.METRICS` or :data:`STRUCTURE` by name.

    Raises:
        ValueError: if neither has it; the message names the nearest.

    Example:
        >>> describe("entropy").unit, describe("attention_distance").unit
        ('nat', 'keys')
    """
    if name in METRICS:
        return METRICS[name]
    if name in STRUCTURE:
        return STRUCTURE[name]
    names = [*METRICS, *STRUCTURE]
    hint = did_you_mean(name, names, f": choose from {', '.join(names)}")
    raise ValueError(f"there is no metric named {name!r}{hint}")
