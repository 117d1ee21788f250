"""acutance.apply: laws, plans, RoPE settings and heads off, as objects, by name or from a file."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import torch

from acutance.calibration import apply_law
from acutance.calibration.apply_law import Applied
from acutance.calibration.in_force import ApplyError, InForce
from acutance.calibration.law import AnyLaw, Change, Law
from acutance.calibration.named_law import named_law
from acutance.judging.remedies import HeadsOff, LawRemedy, PlanRemedy, named_remedy
from acutance.judging.rope import RopeRemedy

__all__ = ["AppliedChange", "apply"]

T = TypeVar("T")


@overload
def apply(
    model: torch.nn.Module, law: str | os.PathLike[str], *, windowed: bool = False
) -> Any: ...
@overload
def apply(model: torch.nn.Module, law: AnyLaw, *, windowed: bool = False) -> Applied: ...
@overload
def apply(model: torch.nn.Module, law: Change[T], *, windowed: bool = False) -> T: ...
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
            ``"off:3.1,4.0"``. A :class:`~acutance.CachePlan`, or another change with a method
            ``applied``, is returned as that method applies it.
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
        named = named_remedy(os.fspath(law))
        law = named.law if isinstance(named, LawRemedy) else named
    if isinstance(law, Mapping):
        law = {place: named_law(one) if isinstance(one, str) else one for place, one in law.items()}
    if isinstance(law, HeadsOff | RopeRemedy):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        return AppliedChange(law.name, law.applied(model))
    return apply_law.apply(model, law, windowed=windowed)


class AppliedChange(InForce):
    """RoPE settings or heads off, applied to a model: what :func:`acutance.apply` returns.

    Args:
        name: of the change.
        context: in which the model is changed; it is entered at once.
    """

    def __init__(self, name: str, context: AbstractContextManager[Any]) -> None:
        self._noun = name
        with ExitStack() as stack:
            stack.enter_context(context)
            self._context = stack.pop_all()

    def __repr__(self) -> str:
        state = "removed" if self._context is None else "applied"
        return f"<{self._noun}, {state}>"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(kind, error, trace)


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
    named = named_remedy(text)
    if isinstance(named, PlanRemedy):
        raise ValueError(
            f"law: {text} is a plan for the cache, which cannot be probed; 'acutance judge --law' "
            "measures what it does to the loss"
        )
    law = named.law if isinstance(named, LawRemedy) else named
    words = str(law) if isinstance(named, LawRemedy) else named.words
    if isinstance(law, Law):
        words = f"{Path(text).name} {named.words.removeprefix('law ')[:12]}"

    @contextmanager
    def changed(model: torch.nn.Module) -> Iterator[None]:
        applied: Applied | AppliedChange = apply(model, law)  # type: ignore[assignment]
        try:
            yield
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a finished run that is resumed runs nothing
                applied.restore()
        if isinstance(applied, Applied) and not applied.calls and applied.skipped:
            name, why = next(iter(applied.skipped.items()))
            raise ApplyError(f"the law scaled no call: {name}: {why}")

    return words, changed
