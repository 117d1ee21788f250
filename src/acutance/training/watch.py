"""AttentionWatch: a model's row statistics while it trains, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from acutance.capture.attention_call import AttentionCall
from acutance.capture.layer_choice import Chosen
from acutance.masks import hidden_scores, hides
from acutance.nn import Recorded
from acutance.nn.recording import listen
from acutance.probing.open_probe import Probe, ProbeError
from acutance.rowstats import RowStatistics, observe
from acutance.shapes import check_flag

__all__ = ["AttentionWatch", "WatchedRows"]


@dataclass(frozen=True)
class WatchedRows:
    """The rows of one attention call.

    Attributes:
        module: qualified name of the module; a second call of one forward ends in ``#1``.
        statistics: rows (B, Hq, L).
        kept: boolean (B, Hq, L): the row sees a key and its token is not padding.
        width: E, of a head's queries; 0 where it is not known.
        dtype: of the queries; None where it is not known.
    """

    module: str
    statistics: RowStatistics
    kept: Tensor
    width: int = 0
    dtype: torch.dtype | None = None


class AttentionWatch(Probe):
    r"""Collects the statistics of every attention call of a model, differentiable.

    What a probe reads it reads too, and the modules of :mod:`acutance.nn` besides. Memory is O(n):
    the statistics are recomputed tile by tile in the backward pass. A model that was compiled runs
    uncompiled while it is watched.

    Args:
        model: any module.
        layers: as for :func:`acutance.probe`: numbers of blocks, ranges, patterns of module names.
        gradients: keep the graph from the statistics to the model's parameters.
        products: leave out softcap, bias and sinks, so that ``max_logit`` is of the scaled products
            :math:`q \cdot k`. Does not concern modules of :mod:`acutance.nn`.

    Attributes:
        rows: what was seen since the context was last entered, a list of :class:`WatchedRows`.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if a part of ``layers`` is no layer of the model.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> with AttentionWatch(layer) as watch:
        ...     out = layer(torch.randn(2, 10, 16))
        >>> watch.rows[0].module, watch.rows[0].statistics.entropy.requires_grad
        ('self_attn', True)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        layers: Chosen | None = None,
        gradients: bool = True,
        products: bool = False,
    ) -> None:
        super().__init__(model, metrics=["entropy"], layers=layers)
        self.layers = layers
        self.gradients = check_flag("gradients", gradients)
        self.products = check_flag("products", products)
        self.rows: list[WatchedRows] = []
        self._seen: list[str] = []
        self._listening: AbstractContextManager[None] = nullcontext()
        self._own: frozenset[str] = frozenset()

    def __enter__(self) -> AttentionWatch:
        self.rows, self._seen = [], []
        super().__enter__()
        recorded = [part for part in self._model.modules() if isinstance(part, Recorded)]
        self._own = frozenset(self.name_of(part) or "" for part in recorded)
        self._listening = listen(recorded, "graph" if self.gradients else "detached", self._hear)
        self._listening.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        listening, self._listening = self._listening, nullcontext()
        listening.__exit__(None, None, None)
        super().__exit__(kind, error, trace)
        if kind is None and not self.rows:
            if self._seen and not self.unread:
                raise ProbeError(
                    f"layers={self.layers!r} names none of the attention that ran: "
                    f"{', '.join(self._seen)}"
                )
            raise ProbeError(self._saw_nothing())

    # -- what the captures report -----------------------------------------------------------------

    def observe(
        self, make: Callable[[], AttentionCall], module: str, output: Callable[[], Tensor] | None
    ) -> None:
        """Keep the statistics of a call, with their graph where gradients are wanted."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpointed forward pass run again for the backward pass
        if module.partition("#")[0] in self._own:
            return  # it hands over its statistics itself
        chosen = self._chosen(module)
        # a checkpoint that saves nothing would miss these when it runs the model's part alone again
        kept = saved_tensors_hooks(_detached, _as_saved)
        with self.mute(), self._graph(), kept, torch._C.DisableTorchFunction():
            call = make()
            with torch.no_grad():
                real = self._real_rows(call)
            if not chosen:
                return
            stats = (_products(call) if self.products else call).statistics(False)
            counted = stats.state.n > 0
            if real is not None:
                counted = counted & real[:, None, :]
            query = call.query
            self.rows.append(WatchedRows(module, stats, counted, query.shape[-1], query.dtype))

    def observe_scores(
        self, scores: Tensor, module: str, doubt: Callable[[], str | None] | None = None
    ) -> None:
        """Keep the statistics of a softmax written by hand, with their graph."""
        if torch._C._current_graph_task_id() != -1:
            return
        why = doubt() if doubt is not None else None
        if not self._chosen(module):
            return
        if why is not None:
            self.unreadable(module, why)
            return
        visible = torch.logical_not(hidden_scores(scores))
        with self.mute(), torch.no_grad(), torch._C.DisableTorchFunction():
            n, seen = visible.sum(-1), visible.any(2).any(1)
            real = self._reader.rows.real_of_scores(scores, module, n, seen).rows
        self._keep(module, scores, visible, real)

    def observe_products(self, products: Tensor, query: Tensor, key: Tensor, module: str) -> None:
        """Keep the statistics of the products that scores written by hand are made of."""
        if torch._C._current_graph_task_id() == -1 and self._chosen(module):
            self._keep(module, products, products > -torch.inf, None, query)

    def _keep(
        self,
        module: str,
        scores: Tensor,
        visible: Tensor,
        real: Tensor | None,
        query: Tensor | None = None,
    ) -> None:
        kept = saved_tensors_hooks(_detached, _as_saved)
        with self.mute(), self._graph(), kept, torch._C.DisableTorchFunction():
            stats = RowStatistics(observe(scores, visible))
            counted = stats.state.n > 0
            if real is not None:
                counted = counted & real[:, None, :]
            width, dtype = (0, scores.dtype) if query is None else (query.shape[-1], query.dtype)
            self.rows.append(WatchedRows(module, stats, counted, width, dtype))

    def _hear(self, module: Recorded, stats: Any) -> None:
        """Keep what a module of :mod:`acutance.nn` recorded, with its graph or cut from it."""
        name = self.name_of(module)
        if name is None or stats is None or not self._chosen(name):
            return
        if isinstance(stats, RowStatistics):
            width = getattr(module, "head_dim", 0)
            self.rows.append(WatchedRows(name, stats, stats.state.n > 0, width))
        else:
            self.unreadable(name, "its weights are no softmax of its scores")

    def _graph(self) -> Any:
        return nullcontext() if self.gradients else torch.no_grad()

    def _chosen(self, module: str) -> bool:
        """Whether a module is among the layers; counts the call."""
        self._calls += 1
        if module not in self._seen:
            self._seen.append(module)
        return self._wanted(module)


def _detached(saved: Tensor) -> Tensor:
    return saved.detach()  # as it is, a saved output would hold its own graph


def _as_saved(saved: Tensor) -> Tensor:
    return saved


def _products(call: AttentionCall) -> AttentionCall:
    """The call with nothing added to its products, and nothing bounding them."""
    mask = call.attn_mask
    if mask is not None and mask.dtype != torch.bool:
        mask = torch.logical_not(hides(mask))
    return replace(call, attn_mask=mask, bias=None, softcap=None, sinks=None)
