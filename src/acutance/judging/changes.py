"""Changes of a model by name, in files and in force: laws, windows, plans, RoPE, heads off.

To add a kind that texts can name, write a subclass of :class:`Change` in a file of its own and add
a reader of its texts to :data:`KINDS`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, overload

import torch

from acutance.caching.plan import BUDGET_SCHEMA, IMPORTS, CachePlan, ForeignPlan, read_foreign
from acutance.caching.plan import SCHEMA as PLAN_SCHEMA
from acutance.calibration import apply_law
from acutance.calibration.apply_law import SCHEMA, AppliedChange, Change, LawChange
from acutance.calibration.law import JOINED, AnyLaw, Law, named_law
from acutance.files import as_json, write_text
from acutance.from_json import read_json, sealed_json
from acutance.judging.heads_off import HeadsOff
from acutance.judging.rope import RopeChange
from acutance.scaling import Window
from acutance.shapes import check_count

__all__ = [
    "AppliedChange",
    "Change",
    "LawChange",
    "LawRemedy",
    "PlanRemedy",
    "Remedy",
    "apply",
    "load_change",
    "save_change",
]

#: Earlier names.
Remedy = Change
LawRemedy = LawChange

#: Readers of the texts of changes that are no laws, by the word before the colon.
KINDS: dict[str, Callable[[str], Change]] = {"off": HeadsOff.named, "rope": RopeChange.named}


def PlanRemedy(name: str, plan: CachePlan | ForeignPlan) -> CachePlan | ForeignPlan:
    """A plan for the key-value cache with a name of its own."""
    return plan.titled(name)


def named_change(text: str) -> Any:
    """The change to a model that a text names: a file, a law, RoPE settings, or heads off.

    A file holds a law, a plan for the cache or what :func:`save_change` wrote;
    ``duo_attention:DIR`` and ``layer_types:FILE`` are plans of other tools, see
    :func:`acutance.caching.import_plan`.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if nothing has that name, or a number in it is wrong.

    Example:
        >>> named_change("log_n:train_length=512").law
        LogN(train_length=512, base=None, n_min=16)
        >>> named_change("off:3.0,3.2").heads
        {3: [0, 2]}
        >>> named_change("rope:yarn,factor=2").kind
        'yarn'
    """
    if os.path.exists(text):
        return load_change(text)
    kind, _, rest = text.partition(":")
    if kind in IMPORTS and (foreign := read_foreign(text)) is not None:
        return foreign
    joined = JOINED.split(text)
    if len(joined) > 1:
        for part in joined:
            if part.partition(":")[0] in KINDS:
                raise ValueError(
                    f"law: {part} cannot be joined to another law by +, got {text!r}. Only a "
                    "scaling and a window can be"
                )
    return KINDS[kind](rest) if kind in KINDS else LawChange(text, named_law(text))


def save_change(change: Any, path: str | os.PathLike[str]) -> None:
    """Write a change to a file that :func:`load_change` and the commands' ``--law`` read.

    Laws and plans of one model have formats of their own; of others the file holds the name.

    Args:
        change: a change, or a law or name as :func:`acutance.apply` takes it.
        path: of the file.

    Raises:
        ValueError: if the change has no file: its name is not one that texts can have.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_change(HeadsOff({3: [0]}), f"{folder}/change.json")
        ...     load_change(f"{folder}/change.json")
        HeadsOff(heads={3: [0]})
    """
    (change,) = as_changes([change])
    record = change.record()
    if record["schema"] == SCHEMA and named_change(change.name).words != change.words:
        raise ValueError(f"{change.name} has no file: its name does not say all of it")
    write_text(path, as_json(sealed_json(record), indent=1) + "\n")


def load_change(path: str | os.PathLike[str]) -> Any:
    """The change in a file: a law, a plan for the cache, or what :func:`save_change` wrote.

    Raises:
        ValueError: if it cannot be read or holds none of them.
    """
    name, start = os.fspath(path), ""
    if os.path.isfile(name):
        with suppress(OSError, ValueError), open(name, encoding="utf-8") as file:
            start = file.read(200)
    if f'"{SCHEMA}"' in start:
        change = read_json(name).get("change")
        if not isinstance(change, str) or os.path.exists(change):
            raise ValueError(f"{name} names no change: {change!r:.60}")
        return named_change(change)
    if any(f'"{kind.partition("/")[0]}/' in start for kind in (PLAN_SCHEMA, BUDGET_SCHEMA)):
        return CachePlan.load(name).titled(name)
    return LawChange(name, named_law(name))


def as_changes(laws: Any) -> list[Change]:
    """The ``laws`` of :func:`acutance.judge` as changes with different names.

    Args:
        laws: a law, a list of laws, or a mapping from names to laws.

    Raises:
        TypeError: if something is not a law.
        ValueError: if there is none, or two have one name.
    """
    # a pair of a scaling and its window is one law
    is_pair = isinstance(laws, tuple) and len(laws) == 2 and isinstance(laws[1], Window)
    if isinstance(laws, Mapping) and all(isinstance(name, str) for name in laws):
        pairs = list(laws.items())
    elif isinstance(laws, list | tuple) and not (is_pair and not isinstance(laws[0], Window)):
        pairs = [("", law) for law in laws]
    else:
        pairs = [("", laws)]
    changes = [_change(name, given) for name, given in pairs]
    if not changes:
        raise ValueError("laws must contain at least one law, got none")
    names = [change.name for change in changes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"laws must have different names, got {twice!r} twice")
    return changes


def for_train_length(
    model: torch.nn.Module, changes: Sequence[Change], train_length: int | None
) -> list[Change]:
    """The changes, with RoPE settings computed from a stated trained length.

    Args:
        model: the model.
        changes: as from :func:`as_changes`.
        train_length: tokens of the windows that it was trained on; None is the configuration's.
    """
    if train_length is None:
        return list(changes)
    check_count("train_length", train_length, 2)
    return [change.for_train_length(model, train_length) for change in changes]


def check_fit(model: torch.nn.Module, changes: Sequence[Change]) -> None:
    """Refuse changes that do not fit the model before it runs, such as heads that it lacks.

    Raises:
        ApplyError: if one cannot change the model.
        ValueError: if there is no such layer or head, or a RoPE parameter is wrong.
    """
    for change in changes:
        if not isinstance(change, CachePlan):  # which checks the model when it is applied
            change.check(model)


def _change(name: str, given: Any) -> Change:
    """A law, a name, a file or a change as a change with the given name."""
    change: Change = named_change(given) if isinstance(given, str) else given
    if not isinstance(given, str | Change):
        title = f"law ({given.target})" if isinstance(given, Law) else str(given)
        change = LawChange(title, given)
    return change.titled(name) if name else change


@overload
def apply(
    model: torch.nn.Module, law: str | os.PathLike[str] | Change, *, windowed: bool = False
) -> Any: ...
@overload
def apply(model: torch.nn.Module, law: AnyLaw, *, windowed: bool = False) -> apply_law.Applied: ...
def apply(model: torch.nn.Module, law: Any, *, windowed: bool = False) -> Any:
    r"""Change a model's attention by a law, which it follows from now on.

    A scaling multiplies each row's query by a factor that depends on n, the keys that the row
    reads: its position in a cache, without padding, within its document and its window. It
    multiplies what reaches the attention call, so after query-key normalisation and rotary
    embedding, and on top of the model's own scale; it is rounded to the query's dtype. A
    :class:`~acutance.scaling.Window` says which keys a row reads and at which distance; windows
    that move keys need transformers' interface and rotary positions.

    Args:
        model: any module whose attention goes through transformers' attention interface,
            ``F.scaled_dot_product_attention`` or ``nn.MultiheadAttention``, or is a softmax of its
            own, whose scores then have their products multiplied and their biases not.
        law: a scaling, a :class:`~acutance.scaling.Window`, or a pair (scaling, window) for all
            heads; a mapping from layer or (layer, head) to these or their names, where layers are
            named as for :func:`acutance.probe` (block numbers, ranges, module names, patterns) and
            what is left out is left alone; a :class:`Law`; or a text as ``acutance judge --law``
            takes it: the file of a law or of a plan for the cache, ``"ssmax"``,
            ``"window:size=1024,sinks=4"``, ``"ssmax+window:size=1024"``, ``"rope:yarn,factor=2"``,
            ``"off:3.1,4.0"``; or a :class:`~acutance.judging.Change`, such as a
            :class:`~acutance.CachePlan`.
        windowed: also scale layers with a sliding window of the model's, whose rows see no more
            keys in a longer text.

    Returns:
        What is in force at once and until ``restore()``, or as a context manager until it ends.
        Leaving the context of a law raises :class:`ApplyError` if no call was scaled.

    Raises:
        ApplyError: if the model cannot be changed in this way.
        OSError: if a file cannot be read.
        TypeError: if ``model`` is not a module or ``law`` no law.
        ValueError: if a law, layer or head does not exist, the law is another model's, or its
            windows move keys and the model's positions are not rotary.

    Warns:
        UserWarning: while the model runs, if a softmax of its own has keys hidden by a number above
            −1e9, which n then counts.

    Example:
        >>> import torch, acutance
        >>> model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
        >>> x = torch.randn(1, 64, 8)
        >>> with acutance.apply(model, "log_n:train_length=16") as applied:
        ...     _ = model(x, x, x)
        >>> applied.calls
        {'MultiheadAttention': 1}
    """
    if isinstance(law, str | os.PathLike):
        law = named_change(os.fspath(law))
        law = law.law if isinstance(law, LawChange) else law
    if isinstance(law, Mapping):
        law = {key: named_law(part) if isinstance(part, str) else part for key, part in law.items()}
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return apply_law.apply(model, law, windowed=windowed)


def applying(text: str) -> tuple[str, Callable[[torch.nn.Module], AbstractContextManager[Any]]]:
    """The law, RoPE settings or heads off that a text names, ready to be applied for a probe.

    Returns:
        A description, different for different laws, and a function that applies the law to a model
        and returns a context manager. Leaving that is no error if the model did not run, as in a
        finished run that is resumed.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if nothing has that name, or it is a plan for the cache.
    """
    change = named_change(text)
    if isinstance(change, CachePlan | ForeignPlan):
        raise ValueError(
            f"law: {text} is a plan for the cache, which cannot be probed; 'acutance judge --law' "
            "measures what it does to the loss"
        )
    words = change.words
    if isinstance(change, LawChange) and isinstance(change.law, Law):
        words = f"{Path(text).name} {words.removeprefix('law ')[:12]}"

    @contextmanager
    def changed(model: torch.nn.Module) -> Iterator[None]:
        applied = change.applied(model)
        try:
            yield
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a finished run that is resumed runs nothing
                applied.restore()
        if isinstance(applied, apply_law.Applied) and not applied.calls and applied.skipped:
            name, why = next(iter(applied.skipped.items()))
            raise apply_law.ApplyError(f"the law scaled no call: {name}: {why}")

    return words, changed
