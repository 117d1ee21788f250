"""Time: contenders in turns, short calls repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from acutance.comparison.timing import Seconds, timed

#: A call shorter than this is repeated and averaged, seconds.
SHORTEST = 0.02
MOST_REPEATS = 5000

Call = Callable[[], object]
#: Prepares a turn, untimed, and gives the call that is timed.
Job = Callable[[], AbstractContextManager[Call]]


def turns(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round, reversed every other one, so that nobody always follows the same.

    Example:
        >>> list(turns(["a", "b", "c"], 3))
        [['a', 'b', 'c'], ['c', 'b', 'a'], ['a', 'b', 'c']]
    """
    for index in range(rounds):
        yield list(names) if index % 2 == 0 else list(reversed(names))


def warm_up(jobs: Mapping[str, Job]) -> dict[str, int]:
    """Call each twice; returns how often each is repeated so that a measurement is long enough."""
    repeats = {}
    for name, job in jobs.items():
        with job() as call:
            first = timed(call).wall
            again = first if first > 50 * SHORTEST else timed(call).wall
            if again < SHORTEST / 50:  # so short that one call says little
                again = timed(call, 20).wall
        repeats[name] = max(1, min(MOST_REPEATS, math.ceil(SHORTEST / max(again, 1e-9))))
    return repeats


def take_turns(
    jobs: Mapping[str, Job], rounds: int, repeats: Mapping[str, int]
) -> Iterator[dict[str, Seconds]]:
    """Time calls in turns; yields each round when it is whole."""
    for order in turns(list(jobs), rounds):
        seconds = {}
        for name in order:
            with jobs[name]() as call:
                seconds[name] = timed(call, repeats[name])
        yield seconds
