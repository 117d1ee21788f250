"""HeadLaws: the scalings and windows of one layer, for all its heads or for some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from acutance.scaling import AnyScaling, NoScaling, Scaling, Window, from_dict, get
from acutance.scaling.learned import LearnedScaling

__all__ = ["HeadLaws"]

#: What a law has for one head, one layer or all: a scaling or its name, a window, or both.
LawPart: TypeAlias = "str | AnyScaling | Window | tuple[str | AnyScaling, Window]"
#: The same in a file.
LawRecord: TypeAlias = "dict[str, Any] | list[dict[str, Any]]"


@dataclass(frozen=True)
class HeadLaws:
    """The scalings and windows of one layer.

    Attributes:
        whole: the layer's scaling, None where heads have their own; it may hold parameters per
            head.
        heads: head and scaling; heads left out are not scaled.
        window: the layer's window, None where it has none or heads have their own.
        windows: head and window, by head; heads left out read all their keys.
    """

    whole: AnyScaling | None = None
    heads: tuple[tuple[int, AnyScaling], ...] = ()
    window: Window | None = None
    windows: tuple[tuple[int, Window], ...] = ()

    @property
    def needs_entropy(self) -> bool:
        """Whether a scaling reads the measured entropy of each row."""
        return any(part.needs_entropy for part in self.scalings())

    def scalings(self) -> list[AnyScaling]:
        """All scalings of the layer: its single one, or those of its heads."""
        return [self.whole] if self.whole is not None else [part for _, part in self.heads]

    def all_windows(self) -> list[Window]:
        """All windows of the layer: its single one, or those of its heads."""
        return [self.window] if self.window is not None else [one for _, one in self.windows]

    def windows_by_head(self, heads: int) -> list[Window | None]:
        """The window of each head; None for one that reads all its keys.

        Raises:
            ValueError: if there is a window for a head beyond ``heads``.

        Example:
            >>> HeadLaws(windows=((1, Window(8)),)).windows_by_head(2)[0] is None
            True
        """
        if self.window is not None:
            return [self.window] * heads
        for head, _ in self.windows:
            if head >= heads:
                raise ValueError(f"the law has head {head}, but the call has {heads} heads")
        by_head = dict(self.windows)
        return [by_head.get(head) for head in range(heads)]

    def with_part(self, name: str, head: int | None, part: LawPart) -> HeadLaws:
        """A copy with another scaling or window, for the whole layer or one head.

        Args:
            name: name of the layer, for error messages.
            head: index of the head; None for the whole layer.
            part: a scaling, its name, a window, or a pair (scaling, window).

        Raises:
            TypeError: if it is none of these.
            ValueError: if the layer would have one scaling (or window) and others for heads.
        """
        scaling, window = scaling_and_window(part)
        changed = self
        if scaling is not None:
            if self.heads if head is None else self.whole is not None:
                raise ValueError(f"{name} must have one scaling or one for each head, got both")
            if head is None:
                changed = replace(changed, whole=scaling)
            else:
                changed = replace(changed, heads=(*self.heads, (head, scaling)))
        if window is not None:
            if self.windows if head is None else self.window is not None:
                raise ValueError(f"{name} must have one window or one for each head, got both")
            if head is None:
                changed = replace(changed, window=window)
            else:
                others = {**dict(self.windows), head: window}
                changed = replace(changed, windows=tuple(sorted(others.items())))
        if changed.needs_entropy and changed.all_windows():
            raise ValueError(
                f"{name} has a scaling that reads the entropy of rows, which its window changes"
            )
        return changed

    def constant(self) -> HeadLaws:
        """The same with learned scalings replaced by constants at their current values."""
        return replace(
            self,
            whole=None if self.whole is None else _constant(self.whole),
            heads=tuple((head, _constant(part)) for head, part in self.heads),
        )

    def to_dict(self) -> dict[str, Any]:
        """The laws as plain JSON values."""
        record: dict[str, Any] = {}
        if self.whole is not None or self.window is not None:
            record["whole"] = part_record(self.whole, self.window)
        scalings, windows = dict(self.heads), dict(self.windows)
        if heads := list(dict.fromkeys([*scalings, *windows])):
            record["heads"] = {
                str(head): part_record(scalings.get(head), windows.get(head)) for head in heads
            }
        return record

    @classmethod
    def from_dict(cls, name: str, record: object) -> HeadLaws:
        """Inverse of :meth:`to_dict`; ``name`` is the layer's, for error messages."""
        if not isinstance(record, dict) or not record or set(record) - {"whole", "heads"}:
            raise ValueError(
                f"layer {name!r:.60} must be a JSON object with 'whole', 'heads' or both"
            )
        laws = cls()
        if "whole" in record:
            laws = laws.with_part(name, None, read_part(name, record["whole"]))
        heads = record.get("heads", {})
        if not isinstance(heads, dict) or ("heads" in record and not heads):
            raise ValueError(
                f"'heads' of layer {name!r:.60} must be a JSON object with at least one head"
            )
        if not all(head.isascii() and head.isdigit() and len(head) < 7 for head in heads):
            raise ValueError(f"the keys of 'heads' of layer {name!r:.60} must be head indices")
        for head, part in heads.items():
            laws = laws.with_part(name, int(head), read_part(f"{name}, {head}", part))
        return laws


def scaling_and_window(part: LawPart) -> tuple[AnyScaling | None, Window | None]:
    """Split a part of a law into its scaling and its window; None for what it does not have.

    Raises:
        TypeError: if it is neither a scaling nor a window nor a pair of them.
        ValueError: if it is a string that names no scaling.

    Example:
        >>> scaling_and_window(("ssmax", Window(64)))[1].size
        64
    """
    if isinstance(part, Window):
        return None, part
    if isinstance(part, tuple):
        pair: tuple[Any, ...] = part
        if len(pair) != 2 or not isinstance(pair[1], Window) or isinstance(pair[0], Window):
            kinds = ", ".join(type(one).__name__ for one in pair)
            raise TypeError(f"a pair in a law must be (scaling, Window), got ({kinds})")
        return get(pair[0]), pair[1]
    return get(part), None


def part_record(scaling: AnyScaling | None, window: Window | None) -> LawRecord:
    """A scaling, a window or both as JSON values; None for what there is not."""
    parts = [] if scaling is None else [_constant(scaling).to_dict()]
    parts += [] if window is None else [window.to_dict()]
    return parts[0] if len(parts) == 1 else parts


def read_part(place: str, record: object) -> LawPart:
    """Inverse of :func:`part_record`.

    Args:
        place: layer or head, for error messages.
        record: the JSON values.

    Raises:
        ValueError: if it is no such record.
    """
    if isinstance(record, list):
        if len(record) != 2:
            raise ValueError(f"the law of {place!r:.60} must be a JSON object or a list of two")
        scaling, window = (read_part(place, one) for one in record)
        if isinstance(window, Window) and isinstance(scaling, Scaling):
            return scaling, window
        raise ValueError(f"the law of {place!r:.60} must be a scaling, then a window")
    if not isinstance(record, dict):
        raise ValueError(f"the scaling of {place!r:.60} must be a JSON object")
    is_window = record.get("name") == Window.name
    try:
        if is_window:
            return Window.from_dict(record)
        found = from_dict(record)
    except (TypeError, ValueError) as error:
        kind = "window" if is_window else "scaling"
        raise ValueError(f"the {kind} of {place!r:.60} is invalid: {error}") from error
    return NoScaling() if isinstance(found, NoScaling) else found


def _constant(scaling: AnyScaling) -> Scaling:
    """A scaling with constant parameters: itself, or the current values of a learned one."""
    if isinstance(scaling, LearnedScaling):
        record: Scaling = scaling.record()
        return record
    return scaling
