"""acutance.calibrate: fit the scale of every head that keeps a target constant in n."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.by_loss.fit import calibrate_by_loss
from acutance.calibration.fit.families import FITTED
from acutance.calibration.fit.layer import LayerFit
from acutance.calibration.fit.measure import (
    TARGETS,
    LayerValues,
    check_reference,
    check_target,
    knots_of,
    no_layer,
    read_layers,
)
from acutance.calibration.fit.result import Calibration, HeadCalibration
from acutance.calibration.fit.windows import (
    AnyBatches,
    Turn,
    batches_by_length,
    check_lengths,
    check_positions,
    check_windows,
    cut,
)
from acutance.calibration.identity import Identity
from acutance.calibration.law import Law
from acutance.calibration.losses import AnyLoss
from acutance.capture.find_layers import layer_numbers
from acutance.probing.causes import is_untrained
from acutance.scaling import Scaling, Window
from acutance.shapes import check_count, check_flag, check_number, did_you_mean

__all__ = ["Advance", "calibrate", "check_request"]

#: Told after each run of the model: tokens just read, the pass from 1, and passes at most.
Advance = Callable[[int, int, int], None]


def calibrate(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    *,
    target: str = "entropy",
    value: float | None = None,
    loss: AnyLoss | None = None,
    lengths: Sequence[int] | None = None,
    reference: int | None = None,
    law: str = "table",
    window: Window | Sequence[Window] | None = None,
    passes: int = 6,
    limit: float = 16.0,
    windowed: bool = False,
    save: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> Calibration:
    r"""Fit, for every head, a factor that depends on the number of keys n.

    The factor keeps a target constant in n, or with ``target="loss"`` lowers the model's loss.

    The model runs over all windows without a law, then a few times under a law that Newton's steps
    improve with the slope of the same run, :math:`dH/d\log\lambda = -\mathrm{Var}_p(\lambda s)`.
    The last run measures the law that is returned.

    For the loss, the model runs with a backward pass over every window, which gives the derivative
    of the loss by all factors at once. Two windows of three are fitted to, by Adam's steps in log
    λ; the third ones decide when to stop, and return to the best so far. Heads and lengths whose
    derivative is not beyond noise (at most one in ten of those changed by chance, Benjamini and
    Hochberg) have the factor 1, as all have if the loss of the deciding windows does not fall
    beyond noise (Student's one-sided test at 5 %).

    Rows count by the keys that they see: a causal
    model has rows of every n up to its window's length, which are read at the lengths by a line in
    log n over the octave below.

    Args:
        model: any module whose attention :func:`acutance.apply` can scale; it is put into
            evaluation mode meanwhile.
        batches: tensors (B, L) of tokens or (B, L, E), which the model is called with, or mappings
            of its keywords; windows first, tokens second. They are cut into windows of every
            length. Or a mapping from each length to such batches that have it, as where every
            window has special tokens of its own. At least 2 windows of each length; errors are
            rough below some 10.
        target: ``"entropy"`` in nats, ``"normalized_entropy"`` H / log n, ``"effective_keys"`` or
            ``"top_weight"``, means over rows; or ``"loss"``.
        value: what is wanted of every head; None is each head's own at the reference length,
            without a law.
        loss: which to lower with ``target="loss"``, as for :func:`acutance.judge`.
        lengths: of windows, rising; None is that of the longest batch and its halves down to an
            eighth.
        reference: the training length, one of the lengths; None is the shortest.
        law: ``"table"``, a factor at every length; or a family fitted to it: ``"constant"``,
            ``"ssmax"`` (s log n + b), ``"log_n"``, ``"sqrt_log_n"``, ``"clip_log_n"``. For the
            loss ``"table"``, ``"constant"``, or with a window ``"none"`` for windows alone.
        window: with ``target="loss"``, let those heads read through it for which that lowers the
            loss, before factors are fitted; of several, each head chooses its own.
        passes: runs over all windows at most, the first without a law.
        limit: factors stay between 1/limit and limit.
        windowed: also fit layers with a sliding window.
        save: with ``target="loss"``, file that keeps the state as it grows, to continue from.
        save_every: windows between two writes, at least.
        resume: continue from what ``save`` holds.
        overwrite: replace what ``save`` holds.
        advance: told after each run of the model how many tokens it read, which pass this is, and
            how many there are at most.

    Returns:
        The law with what was measured for each head: values before and after with standard errors,
        predicted effect, factors, and the family that they resemble. Rows shorter than the first
        length have its factor; beyond the last each head continues by its family. For the
        loss a :class:`LossCalibration` with the derivatives, constant beyond the last length.

    Raises:
        ApplyError: if attention that was seen cannot be scaled.
        FileExistsError: if the file of ``save`` is there, and is neither resumed nor overwritten.
        LossError: if the model has no such loss.
        ProbeError: if no attention was seen.
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, the text too short, lengths are beyond the model's
            learned positions, or the state to resume is of another run.

    Warns:
        UserWarning: if lengths are beyond positions that are not learned.

    Example:
        >>> import acutance
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> text = [2 * torch.randn(8, 256, 32)]
        >>> law = acutance.calibrate(model, text, lengths=[64, 128, 256])
        >>> for numbers in (law.heads[0].before, law.heads[0].factors, law.heads[0].after):
        ...     [f"{number:.1f}" for number in numbers]
        ['2.7', '3.2', '3.8']
        ['1.0', '1.3', '1.5']
        ['2.7', '2.7', '2.7']
        >>> with acutance.apply(model, law):
        ...     _ = model(text[0])

    Source:
        Su (2021), https://kexue.fm/archives/8823 (keep the entropy as n grows).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if target == "loss":
        if value is not None or reference is not None:
            raise ValueError(
                "target='loss' holds nothing constant: value and reference cannot be given"
            )
        by_loss = calibrate_by_loss(
            model, batches, lengths=lengths, loss=loss, law=law, window=window, passes=passes,
            limit=limit, windowed=windowed, save=save, save_every=save_every, resume=resume,
            overwrite=overwrite, advance=advance,
        )  # fmt: skip
        return replace(by_loss, untrained=is_untrained(model))
    only_loss = {"loss": loss, "window": window, "save": save, "resume": resume or None}
    for option, given in only_loss.items():
        if given is not None:
            raise ValueError(f"{option} is for target='loss', got target={target!r:.40}")
    by_length = batches_by_length(batches)
    places = check_lengths(lengths, by_length)
    name, value, reference = check_request(
        target, value, places, reference, law, passes, limit, windowed
    )
    check_positions(model, places)
    turns = cut(by_length, places)
    windows = check_windows(turns, places)
    knots = knots_of(places, reference)

    def read(
        factors: Mapping[Any, Scaling] | None, number: int
    ) -> tuple[dict[str, LayerValues], dict[str, str]]:
        def after(turn: Turn) -> None:
            if advance is not None:
                advance(turn.tokens, number, passes)

        return read_layers(model, turns, name, knots, factors, windowed=windowed, after=after)

    first, skipped = read(None, 1)
    few = f"no row sees more than {knots[0] // 2} keys"
    skipped |= {module: few for module, values in first.items() if not values.knots}
    at = knots.index(reference)
    fits = {
        module: LayerFit(values, name, value, at, limit)
        for module, values in first.items()
        if values.knots
    }
    if not fits:
        raise ValueError(no_layer(skipped))
    used = 1
    for number in range(2, passes + 1):
        settled = [fit.propose() for fit in fits.values()]
        as_family = law != "table" and (number == passes or (number > 2 and all(settled)))
        if number > 2 and all(settled) and not as_family:
            break
        applied: dict[Any, Scaling] = {}
        for module, fit in fits.items():
            applied |= fit.law(module, law if as_family else "table", reference)
        values, _ = read(applied, number)
        for module, fit in fits.items():
            fit.add(values[module])
        used = number
        if as_family:
            break
    return replace(
        _result(model, fits, knots),
        target=name if value is None else f"{name}={value:g}",
        metric=name,
        value=value,
        reference=reference,
        family=law,
        passes=used,
        windows=windows,
        skipped=skipped,
        untrained=is_untrained(model),
    )


def check_request(
    target: str,
    value: float | None,
    lengths: Sequence[int],
    reference: int | None,
    law: str,
    passes: int,
    limit: float,
    windowed: bool,
) -> tuple[str, float | None, int]:
    """Check everything that can be refused without running the model.

    Returns:
        The metric's name, the wanted value, and the reference length.

    Raises:
        TypeError: if something is of the wrong kind.
        ValueError: if something is out of range, or does not go together.
    """
    name, at = check_target(target), check_reference(reference, lengths)
    if law not in FITTED:
        hint = did_you_mean(law, FITTED)
        raise ValueError(f"law={law!r:.40} is not one of {', '.join(FITTED)}{hint}")
    check_count("passes", passes, 2)
    check_number("limit", limit, above=1.0)
    check_flag("windowed", windowed)
    if value is None:
        return name, None, at
    value, n = check_number("value", value), lengths[-1]
    low, high = TARGETS[name].limits(n)
    if not low < value < high:
        least = f" (1/{n})" if name == "top_weight" else ""
        most = f" (log {n})" if name == "entropy" else ""
        unit = "" if TARGETS[name].unit == "1" else f" {TARGETS[name].unit}"
        raise ValueError(
            f"value: {name} of rows with {n} keys must be between {low:.4g}{least} and "
            f"{high:.4g}{most}, got {value:g}{unit}"
        )
    if law in ("sqrt_log_n", "clip_log_n"):
        raise ValueError(f"law={law!r} is 1 at the reference, so value cannot be given")
    return name, value, at


def _result(
    model: torch.nn.Module, fits: Mapping[str, LayerFit], knots: Sequence[int]
) -> Calibration:
    """The law, and the record of every head in model order."""
    numbers = layer_numbers(model, list(fits))
    modules = sorted(fits, key=lambda module: numbers.get(module, len(numbers)))
    law: dict[Any, Scaling] = {}
    heads: list[HeadCalibration] = []
    for index, module in enumerate(modules):
        law |= fits[module].scalings(module)
        heads += fits[module].heads(numbers.get(module, index), module)
    bins = {k for fit in fits.values() for k in fit.first.bins}
    return Calibration(
        model=Identity.of(model),
        everywhere=None,
        layers=Law.of(model, law).layers,
        lengths=tuple(knots[k] for k in sorted(bins)),
        heads=tuple(heads),
    )
