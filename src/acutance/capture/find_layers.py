"""The modules of a model before it runs: names, attention layers, heads, and which a user chose.

Names do not depend on wrappers such as DataParallel or torch.compile. Whether a module computes
attention is known only when it runs. Before that, layers are recognised by the names of their
classes. Layers and heads are chosen by numbers, ranges and name patterns.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

import torch

T = TypeVar("T")

#: Under which name a wrapper, told by its class, holds the module that it wraps.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",  # torch.compile
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "_FabricModule": "_forward_module",  # Lightning
    "PeftModel": "base_model",
    "BaseTuner": "model",  # PEFT's LoraModel and its like
}
#: Bases of the subclass that ``fully_shard`` or ``replicate`` makes of a module's class.
_ADDED = ("FSDPModule", "ReplicateModule")


def once_for_a_class(question: Callable[[type], T]) -> Callable[[type], T]:
    """Remember what a function says of the last 1,024 classes that it was asked about."""
    return functools.lru_cache(maxsize=1024)(question)


def module_name(model: torch.nn.Module, name: str) -> str:
    """A module's name without wrappers: DataParallel, FSDP, torch.compile, checkpoint wrappers.

    Args:
        model: the root that ``name`` starts from.
        name: name of a module or parameter, as from ``named_modules`` or ``named_parameters``.

    Returns:
        Its name in the unwrapped model; for the model itself, the name of its class.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> wrapped = torch.nn.DataParallel(model)
        >>> module_name(wrapped, "module.0.weight"), module_name(wrapped, "")
        ('0.weight', 'Sequential')
    """
    parts: list[str] = []
    module: torch.nn.Module | None = model
    for piece in name.split(".") if name else ():
        if module is None or piece != _wrapper(type(module)):
            parts.append(piece)
        module = None if module is None else module._modules.get(piece)
    return ".".join(parts) or class_name(model)


def named_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """All modules with their :func:`module_name`, in model order.

    A wrapper has the same name as the module inside it.
    """
    modules = list(model.named_modules())
    if not any(map(_wrapper, set(map(type, dict(modules).values())))):
        modules[0] = class_name(model), model
        return modules
    return [(module_name(model, name), module) for name, module in modules]


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers such as ``DataParallel``, or the module itself.

    Example:
        >>> unwrap(torch.nn.DataParallel(torch.nn.Linear(2, 2)))
        Linear(in_features=2, out_features=2, bias=True)
    """
    while (inner := module._modules.get(_wrapper(type(module)) or "")) is not None:
        module = inner
    return module


def class_name(module: torch.nn.Module) -> str:
    """Class name of the module inside wrappers, as it was before sharding."""
    kind = type(unwrap(module))
    bases = kind.__bases__
    sharded = len(bases) > 1 and bases[0].__name__ in _ADDED
    return bases[1].__name__ if sharded else kind.__name__


@once_for_a_class
def _wrapper(kind: type) -> str | None:
    """Attribute in which a wrapper class stores its module; None for other classes."""
    names = (_WRAPPERS.get(base.__name__) for base in kind.__mro__)
    return next((name for name in names if name is not None), None)


# -- heads and attention layers --------------------------------------------------------------------

#: How a module may name its number of heads.
HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
    "attention_heads",
    "num_attn_heads",
)

#: Ends the reason of a module that is listed for its name alone.
NOT_READ = "nothing in it was read as attention"
_NAME = re.compile(r"attention|attn", re.IGNORECASE)
_SPARSE = re.compile(r"sparsemax|entmax", re.IGNORECASE)
_OPERATIONS = re.compile(r"aten::(_?softmax|scaled_dot_product_attention|_safe_softmax)\b")


@functools.lru_cache(maxsize=1024)
def looks_like_attention(kind: str) -> bool:
    """Whether a class name contains "attention" or "attn".

    Example:
        >>> [looks_like_attention(name) for name in ("LlamaAttention", "SelfAttn", "Linear")]
        [True, True, False]
    """
    return _NAME.search(kind) is not None


def looks_like_weights(kind: str) -> bool:
    """Whether a class name contains "attention", "attn", or the name of a sparse softmax.

    Example:
        >>> [looks_like_weights(name) for name in ("Sparsemax", "Entmax15", "SelfAttn", "Softmax")]
        [True, True, True, False]
    """
    return looks_like_attention(kind) or _SPARSE.search(kind) is not None


#: Why attention in a ``torch.jit`` module is not captured.
SCRIPTED = "torch.jit compiled it, so it cannot be captured: probe the model before compilation"


def computes_attention(script: torch.jit.ScriptModule) -> bool:
    """Whether a module that ``torch.jit`` compiled calls the operators of attention."""
    try:
        return _OPERATIONS.search(str(script.inlined_graph)) is not None
    except (RuntimeError, AttributeError):
        return False


def attributes(holder: object, *names: str) -> list[Any]:
    """Attributes of a module or configuration; None for those that there are not.

    ``getattr`` on a module without one searches the parameters and raises, which over many names
    and modules would take longer than a forward pass.
    """
    kind, values = type(holder), []
    is_plain = getattr(kind, "__getattr__", None) is torch.nn.Module.__getattr__
    for name in names:
        exists = not is_plain or name in vars(holder) or hasattr(kind, name)
        values.append(getattr(holder, name, None) if exists else None)
    return values


def heads_of(module: torch.nn.Module | None) -> int | None:
    """Number of heads of a module, from its attributes or configuration; None if it states none.

    Example:
        >>> heads_of(torch.nn.MultiheadAttention(8, 2))
        2
    """
    for holder in (module, *attributes(module, "config")):
        for name in HEADS:
            try:
                (heads,) = attributes(holder, name)
            except RuntimeError:  # layers have numbers of their own, says the configuration
                continue
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
    return None


_HEADS = frozenset(HEADS)
_LOCAL = {"sliding_attention", "chunked_attention", "local", "local_attention"}


def attention_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules that look like attention, by module name, in model order.

    They are recognised by their own name, their class name or a head count.

    Of nested modules only the innermost counts: transformers' ``BertAttention`` contains the
    ``BertSelfAttention`` that computes attention. A module with a head count that contains, or lies
    in, a module named attention does not count.

    Args:
        model: any module.

    Example:
        >>> list(attention_layers(torch.nn.TransformerDecoderLayer(8, 2)))
        ['self_attn', 'multihead_attn']
    """
    modules = dict(model.named_modules())
    kinds = set(map(type, modules.values()))
    named = {kind for kind in kinds if looks_like_attention(kind.__name__)}
    counting = {  # classes by which a module may have a number of heads
        kind
        for kind in kinds
        if getattr(kind, "__getattr__", None) is not torch.nn.Module.__getattr__
        or not _HEADS.isdisjoint(dir(kind))
    }
    innermost: set[str] = set()
    holding: set[str] = set()
    for name in reversed(modules):  # innermost first
        if type(modules[name]) in named and name not in holding:
            innermost.add(name)
            holding |= _parents(name)
    for name in reversed(modules):
        if name in innermost or name in holding:
            continue
        module = modules[name]
        if _HEADS.isdisjoint(vars(module)) and type(module) not in counting:
            continue
        if int not in map(type, attributes(module, *HEADS)):
            continue
        around = _parents(name)
        if innermost.isdisjoint(around):
            innermost.add(name)
            holding |= around
    return {
        shown: module
        for name, (shown, module) in zip(modules, named_modules(model), strict=True)
        if name in innermost
    }


def layer_numbers(model: torch.nn.Module, names: Iterable[str]) -> dict[str, int]:
    """Index of each of these layers among the model's attention layers.

    If one of them is not recognised as an attention layer, they are numbered among themselves.

    Args:
        model: any module.
        names: names of modules that computed attention.

    Example:
        >>> layer_numbers(torch.nn.TransformerDecoderLayer(8, 2), ["multihead_attn"])
        {'multihead_attn': 1}
    """
    attended = set(names)
    known = list(attention_layers(model))
    if not attended <= set(known):
        known = [name for name in dict(named_modules(model)) if name in attended]
    return {name: place for place, name in enumerate(known) if name in attended}


def max_heads(model: torch.nn.Module) -> int | None:
    """Largest number of heads of any attention layer; None if one of them does not state it.

    Example:
        >>> max_heads(torch.nn.TransformerDecoderLayer(8, 2))
        2
    """
    counts = [heads_of(module) for module in attention_layers(model).values()]
    known = [count for count in counts if count is not None]
    return max(known) if known and len(known) == len(counts) else None


def _parents(name: str) -> set[str]:
    """Names of all modules that contain the named module."""
    parents: set[str] = set()
    while name:
        name = name.rpartition(".")[0]
        parents.add(name)
    return parents


def is_softmax(module: torch.nn.Module) -> bool:
    """Whether a module is only a softmax, so that its parent is the attention layer."""
    return "softmax" in type(module).__name__.lower()


def may_compute_attention(module: torch.nn.Module) -> bool:
    """Whether a module has code that could compute attention, unlike PyTorch's simple layers."""
    kind: type = type(module)
    if not has_forward(kind):
        return False
    simple = kind.__module__.startswith("torch.nn.modules.") and not list(module.children())
    return is_softmax(module) or not simple


@once_for_a_class
def has_forward(kind: type) -> bool:
    """Whether a class of modules can be called; a list or a table of modules cannot."""
    # a scripted class has one that cannot be asked for
    return inspect.getattr_static(kind, "forward", None) is not torch.nn.Module.forward


def uses_interface(module: torch.nn.Module) -> bool:
    """Whether a class gets its attention function from transformers' ``AttentionInterface``."""
    for base in type(module).__mro__:
        for member in vars(base).values():
            code = getattr(getattr(member, "__wrapped__", member), "__code__", None)
            if "get_interface" in getattr(code, "co_names", ()):
                return True
    return False


def is_windowed(module: torch.nn.Module) -> bool:
    """Whether a transformers layer's configuration gives it a window or chunks.

    An explicit ``sliding_window`` argument of a call is better evidence; this is for layers whose
    window is only in their mask.
    """
    layer_type, attention_type, is_sliding, longformer_window, config, index = attributes(
        module,
        *("layer_type", "attention_type", "is_sliding", "one_sided_attn_window_size"),
        *("config", "layer_idx"),
    )
    if layer_type in _LOCAL or attention_type in _LOCAL or is_sliding is True:
        return True
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list | tuple) and isinstance(index, int) and index < len(kinds):
        return kinds[index] in _LOCAL or isinstance(longformer_window, int)
    return isinstance(longformer_window, int)


def windowed_layers(model: torch.nn.Module) -> dict[str, bool]:
    """Whether each module's attention is windowed, by module name.

    It is read from the configuration of the module or its parent.

    Example:
        >>> windowed_layers(torch.nn.MultiheadAttention(8, 2))["MultiheadAttention"]
        False
    """
    modules, top = dict(named_modules(model)), class_name(model)
    return {
        name: is_windowed_inside(module, modules[name.rpartition(".")[0] or top])
        for name, module in modules.items()
    }


def is_windowed_inside(module: torch.nn.Module, parent: torch.nn.Module | None) -> bool:
    """Whether a module, or the attention module ``parent`` that contains it, is windowed."""
    outer = "att" in type(parent).__name__.lower() and parent is not None and is_windowed(parent)
    return outer or is_windowed(module)


def is_cross(name: str, module: Any = None) -> bool:
    """Whether a module is known to be cross-attention."""
    if getattr(module, "is_cross_attention", False):
        return True
    ends = name.lower().split(".")[-2:]
    return "encoder_attn" in ends or "cross" in ".".join(ends) or "encdec" in ".".join(ends)


# -- layers and heads that a user chose ------------------------------------------------------------

#: What names layers or heads: numbers, ranges, text as ``"0-3,8"``, or several of these.
Chosen: TypeAlias = int | str | range | Iterable["int | str | range"]

_RANGE = re.compile(r"(-?\d+)(?:-(-?\d+))?")


def _items(name: str, given: Chosen) -> list[range | str]:
    """Parse a choice: numbers and ranges become ``range``, patterns stay text.

    Raises:
        TypeError: if an item is not a number, range or text.
        ValueError: if nothing is chosen, or a range is empty.
    """
    if isinstance(given, int | str | range):
        given = (given,)
    items: list[range | str] = []
    for item in given:
        if isinstance(item, range):
            items += [range(number, number + 1) for number in item]
        elif isinstance(item, int) and not isinstance(item, bool):
            items.append(range(item, item + 1))
        elif isinstance(item, str):
            for text in filter(None, map(str.strip, item.split(","))):
                match = _RANGE.fullmatch(text)
                if match is None:
                    items.append(text)
                    continue
                first, last = int(match[1]), int(match[2] or match[1])
                if last < first:
                    raise ValueError(f"{name} must have ranges low-high, got {text!r}")
                items.append(range(first, last + 1))
        else:
            raise TypeError(f"{name} must contain numbers, ranges and text, got {item!r}")
    if not items:
        raise ValueError(f"{name} must name at least one, got {given!r}")
    return items


class LayerChoice:
    """The layers of a model that a user chose.

    A number is a block's number in the module name: ``encoder.layer.3.attention.self`` lies in
    block 3; negative numbers count from the last. In a model without numbered blocks it is the
    index of an attention layer. A pattern (``*`` and ``?``) matches the name of a module or of one
    that contains it.

    Args:
        given: the user's choice.
        names: names of all modules of the model, without wrappers.
        attention: names of its attention layers, in order.
        argument: name of the option, for messages.

    Raises:
        TypeError: if the choice holds anything but numbers, ranges and text.
        ValueError: if a part of it chooses no module.

    Example:
        >>> names = ["layers", "layers.0", "layers.0.attn", "layers.1", "layers.1.attn", "head"]
        >>> choice = LayerChoice("-1", names)
        >>> [name for name in names if name in choice]
        ['layers.1', 'layers.1.attn']
        >>> "layers.0.attn" in LayerChoice("*.0", names)
        True
        >>> LayerChoice(7, names)
        Traceback (most recent call last):
        ValueError: layers=7 is not a layer of the model: it has 2 blocks, 0 to 1
        >>> LayerChoice("hea", names)
        Traceback (most recent call last):
        ValueError: layers='hea' is not a layer of the model; did you mean 'head'?
    """

    def __init__(
        self,
        given: Chosen,
        names: Sequence[str],
        attention: Sequence[str] = (),
        argument: str = "layers",
    ) -> None:
        self._argument, self._attention = argument, list(attention)
        self._counts: dict[str, int] = {}
        for name in names:
            base, number = block_of(name)
            if number is not None:
                self._counts[base] = max(self._counts.get(base, 0), number + 1)
        self._most = most = max(self._counts.values(), default=len(self._attention))
        self._items = _items(argument, given)
        for item in self._items:
            beyond = isinstance(item, range) and not (-most <= item[0] and item[-1] < most)
            if beyond or not any(self._takes(item, name) for name in names):
                raise ValueError(self._nothing(item, names))

    @classmethod
    def from_model(
        cls, given: Chosen, model: torch.nn.Module, argument: str = "layers"
    ) -> LayerChoice:
        """Apply a choice to the modules of a model, however it is wrapped."""
        names = [name for name, _ in named_modules(model)]
        return cls(given, names, list(attention_layers(model)), argument)

    def __contains__(self, name: str) -> bool:
        return any(self._takes(item, name.partition("#")[0]) for item in self._items)

    def _takes(self, item: range | str, name: str) -> bool:
        """Whether an item of the choice, a range or a pattern, includes the named module."""
        if isinstance(item, str):
            return any(fnmatchcase(outer, item) for outer in (name, *_parents(name)) if outer)
        base, number = block_of(name)
        count = self._counts.get(base, 0)
        if not self._counts:
            number = self._attention.index(name) if name in self._attention else None
            count = len(self._attention)
        return number is not None and (number in item or number - count in item)

    def _nothing(self, item: range | str, names: Sequence[str]) -> str:
        """A sentence for an item that chooses no module, with the nearest names."""
        if isinstance(item, str):
            ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
            near = difflib.get_close_matches(item, names, n=3, cutoff=0.6)
            near = near or difflib.get_close_matches(item, ends, n=1, cutoff=0.7)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            if not near and self._attention:
                first, count = self._attention[0], len(self._attention)
                hint = f": it has {count} attention layer{'s' * (count > 1)}, the first is {first}"
            return f"{self._argument}={item!r} is not a layer of the model{hint}"
        requested = item[0] if len(item) == 1 else f"{item[0]}-{item[-1]}"
        known = "no numbered blocks, so use module names"
        if self._most:
            kind = "block" if self._counts else "attention layer"
            numbers = f"s, 0 to {self._most - 1}" if self._most > 1 else ", 0"
            known = f"{self._most} {kind}{numbers}"
        return f"{self._argument}={requested} is not a layer of the model: it has {known}"


def choose_layers(model: torch.nn.Module, given: Chosen, argument: str = "layers") -> list[str]:
    """Names of the chosen attention layers, in model order.

    Text that names a module without known attention layers chooses that module. If no attention
    layer of the model is known before it runs, the outermost chosen modules are returned.

    Raises:
        TypeError: if ``given`` holds anything but numbers, ranges and text.
        ValueError: if a part of it is not a layer of the model.

    Example:
        >>> model = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(8, 2), 2)
        >>> choose_layers(model, "-1"), choose_layers(model, "layers.0.self_attn")
        (['layers.1.self_attn', 'layers.1.multihead_attn'], ['layers.0.self_attn'])
    """
    choice = LayerChoice.from_model(given, model, argument)
    attention = attention_layers(model)
    if isinstance(given, str) and given in attention:
        return [given]
    chosen = [name for name in attention if name in choice]
    if chosen:
        return chosen
    names = list(dict(named_modules(model)))
    if isinstance(given, str) and given in names:
        return [given]
    if not attention:
        chosen = [name for name in names if name in choice]
        return [
            name for name in chosen if not any(name.startswith(f"{outer}.") for outer in chosen)
        ]
    raise ValueError(f"{argument}={given!r} is not a layer of the model: it has no attention")


class HeadChoice:
    """The chosen heads of every layer: numbers and ranges, negative ones counted from the last.

    Raises:
        TypeError: if the choice holds anything but numbers, ranges and text.
        ValueError: if text is neither a number nor a range.

    Example:
        >>> HeadChoice("0,4-5,-1").of(8)
        [0, 4, 5, 7]
        >>> HeadChoice(9).of(8)
        []
    """

    def __init__(self, given: Chosen) -> None:
        self._ranges: list[range] = []
        for item in _items("heads", given):
            if isinstance(item, str):
                raise ValueError(f"heads must be numbers or ranges, such as 0,4-7, got {item!r}")
            self._ranges.append(item)

    def check(self, model: torch.nn.Module, name: str = "", stated: int = 0) -> None:
        """Raise ValueError for the first chosen head that no attention layer of a model has.

        Args:
            model: any module.
            name: what messages call it; empty for its class.
            stated: most heads of a layer if the layers do not say; 0 if unknown.
        """
        most = max_heads(model) or stated
        if not most:
            return
        for chosen in self._ranges:
            for head in (chosen[-1], chosen[0]):
                if not -most <= head < most:
                    raise ValueError(
                        f"heads includes head {head}, but the layers of "
                        f"{name or class_name(model)} have {most} heads: 0 to {most - 1}"
                    )

    def of(self, heads: int) -> list[int]:
        """Indices of the chosen heads of a layer with ``heads`` heads, ascending."""
        return [
            head
            for head in range(heads)
            if any(head in chosen or head - heads in chosen for chosen in self._ranges)
        ]


def block_of(name: str) -> tuple[str, int | None]:
    """Prefix of a dotted name before its first number, and that number."""
    pieces = name.split(".")
    for index, piece in enumerate(pieces):
        if piece.isascii() and piece.isdigit():
            return ".".join(pieces[:index]), int(piece)
    return name, None


# -- the key-value cache ---------------------------------------------------------------------------

#: Names under which a transformers model takes and returns its cache, the newest first: ``cache``
#: since transformers 5.24; layers of older releases took ``past_key_value``.
CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")


def cache_argument(names: Iterable[str]) -> str | None:
    """The first of :data:`CACHE_ARGUMENTS` in ``names``, a forward method's; None without a cache.

    Example:
        >>> cache_argument(["input_ids", "past_key_values"]), cache_argument(["input_ids"])
        ('past_key_values', None)
    """
    known = set(names)
    return next((name for name in CACHE_ARGUMENTS if name in known), None)


def returned_cache(output: Any) -> Any:
    """The key-value cache in a model's output; None if it returned none."""
    if hasattr(output, "cache"):
        return output.cache
    return getattr(output, "past_key_values", None)
