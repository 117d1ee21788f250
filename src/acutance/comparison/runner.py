"""Run a comparison: every mechanism at every length, on the same queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.comparison.record import COMPARED, Comparison, Reading, Result
from acutance.comparison.rows import (
    Gaussian,
    Inputs,
    captured,
    mean_and_error,
    measure,
    predict_rows,
)
from acutance.comparison.timing import Seconds, timed
from acutance.mechanisms import MECHANISMS, Mechanism, mechanism
from acutance.mechanisms.table import Decay, Linear, Recurrence
from acutance.probing.query_key_sample import QueryKeySample
from acutance.shapes import check_count, check_flag, check_number

#: A call shorter than this is taken three times, seconds, and the quickest counts.
QUICK = 0.1
DEFAULT_LENGTHS = (256, 1024, 4096)
#: One of each kind: what concentrates, what cannot, and what does so by place alone.
DEFAULT_MECHANISMS = (
    "scaled_dot", "dot", "cosine", "cosine_tau", "log_n", "sigmoid", "relu2", "identity",
    "linear_elu1", "linear_exp", "decay", "lru",
)  # fmt: skip


class Step(NamedTuple):
    """Progress of a comparison: finished steps, total steps, and the next mechanism and length."""

    done: int
    total: int
    mechanism: str
    n: int


def compare(
    mechanisms: str | Mechanism | Sequence[str | Mechanism] | None = None,
    *,
    n: int | Sequence[int] = DEFAULT_LENGTHS,
    d: int = 64,
    heads: int = 16,
    batch: int = 1,
    samples: int = 16,
    mean: float | tuple[float, float] = 0.0,
    std: float | tuple[float, float] = 1.0,
    is_causal: bool = False,
    seed: int = 0,
    source: QueryKeySample | None = None,
    costs: bool = True,
    progress: Callable[[Step], None] | None = None,
) -> Comparison:
    r"""Run mechanisms on the same queries and keys; compare measured with predicted metrics.

    Rows are sampled: ``samples`` queries of each head, the last of their sequence, against all n
    keys of the head. Queries and keys are random normal, or those of a model (``source``).

    Args:
        mechanisms: names of :data:`acutance.MECHANISMS` or entries; ``"all"`` for all of them, None
            for :data:`DEFAULT_MECHANISMS`.
        n: numbers of keys, each at least 2.
        d: width of queries, keys and values.
        heads: number of heads, each with its own keys; with a source, the largest number.
        batch: number of sequences.
        samples: number of rows per head.
        mean: mean of the components, or a pair for queries and keys. Scaled dot products then have
            the mean :math:`\sqrt d \, \mu_q \mu_k`.
        std: their standard deviation, or a pair.
        is_causal: rows see only the keys up to their own position; recurrent mechanisms always do.
        seed: random seed.
        source: queries and keys of a model (:meth:`acutance.probing.Probe.queries_keys`); ``d``,
            ``batch``, ``mean`` and ``std`` are then ignored.
        costs: also measure the time of one head with n rows.
        progress: called before each step.

    Returns:
        The :class:`Comparison`. If interrupted (KeyboardInterrupt) after the first result, it holds
        the finished results, and ``complete`` is False.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a mechanism is unknown (the message names the nearest) or a number is out of
            range.
        ImportError: if a mechanism needs a library that is not installed; raised before anything is
            measured.

    Example:
        >>> found = compare(["cosine", "decay"], n=64, d=16, heads=2, costs=False)
        >>> found["decay", 64]["effective_keys"].predicted
        18.8...
        >>> reading = found["cosine", 64]["entropy"]
        >>> reading.measured > 4.1589 - 0.4745
        True

    Source:
        Su Jianlin, kexue.fm/archives/9889 and 9593.
    """
    chosen = pick(mechanisms)
    lengths = _lengths(n)
    check_count("d", d, 2)
    for name, value in (("heads", heads), ("batch", batch), ("samples", samples)):
        check_count(name, value, 1)
    check_count("seed", seed, 0)
    means, stds = _pair("mean", mean), _pair("std", std)
    for each in stds:
        check_number("std", each, above=0.0)
    law = Gaussian(means[0], stds[0], means[1], stds[1])
    causal = check_flag("is_causal", is_causal) or bool(source is not None and source.is_causal)

    def inputs(count: int, rows: int, of: int, sequences: int) -> Inputs:
        if source is not None:
            return captured(source, count, heads=of, samples=rows, is_causal=causal)
        return law.draw(
            count, d, heads=of, batch=sequences, samples=rows, seed=seed, is_causal=causal
        )

    two = torch.zeros(1, 1, 2, 16)
    with torch.no_grad():  # a missing library is reported before any work
        for entry in chosen:
            entry.run(two, two, two)
    results: dict[str, dict[int, Result]] = {entry.name: {} for entry in chosen}
    done, total = 0, len(chosen) * len(lengths)
    try:
        for count in lengths:
            sampled = inputs(count, samples, heads, batch)
            whole = inputs(count, count, 1, 1) if costs else None
            for entry in chosen:
                if progress is not None:
                    progress(Step(done, total, entry.name, count))
                results[entry.name][count] = _result(entry, sampled, whole, seed)
                done += 1
    except KeyboardInterrupt:
        if not done:
            raise
    settings: dict[str, Any] = {
        "n": list(lengths), "d": sampled.key.shape[3], "heads": sampled.query.shape[1],
        "batch": sampled.query.shape[0], "samples": samples, "is_causal": causal, "seed": seed,
        "query_mean": None, "query_std": None, "key_mean": None, "key_std": None,
        "heads_of_the_model": list(sampled.names),
    }  # fmt: skip
    if source is None:
        settings |= {name: getattr(law, name) for name in settings if hasattr(law, name)}
    settings |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    ordered = [result for by_length in results.values() for result in by_length.values()]
    return Comparison(tuple(ordered), settings, done == total)


def pick(mechanisms: str | Mechanism | Sequence[str | Mechanism] | None) -> tuple[Mechanism, ...]:
    """The requested entries of the table, without duplicates; see :func:`compare`.

    Raises:
        ValueError: if one is unknown (the nearest is named), or none is given.

    Example:
        >>> [entry.name for entry in pick("relu2")]
        ['relu2']
        >>> len(pick("all")) == len(MECHANISMS)
        True
    """
    if mechanisms is None:
        mechanisms = DEFAULT_MECHANISMS
    if isinstance(mechanisms, str | Mechanism):
        mechanisms = [mechanisms]
    chosen: dict[str, Mechanism] = {}
    for mechanism_or_name in mechanisms:
        if mechanism_or_name == "all":
            chosen.update(MECHANISMS)
        else:
            entry = mechanism(mechanism_or_name)
            chosen[entry.name] = entry
    if not chosen:
        raise ValueError("mechanisms must name at least one mechanism, got none")
    return tuple(chosen.values())


def _result(entry: Mechanism, sampled: Inputs, whole: Inputs | None, seed: int) -> Result:
    """Measure and predict one mechanism at one n."""
    measured = measure(entry, sampled, seed)
    predicted = predict_rows(entry, sampled, measured)
    fixed = isinstance(entry.form, Decay | Recurrence)  # weights depend only on distance
    alike = not (isinstance(entry.form, Linear) and entry.form.decays is not None)
    readings = {}
    for name in COMPARED:
        reading: dict[str, Any] = {}
        rows, theory = measured.values.get(name), predicted.values.get(name)
        if rows is not None:
            if name == "query_gradient":
                rows = rows.nanmedian(1, keepdim=True).values
            reading["measured"], reading["error"] = mean_and_error(rows, fixed=fixed, alike=alike)
        if theory is not None:
            kind = predicted.kinds[name]
            reading |= {"predicted": float(theory.nanmean()), "kind": kind}
            if rows is not None and kind == "mean":
                apart, error = mean_and_error(rows - theory)
                reading["z"] = apart / error if error > 0 else math.nan
        why = measured.why.get(name) or predicted.why.get(name, "")
        readings[name] = Reading(**reading, why=why)
    spent = Seconds(math.nan, math.nan) if whole is None else _cost(entry, whole)
    count = next(iter(measured.values.values())).numel()
    return Result(entry.name, sampled.n, count, readings, *spent, parameters=predicted.parameters)


def _cost(mechanism: Mechanism, inputs: Inputs) -> Seconds:
    """Time of a mechanism, statistics included, after a warm-up over 64 rows."""

    def run(tensors: Iterable[Tensor]) -> None:
        mechanism.run(*tensors, is_causal=inputs.is_causal)

    tensors = inputs.query, inputs.key, inputs.value
    with torch.no_grad():
        run(tensor[:, :, :64] for tensor in tensors)
        timings = [timed(lambda: run(tensors))]
        if timings[0].wall < QUICK:
            timings += [timed(lambda: run(tensors)) for _ in range(2)]
    return min(timings, key=lambda seconds: seconds.wall)


def _lengths(n: int | Sequence[int]) -> tuple[int, ...]:
    """Check the numbers of keys; ascending, without duplicates."""
    lengths = (n,) if isinstance(n, int) else tuple(n)
    if not lengths:
        raise ValueError("n must contain at least one number of keys, got none")
    return tuple(sorted({check_count("n", count, 2) for count in lengths}))


def _pair(name: str, value: float | tuple[float, float]) -> tuple[float, float]:
    """Split one or two numbers into one for queries and one for keys."""
    both = value if isinstance(value, tuple | list) else (value, value)
    if len(both) != 2:
        raise ValueError(
            f"{name} must be one number, or one for queries and one for keys, got {value}"
        )
    return check_number(name, both[0]), check_number(name, both[1])
