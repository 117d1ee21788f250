"""Runs: which rows of a serving engine are read, and sequences followed from pass to pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Most consecutive rows of a sequence that are read together. The kernels compute 32 rows at once.
RUN = 32


class Rows(NamedTuple):
    """The rows of one sequence in a forward pass.

    Attributes:
        position: of the first row in the sequence.
        length: number of rows.
        slot: where the key of the first row is stored in the cache.
        last_slot: where the key of the last row is stored.
    """

    position: int
    length: int
    slot: int
    last_slot: int


@dataclass(eq=False)
class Run:
    """Consecutive rows of one sequence that are read together.

    Attributes:
        position: of the first row in the sequence.
        decoded: whether the rows come one by one.
        rows: number of rows so far.
        recorded: what the reader stores of them.
    """

    position: int
    decoded: bool
    rows: int = 0
    recorded: dict[Any, Any] = field(default_factory=dict)


class Piece(NamedTuple):
    """Rows of a run in one forward pass.

    Attributes:
        run: the run.
        sequence: index of the sequence in the pass.
        start: index of the first row in the pass.
        rows: number of rows.
    """

    run: Run
    sequence: int
    start: int
    rows: int


class Runs:
    """Chooses rows of sequences in blocks of :data:`RUN` positions, each block by one draw.

    Several rows of a sequence in one pass, as of a prompt, are read after the pass. Rows that come
    one by one wait until their block of positions is complete, so that the keys are read once. The
    next row of a sequence is recognised by its slot, which follows the last one within a block of
    the cache. At the end of such a block, the run ends too, and a new draw decides on the rest.

    Args:
        draw: returns True for a share of its calls.
        windows: sliding windows of the layers, in keys. A run ends before the engine may free a
            block that its first row needs.

    Attributes:
        wait: whether rows may wait. Where some passes are not seen, keys of rows that wait may be
            overwritten unnoticed.

    Example:
        >>> runs = Runs(lambda: True)
        >>> pieces, complete, _ = runs.follow([Rows(0, 40, 128, 167)], block=64)  # a prompt
        >>> [(piece.start, piece.rows) for piece in pieces], len(complete)
        ([(0, 32), (32, 8)], 2)
        >>> pieces, complete, _ = runs.follow([Rows(40, 1, 168, 168)], block=64)  # a token waits
        >>> [(piece.start, piece.rows) for piece in pieces], len(complete)
        ([(0, 1)], 0)
        >>> [run.rows for run in runs.take()]
        [1]
    """

    def __init__(self, draw: Callable[[], bool], windows: Collection[int] = ()) -> None:
        self._draw, self._windows, self.wait = draw, windows, True
        self._next: dict[int, tuple[int, Run | None]] = {}  # slot -> position, None if not chosen

    def follow(
        self, sequences: Sequence[Rows], block: int
    ) -> tuple[list[Piece], list[Run], list[Run]]:
        """Choose the rows of a forward pass.

        Args:
            sequences: those of the pass, in order.
            block: number of tokens in a block of the cache.

        Returns:
            Rows to record; runs to read after the pass; and runs of earlier passes whose sequences
            do not go on, unless :meth:`end` has returned them.
        """
        earlier, self._next = self._next, {}
        pieces: list[Piece] = []
        complete: list[Run] = []
        row = 0
        for index, (position, length, slot, last_slot) in enumerate(sequences):
            if length == 0:
                continue
            end, at = position + length, position
            known = earlier.get(slot)
            if known is not None and known[0] == position:
                run = earlier.pop(slot)[1]
            else:
                run = Run(at, length == 1) if self._draw() else None
            while True:
                stop = min(end, at - at % RUN + RUN)
                if run is not None:
                    run.rows += stop - at
                    pieces.append(Piece(run, index, row + at - position, stop - at))
                # the keys of rows that wait stay in the cache while the next row is computed: an
                # engine may free a block when all its keys are outside the window of that row
                waits = (
                    run is not None
                    and length == 1
                    and self.wait
                    and all(
                        (end - window + 1) // block <= max(run.position - window + 1, 0) // block
                        for window in self._windows
                    )
                )
                goes_on = end % RUN != 0 and (last_slot + 1) % block != 0
                if run is not None and not (stop == end and goes_on and waits):
                    complete.append(run)
                if stop == end:
                    if goes_on:
                        later = run if waits or run is None else Run(end, True)
                        self._next[last_slot + 1] = end, later
                    break
                at = stop
                run = Run(at, False) if self._draw() else None
            row += length
        ended = [run for _, run in earlier.values() if run is not None and run.rows]
        return pieces, complete, ended

    def end(self, slots: Collection[int]) -> list[Run]:
        """End the runs whose sequences do not go on, and return those with rows.

        Args:
            slots: where the keys of the next pass will be stored.
        """
        # where the last row's slot is written again, its block belongs to another sequence
        ended = [slot for slot in self._next if slot not in slots or slot - 1 in slots]
        runs = [self._next.pop(slot)[1] for slot in ended]
        return [run for run in runs if run is not None and run.rows]

    def take(self) -> list[Run]:
        """Take the rows that wait, to read them now; their runs go on with the next row."""
        waiting = self.waiting
        for slot, (position, run) in self._next.items():
            if run is not None and run.rows:
                self._next[slot] = position, Run(position, True)
        return waiting

    @property
    def waiting(self) -> list[Run]:
        """Runs with rows that wait."""
        return [run for _, run in self._next.values() if run is not None and run.rows]
