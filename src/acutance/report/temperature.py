"""Recommend the temperature of a softmax over cosines, to reach a share of log n as information.

The three arrangements of keys are those of :func:`acutance.theory.tau_for_information`: cosines
chosen freely, aligned pairs with all other keys spread evenly, and one match among random keys.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from acutance.report.table import Column, Table, styled
from acutance.theory import (
    cosine_best_count,
    cosine_entropy_lower_bound,
    expected_max,
    information_range_limit,
    match_dimension,
    onehot_entropy,
    tau_for_information,
)

SCHEMA = "acutance.temperature/1"
Key = Literal["free", "simplex", "random_keys"]
#: What the command calls each arrangement, and how the theory does.
NEGATIVES: dict[str, Key] = {"box": "free", "simplex": "simplex", "random": "random_keys"}

#: From here on the estimate for random keys was compared with drawn ones.
_CHECKED_KEYS, _CHECKED_DIMENSION = 64, 8


@dataclass(frozen=True)
class Setting:
    """The temperature for one arrangement of keys.

    Attributes:
        key: its name in :func:`acutance.theory.tau_for_information`.
        name: its description.
        tau: temperature at which a row carries the requested information.
        at_one: largest information at temperature 1, in nats; None if there is no formula.
        needs: what the arrangement requires.
        feasible: whether the dimension, if given, allows it.
    """

    key: Key
    name: str
    tau: float
    at_one: float | None
    needs: str
    feasible: bool


@dataclass(frozen=True)
class Advice:
    """A recommended temperature with an explanation.

    Attributes:
        n: number of keys in a row.
        fraction: requested information, as a share of log n.
        d: dimension of queries and keys; None if not given.
        settings: the arrangements that could be computed.
        chosen: the arrangement whose temperature is recommended.
        sentences: the explanation.
    """

    n: int
    fraction: float
    d: float | None
    settings: tuple[Setting, ...]
    chosen: Setting
    sentences: tuple[str, ...]

    @property
    def tau(self) -> float:
        """The recommended temperature."""
        return self.chosen.tau

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {"schema": SCHEMA, "tau": self.tau, "scale": 1 / self.tau, **asdict(self)}


def advise(n: int, fraction: float, d: float | None = None, negatives: str | None = None) -> Advice:
    """Recommend a temperature for a softmax over n cosines.

    Args:
        n: number of keys in a row, at least 2.
        fraction: information as a share of log n, between 0 and 1.
        d: dimension of queries and keys, at least 2, if known.
        negatives: "box" (cosines may have any value), "simplex" (aligned pairs, the others spread
            evenly) or "random" (needs ``d``). By default "random" with ``d``, else "simplex".

    Raises:
        ValueError: if an argument is outside its domain, or "random" lacks ``d``.

    Example:
        >>> advice = advise(256, 0.9)
        >>> advice.chosen.name, advice.tau
        ('even negatives', 0.12090528)
        >>> advise(65536, 0.9, d=128).tau
        0.069818793
    """
    if d is not None and not (math.isfinite(d) and d >= 2):
        raise ValueError(f"d: must be finite and at least 2, got d={d:g}")
    if negatives is None:
        negatives = "simplex" if d is None else "random"
    if negatives not in NEGATIVES:
        raise ValueError(f"negatives: must be one of {', '.join(NEGATIVES)}, got {negatives!r}")
    if negatives == "random" and d is None:
        raise ValueError('d: "random" negatives need the dimension, got d=None')
    settings = _settings(n, fraction, d)
    chosen = next(setting for setting in settings if setting.key == NEGATIVES[negatives])
    sentences = tuple(_sentences(n, fraction, d, settings, chosen))
    return Advice(n, fraction, d, settings, chosen, sentences)


def _settings(n: int, fraction: float, d: float | None) -> tuple[Setting, ...]:
    """The temperature for each arrangement of keys, the best first."""
    free = float(tau_for_information(n, fraction))
    even = float(tau_for_information(n, fraction, setting="simplex"))
    most = math.log(n) - float(cosine_entropy_lower_bound(n, 1.0))
    most_even = math.log(n) - float(onehot_entropy(n, n / (n - 1)))
    pairs, fits = f"aligned pairs; d ≥ {n - 1:,}", d is None or d >= n - 1
    settings = [
        Setting("free", "free cosines", free, most, "one row alone; d ≥ 2", True),
        Setting("simplex", "even negatives", even, most_even, pairs, fits),
    ]
    if d is not None:
        tau = float(tau_for_information(n, fraction, setting="random_keys", d=d))
        needs = f"one match at cosine 1; d = {d:g}"
        settings.append(Setting("random_keys", "random negatives", tau, None, needs, True))
    return tuple(settings)


def _sentences(
    n: int, fraction: float, d: float | None, settings: tuple[Setting, ...], chosen: Setting
) -> list[str]:
    """Sentences that explain the recommended temperature."""
    log_n = math.log(n)
    free, even = settings[0], settings[1]
    share = f"{fraction * log_n:.4g} nat ({100 * fraction:.6g} % of log {n:,})"
    sentences = [
        f"Use τ = {chosen.tau:.4g}: multiply the cosines by {1 / chosen.tau:.4g}, for example "
        f"with scale={1 / chosen.tau:.4g} in scaled_dot_product_attention of normalised q and "
        "k."
    ]
    count = int(cosine_best_count(n, free.tau))
    tops = "1 key at +1" if count == 1 else f"{count:,} keys at +1"
    sentences.append(
        f"Box bound: no τ above {free.tau:.4g} reaches {share} in a row, even with every "
        f"cosine chosen freely in [−1, 1] ({tops}, {n - count:,} at −1)."
        + ("" if count == 1 else " That optimum is not attention to a single key.")
    )
    weight = 1 / (1 + (n - 1) * math.exp(-n / (n - 1) / even.tau))
    sentences.append(
        f"Aligned pairs: if every query equals its key and the other{'s' * (n > 2)} "
        f"({n - 1:,}) are evenly spaced, at cosine {-1 / (n - 1):.3g}, every row reaches it at "
        f"τ = {even.tau:.4g}, with weight {weight:.3f} on its key. Rows cannot all do better "
        "at the same time."
    )
    if d is None:
        sentences.append(
            f"This arrangement needs d ≥ {n - 1:,}; pass --d to see the result for random keys."
        )
    else:
        sentences += _dimension_sentences(n, d, even, settings[2])
    limit = float(information_range_limit(1.0))
    assert free.at_one is not None
    sentences.append(
        f"At τ = 1 the information of a row is at most {free.at_one:.4f} nat, "
        f"{100 * free.at_one / log_n:.3g} % of log n, and never above {limit:.4f} for any "
        f"number of keys: entropy stays within [log n − {limit:.4f}, log n], so cosines need a "
        "temperature."
    )
    return [
        sentence.replace("-", "−") if "cosine -" in sentence else sentence for sentence in sentences
    ]


def _dimension_sentences(n: int, d: float, even: Setting, random: Setting) -> list[str]:
    """Sentences on random keys in d dimensions."""
    best = round(float(expected_max(n - 1, "cosine", d=d)), 6) + 0.0
    trust = "an estimate, within half a per cent of log n where tested"
    if n < _CHECKED_KEYS or d < _CHECKED_DIMENSION:
        trust = "a rough estimate: it assumes many keys and dimensions"
    sentences = [
        f"Random keys: in d = {d:g} other keys have cosines of about ±{d ** (-0.5):.3g}, the "
        f"largest of {n - 1:,} about {best:.3g}; a match at cosine 1 then reaches it at τ = "
        f"{random.tau:.4g} ({trust})."
    ]
    if not even.feasible:
        sentences.append(
            f"With d = {d:g} the evenly spaced arrangement is not possible for all rows: it "
            f"needs d ≥ {n - 1:,}."
        )
    least = float(match_dimension(n))
    if d >= least:
        sentences.append(
            f"d = {d:g} is enough for a match to have half the weight among {n - 1:,} random "
            f"keys, which needs d ≥ 2 log(n − 1) = {least:.3g}."
        )
    else:
        sentences.append(
            f"d = {d:g} is below 2 log(n − 1) = {least:.3g}: if cosines were normal, no "
            "temperature would give a match half the weight. They are bounded, so a low "
            "temperature does, but other keys come close."
        )
    return sentences


def advice_table(advice: Advice) -> Table:
    """A recommended temperature, and a line for each arrangement of keys."""
    rows = []
    for setting in advice.settings:
        needs = setting.needs + ("" if setting.feasible else " (not met)")
        row = (setting.name, setting.tau, 1 / setting.tau, needs)
        rows.append(styled(row, "bold") if setting is advice.chosen else row)
    title = f"τ = {advice.tau:.4g} for {100 * advice.fraction:.6g} % of log {advice.n:,}"
    numbers = (Column(name, format=".4g") for name in ("τ", "scale"))
    columns = (Column("arrangement of keys", "words"), *numbers, Column("needs", "words"))
    return Table(title, columns, rows, advice.sentences, heading="Why")
