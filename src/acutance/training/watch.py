"""AttentionWatch: a model's row statistics during training, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.find_layers import Chosen
from acutance.capture.listener import Listener, ProbeError
from acutance.masks import hidden_scores, shows
from acutance.nn import Recorded
from acutance.nn.recording import listen
from acutance.rowstats import RowStatistics, observe
from acutance.shapes import check_flag


@dataclass(frozen=True)
class WatchedRows:
    """Row statistics of one attention call.

    Attributes:
        module: qualified name of the module; the name of a second call in one forward ends in
            ``#1``.
        statistics: row statistics, fields (B, Hq, L).
        kept: boolean (B, Hq, L), True if the row sees a key and its token is not padding.
        width: width of a head's queries, E; 0 if unknown.
        dtype: dtype of the queries; None if unknown.
    """

    module: str
    statistics: RowStatistics
    kept: Tensor
    width: int = 0
    dtype: torch.dtype | None = None


class AttentionWatch:
    r"""Collects the row statistics of every attention call of a model, differentiable.

    It reads what a probe reads, and the modules of :mod:`acutance.nn`. Memory is O(n): statistics
    are recomputed tile by tile in the backward pass. Compiled models run uncompiled while they are
    watched.

    Args:
        model: any module.
        layers: as for :func:`acutance.probe`: numbers of blocks, ranges, patterns of module names.
        gradients: keep the graph from the statistics to the model's parameters.
        products: ignore softcap, bias and sinks, so that ``max_logit`` is that of the scaled
            products :math:`q \cdot k`. Does not affect modules of :mod:`acutance.nn`.
        noted: called with a module's name, queries and keys before each call is read.

    Attributes:
        rows: the calls since the context was last entered, a list of :class:`WatchedRows`.
        unread: attention that could not be read, with the reason.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if a part of ``layers`` is not a layer of the model.

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
        noted: Callable[[str, Tensor, Tensor], None] | None = None,
    ) -> None:
        self.layers = layers
        self.gradients = check_flag("gradients", gradients)
        self.products = check_flag("products", products)
        self.rows: list[WatchedRows] = []
        self._model, self._noted = model, noted
        self._listener = Listener(
            model,
            self,
            layers=layers,
            gradients=gradients,
            products=products,
            listed_errors=(),
            all_rows=True,
            context=self._recorded,
        )

    def __enter__(self) -> AttentionWatch:
        self.rows = []
        self._listener.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        listener = self._listener
        listener.__exit__(kind, *details)
        if kind is None and not self.rows:
            if listener.attention_modules and not self.unread:
                raise ProbeError(
                    f"layers={self.layers!r} matches none of the layers that ran: "
                    f"{', '.join(listener.attention_modules)}"
                )
            raise ProbeError(listener.nothing_captured())

    @property
    def unread(self) -> list[str]:
        """Attention that could not be read, with the reason."""
        return self._listener.unread

    def captures_module(self, name: str) -> bool:
        """Whether the attention of the named module is collected."""
        return self._listener.captures_module(name)

    def _recorded(self) -> AbstractContextManager[None]:
        """Context in which modules of :mod:`acutance.nn` report their statistics to this watch."""
        recorded = [part for part in self._model.modules() if isinstance(part, Recorded)]
        names = (self._listener.name_of(part) for part in recorded)
        self._listener.skipped = frozenset(name for name in names if name is not None)
        return listen(recorded, "graph" if self.gradients else "detached", self._on_recorded)

    # -- what is heard ----------------------------------------------------------------------------

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Store the statistics of a call."""
        self._note(call.module, call.query, call.key)
        with torch.no_grad():
            real = self._listener.rows.real(call).rows
        if self.products:  # without bias, softcap and sinks
            mask = None if call.attn_mask is None else shows(call.attn_mask)
            call = replace(call, attn_mask=mask, bias=None, softcap=None, sinks=None)
        query = call.query
        self._add(call.module, call.statistics(False), real, query.shape[-1], query.dtype)

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None]) -> None:
        """Store the statistics of a hand-written softmax."""
        if (reason := doubt()) is not None:
            self._listener.unreadable(name, reason)
            return
        visible = torch.logical_not(hidden_scores(scores))
        with torch.no_grad():
            n, seen = visible.sum(-1), visible.any(2).any(1)
            real = self._listener.rows.real_of_scores(scores, name, n, seen).rows
        self._add(name, RowStatistics(observe(scores, visible)), real, 0, scores.dtype)

    def on_products(self, products: Tensor, query: Tensor, key: Tensor, name: str) -> None:
        """Store the statistics of the products that hand-written scores are computed from."""
        self._note(name, query, key)
        stats = RowStatistics(observe(products, products > -torch.inf))
        self._add(name, stats, None, query.shape[-1], query.dtype)

    def _note(self, name: str, query: Tensor, key: Tensor) -> None:
        """Pass a module's queries and keys to the callback ``noted``."""
        if self._noted is not None:
            self._noted(name.partition("#")[0], query, key)

    def _add(self, name: str, stats: RowStatistics, real: Tensor | None, *queries: Any) -> None:
        """Store the statistics of a call: of rows that count, with width and dtype of queries."""
        counted = stats.state.n > 0
        if real is not None:
            counted = counted & real[:, None, :]
        self.rows.append(WatchedRows(name, stats, counted, *queries))

    def _on_recorded(self, module: Recorded, stats: Any) -> None:
        """Collect the statistics that a module of :mod:`acutance.nn` recorded."""
        name = self._listener.name_of(module)
        if name is None or stats is None:
            return
        self._listener.attention_modules.setdefault(name)
        if not self._listener.captures_module(name):
            return
        if isinstance(stats, RowStatistics):
            self._add(name, stats, None, getattr(module, "head_dim", 0))
        else:
            self._listener.unreadable(name, "its weights are not a softmax of its scores")
