"""Read one captured call: the statistics of its rows, and whether they can be trusted.

With ``provide`` acutance's kernel also computes the call in place of the model, and returns the
statistics with the output: measuring then costs little more than running the model. Outputs equal
the model's up to rounding. The first call of each kind is also computed by the model's function; a
layer whose outputs differ is not replaced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from acutance.capture.attention_call import VERIFY_TOLERANCE, AttentionCall, observe_scores
from acutance.capture.find_layers import HeadChoice
from acutance.capture.head_axis import first_head
from acutance.capture.intercept import unwatched
from acutance.capture.listener import Listener
from acutance.kernels.fast_path import PackedStatistics
from acutance.masks import hidden_scores, shallow_mask
from acutance.probing.accumulate import LayerRecords
from acutance.probing.causes import differences, find_cause, row_errors
from acutance.probing.settings import ProbeSettings
from acutance.probing.tokens import PlaceReader, Reader, SelectedCall, draw
from acutance.rowstats import RowState, RowStatistics
from acutance.summary.layer import Layer, Status
from acutance.summary.readouts.moments import CallRows

#: Begins the doubt about a call of which something was missed.
REBUILT_DIFFERS = "do not trust its rows: the output recomputed from the captured arguments differs"

#: What is not known of scores that were sorted.
SORTED = "its keys are in the order of their scores, as after top-k: first_weight is not known"
#: Why weights on single keys are not read where a law moves them.
MOVED = (
    "its law reads keys at other positions: statistics of rows are known, but no weights on single "
    "keys, and no queries and keys are kept"
)


_ORDINARY = 1e3  # no score beyond it is beside a mask of −1e4


class CallReader:
    """Reads the calls that a probe's listener captures, and adds their rows to its records.

    Attributes:
        listener: captures the calls, and lists those whose rows are not reliable.
    """

    listener: Listener

    def __init__(
        self, settings: ProbeSettings, readers: Sequence[Reader], records: LayerRecords
    ) -> None:
        """Create a reader.

        Args:
            settings: the probe's options.
            readers: what else is read of each call, such as its structure.
            records: the accumulated statistics of each layer.
        """
        self._settings, self._readers, self._records = settings, readers, records
        self._places = PlaceReader()
        self._verify = settings.verify
        self._moments_wanted = settings.noise, settings.gaps
        self._agreed_kinds: set[tuple[object, ...]] = set()
        self._verified_modules: set[str] = set()
        self._heads = None if settings.heads is None else HeadChoice(settings.heads)
        self._suspects: set[str] = set()  # modules whose output differed: not provided any more
        self._provided_kinds: set[tuple[object, ...]] = set()
        self._doubted_modules: set[str] = set()
        self._warned: set[bool] = set()

    def on_call(
        self, call: AttentionCall, output: Callable[[], Tensor] | None, module: torch.nn.Module
    ) -> None:
        """Record a call that the model computed; ``output`` returns the model's (B, Hq, L, Ev)."""
        _check_not_batched(call.query, call.key, call.value)
        call = self._with_deep_masks(call)
        selected = self._select(call, module)
        doubted = call.module in self._suspects
        if call.dropout_p > 0.0:
            output = None  # not to be compared
        kind = call.kind() if output is not None and self._verify == "first" else None
        already_agreed = not doubted and kind in self._agreed_kinds
        if output is None or already_agreed or not (self._verify or doubted):
            status: Status = "checked" if already_agreed else "captured"
            rows = _result(selected, selected.call.statistics(*self._moments_wanted), status)
        else:
            rows = self._verified(selected, output, kind, module)
        self._record(self._read_more(selected, rows, module), call.module)

    def on_scores(self, scores: Tensor, name: str, doubt: Callable[[], str | None]) -> None:
        """Record rows whose scores are known, but not their queries and keys.

        Args:
            scores: (B, H, L, S), −inf where a key is hidden.
            name: name of the call.
            doubt: called when the rows are to be verified; returns why they are wrong, or None.
        """
        _check_not_batched(scores)
        scores = self._with_deep_mask(scores.detach(), name, products=True)
        heads = self._chosen(scores.shape[1])
        chosen = scores if heads is None else scores[:, heads]
        stats, visible = observe_scores(chosen, self._settings.gaps)
        counting = self.listener.rows.rows_of_scores(scores, name, stats.state.n, visible)
        empty = scores[..., :0]
        call = AttentionCall(name, "softmax", empty, empty, empty)
        selected = SelectedCall(call, counting, heads)
        verified = self._verify == "first" and name in self._verified_modules
        self._verified_modules.add(name)
        doubt_text = doubt() if self._verify and not verified else None
        status: Status = "unverified" if doubt_text is None else "mismatch"
        if _in_order_of_size(chosen):
            stats.state.first.fill_(torch.nan)
            doubt_text = doubt_text or SORTED
        rows = _result(selected, stats, status)._replace(doubt=doubt_text)
        for reader in self._readers:
            rows = reader.read_scores(chosen, rows)
        self._record(rows, name)

    def compute(
        self, call: AttentionCall, model_output: Callable[[], Tensor], module: torch.nn.Module
    ) -> tuple[Tensor, Callable[[], None]]:
        """Compute a call's output in place of the model.

        Returns:
            The output (B, Hq, L, Ev), and a function that records the call's statistics.

        Raises:
            ValueError: if it cannot be computed; the message is the reason.
        """
        if self._with_deep_masks(call) is not call:
            raise ValueError("its mask hides keys with a number above -1e9")
        if reason := reason_not_provided(call):
            raise ValueError(reason)
        if call.module in self._suspects:
            raise ValueError("its output differs from the model's")
        with unwatched():
            output, stats = call.rebuild(*self._moments_wanted)
        if output.requires_grad:
            state = RowState(*(field.detach() for field in stats.state))
            stats = RowStatistics(state, stats.backend)
        kind = (*call.kind(), bool((stats.state.n == 0).any()))
        error = None
        if self._verify is True or kind not in self._provided_kinds:
            with torch.no_grad():
                error = _difference(output, model_output())
            if not error <= VERIFY_TOLERANCE.get(output.dtype, 0.0):
                self._suspects.add(call.module)
                raise ValueError(
                    f"its output differs from the model's by a relative error of {error:.2g}"
                )
            self._provided_kinds.add(kind)

        def record() -> None:
            selected, selected_stats = self._select(call, module), stats
            if selected.heads is not None or selected.sample is not None:
                state = RowState(*(selected.select(field) for field in stats.state))
                selected_stats = RowStatistics(state, stats.backend)
            status: Status = "checked" if error is None else "verified"
            rows = _result(selected, selected_stats, status, error, provided=True)
            self._record(self._read_more(selected, rows, module), call.module)

        return output, record

    def _record(self, rows: CallRows, name: str) -> None:
        """Add what was read of a call to the records, and list it if it is doubtful."""
        self._records.add(rows)
        if rows.doubt is not None:
            self.listener.unreadable(name, rows.doubt)

    def _verified(
        self,
        selected: SelectedCall,
        output: Callable[[], Tensor],
        kind: tuple[object, ...] | None,
        module: torch.nn.Module,
    ) -> CallRows:
        """Read a call and compare its rebuilt output with the model's.

        Args:
            selected: the heads and rows to read.
            output: returns the model's output (B, Hq, L, Ev).
            kind: of the calls that need no comparison if this one agrees; None for this call alone.
            module: the attention module.
        """
        call = selected.whole
        rebuilt, stats = selected.call.rebuild(*self._moments_wanted)
        model_output = selected.select(output())
        if model_output.shape != rebuilt.shape:
            raise ValueError(
                f"its output has shape {tuple(model_output.shape)}, but the output recomputed from "
                f"its queries, keys and values has {tuple(rebuilt.shape)}"
            )
        counted = _counted_rows(selected, stats)
        errors, tolerance = differences(
            selected.call, rebuilt, stats.state.m, model_output, counted
        )
        agrees, error = bool((errors <= tolerance).all()), _largest(errors)
        status: Status = "verified" if agrees else "mismatch"
        rows = _result(selected, stats, status, error, counted=counted)
        if agrees and kind is not None:
            self._agreed_kinds.add(kind)
        if not agrees and call.module not in self._doubted_modules:  # a module's first says it all
            self._doubted_modules.add(call.module)
            if selected.sample is not None:
                # sampled rows would not do: their causality and window have become one mask
                selected = replace(selected, sample=None)
                counted = _counted_rows(selected, selected.call.statistics(False))
            cause = find_cause(selected.call, selected.select(output()), counted, module)
            reason = f"; {cause.sentence}" if cause else call.unknown_keywords()
            rows = rows._replace(doubt=f"{REBUILT_DIFFERS} by {error:.2g} of its size{reason}")
        return rows

    def _read_more(
        self, selected: SelectedCall, rows: CallRows, module: torch.nn.Module
    ) -> CallRows:
        """Add what needs the call's queries and keys: structure, maps, spans, a sample of them."""
        if not self._readers:
            return rows
        if selected.whole.moved and any(reader.option != "spans" for reader in self._readers):
            raise ValueError(MOVED)
        self._places.place(selected, module)
        for reader in self._readers:
            rows = reader.read(selected, rows)
        return rows

    def _with_deep_masks(self, call: AttentionCall) -> AttentionCall:
        """The call with its additive masks as :meth:`_with_deep_mask` reads them."""
        for name in ("attn_mask", "bias"):
            mask = getattr(call, name)
            if mask is not None and mask.dtype != torch.bool:
                deep: Any = self._with_deep_mask(mask, call.module)
                call = call if deep is mask else replace(call, **{name: deep})
        return call

    def _with_deep_mask(self, added: Tensor, module: str, *, products: bool = False) -> Tensor:
        """Read one number above −1e9 that seems to hide keys, such as −1e4, as −inf, and warn.

        Several such numbers are left as they are, with another warning.

        Args:
            added: an additive mask, or scores.
            module: name of the module.
            products: whether these are scores, which may be large without a mask; then all others
                must be small.
        """
        shallow = shallow_mask(added)
        if shallow is None:
            return added
        if products:
            seen = added.masked_fill(shallow | hidden_scores(added), 0.0)
            if not bool((seen.abs() <= _ORDINARY).all()):
                return added
        low = added[shallow]
        uniform = bool((low == low[0]).all())
        if uniform not in self._warned:
            self._warned.add(uniform)
            read = (
                f"{float(low[0]):g}, which the probe reads as a mask, as it is the same everywhere"
                if uniform
                else "numbers above -1e9, which the probe counts as visible keys, so that n and "
                "logit_std are too large"
            )
            warnings.warn(
                f"{module} hides keys with {read}; mask with -inf or torch.finfo(dtype).min",
                stacklevel=2,
            )
        return added.masked_fill(shallow, -torch.inf) if uniform else added

    def _chosen(self, total: int) -> list[int] | None:
        """Indices of the requested heads among ``total``; None for all."""
        if self._heads is None:
            return None
        heads = self._heads.of(total)
        if not heads:
            raise ValueError(f"heads: none of the requested heads exists, the layer has {total}")
        return heads

    def _select(self, call: AttentionCall, module: torch.nn.Module) -> SelectedCall:
        """Choose the heads and rows of a call to read; the call itself is not yet restricted."""
        counting = self.listener.rows.rows_of_call(call)
        split = dist.is_available() and dist.is_initialized()
        first = first_head(module, call.query) if split else 0
        sample, heads = None, self._chosen(call.query.shape[1])
        if (max_rows := self._settings.max_rows) is not None:
            thread = self.listener.thread
            number = thread.call_number(call.module)
            seed = (self._settings.seed, call.module, thread.pass_number, number)
            every = torch.ones_like(call.query[:, 0, :, 0], dtype=torch.bool)
            real = every if counting.counted is None else counting.counted.to(every.device)
            sample = draw(real, max_rows, seed)
        return SelectedCall(call, counting, heads, first, sample)


def _counted_rows(selected: SelectedCall, stats: RowStatistics) -> Tensor:
    """Rows that enter the summary, boolean (B, H, L): real tokens that see a key."""
    real = selected.rows.counted if selected.sample is None else selected.sample.real
    n = stats.n if isinstance(stats, PackedStatistics) else stats.state.n
    return n > 0 if real is None else (n > 0) & real[:, None, :]


def _result(
    selected: SelectedCall,
    stats: RowStatistics,
    status: Status,
    error: float | None = None,
    *,
    counted: Tensor | None = None,
    provided: bool = False,
) -> CallRows:
    """Combine statistics with the layer's record: counts of rows, status, error of the output.

    Args:
        selected: the heads and rows that were read.
        stats: statistics of the selected rows.
        status: how far the capture was verified.
        error: largest relative error of the rebuilt output; None if not compared.
        counted: the rows that enter the summary, if that is known.
        provided: whether acutance's kernel computed the call in place of the model.
    """
    if counted is None:
        counted = _counted_rows(selected, stats)
    sample, counting = selected.sample, selected.rows
    batch, heads, queries = counted.shape
    padded, padded_by, unseen = counting.padded, counting.source, 0
    rows = int(counted.sum((0, 2)).max()) if counted.numel() else 0
    if sample is not None:
        counts = {"skipped": sample.total - sample.n_sampled, "empty": sample.n_sampled - rows}
    else:
        if counting.unseen is not None:
            unseen = int((counted.any(1) & counting.unseen).sum())
            blank = int((torch.logical_not((stats.state.n > 0).any(1)) & counting.unseen).sum())
            padded, padded_by = padded + blank, "masks" if blank else padded_by
        counts = {"empty": batch * queries - padded - counting.excluded - rows}
    counts |= {"rows": rows, "padded": padded, "excluded": counting.excluded, "unseen": unseen}
    layer = Layer(
        selected.whole.module, heads, status, calls=1, padded_by=padded_by if padded else "",
        error=error, source=selected.whole.source, chosen=selected.numbers, provided=int(provided),
        **counts,
    )  # fmt: skip
    drawn = None if sample is None else (sample.total, sample.n_sampled)
    return CallRows(layer, stats, counted, drawn)


def reason_not_provided(call: AttentionCall) -> str | None:
    """Reason why acutance's kernel cannot replace a call; None if it can.

    Example:
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> reason_not_provided(AttentionCall("layer", "sdpa", x, x, x, dropout_p=0.1))
        'dropout makes its weights random'
    """
    if call.dropout_p > 0.0:
        return "dropout makes its weights random"
    for tensor in (call.query, call.key, call.value):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"its tensors have type {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return "its tensors are nested or sparse"
    if torch._C._functorch.maybe_current_level() is not None:
        return "it runs inside a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "it runs under forward-mode differentiation"
    return None


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest relative difference of two outputs; infinite where exactly one of them is NaN."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    both_nan = ours.isnan() & theirs.isnan()
    all_rows = torch.ones(ours.shape[:3], dtype=torch.bool, device=ours.device)
    first, second = (output.detach().masked_fill(both_nan, 0.0) for output in (ours, theirs))
    return _largest(row_errors(first, second, all_rows))


def _largest(errors: Tensor) -> float:
    """The largest error; 0 if there are no rows."""
    return float(errors.max()) if errors.numel() else 0.0


def _in_order_of_size(scores: Tensor) -> bool:
    """Whether all rows have their largest score first and their smallest last, as after top-k.

    False for scores (B, H, L, S) of fewer than eight rows with three visible keys, which may be so
    by chance.
    """
    if scores.shape[-1] < 3:
        return False
    for columns in (min(4, scores.shape[-1]), scores.shape[-1]):  # most end at the first few
        some = scores[..., :columns].detach()
        hidden = hidden_scores(some)
        if not bool(((some[..., 1:] <= some[..., :-1]) | hidden[..., 1:]).all()):
            return False
    last = some.masked_fill(hidden, torch.inf).amin(-1)
    falling = (torch.logical_not(hidden).sum(-1) > 2) & (last < some[..., 0])
    return int(falling.sum()) > 7


def _check_not_batched(*tensors: Tensor) -> None:
    """Raise ValueError for tensors inside ``torch.vmap``, where one call is for a whole batch."""
    if any(map(torch._C._functorch.is_batchedtensor, tensors)):
        raise ValueError(
            "its calls inside torch.vmap cannot be captured: loop over the batch instead"
        )
