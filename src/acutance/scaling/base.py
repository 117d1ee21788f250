"""The base class of scalings: from the visible keys of a row to a factor on its query."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from acutance.shapes import check_count, check_number, check_tensor

__all__ = ["Scaling"]

#: One number for all heads, or one for each query head.
PerHead: TypeAlias = float | Sequence[float] | Tensor
#: By parameter, the function that checks its value; called with the name and the value.
Checks: TypeAlias = Mapping[str, Callable[[str, Any], Any]]


@dataclass(frozen=True)
class Rows:
    """The checked arguments of :meth:`Scaling.factor`: what a scaling knows of each row.

    Attributes:
        n: number of visible keys of each row, (..., L), at least 1, floating point.
        positions: position of each row's token, counted from 0, broadcastable with ``n``.
        entropy: measured entropy of each unscaled row in nats; None unless it was given.
    """

    n: Tensor
    positions: Tensor
    entropy: Tensor | None = None

    @property
    def log_n(self) -> Tensor:
        """Natural logarithm of n."""
        return self.n.log()


@dataclass(frozen=True)
class Scaling(ABC):
    """A factor on the logits of a row as a function of its number of visible keys n.

    The factor multiplies the query, after query-key normalisation and rotary embedding, and so the
    logits. Parameters that differ from head to head are tuples, whatever they were given as, so
    that records compare, hash and write themselves as JSON.

    Attributes:
        name: as in :data:`~acutance.scaling.SCALINGS`.
        source: article, or the model that uses it.
        needs_entropy: whether :meth:`factor` needs the measured entropy of each row.
        checks: by parameter, a function of its name and value that returns the value to keep. A
            parameter whose default is None may be None.
        either: parameters of which exactly one is given.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    needs_entropy: ClassVar[bool] = False
    checks: ClassVar[Checks] = {}
    either: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.either and sum(getattr(self, name) is not None for name in self.either) != 1:
            given = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.either)
            raise ValueError(f"{self.name} needs either {' or '.join(self.either)}, got {given}")
        for name, check in self.checks.items():
            value = getattr(self, name)
            if value is not None or getattr(type(self), name, MISSING) is not None:
                self._set(**{name: check(name, value)})

    def factor(
        self,
        n: Tensor | int,
        positions: Tensor | None = None,
        *,
        entropy: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The factor on the query of each row.

        Args:
            n: visible keys of each row, (..., L), as :func:`visible_keys` counts them; a row that
                sees none is treated as if it saw one.
            positions: position of each row's token, counted from 0, broadcastable with ``n``. None
                is n − 1, where a causal row without window, padding or packing stands.
            entropy: measured entropy of each row, in nats; only ``adaptive_poly`` reads it.
            dtype: of the result; None is that of ``n`` where it is float32 or float64, otherwise
                the default dtype.

        Returns:
            The factor, shaped as ``n``; with parameters per head, (..., Hq, L), broadcast with
            ``n``.

        Raises:
            TypeError: if an argument is not a Tensor.
            ValueError: if the law needs an entropy and there is none.
        """
        return self.law(gather_rows(n, positions, entropy, dtype))

    @abstractmethod
    def law(self, rows: Rows) -> Tensor:
        """The factor on the query of each row, from checked arguments; what each scaling defines.

        Args:
            rows: the checked arguments of :meth:`factor`.

        Returns:
            The factor, shaped as ``rows.n``; (..., Hq, L) with parameters per head.
        """

    def to_dict(self) -> dict[str, Any]:
        """Name and parameters as JSON values; :func:`from_dict` is the inverse.

        Example:
            >>> from acutance import scaling
            >>> scaling.SSMax(s=(0.25, 0.5)).to_dict()
            {'name': 'ssmax', 's': [0.25, 0.5], 'bias': 0.0}
        """
        return {"name": self.name} | {
            part.name: _plain(getattr(self, part.name)) for part in fields(self)
        }

    def _set(self, **values: object) -> None:
        """Set attributes of the frozen record; only for ``__post_init__``."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def gather_rows(
    n: Tensor | int, positions: Tensor | None, entropy: Tensor | None, dtype: torch.dtype | None
) -> Rows:
    """Check the arguments of :meth:`Scaling.factor` and convert them to floating point.

    Returns:
        The rows. ``positions`` of None become n − 1, and n = 0 becomes 1.

    Raises:
        TypeError: if an argument is of the wrong type.
    """
    if not isinstance(n, Tensor):
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"n must be a Tensor or an integer, got {type(n).__name__}")
        n = torch.tensor(check_count("n", n, 0))
    if n.dtype == torch.bool or n.is_complex():
        raise TypeError(f"n must contain whole numbers of visible keys, got a Tensor of {n.dtype}")
    if dtype is None:
        dtype = n.dtype if n.dtype in (torch.float32, torch.float64) else torch.get_default_dtype()
    if positions is None:
        positions = (n - 1).clamp(min=0)
    check_tensor("positions", positions)
    if entropy is not None:
        entropy = check_tensor("entropy", entropy).to(dtype)
    return Rows(n.to(dtype).clamp(min=1), positions, entropy)


def check_per_head(
    name: str, value: PerHead, *, above: float = -math.inf
) -> float | tuple[float, ...]:
    """Check a number, or a sequence or (Hq,) tensor with one number for each query head.

    Args:
        name: of the parameter, for error messages.
        value: what to check. Nothing checks its length against a number of heads.
        above: every number must be larger than this.

    Returns:
        A float for a number, a tuple of floats for a sequence (also one of length 1).

    Raises:
        TypeError: if it is neither, or a tensor that requires a gradient: the parameters of a
            scaling law are constants.
        ValueError: if a number is not finite or not larger than ``above``, or the sequence is
            empty or has more than one dimension.
    """
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise TypeError(
                f"{name} must be constant, got a tensor that requires a gradient: detach it, or "
                "train it with a module such as scaling.LearnedSSMax"
            )
        if value.dim() > 1:
            raise ValueError(f"{name} must be a number or (Hq,), got {tuple(value.shape)}")
        value = value.tolist()
    numbers: Iterable[float] = value if isinstance(value, Sequence) else (value,)
    checked = []
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(
                f"{name} must be a number or one for each head, got {number!r} "
                f"({type(number).__name__})"
            )
        if not (math.isfinite(number) and number > above):
            bound = "" if above == -math.inf else f" above {above:g}"
            raise ValueError(f"{name} must be finite{bound}, got {number!r}")
        checked.append(float(number))
    if not checked:
        raise ValueError(f"{name} must have one number for each head, got none")
    return tuple(checked) if isinstance(value, Sequence) else checked[0]


def at_least(least: int) -> Callable[[str, Any], int]:
    """A check for a whole number of at least ``least``."""
    return partial(check_count, least=least)


def number(**bounds: Any) -> Callable[[str, Any], float]:
    """A check for a number within the bounds of :func:`acutance.shapes.check_number`."""
    return partial(check_number, **bounds)


POSITIVE = number(above=0.0)
NOT_NEGATIVE = number(above=0.0, including=True)
POSITIVE_BY_HEAD = partial(check_per_head, above=0.0)


def by_head(value: PerHead, like: Tensor) -> Tensor | float:
    """A parameter in a form that multiplies rows (..., L).

    Args:
        value: a number, or one for each head.
        like: tensor whose dtype and device the result has.

    Returns:
        The number itself, or a tensor (Hq, 1).
    """
    if isinstance(value, Tensor | Sequence):
        return torch.as_tensor(value, dtype=like.dtype, device=like.device).unsqueeze(-1)
    return value


def _plain(value: object) -> object:
    """A value as JSON can hold it: tuples become lists."""
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def arguments(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which a record's class is built, from what its ``to_dict`` wrote.

    Raises:
        ValueError: if a parameter is unknown, or one without a default is missing.
    """
    given = {key: value for key, value in record.items() if key != "name"}
    known = [parameter.name for parameter in fields(kind)]
    for key in given:
        if key not in known:
            takes = f"its parameters are {', '.join(known)}" if known else "it has no parameters"
            raise ValueError(f"{kind.name} has no {key!r}: {takes}")
    missing = [name for name in required(kind) if name not in given]
    if missing:
        raise ValueError(f"{kind.name} needs {' and '.join(missing)}")
    return given


def required(kind: type[Any]) -> list[str]:
    """The parameters of a record's class that have no default."""
    return [parameter.name for parameter in fields(kind) if parameter.default is MISSING]
