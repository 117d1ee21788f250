"""The entropy of a model's heads by the number of keys, with and without a change."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from acutance.judging.remedies import Remedy
from acutance.probing.open_probe import probe

__all__ = ["entropy_by_n"]


def entropy_by_n(
    model: torch.nn.Module, remedy: Remedy | None, ids: Tensor
) -> tuple[tuple[float, float, float], ...]:
    """Mean entropy of all heads by octave of n, while a model reads a window.

    Args:
        model: the model.
        remedy: the change that it is read under.
        ids: tokens, (1, L).

    Returns:
        For each octave: the typical n of its rows, the mean over heads in nats, and the standard
        deviation from head to head.

    Raises:
        ProbeError: if the model has no attention that a probe can read.

    Example:
        >>> from acutance.reproduce import decoder
        >>> found = entropy_by_n(decoder(), None, torch.arange(64)[None])
        >>> len(found), found[0]
        (6, (1.0, 0.0, 0.0))
    """
    base = getattr(model, "base_model", model)
    tokens = ids.to(next(model.parameters()).device)
    with (
        nullcontext() if remedy is None else remedy.applied(model),
        probe(model, metrics=["entropy"], verify=False) as measured,
    ):
        (base if isinstance(base, torch.nn.Module) else model)(tokens, use_cache=False)
    profile = measured.summary().profile
    if profile is None:
        return ()
    found = []
    for octave in range(profile.mean.shape[2]):
        known = profile.count[:, 0, octave] >= (1 << octave) / 8  # a few rows are no octave
        if bool(known.any()):
            mean = profile.mean[known, 0, octave]
            n = float(profile.log_n[known, octave].mean().exp())
            found.append((n, float(mean.mean()), float(mean.std(correction=0))))
    return tuple(found)
