"""The arguments of a calibration, validated before anything runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from acutance.calibration.fit.collect import TARGETS, Target
from acutance.calibration.fit.law_families import FITTED
from acutance.calibration.fit.passes import knots_of
from acutance.calibration.fit.windows import Turn
from acutance.calibration.identity import longest, positions_are_learned
from acutance.shapes import check_count, check_flag, check_number, did_you_mean

__all__ = [
    "Request",
    "check_request",
    "check_positions",
    "check_reference",
    "check_target",
    "check_windows",
]

#: Other names that a target is known by.
_ALIASES = {"information_fraction": "normalized_entropy"}


@dataclass(frozen=True)
class Request:
    """The arguments of a calibration that do not depend on the model.

    Attributes:
        target: the metric to hold.
        value: wanted everywhere; None is each head's own at the reference.
        knots: rising lengths at which factors are fitted.
        reference: one of them.
        law: ``"table"`` or the family to fit.
        passes: measurements, at most.
        limit: bound of the factors, either way.
        windowed: also fit layers with a sliding window.
    """

    target: Target
    value: float | None
    knots: tuple[int, ...]
    reference: int
    law: str
    passes: int
    limit: float
    windowed: bool


def check_request(
    target: str,
    value: float | None,
    lengths: Sequence[int],
    reference: int | None,
    law: str,
    passes: int,
    limit: float,
    windowed: bool,
) -> Request:
    """Everything that can be refused without running the model.

    Raises:
        TypeError: if something is of the wrong kind.
        ValueError: if something is out of range, or does not go together.
    """
    kind = check_target(target)
    if law not in FITTED:
        hint = did_you_mean(law, FITTED)
        raise ValueError(f"law={law!r:.40} is not one of {', '.join(FITTED)}{hint}")
    at = check_reference(reference, lengths)
    if value is not None:
        value = _check_value(kind, value, lengths)
        if law in ("sqrt_log_n", "clip_log_n"):
            raise ValueError(f"law={law!r} is 1 at the reference, so value cannot be given")
    if kind.name == "max_logit" and law not in ("table", "constant"):
        raise ValueError(
            f"target='max_logit' is a bound, which law={law!r} cannot keep: use law='table'"
        )
    return Request(
        kind,
        value,
        knots_of(lengths, at),
        at,
        law,
        check_count("passes", passes, 2),
        check_number("limit", limit, above=1.0),
        check_flag("windowed", windowed),
    )


def check_reference(reference: int | None, lengths: Sequence[int]) -> int:
    """The reference length: the given one, or the first length if None.

    Raises:
        TypeError: if it is not a whole number.
        ValueError: if it is not one of the lengths.
    """
    at = lengths[0] if reference is None else check_count("reference", reference, 2)
    if at not in lengths:
        raise ValueError(f"reference must be one of the lengths {list(lengths)}, got {at}")
    return at


def check_target(target: str) -> Target:
    """The :class:`Target` of a name.

    Raises:
        TypeError: if the name is not a string.
        ValueError: if it is unknown; the message names the nearest.
    """
    if not isinstance(target, str):
        raise TypeError(f"target must be the name of a metric, got {type(target).__name__}")
    name = _ALIASES.get(target, target)
    if name not in TARGETS:
        raise ValueError(
            f"target={target!r:.40} is not one of "
            f"{', '.join((*TARGETS, 'loss'))}{did_you_mean(target, (*TARGETS, 'loss'))}"
        )
    return TARGETS[name]


def _check_value(target: Target, value: float, lengths: Sequence[int]) -> float:
    """The value as a float; raises ValueError if rows of the longest length cannot have it."""
    value = check_number("value", value)
    n = lengths[-1]
    low, high = target.limits(n)
    if target.name == "max_logit":
        low, said = 0.0, "above 0"
    else:
        least = "" if target.name != "top_weight" else f" (1/{n})"
        most = f" (log {n})" if target.name == "entropy" else ""
        said = f"between {low:.4g}{least} and {high:.4g}{most}"
    if not low < value < high:
        unit = "" if target.unit == "1" else f" {target.unit}"
        raise ValueError(
            f"value: {target.name} of rows with {n} keys must be {said}, got {value:g}{unit}"
        )
    return value


def check_positions(model: torch.nn.Module, lengths: Sequence[int]) -> None:
    """Raise ValueError if lengths exceed the model's learned positions.

    Warns:
        UserWarning: if they exceed positions that are not learned.
    """
    limit = longest(model)
    if limit is None or lengths[-1] <= limit:
        return
    said = f"lengths reach {lengths[-1]}, but the model has {limit} positions"
    if positions_are_learned(model):
        raise ValueError(said)
    warnings.warn(said, stacklevel=3)


def check_windows(turns: Sequence[Turn], lengths: Sequence[int]) -> dict[int, int]:
    """Number of windows of each length.

    Raises:
        ValueError: if a length has fewer than two windows, so that no error can be estimated.
    """
    found = dict.fromkeys(lengths, 0)
    parts: dict[int, set[int]] = {length: set() for length in lengths}
    for turn in turns:
        found[turn.length] += turn.groups.numel()
        parts[turn.length].update(turn.groups.tolist())
    for length in reversed(lengths):
        if len(parts[length]) < 2:
            raise ValueError(
                f"calibration needs at least 2 windows of {length} tokens, got "
                f"{found[length]}: give more text, or shorter lengths"
            )
    return found
