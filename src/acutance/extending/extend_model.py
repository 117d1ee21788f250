"""acutance.extend: the change that lowers a model's loss beyond its trained length most."""

from __future__ import annotations

import itertools
import math
import os
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from acutance.caching.plan import CachePlan, ForeignPlan
from acutance.calibration.apply_law import ApplyError
from acutance.calibration.law import longest, positions_are_learned
from acutance.calibration.loss_table import SEARCH, LossTable, Saving
from acutance.calibration.losses import AnyLoss, choose_loss
from acutance.calibration.windows import evaluating
from acutance.corpus.texts import model_digest, text_digest
from acutance.extending.record import Extension
from acutance.extending.search import Advance, Search
from acutance.judging.changes import (
    Change,
    as_changes,
    check_fit,
    for_train_length,
    named_change,
)
from acutance.judging.rope import rope_modules
from acutance.probing.probe import probe
from acutance.shapes import check_count, check_number

#: Rise of the loss up to the trained length that is allowed, nats a token.
MAX_COST = 0.005
#: Parts of the positions up to the trained length.
_PARTS = 8


def extend(
    model: torch.nn.Module,
    to: int,
    windows: Tensor,
    *,
    train_length: int | None = None,
    laws: Any = None,
    final: int | None = None,
    max_cost: float = MAX_COST,
    budget: float | None = None,
    loss: AnyLoss | None = None,
    by_head: bool = True,
    entropy: bool = True,
    save: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> Extension:
    r"""Find the change that lowers a model's loss beyond its trained length most.

    Every change is tried on one window; the better third goes on to the next round with twice the
    windows, until one is left or the windows of the search are used up. What counts is the mean
    loss beyond the trained length, among changes that raise the loss up to it by at most
    ``max_cost``. The last ``final`` windows then show the loss of the model as it is, of what was
    chosen, and of the best RoPE setting; no choice is made on them.

    Args:
        model: a causal language model with its head; it is put into evaluation mode meanwhile.
        to: tokens that it is to read.
        windows: (windows, L) int64 with L ≥ ``to``, of which the first ``to`` are read, at least 4.
        train_length: tokens of the windows that it was trained on; None is the longest of its
            configuration.
        laws: what to try, as for :func:`acutance.judge`, but for plans of the cache; None is
            :func:`proposals`.
        final: windows for the final numbers, at least 2; None is half of them.
        max_cost: nats a token.
        budget: minutes after which the search stops and the final windows begin; None is no limit.
            The time that the final windows will take is set aside.
        loss: as for :func:`acutance.judge`.
        by_head: if a window is best, also try other windows and temperatures for each head, by one
            backward pass; not with less than three windows for the search.
        entropy: also measure the entropy of all heads, on one final window.
        save: file that keeps the state after each run of the model, to continue from.
        resume: continue from what ``save`` holds.
        overwrite: replace what ``save`` holds.
        advance: called after each run of the model.

    Returns:
        What was chosen, losses by position before and after with errors, and all that was tried.

    Raises:
        ApplyError: if a law changes nothing of the model.
        FileExistsError: if the file of ``save`` is there, and is neither resumed nor overwritten.
        LossError: if the model has no such loss, or a loss is not a number.
        TypeError: if an argument is of the wrong kind.
        ValueError: if an argument is out of range, positions are learned, or the state to resume
            is of another run.

    Example:
        >>> import torch, acutance
        >>> from acutance.reproduce import decoder, texts
        >>> code, seed = texts.read(texts.files("held out")), torch.Generator().manual_seed(0)
        >>> windows = texts.sample_windows(code, 512, 8, seed)  # it was trained on windows of 128
        >>> laws = ["clip_log_n:train_length=128", "rope:linear,factor=4"]
        >>> found = acutance.extend(decoder(), 512, windows, train_length=128, laws=laws)
        >>> found.chosen.name, found.helps
        ('clip_log_n:train_length=128', True)
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_count("to", to, 2)
    given: Any = windows
    if not isinstance(given, Tensor) or given.dim() != 2 or given.is_floating_point():
        what = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"windows must be token IDs of shape (windows, L), got {what}")
    trained = trained_length(model, train_length)
    if to <= trained:
        raise ValueError(
            f"to must be above the trained length, got to={to} and train_length={trained}"
        )
    if len(windows) < 4 or windows.shape[1] < to:
        raise ValueError(
            f"windows must be at least 4 of at least {to} tokens, two to search on and two for "
            f"the final numbers, got {tuple(windows.shape)}"
        )
    limit = longest(model)
    if positions_are_learned(model) and limit is not None and to > limit:
        raise ValueError(
            f"the model has {limit} learned positions, and no setting gives it more, got to={to}"
        )
    count = len(windows)
    final = max(2, count // 2) if final is None else check_count("final", final, 2)
    if count - final < 1:
        raise ValueError(f"windows must leave one for the search, got {count} and final={final}")
    check_number("max_cost", max_cost, above=0.0, including=True)
    if budget is not None:
        check_number("budget", budget, above=0.0)
    saving = Saving.to(save, resume=resume, overwrite=overwrite, tables={"": SEARCH})
    if laws is None:
        changes = proposals(model, trained, to)
    else:
        changes = for_train_length(model, as_changes(laws), train_length)
        for one in changes:
            if isinstance(one, CachePlan | ForeignPlan):
                raise ValueError(
                    f"law: {one.name} is a plan for the cache, which extends no model; 'acutance "
                    "judge --law' measures what it does to the loss"
                )
    check_fit(model, changes)
    measured = choose_loss(model, loss)
    windows = windows[:, :to]
    settings = {
        "model": model_digest(model),
        "text": text_digest(windows.tolist()),
        "loss": measured.words,
        "dtype": str(next((part.dtype for part in model.parameters()), None)),
        "attention": str(getattr(getattr(model, "config", None), "_attn_implementation", "")),
        "train_length": trained,
        "to": to,
        "laws": [one.words for one in changes],
        "windows": count,
        "final": final,
        "max_cost": max_cost,
        "by_head": by_head,
        "shown": {
            "laws": [one.name for one in changes] if laws is not None else "acutance's proposals"
        },
    }
    ranges = _ranges(trained, to)
    table = LossTable(settings, saving)
    search = Search(
        model=model, windows=windows, loss=measured, table=table, changes=changes, ranges=ranges,
        train_length=trained, finals=final, max_cost=max_cost,
        budget=None if budget is None else 60.0 * budget, by_head=by_head, advance=advance,
    )  # fmt: skip
    with evaluating(model), torch.inference_mode():
        measured.check(model, {"input_ids": windows[:1].to(next(model.parameters()).device)})
        search.run()
        shown = search.measure_finals()
        heads = {one: entropy_by_n(model, one, windows[-1:]) for one in shown if entropy}
    return Extension(
        to=to,
        train_length=trained,
        chosen=search.chosen,
        finals=tuple(search.final(one, heads.get(one, ())) for one in shown),
        gain=search.gain(shown),
        tried=tuple(search.tried()),
        ranges=tuple(ranges),
        search_windows=count - final,
        final_windows=final,
        max_cost=max_cost,
        complete=search.complete,
        seconds=search.seconds,
    )


def proposals(model: torch.nn.Module, train_length: int, to: int) -> list[Change]:
    """Changes to try, in the order in which they are tried.

    The factor of RoPE settings is ``to / train_length``, and groups of windows are so large, that
    the largest distance lies within those of the training.

    Args:
        model: the model; RoPE settings are left out where it has none.
        train_length: tokens of the windows that it was trained on.
        to: tokens that it is to read.

    Raises:
        ValueError: if ``to`` is not above ``train_length``.

    Example:
        >>> from acutance.reproduce import decoder
        >>> [one.name for one in proposals(decoder(), 128, 512)][:2]
        ['rope:yarn,factor=4,original_max_position_embeddings=128', \
'rope:dynamic,factor=1,original_max_position_embeddings=128']
    """
    check_count("train_length", train_length, 2)
    if to <= train_length:
        raise ValueError(
            f"to must be above train_length, the length that the model reads already, got to={to} "
            f"and train_length={train_length}"
        )
    names: list[str] = []
    with suppress(ApplyError):  # positions are not rotary
        config: Any = rope_modules(model)[0][2].config
        own = config.max_position_embeddings == train_length  # then nothing has to say it
        trained = "" if own else f",original_max_position_embeddings={train_length}"
        ratio, base = to / train_length, config.rope_parameters.get("rope_theta")
        factor = f"factor={int(ratio) if ratio.is_integer() else round(ratio, 4)}"
        warm = round(1 + 0.2 * math.log(ratio), 3)  # YaRN's is 1 + 0.1 ln factor
        names = [
            f"rope:yarn,{factor}{trained}",
            f"rope:dynamic,factor=1{trained}",
            f"rope:dynamic,{factor}{trained}",
            f"rope:llama3,{factor}{trained}",
            f"rope:linear,{factor}",
            f"rope:yarn,{factor}{trained},attention_factor=1.0",
            f"rope:yarn,{factor}{trained},attention_factor={warm}",
        ]
        if base is not None:  # else the settings are by type of layer
            names.append(f"rope:default,rope_theta={round(base * ratio, 3)}")
    half, quarter = max(1, train_length // 2), max(1, train_length // 4)
    windows = [f"size={train_length}", f"size={half}"]  # those that only drop keys come first
    if names:
        windows += [
            f"size={max(1, train_length - 4)},sinks=4,sink_positions=window",
            f"size={half},sinks=4,sink_positions=window",
            f"size={half},far=clamp",
        ]
        for size in (half, quarter):  # the farthest key just within the trained length, and nearer
            least = math.ceil((to - size) / (train_length - size))
            windows += [f"size={size},far=group,group={group}" for group in (least, least + 1)]
    # rows up to the trained length stay as they are
    names.append(f"clip_log_n:train_length={train_length}")
    names += [f"window:{window},beyond={train_length}" for window in windows]
    return [named_change(name) for name in names]


def trained_length(model: torch.nn.Module, given: int | None) -> int:
    """Number of tokens of the windows a model was trained on: as given, or from its configuration.

    Args:
        model: the model.
        given: the user's number; None reads the configuration.

    Raises:
        ValueError: if neither states it.
    """
    found = longest(model) if given is None else check_count("train_length", given, 2)
    if found is None:
        raise ValueError("train_length must be given: the model's configuration has none")
    return found


def _ranges(train_length: int, to: int) -> list[tuple[int, int]]:
    """First and last n of ranges of equal size up to ``to``, one ending at the trained length."""
    size = max(1, train_length // _PARTS, (to + 127) // 128)
    edges = [0, *range(train_length, 0, -size)[::-1], *range(train_length + size, to, size), to]
    edges = sorted(set(edges))
    return [(first + 1, last) for first, last in itertools.pairwise(edges)]


def entropy_by_n(
    model: torch.nn.Module, change: Change | None, ids: Tensor
) -> tuple[tuple[float, float, float], ...]:
    """Mean entropy of all heads by octave of n, while a model reads a window.

    Args:
        model: the model.
        change: the change that it is read under.
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
        nullcontext() if change is None else change.on(model),
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
