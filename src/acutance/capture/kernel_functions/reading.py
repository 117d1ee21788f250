"""What one call of a kernel computes: its arguments by name, its masks, where its sequences lie.

Sequences of one length lie in a batch; others lie one after another, in a cache, or in pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall, Carrier
from acutance.capture.find_layers import is_cross
from acutance.masks import Band

#: Arguments that change how a kernel computes, not what.
_HARMLESS = {
    *("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "return_lse"),
    *("return_attn_probs", "return_softmax_lse", "return_softmax", "return_aux", "zero_tensors"),
    *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "max_q", "max_k", "fa_version"),
    *("out", "out_", "lse", "score_mod_bwd", "block_sparse_tensors_bwd", "backend", "enable_pdl"),
    *("enable_gqa", "qk_quant_gran", "pv_accum_dtype", "smooth_k", "smooth_v"),
    *("quantization_backend", "op", "output_dtype"),
}
_Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kernel:
    """A kernel that models call as a function.

    Attributes:
        name: the function's name; of a method, with its class.
        reading: reads the arguments of a call; of a function that only plans later calls, stores
            them.
        names: what the function calls the arguments that ``reading`` asks for by other names.
        plans: whether the function only plans later calls.
    """

    name: str
    reading: Callable[[FunctionCall], Any]
    names: Mapping[str, str] = field(default_factory=dict)
    plans: bool = False


class FunctionCall(Carrier):
    """One call of a kernel that a model calls as a function, and which arguments have been read.

    Args:
        kernel: the kernel.
        function: what computes the call.
        bound: its arguments, bound to the function's signature.

    Example:
        >>> def kernel(query, softcap=0.0, **options):
        ...     return query
        >>> bound = inspect.signature(kernel).bind(1, tilt=3)
        >>> call = FunctionCall(Kernel("kernel", print, {"q": "query"}), kernel, bound)
        >>> call["q"], call["softcap"], call["window"]
        (1, 0.0, None)
        >>> call.check()
        Traceback (most recent call last):
            ...
        ValueError: kernel is called with tilt=3, which the probe does not know
    """

    can_be_provided = True

    def __init__(
        self, kernel: Kernel, function: Callable[..., Any], bound: inspect.BoundArguments
    ) -> None:
        self.kernel, self.name = kernel, kernel.name
        self._function, self._bound = function, bound
        self._reading: Reading | None = None
        self._read: set[str] = set()
        self._given, self._defaults = dict(bound.arguments), dict[str, Any]()
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self._given |= self._given.pop(name, {})
            elif parameter.default is not inspect.Parameter.empty:
                self._defaults[name] = parameter.default

    # -- what a handler does with a call ----------------------------------------------------------

    def read(self, module: str) -> AttentionCall:
        """The call as the kernel computes it; ``module`` is the name of the module that makes it.

        Raises:
            ValueError: if it is not understood; the message names the kernel.
        """
        try:
            self._reading = reading = self.kernel.reading(self)
        except ValueError as error:
            if self.name in str(error):
                raise
            raise ValueError(f"{self.name} cannot be read: {error}") from error
        except Exception as error:  # a version of the library with other arguments
            raise ValueError(
                f"the arguments of {self.name} are not understood: {type(error).__name__}: {error}"
            ) from error
        self.check()
        if is_cross(module):
            reading.fields["cross"] = True
        return AttentionCall(module=module, source=self.name, **reading.fields)

    def refusal(self, reason: str) -> str:
        """Why the call cannot be changed, with the name of the kernel."""
        return reason if self.name in reason else f"it calls {self.name}: {reason}"

    def result_needed_because(self) -> str:
        """Why its output cannot be computed in place of the model."""
        return f"{self.name} is called as a function"

    def scale_queries(self, factor: Tensor) -> None:
        """Multiply the queries by a factor (B or 1, Hq or 1, L, 1), once the call has been read.

        Raises:
            ValueError: if they are in 8 bits, where the product would be rounded to few digits, or
                no parameter of the function.
        """
        assert self._reading is not None
        name = self.kernel.names.get(self._reading.argument, self._reading.argument)
        if name not in self._bound.arguments:
            raise ValueError(f"its {name} is no parameter of the function")
        given: Tensor = self._given[name]
        if given.dtype.itemsize < 2:
            raise ValueError(f"its queries are {given.dtype}")
        # where each row of each head lies, from 1; rows of padding are at 0
        places = torch.arange(1, given[..., 0].numel() + 1, device=given.device)
        rows = self._reading.rows(places.view(*given.shape[:-1], 1))
        factors = given.new_ones(len(places) + 1)
        factors[rows] = factor.detach().to(given.dtype).expand(rows.shape)
        scaled = given * factors[1:].view(*given.shape[:-1], 1)
        self._bound.arguments[name] = self._given[name] = scaled

    def compute(self) -> Any:
        """The result of the kernel."""
        return self._function(*self._bound.args, **self._bound.kwargs)

    def output(self, result: Any) -> Tensor:
        """The output (B, Hq, L, Ev) in a result, once the call has been read."""
        assert self._reading is not None
        if self.name.endswith("_out"):
            result = self._given["out"]
        return self._reading.rows(result[0] if isinstance(result, tuple | list) else result)

    # -- its arguments ----------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """An argument, or its default; None if the function has no such parameter."""
        name = self.kernel.names.get(name, name)
        self._read.add(name)
        return self._given.get(name, self._defaults.get(name))

    def tensor(self, name: str) -> Tensor:
        """A tensor argument.

        Raises:
            ValueError: if it is anything but a plain tensor.
        """
        value = self[name]
        if not isinstance(value, Tensor) or value.is_nested:
            kind = "a nested tensor" if isinstance(value, Tensor) else type(value).__name__
            name = self.kernel.names.get(name, name)
            raise ValueError(f"{self.name} is called with {name} of type {kind}")
        return value

    def optional(self, *names: str) -> Tensor | None:
        """The first of these tensor arguments that is given; None if none is."""
        given = (self.tensor(name) for name in names if self[name] is not None)
        return next(given, None)

    def number(self, name: str) -> float | None:
        """A number, which may be given as a tensor of one element; None if there is none."""
        value = self[name]
        return None if value is None else float(torch.as_tensor(value).reshape(()).item())

    def qkv(self) -> _Tensors:
        """Query, key and value."""
        return self.tensor("q"), self.tensor("k"), self.tensor("v")

    def ignore(self, *names: str) -> None:
        """Mark arguments as read, because they do not change what is computed."""
        self._read.update(names)

    def add(self, earlier: Mapping[str, Any]) -> None:
        """Add the arguments of an earlier call, which those of this one replace."""
        self._given = {**earlier, **self.changed()}

    def changed(self) -> dict[str, Any]:
        """The arguments that are not at their defaults."""
        changed = {}
        for name, value in self._given.items():
            default = self._defaults.get(name)
            same = value is default or (type(value) is type(default) and value == default)
            if value is not None and not same:
                changed[name] = value
        return changed

    def check(self) -> None:
        """Check that every argument that is not at its default has been read.

        Raises:
            ValueError: if one has not; the message names the function and the argument.
        """
        for name, value in self.changed().items():
            if name not in self._read and name not in _HARMLESS:
                plain = isinstance(value, bool | int | float | str)
                shown = value if plain else type(value).__name__
                raise ValueError(
                    f"{self.name} is called with {name}={shown}, which the probe does not know"
                )


# -- where sequences lie --------------------------------------------------------------------------


@dataclass(frozen=True)
class Sequences:
    """Where the tokens of N sequences are in a tensor (T, H, E).

    Attributes:
        index: (N, W), index of each token; what is beyond a sequence's length is not read.
        lengths: (N,), numbers of tokens.
    """

    index: Tensor
    lengths: Tensor

    def aligned(self, at_end: bool) -> tuple[Tensor, Tensor]:
        """Indices (N, L) of the tokens, 0 on padding, and boolean (N, L), False on padding.

        Args:
            at_end: whether sequences are aligned at their last tokens, not at their first.
        """
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        column = torch.arange(longest, device=self.index.device).expand(len(self.lengths), -1)
        if at_end:
            column = column - (longest - self.lengths).unsqueeze(1)
        real = (column >= 0) & (column < self.lengths.unsqueeze(1))
        return self.index.gather(1, column.masked_fill(~real, 0)).masked_fill(~real, 0), real

    @classmethod
    def packed(cls, starts: Tensor, lengths: Tensor | None = None) -> Sequences:
        """Sequences that lie one after another, with or without gaps.

        Args:
            starts: (N + 1,), where each begins and the last one ends.
            lengths: (N,); None if there are no gaps.

        Example:
            >>> Sequences.packed(torch.tensor([0, 2, 5])).aligned(at_end=True)[0]
            tensor([[0, 0, 1],
                    [2, 3, 4]])
        """
        starts = starts.long()
        lengths = starts.diff() if lengths is None else lengths.to(starts.device).long()
        width = int(lengths.max()) if len(lengths) else 0
        column = torch.arange(width, device=starts.device)
        return cls(starts[: len(lengths), None] + column, lengths)

    @classmethod
    def batched(cls, tensor: Tensor, lengths: Tensor | None = None) -> Sequences:
        """Sequences of a tensor (B, W, H, E), whose first two dimensions are flattened."""
        batch, width = tensor.shape[:2]
        return cls.packed(torch.arange(batch + 1, device=tensor.device) * width, lengths)

    @classmethod
    def paged(cls, table: Tensor, page: int, lengths: Tensor) -> Sequences:
        """Sequences in pages of a tensor (pages, page, H, E), whose first dimensions are flattened.

        Args:
            table: (N, most pages of a sequence), the numbers of its pages.
            page: tokens in a page.
            lengths: (N,).
        """
        index = table.long().unsqueeze(-1) * page + torch.arange(page, device=table.device)
        return cls(index.flatten(1), lengths.to(table.device).long())


# -- readings of calls ----------------------------------------------------------------------------


def heads_first(tensor: Tensor, layout: str) -> Tensor:
    """A tensor with dimensions such as "LBHE" as (B, H, L, E); what it lacks has size 1.

    Example:
        >>> (
        ...     heads_first(torch.zeros(2, 5, 3, 8), "BLHE").shape,
        ...     heads_first(torch.zeros(3, 8), "HE").shape,
        ... )
        (torch.Size([2, 3, 5, 8]), torch.Size([1, 3, 1, 8]))
    """
    tensor = tensor.permute([layout.index(name) for name in "BHLE" if name in layout])
    for place, name in enumerate("BHLE"):
        if name not in layout:
            tensor = tensor.unsqueeze(place)
    return tensor


@dataclass(frozen=True)
class Reading:
    """What one call of a kernel computes.

    Attributes:
        fields: the fields of the :class:`AttentionCall`, without module and source.
        rows: takes the argument that holds the queries, or the output, to (B, Hq, L, width).
        argument: name of that argument.
    """

    fields: dict[str, Any]
    rows: Callable[[Tensor], Tensor]
    argument: str = "q"

    @classmethod
    def of_batch(
        cls, tensors: _Tensors, layout: str = "BLHE", *, keys: str | None = None, **options: Any
    ) -> Reading:
        """A call on sequences of one length.

        Args:
            tensors: query, key and value.
            layout: of the query and of the output, as for :func:`heads_first`.
            keys: of key and value; None for that of the query.
            options: masks and others, as for :func:`_fields`.
        """
        layouts = (layout, keys or layout, keys or layout)
        fields = _fields(*map(heads_first, tensors, layouts), **options)
        return cls(fields, lambda tensor: heads_first(tensor, layout))

    @classmethod
    def of_sequences(
        cls,
        tensors: _Tensors,
        queries: Sequences,
        keys: Sequences,
        *,
        at_end: bool = True,
        **options: Any,
    ) -> Reading:
        """A call on sequences of different lengths.

        Args:
            tensors: query, key and value, (T, H, E) or with the first dimension in two.
            queries: the sequences in the query.
            keys: the sequences in key and value.
            at_end: whether the last query is at the last key; else the first is at the first.
            options: masks and others, as for :func:`_fields`.
        """
        query, key, value = (tensor.flatten(0, -3) for tensor in tensors)
        documents = None
        if options.get("slopes") is None and len(query) == len(key):
            documents = _documents(queries, keys, len(query))
        if documents is not None:

            def rows(tensor: Tensor) -> Tensor:
                return heads_first(tensor.flatten(0, -3), "LHE")

            fields = _fields(rows(query), rows(key), rows(value), at_end=at_end, **options)
            return cls({**fields, "cu_seqlens": documents, "packed": True}, rows)
        index, real = queries.aligned(at_end)
        key_index, seen = keys.aligned(at_end)

        def padded(tensor: Tensor) -> Tensor:
            tensor = tensor.flatten(0, -3)[index]
            return tensor.masked_fill(~real[..., None, None], 0).transpose(1, 2)

        key, value = (
            tensor[key_index].masked_fill(~seen[..., None, None], 0).transpose(1, 2)
            for tensor in (key, value)
        )
        fields = _fields(padded(query), key, value, at_end=at_end, **options)
        if not bool(seen.all()):
            fields["key_mask"] = seen
        return cls({**fields, "real": real, "packed": True}, padded)


def _documents(queries: Sequences, keys: Sequences, total: int) -> Tensor | None:
    """Cumulative lengths of sequences that can be read as documents of one sequence; else None.

    They can if queries and keys are the same tokens, without gaps or empty sequences.
    """
    lengths = queries.lengths
    if not torch.equal(lengths, keys.lengths) or not len(lengths) or not bool(lengths.all()):
        return None
    cumulative = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    in_order = (torch.equal(part.index[:, 0], cumulative[:-1]) for part in (queries, keys))
    return cumulative if int(cumulative[-1]) == total and all(in_order) else None


def _fields(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    at_end: bool = True,
    window: tuple[int | None, int | None] = (None, None),
    slopes: Tensor | None = None,
    **given: Any,
) -> dict[str, Any]:
    """The fields of an :class:`AttentionCall`.

    Row i sees the keys from ``i + offset - left`` to ``i + offset + right``, both included.

    Args:
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev).
        causal: whether rows see no later keys.
        at_end: whether the last query is at the last key; else the first is at the first.
        window: keys to the left and right that a row sees; None for all.
        slopes: of ALiBi, (Hq,) or (B, Hq).
        given: further fields; None for absent ones.

    Example:
        >>> query, key = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
        >>> fields = _fields(query, key, key, causal=True, window=(1, None))
        >>> fields["query_offset"], fields["is_causal"], fields["window"]
        (3, True, 2)
    """
    rows, columns = query.shape[2], key.shape[2]
    offset = columns - rows if at_end else 0
    fields: dict[str, Any] = {"query": query, "key": key, "value": value, "query_offset": offset}
    fields |= {name: value for name, value in given.items() if value is not None}
    left, right = (window[0], 0) if causal else window
    if right == 0:
        fields["is_causal"] = True
    if left is not None and right in (0, left):
        fields["window"] = left + 1
    elif right != 0 and window != (None, None):
        mask = banded(rows, columns, offset, left, right, query.device)
        fields["attn_mask"] = mask & fields["attn_mask"] if "attn_mask" in fields else mask
    if slopes is not None:
        fields["bias"] = alibi(slopes, rows, columns, offset) + fields.get("bias", 0.0)
    return fields


def banded(
    queries: int, keys: int, offset: int, left: int | None, right: int | None, device: torch.device
) -> Tensor:
    """The mask (1, 1, L, S) of a window: rows see ``left`` and ``right`` keys beside their own."""
    lowest = None if left is None else offset - left
    highest = None if right is None else offset + right
    return torch.logical_not(Band(lowest, highest).outside(queries, keys, device))[None, None]


def alibi(slopes: Tensor, queries: int, keys: int, offset: int) -> Tensor:
    """The bias −slope · abs(i + offset − j), (1 or B, H, L, S), of slopes (H,) or (B, H)."""
    rows = torch.arange(queries, device=slopes.device).unsqueeze(1) + offset
    distance = (rows - torch.arange(keys, device=slopes.device)).abs()
    slopes = slopes if slopes.dim() == 2 else slopes.unsqueeze(0)
    return -slopes[..., None, None] * distance
