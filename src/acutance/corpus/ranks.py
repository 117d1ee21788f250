"""Probing with many processes: the ranks that torchrun starts, and one summary of all of them.

Summaries are sent as safetensors bytes along a tree: log2(ranks) steps, at most two summaries in
memory per rank, merged in rank order.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from acutance.corpus.load_model import available
from acutance.summary.head_summary import HeadSummary
from acutance.summary.state import from_parts

T = TypeVar("T")
#: How long the ranks that failed wait for the first one to say why.
_LAST_WORDS = timedelta(seconds=10)


class RankError(RuntimeError):
    """Raised for an error on another rank."""


class LostRankError(RankError):
    """Raised if another rank does not respond."""

    everywhere = True


def all_reduce_summary(
    summary: HeadSummary | None, group: dist.ProcessGroup | None = None
) -> HeadSummary:
    """The summary of all ranks' rows, on every rank of a group.

    Counts, extremes and histograms equal those of one process that saw all rows; means and spreads
    agree up to float64 rounding. Every rank of the group must call it.

    Args:
        summary: this rank's summary (:meth:`acutance.Probe.summary`); None if it has no rows.
        group: the process group (gloo or NCCL); None for the default group.

    Raises:
        RuntimeError: if torch.distributed is not initialised.
        ValueError: on every rank, if no rank has a summary, or if summaries do not merge.

    Example:
        >>> import acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> all_reduce_summary(probe.summary()).mean("effective_keys")
        tensor([4.0000, 4.0000], dtype=torch.float64)
        >>> dist.destroy_process_group()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "all_reduce_summary needs torch.distributed, which is not initialised: call "
            "torch.distributed.init_process_group first"
        )
    joined, problem = _collect(summary, group)
    first = dist.get_rank(group) == 0
    if first and joined is None and not problem:
        problem = "no rank has a summary, because none captured attention"
    box = [_message(joined, problem, group)]
    dist.broadcast_object_list(box, _peer(0, group), group)
    data, problem = box[0]
    if problem:
        raise ValueError(problem)
    return joined if joined is not None and first else unpacked(data)


def _collect(
    summary: HeadSummary | None, group: dist.ProcessGroup | None
) -> tuple[HeadSummary | None, str]:
    """All ranks' summaries on the group's first rank, and why there is none; else None and ""."""
    rank, size, step = dist.get_rank(group), dist.get_world_size(group), 1
    problem = ""
    while step < size:
        if rank % (2 * step):
            dist.send_object_list(
                [_message(summary, problem, group)], _peer(rank - step, group), group
            )
            return None, ""
        if rank + step < size:
            box: list[tuple[bytes, str]] = [(b"", "")]
            dist.recv_object_list(box, _peer(rank + step, group), group)
            data, theirs = box[0]
            problem = problem or theirs
            if data and not problem:
                try:
                    other = unpacked(data)
                    summary = other if summary is None else summary.merge(other)
                except ValueError as error:
                    last = min(rank + 2 * step, size) - 1
                    problem = f"the summaries of ranks {rank} to {last} do not merge: {error}"
        step *= 2
    return (None if problem else summary), problem


def _message(
    summary: HeadSummary | None, problem: str, group: dist.ProcessGroup | None
) -> tuple[bytes, str]:
    """What a rank sends to the others, which wait for it: its summary or nothing, and an error."""
    data = b""
    if not problem and summary is not None:
        try:
            data = packed(summary)
        except (AttributeError, TypeError, ValueError) as error:  # no summary, or none as JSON
            problem = f"rank {dist.get_rank(group)} cannot send its summary: {error}"
    return data, problem


def packed(summary: HeadSummary) -> bytes:
    """A summary as safetensors bytes."""
    from safetensors.torch import save

    header, tensors = summary.parts()
    return bytes(save(tensors, metadata=header))


def unpacked(data: bytes) -> HeadSummary:
    """The summary from safetensors bytes."""
    from safetensors.torch import load

    size = int.from_bytes(data[:8], "little")
    return from_parts(json.loads(data[8 : 8 + size])["__metadata__"], load(data))


def _peer(rank: int, group: dist.ProcessGroup | None) -> int:
    """Global rank of the process that has rank ``rank`` in the group."""
    return rank if group is None else dist.get_global_rank(group, rank)


class Ranks:
    """The ranks of one probing run, started by torchrun, which communicate on the CPU, over gloo.

    One process by itself is a single rank, which asks no other.

    Attributes:
        rank: number of this process.
        size: number of processes.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.rank, self.size = rank, size
        self._local, self._stop = local_rank, False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context for work that every rank does; an error on one rank is raised on all.

        Raises:
            RankError: on the ranks where the work itself went well.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            problem = error
        if not self._any(problem is not None):
            return
        text = None if problem is None else str(problem) or type(problem).__name__
        messages: list[str | None] = [None] * self.size
        with _gloo_errors():
            dist.all_gather_object(messages, text)
        if problem is not None:
            raise problem
        rank = next(index for index, message in enumerate(messages) if message is not None)
        raise RankError(f"rank {rank}: {messages[rank]}")

    def stopped(self) -> bool:
        """Whether any rank was asked to stop, by Ctrl-C or torchrun."""
        return self._any(self._stop)

    def collect(self, summary: HeadSummary | None) -> HeadSummary | None:
        """All ranks' summaries on the first rank; None on the others."""
        if self.size == 1:
            return summary
        with _gloo_errors():
            joined, problem = _collect(summary, None)
        if problem:
            raise ValueError(problem)
        return joined

    def first(self, value: T) -> T:
        """The first rank's value, on every rank."""
        box = [value]
        if self.size > 1:
            with _gloo_errors():
                dist.broadcast_object_list(box, 0)
        return box[0]

    def device(self, name: str) -> str:
        """The device of this rank's model: each rank of a machine has its own CUDA device."""
        name = available(name)
        return f"cuda:{self._local}" if name == "cuda" and self.size > 1 else name

    def stop(self, *_: object) -> None:
        """Signal handler: stop after the current batch."""
        self._stop = True

    def _any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        if self.size == 1:
            return flag
        flags = torch.tensor([int(flag)])
        with _gloo_errors():
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)


@contextmanager
def _gloo_errors() -> Iterator[None]:
    """Context in which gloo's socket errors become LostRankError."""
    try:
        yield
    except RuntimeError as error:
        rank = os.environ.get("RANK", "0")
        this = "" if rank == "0" else f"rank {rank}: "
        raise LostRankError(
            f"{this}another rank has exited or does not respond, so this run stops; continue "
            "from the saved state with --resume"
        ) from error


@contextmanager
def world(timeout: timedelta = timedelta(minutes=30)) -> Iterator[Ranks]:
    """Context manager for the ranks of this run: :class:`Ranks` under torchrun, else one process.

    Args:
        timeout: how long a rank waits for the others.
    """
    by_torchrun = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    if not by_torchrun or os.environ["WORLD_SIZE"] == "1":
        yield Ranks()
        return
    dist.init_process_group("gloo", timeout=timeout)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = Ranks(dist.get_rank(), dist.get_world_size(), local)
    before = {
        kind: signal.signal(kind, ranks_here.stop) for kind in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield ranks_here
    finally:
        with suppress(RuntimeError):  # the first rank may have words to say before torchrun ends it
            dist.barrier(async_op=True).wait(_LAST_WORDS)
        with suppress(RuntimeError):
            dist.destroy_process_group()
        for kind, handler in before.items():
            signal.signal(kind, handler)
