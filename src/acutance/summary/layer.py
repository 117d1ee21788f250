"""Layer: one attention layer of a model as a probe saw it, and how far it is to be trusted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["LEFT_OUT", "STATUSES", "Layer", "Status"]

Status = Literal["verified", "checked", "captured", "unverified", "mismatch"]

#: What each status means, for reports; the most to be trusted first.
STATUSES: dict[Status, str] = {
    "verified": "the call's output was rebuilt from what was captured and agrees",
    "checked": "the first call's output was rebuilt from what was captured and agrees; later calls "
    "were read in the same way",
    "captured": "read from the call's own arguments, output not rebuilt",
    "unverified": "read from a softmax alone, so what came before it is not known",
    "mismatch": "the output rebuilt from what was captured differs: do not trust these rows",
}
_WORST = tuple(STATUSES)
#: Fields that count rows left out, each for another reason.
LEFT_OUT = ("padded", "empty", "excluded", "skipped")


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model, in model order.

    Attributes:
        module: qualified name of the module whose attention this is.
        heads: query heads seen.
        status: how far the capture is to be trusted, see :data:`STATUSES`.
        calls: attention calls read.
        rows: rows read for each head.
        padded: rows left out because their token is padding.
        padded_by: what told that: the masks' names; ``masks`` where a token sees no key and no row
            sees it. Empty where nothing told of padding.
        excluded: rows left out because the probe's ``rows=`` did not ask for them.
        unseen: rows read of tokens that no row sees as a key, where nothing told of padding.
        empty: rows left out because they see no key.
        error: largest relative difference of a rebuilt output, None where none was rebuilt.
        source: what the call was read from.
        chosen: numbers of the heads, ascending, where they are not the first ``heads``.
        skipped: rows not read because others were drawn in their place.
        provided: calls whose output acutance computed in the model's stead.
    """

    module: str
    heads: int
    status: Status = "captured"
    calls: int = 0
    rows: int = 0
    padded: int = 0
    empty: int = 0
    excluded: int = 0
    unseen: int = 0
    padded_by: str = ""
    error: float | None = None
    source: str = ""
    chosen: tuple[int, ...] = ()
    skipped: int = 0
    provided: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """Number of each head in its layer."""
        return self.chosen or tuple(range(self.heads))

    def beside(self, other: Layer) -> Layer:
        """The same calls, other heads of them: what ranks see that share out a layer's heads."""
        numbers = tuple(sorted(self.numbers + other.numbers))
        counts = ("calls", "rows", *LEFT_OUT, "unseen", "provided")
        most = {name: max(getattr(self, name), getattr(other, name)) for name in counts}
        joined = replace(self.merge(replace(other, heads=self.heads, chosen=self.chosen)), **most)
        whole = numbers == tuple(range(len(numbers)))
        return replace(joined, heads=len(numbers), chosen=() if whole else numbers)

    def merge(self, other: Layer) -> Layer:
        """The same layer, seen in both."""
        if (self.module, self.heads) != (other.module, other.heads):
            raise ValueError(
                f"layers merge with themselves: {self.module} with {self.heads} heads is not "
                f"{other.module} with {other.heads}"
            )
        if self.numbers != other.numbers:
            raise ValueError(
                f"layers merge where they have the same heads or none in common: {self.module} "
                f"has {list(self.numbers)} and {list(other.numbers)}"
            )
        errors = [error for error in (self.error, other.error) if error is not None]
        seen = [part for part in (self, other) if part.calls] or [self]
        return replace(
            self,
            status=max((part.status for part in seen), key=_WORST.index),
            calls=self.calls + other.calls,
            rows=self.rows + other.rows,
            padded=self.padded + other.padded,
            padded_by=_both(self.padded_by, other.padded_by),
            empty=self.empty + other.empty,
            excluded=self.excluded + other.excluded,
            unseen=self.unseen + other.unseen,
            error=max(errors) if errors else None,
            source=self.source or other.source,
            skipped=self.skipped + other.skipped,
            provided=self.provided + other.provided,
        )


def _both(one: str, other: str) -> str:
    """Names in either list, each once, in alphabetical order."""
    names = {*one.split(", "), *other.split(", ")} - {""}
    return ", ".join(sorted(names))
