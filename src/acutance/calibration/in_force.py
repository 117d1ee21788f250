"""A change of a model that is in force until it is restored, at once or as a context manager."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ApplyError"]


class ApplyError(RuntimeError):
    """A law could not be applied where it should have been."""


class InForce(ABC):
    """A change that a subclass installs when it is created."""

    #: What removes it; None once that was done.
    _context: ExitStack | None
    #: What it is, in messages.
    _noun = "this law"

    def restore(self) -> None:
        """Remove the change from the model with all its hooks. Later calls have no effect.

        Warns:
            UserWarning: if nothing ran that it could change.
        """
        try:
            self.__exit__(None, None, None)
        except ApplyError as error:
            warnings.warn(str(error), stacklevel=2)

    def __enter__(self) -> Self:
        if self._context is None:
            raise ApplyError(f"{self._noun} was removed from its model: apply it again")
        return self

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove the change; raise ApplyError if nothing ran that it could change."""


class CountedChange(InForce):
    """A change that counts the calls that it changes.

    Attributes:
        calls: number of changed calls by module name.
    """

    calls: dict[str, int]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._remove() and kind is None and not self.calls:
            raise ApplyError(self._did_nothing())

    def _remove(self) -> bool:
        """Remove all hooks; returns whether they were still installed."""
        context, self._context = self._context, None
        if context is not None:
            context.close()
        return context is not None

    @abstractmethod
    def _did_nothing(self) -> str:
        """The sentence for a change under which no call was changed."""
