"""Reads and changes calls of attention functions: SDPA and what calls it, FlexAttention, our own.

Inside ``F.multi_head_attention_forward`` no function mode is active, so that the names of the
functions that it calls are replaced meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance import scaling as scalings
from acutance import scores
from acutance import weights as weightings
from acutance.attend import DEFAULTS, attention
from acutance.capture.attention_call import VERIFY_TOLERANCE, AttentionCall, Carrier
from acutance.capture.find_layers import is_cross
from acutance.capture.intercept import Handler, pass_on
from acutance.capture.kernel_functions.reading import alibi
from acutance.masks import check_masking, hides
from acutance.scaling import NoScaling
from acutance.scores import DotScore
from acutance.shapes import check_inputs
from acutance.weights import Softmax, SoftmaxOne

# -- scaled dot-product attention ------------------------------------------------------------------

_NAMES = "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"


class SdpaCall(Carrier):
    """One call of ``F.scaled_dot_product_attention``.

    Args:
        function: the function, or its operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        heads: number of heads of the module; None if unknown.

    Attributes:
        arguments: the arguments by name.
        heads: as given.
        multihead: arguments of the call of multi-head attention that this is part of, if it is.

    Example:
        >>> x, mask = torch.zeros(6, 5, 4), torch.zeros(5, 5)
        >>> apart = SdpaCall(torch.nn.Identity(), (x, x, x, mask), {}, heads=3).apart
        >>> apart["query"].shape, apart["attn_mask"].shape
        (torch.Size([2, 3, 5, 4]), torch.Size([5, 5]))
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        heads: int | None = None,
    ) -> None:
        self.heads, self._function = heads, function
        self.arguments = dict(zip(_NAMES, args, strict=False)) | dict(kwargs)
        self.multihead: Mapping[str, Any] | None = None

    @property
    def can_be_provided(self) -> bool:
        """Whether nobody has computed it yet."""
        return self.provided is None

    @property
    def sdpa(self) -> SdpaCall:
        """Itself."""
        return self

    @property
    def apart(self) -> dict[str, Any]:
        """The arguments, those (B · H, L, E) as (B, H, L, E) if the number of heads is known.

        Queries (B, L, E) that are part of a tensor with all heads are those of one head.
        """
        heads, query = self.heads, self.arguments["query"]
        parts = {name: self.arguments[name] for name in _NAMES[:3]}
        if heads is None or any(
            part.is_nested or part.dim() != 3 or part.shape[0] % heads or part.shape[0] == 0
            for part in parts.values()
        ):
            return self.arguments
        if not query.is_contiguous() and query.stride(0) > query.stride(1):
            return self.arguments
        parts = {name: part.unflatten(0, (-1, heads)) for name, part in parts.items()}
        mask = self.arguments.get("attn_mask")
        if isinstance(mask, Tensor) and mask.dim() == 3 and mask.shape[0] > 1:
            parts["attn_mask"] = mask.unflatten(0, (-1, heads))
        return self.arguments | parts

    def result_needed_because(self) -> str | None:
        """Why its output cannot be computed in place of the model; None if it can."""
        nested = any(self.arguments[name].is_nested for name in ("query", "key", "value"))
        return "its tensors are nested" if nested else None

    def read(self, name: str) -> AttentionCall:
        """The call; ``name`` is that of the module. Its tensors broadcast as those of SDPA do.

        Raises:
            ValueError: if nested tensors have an unsupported layout.
        """
        arguments, around, real = self.apart, self.multihead, None
        if around is None:
            cross = is_cross(name)
        else:
            cross = not _same_memory(around["query"], around["key"])
            padding = None if cross else around.get("key_padding_mask")
            if padding is not None:
                hidden = padding if padding.dtype == torch.bool else hides(padding)
                real = torch.logical_not(hidden if hidden.dim() == 2 else hidden.unsqueeze(0))
        parts = [arguments[part] for part in ("query", "key", "value")]
        scale, mask = arguments.get("scale"), arguments.get("attn_mask")
        causal, offset = bool(arguments.get("is_causal", False)), 0
        fields: dict[str, Any] = {
            "module": name,
            "source": "scaled_dot_product_attention",
            "scale": None if scale is None else float(scale),
            "dropout_p": float(arguments.get("dropout_p") or 0.0),
            "cross": cross,
        }
        if any(part.is_nested for part in parts):  # padded here, and the padding is hidden
            if mask is not None:
                raise ValueError("nested tensors with an attn_mask cannot be read")
            (query, asks), (key, answers), (value, _) = map(_padded, parts)
            fields |= {"is_causal": causal, "key_mask": answers, "real": asks}
            return AttentionCall(query=query, key=key, value=value, **fields)
        rank = parts[0].dim()
        if rank == 3:  # (N, L, E) is one head each
            parts = [part.unsqueeze(1) for part in parts]
        elif rank == 2:
            parts = [part[None, None] for part in parts]
        batch = _broadcast(*(part.shape[:-3] for part in parts))
        heads: tuple[int, ...] = ()
        if not arguments.get("enable_gqa", False):
            heads = _broadcast(*(part.shape[-3:-2] for part in parts))
        query, key, value = (
            _fold_batch(_expanded(part, (*batch, *(heads or part.shape[-3:-2]), *part.shape[-2:])))
            for part in parts
        )
        if mask is not None and type(mask) is not Tensor:
            from torch.nn.attention.bias import CausalBias, CausalVariant  # imports the compiler

            if isinstance(mask, CausalBias):  # no tensor of a mask: its own entries mean nothing
                causal = True
                if mask.variant == CausalVariant.LOWER_RIGHT:
                    offset = mask.seq_len_kv - mask.seq_len_q
                mask = None
        if isinstance(mask, Tensor):
            if rank == 3 and mask.dim() == 3:
                mask = mask.unsqueeze(1)
            elif rank > 4 and mask.dim() > 3:
                mask = _fold_batch(mask.expand(*batch, *mask.shape[-3:]))
        fields |= {"attn_mask": mask, "is_causal": causal, "query_offset": offset, "real": real}
        return AttentionCall(query=query, key=key, value=value, **fields)

    def compute(self) -> Any:
        """The result of the function, or what was computed instead."""
        if self.provided is not None:
            return restore_shape(self.provided, self.arguments)
        return self._function(**self.arguments)

    def scale_queries(self, factor: Tensor) -> None:
        """Multiply the queries by a factor (B or 1, Hq or 1, L, 1)."""
        query = self.arguments["query"]
        if query.dim() == 3:  # one head each
            factor = factor.squeeze(1)
        elif query.dim() < 3:
            factor = factor[0, 0]
        elif query.dim() > 4:
            shape = *query.shape[:-1], 1
            factor = factor.expand(math.prod(shape[:-3]), *shape[-3:]).reshape(shape)
        self.arguments = {**self.arguments, "query": query * factor}

    def output(self, result: Any) -> Tensor:
        """The output (B, Hq, L, Ev) in a result."""
        if self.apart["query"] is not self.arguments["query"]:
            result = result.unflatten(0, (-1, self.heads))
        if result.is_nested:
            return _padded(result)[0]
        output: Tensor = result
        if result.dim() < 4:
            output = result[None, None] if result.dim() == 2 else result.unsqueeze(1)
        return _fold_batch(output)


def _same_memory(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are the same memory with the same shape and strides."""
    return left is right or (
        left.data_ptr() == right.data_ptr()
        and left.shape == right.shape
        and left.stride() == right.stride()
    )


class QueryChunks:
    """Recognises calls of SDPA whose queries continue those of the call before, with its keys.

    Example:
        >>> query, key, chunks = torch.zeros(1, 2, 6, 4), torch.zeros(1, 2, 6, 4), QueryChunks()
        >>> [
        ...     chunks.name(name, SdpaCall(torch.nn.Identity(), (part, key, key), {}, 2))
        ...     for name, part in zip(("attn", "attn#1", "attn#2"), query.split(2, 2))
        ... ]
        ['attn', 'attn', 'attn']
    """

    def __init__(self) -> None:
        self._name = ""
        self._next: tuple[Any, ...] = ()  # memory, module and place of queries that continue

    def name(self, name: str, call: SdpaCall) -> str:
        """Name of the layer of a call: that of the call before if this one continues it.

        Without a number of heads, chunks are not told from heads.

        Args:
            name: name of the call.
            call: the call.
        """
        query, key, heads = call.apart["query"], call.apart["key"], call.heads
        expected, self._next = self._next, ()
        if query.is_nested or key.is_nested or query.dim() != 4 or query.shape[1] != heads:
            return name
        try:
            memory = query.untyped_storage().data_ptr(), key.data_ptr()
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own
            return name
        layout = *memory, query.stride(), key.stride(), name.partition("#")[0]
        begins = query.storage_offset()
        if (*layout, begins) == expected:
            name = self._name
        self._name = name
        self._next = *layout, begins + query.shape[2] * query.stride(2)
        return name


def _broadcast(*shapes: torch.Size) -> torch.Size:
    """The shape to which all broadcast; PyTorch's function is slow even where all are equal."""
    alike = all(shape == shapes[0] for shape in shapes)
    return shapes[0] if alike else torch.broadcast_shapes(*shapes)


def _padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Pad a jagged tensor (B, H, l, E) with zeros, and boolean (B, L), True on tokens."""
    ragged = getattr(nested, "_ragged_idx", None)
    if not nested.is_nested or nested.layout is not torch.jagged or ragged != 2:
        raise ValueError(
            "nested tensors must have layout torch.jagged and shape (B, H, lengths, E), got "
            f"layout {nested.layout} with ragged dimension {ragged}"
        )
    starts = nested.offsets()[:-1]  # type: ignore[attr-defined]
    lengths = nested.lengths()  # type: ignore[attr-defined]
    lengths = nested.offsets().diff() if lengths is None else lengths  # type: ignore[attr-defined]
    tokens = nested.values().detach().movedim(1, 0)  # (all tokens, H, E)
    positions = torch.arange(int(lengths.max()), device=tokens.device)
    is_token = positions < lengths.unsqueeze(1)
    rows = tokens.new_zeros(*is_token.shape, *tokens.shape[1:])
    rows[is_token] = tokens[(starts.unsqueeze(1) + positions)[is_token]]
    return rows.transpose(1, 2), is_token


def _expanded(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor broadcast to a shape; the same tensor, of whose gradient it is, if it fits."""
    return part if tuple(part.shape) == shape else part.expand(shape)


def _fold_batch(tensor: Tensor) -> Tensor:
    """Fold all dimensions before the last three into one."""
    return tensor if tensor.dim() == 4 else tensor.flatten(0, tensor.dim() - 4)


def restore_shape(output: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Reshape an output (B, Hq, L, Ev) to the shape that SDPA would return for these arguments."""
    parts = [arguments[part] for part in ("query", "key", "value")]
    rank = parts[0].dim()
    if rank == 4:
        return output
    if rank < 4:
        return output.flatten(0, 1) if rank == 3 else output[0, 0]
    batch = torch.broadcast_shapes(*(part.shape[:-3] for part in parts))
    shaped: Tensor = output.unflatten(0, batch)
    return shaped


# -- FlexAttention ---------------------------------------------------------------------------------

#: The operator that FlexAttention calls, whatever happens before; None where PyTorch has none.
FLEX: Any = None
with contextlib.suppress(ImportError):
    FLEX = importlib.import_module("torch._higher_order_ops.flex_attention").flex_attention
_FLEX_NAMES = (
    "query",
    "key",
    "value",
    "score_mod",
    "block_mask",
    "scale",
    "kernel_options",
    "score_mod_other_buffers",
    "mask_mod_other_buffers",
)
_AT_ONCE = 1 << 22  # scores


class FlexCall(Carrier):
    """One call of the operator that FlexAttention calls.

    Uncompiled FlexAttention materialises all scores, so a mask and a bias of that size are
    affordable.
    """

    unchangeable = "it calls flex_attention itself"

    def read(self, name: str) -> AttentionCall:
        """The call; ``name`` is that of the module."""
        arguments = dict(zip(_FLEX_NAMES, self._args, strict=False)) | dict(self._kwargs)
        query, key = arguments["query"].detach(), arguments["key"].detach()
        if query.shape[0] != key.shape[0]:  # a batch of one key set is shared
            key = key.expand(query.shape[0], -1, -1, -1)
        value = arguments["value"].detach().expand(key.shape[0], -1, -1, -1)
        scale = float(arguments["scale"])
        score_mod = _over_all(
            arguments["score_mod"], (0, *arguments.get("score_mod_other_buffers", ()))
        )
        mask_mod = _over_all(
            arguments["block_mask"][-1], arguments.get("mask_mod_other_buffers", ())
        )
        batch, heads, queries, _ = query.shape
        keys = key.shape[2]
        places = [torch.arange(n, device=query.device) for n in (batch, heads, queries, keys)]
        rows = max(1, _AT_ONCE // max(1, batch * heads * keys))
        many = key.repeat_interleave(heads // key.shape[1], dim=1)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        visible, bias = [], []
        for start in range(0, queries, rows):
            b, h, i, j = places[0], places[1], places[2][start : start + rows], places[3]
            part = query[:, :, start : start + rows]
            scores = part.to(wide) @ many.to(wide).mT * scale
            modified = score_mod(scores, b, h, i, j).to(scores.dtype)
            seen = mask_mod(b, h, i, j).expand(scores.shape) & (modified > -torch.inf)
            visible.append(seen)
            bias.append(torch.where(seen, modified - scores, 0.0))
        return AttentionCall(
            module=name,
            source="flex_attention",
            query=query,
            key=key,
            value=value,
            attn_mask=torch.cat(visible, 2),
            bias=torch.cat(bias, 2),
            scale=scale,
        )


def _over_all(function: Callable[..., Tensor], buffers: Sequence[Any]) -> Callable[..., Tensor]:
    """Vectorise a function of single indices over all batches, heads, queries and keys.

    Args:
        function: takes (a score and) the indices of batch, head, query and key.
        buffers: the arguments that are the same for all indices, such as tensors that the function
            reads; a leading 0 says that the function takes a score first.
    """
    scored = bool(buffers) and isinstance(buffers[0], int)
    rest = tuple(buffers[1:] if scored else buffers)
    none = (None,) * len(rest)
    lead = (0,) if scored else ()
    for place in (3, 2, 1, 0):
        takes = tuple(0 if place == other else None for other in range(4))
        function = torch.vmap(function, (*lead, *takes, *none), 0)

    def all_places(*arguments: Tensor) -> Tensor:
        return function(*arguments, *rest)

    return all_places


# -- nn.MultiheadAttention -------------------------------------------------------------------------

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class _Thread(threading.local):
    """What the open contexts of a thread do with its calls, outermost first.

    Attributes:
        changing: handlers of SDPA calls that change them.
        looking: those that see them as all others change them.
        scores: changes made to the scores of softmaxes.
    """

    changing: tuple[Handler, ...] = ()
    looking: tuple[Handler, ...] = ()
    scores: tuple[Callable[[Tensor], Tensor], ...] = ()


_thread = _Thread()
_lock = threading.Lock()
_open: list[str] = []  # of each context, the name of the function that it replaces
_originals: dict[str, Callable[..., Tensor]] = {}


@contextmanager
def handling(group: str, handler: Any, *, alone: bool = False) -> Iterator[None]:
    """Context in which SDPA or softmax calls this thread's handlers, whatever mode is active.

    Args:
        group: to what a handler is added, an attribute of :class:`_Thread`.
        handler: of SDPA called with the call, and with ``run``, which goes on with it.
        alone: whether those of enclosing contexts are not called.
    """
    name = "softmax" if group == "scores" else "scaled_dot_product_attention"
    outer: tuple[Any, ...] = getattr(_thread, group)
    setattr(_thread, group, (handler,) if alone else (*outer, handler))
    with _lock:
        if name not in _open:
            _originals[name] = getattr(F, name)
            setattr(F, name, _HANDLED[name])
        _open.append(name)
    try:
        yield
    finally:
        setattr(_thread, group, outer)
        with _lock:
            _open.remove(name)
            if name not in _open:
                setattr(F, name, _originals[name])


def _handled_sdpa(*args: Any, **kwargs: Any) -> Any:
    """``F.scaled_dot_product_attention``, through this thread's handlers."""
    call = SdpaCall(_originals["scaled_dot_product_attention"], args, kwargs)
    return pass_on(call, (*_thread.changing, *_thread.looking))


def changed_softmax(*args: Any, **kwargs: Any) -> Tensor:
    """``F.softmax`` with the scores changed by this thread's handlers."""
    for change in _thread.scores:
        args = change(args[0]), *args[1:]
    return _originals["softmax"](*args, **kwargs)


_HANDLED = {"scaled_dot_product_attention": _handled_sdpa, "softmax": changed_softmax}


class _SdpaReached(Exception):  # noqa: N818 - it is no error
    """Raised to stop multi-head attention once its call of SDPA is known."""


class MultiHeadCall(Carrier):
    """One call of ``F.multi_head_attention_forward``.

    If its weights are requested it calls no SDPA: then it is read, and what a law changes of it is
    known, from the same call without weights and dropout.

    Attributes:
        arguments: the arguments by name, with defaults.
        compared: whether nothing is dropped, so that outputs can be compared.
    """

    can_be_provided = True

    def __init__(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__(function, args, kwargs)
        bound = _MULTI_HEAD.bind(*args, **kwargs)
        bound.apply_defaults()
        self.arguments = bound.arguments
        self.compared = not (self.arguments["training"] and self.arguments["dropout_p"] > 0.0)
        self._result: Any = None
        self._sdpa: Any = None
        self._factor: Any = None
        self._mask: Tensor | None = None

    @property
    def sdpa(self) -> Any:
        """The call of SDPA that it would make without weights, once it was read before it ran."""
        return self._sdpa

    def result_needed_because(self) -> str:
        """Why its output cannot be computed in place of the model."""
        return "its weights are requested: call it with need_weights=False"

    def read(self, name: str) -> AttentionCall:
        """The call; ``name`` is that of the module.

        Raises:
            ValueError: if it ran, and its output is another when it is run again.
        """
        if self._result is None:
            with (
                torch.no_grad(),
                torch._C.DisableTorchFunction(),
                contextlib.suppress(_SdpaReached),
                handling("looking", self._stop_at, alone=True),
            ):  # with is_causal it would leave the mask out
                self._function(**{**self.arguments, "need_weights": False, "is_causal": False})
            self._mask = self._sdpa.arguments.get("attn_mask")
            read: AttentionCall = self._sdpa.read(name)
            return read
        second_output, call, output = self._without_weights()
        if self.compared and not outputs_agree(second_output, self._result[0]):
            raise ValueError("multi-head attention returned a different output when run again")
        call.multihead = self.arguments
        self._output = call.output(output)
        return call.read(name)

    def _stop_at(self, call: SdpaCall, _: Callable[[], Any]) -> None:
        """Keep the call of SDPA, and run nothing from there on."""
        self._sdpa = call
        raise _SdpaReached

    def _without_weights(self) -> tuple[Tensor, SdpaCall, Tensor]:
        """Its output without weights and dropout, its call of SDPA, and the output of that.

        Enclosing handlers that look do not see it.
        """
        calls: list[tuple[SdpaCall, Tensor]] = []

        def note(call: SdpaCall, run: Callable[[], Any]) -> Any:
            result = run()
            calls.append((call, result))
            return result

        with handling("looking", note, alone=True):
            without = {"need_weights": False, "training": False}
            output, _ = self._function(**{**self.arguments, **without})
        return output, *calls[-1]

    def compute(self) -> Any:
        """Its output and weights."""
        with ExitStack() as stack:
            if self._factor is not None:
                stack.enter_context(handling("changing", self._change_sdpa))
                stack.enter_context(handling("scores", self._changed_scores))
            self._result = self._function(**self.arguments)
        return self._result

    def output(self, result: Any) -> Tensor:
        """The output (B, Hq, L, Ev), once the call has been read after it ran."""
        return self._output

    # -- under a law ------------------------------------------------------------------------------

    def scale_queries(self, factor: Tensor) -> None:
        """Multiply the queries by a factor (B or 1, Hq or 1, L, 1)."""
        self._factor = factor

    def _change_sdpa(self, call: SdpaCall, run: Callable[[], Any]) -> Any:
        """Change the call of SDPA of a probe, which runs this without weights."""
        call.scale_queries(self._factor)
        mask = self._sdpa.arguments.get("attn_mask")
        if mask is not self._mask:
            call.arguments |= {"attn_mask": mask}
        return run()

    def _changed_scores(self, scores: Tensor) -> Tensor:
        """The scores (B · H, L, S) that it computes, as the law changes them."""
        shape = *self._sdpa.arguments["query"].shape[:3], scores.shape[-1]
        scaled = scaled_weights(scores, self._factor, self._mask, shape)
        mask: Any = self._sdpa.arguments.get("attn_mask")
        if mask is self._mask:
            return scaled
        hidden = hides(mask) if mask.is_floating_point() else torch.logical_not(mask)
        return scaled.masked_fill(hidden.expand(shape).reshape(scores.shape), -torch.inf)


def scaled_weights(
    scores: Tensor, factor: Tensor, mask: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """Scale the products in the scores that ``F.multi_head_attention_forward`` computes itself.

    Args:
        scores: (B · H, L, S), with the mask added.
        factor: (B or 1, H or 1, L, 1).
        mask: what was added, broadcastable to ``shape``.
        shape: (B, H, L, S).

    Returns:
        (B · H, L, S), the products multiplied by ``factor`` and the mask added once.

    Example:
        >>> scores, mask = torch.tensor([[[2.5, -torch.inf]]]), torch.tensor([0.5, -torch.inf])
        >>> scaled_weights(scores, torch.full((1, 1, 1, 1), 3.0), mask, (1, 1, 1, 2))
        tensor([[[6.5000,   -inf]]])
    """
    products = scores
    if mask is not None:
        expanded_mask = mask.expand(shape).reshape(scores.shape)
        products = (scores - expanded_mask).masked_fill(hides(expanded_mask), 0.0)
    return scores + products * (factor - 1).expand(*shape[:3], 1).reshape(*scores.shape[:2], 1)


def outputs_agree(second_output: Tensor, output: Tensor) -> bool:
    """Whether two outputs are equal up to rounding where the second is finite.

    A row that sees no key is 0 from SDPA and NaN where the weights are computed.
    """
    finite = output.isfinite()
    first, second = (torch.where(finite, part.detach(), 0.0) for part in (second_output, output))
    size = float(second.abs().max()) if second.numel() else 0.0
    tolerance = VERIFY_TOLERANCE.get(output.dtype, 1e-4) * max(size, 1e-30)
    return torch.allclose(first, second, rtol=0.0, atol=tolerance)


# -- acutance.attention, and what acutance.tap reports ---------------------------------------------

ACUTANCE = attention
_SIGNATURE = inspect.signature(attention)
_MASKS = list(inspect.signature(check_masking).parameters)[2:]  # without query and key
_OPTIONS = {*_MASKS, "scale", "dropout_p", "softcap", "sinks"} - {"document_ids", "alibi_slopes"}


def call_from_arguments(arguments: Mapping[str, Any], name: str, source: str) -> AttentionCall:
    """An :class:`AttentionCall` from query, key, value and options.

    Raises:
        TypeError: as :func:`acutance.attention`.
        ValueError: as :func:`acutance.attention`.
    """
    query, key, value = arguments["query"], arguments["key"], arguments.get("value")
    if value is None:
        value = key[..., :0]
    check_inputs(query, key, value, True)
    check_masking(
        query, key, **{name: arguments[name] for name in _MASKS if arguments.get(name) is not None}
    )
    options = {name: arguments[name] for name in _OPTIONS if arguments.get(name) is not None}
    cross = query.shape[-2] != key.shape[-2]
    return AttentionCall(name, source, query, key, value, **options, cross=cross)


class OurCall(Carrier):
    """One call of :func:`acutance.attention`.

    Example:
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> OurCall(attention, (x, x, x), {"score": "cosine"}).read("layer").source
        'acutance.attention'
        >>> OurCall(attention, (x, x, x), {"weights": "relu2"}).read("layer")
        Traceback (most recent call last):
            ...
        ValueError: acutance.attention with weights='relu2': return_stats=True reads it
    """

    def read(self, name: str) -> AttentionCall:
        """The call; ``name`` is that of the module.

        Raises:
            ValueError: if it is not a softmax of dot products, or has a scaling.
        """
        bound = _SIGNATURE.bind(*self._args, **self._kwargs)
        bound.apply_defaults()
        arguments = {**DEFAULTS, **bound.arguments, **bound.arguments["options"]}
        score, weighting = scores.get(arguments["score"]), weightings.get(arguments["weights"])
        law, query, key = scalings.get(arguments["scaling"]), arguments["query"], arguments["key"]
        other = []
        if not isinstance(score, DotScore):
            other.append(f"score={arguments['score']!r}")
        if isinstance(weighting, SoftmaxOne):
            arguments["sinks"] = query.new_zeros(query.shape[1])
        elif weighting != Softmax():
            other.append(f"weights={arguments['weights']!r}")
        if not isinstance(law, NoScaling):
            other.append("a scaling")
        if arguments["document_ids"] is not None:
            other.append("document_ids")
        if other or not isinstance(score, DotScore):
            reason = "return_stats=True reads it"
            raise ValueError(f"acutance.attention with {', '.join(other)}: {reason}")
        scale = arguments["scale"]
        query, key, score_scale = score.transform(query.detach(), key.detach())
        arguments |= {"query": query, "key": key, "scale": score_scale if scale is None else scale}
        if arguments["alibi_slopes"] is not None:
            slopes, offset = arguments["alibi_slopes"].detach(), arguments["query_offset"]
            bias = alibi(slopes, query.shape[2], key.shape[2], offset)
            arguments["bias"] = bias if arguments["bias"] is None else arguments["bias"] + bias
            arguments["alibi_slopes"] = None
        return call_from_arguments(arguments, name, "acutance.attention")
