"""Layer: one attention layer of a probed model, and warnings of a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Status = Literal["verified", "checked", "captured", "unverified", "mismatch"]


#: What each status means, for reports; the most to be trusted first.
STATUSES: dict[Status, str] = {
    "verified": (
        "every call's output was recomputed from the captured arguments and agrees with the model's"
    ),
    "checked": (
        "the first call's output was recomputed from the captured arguments and agrees with the "
        "model's; later calls were read in the same way"
    ),
    "captured": "read from the call's arguments; its output was not recomputed",
    "unverified": "read from a softmax alone, so the computation of its scores is not known",
    "mismatch": (
        "the output recomputed from the captured arguments differs from the model's: do not "
        "trust these rows"
    ),
}


#: Fields that count rows left out, each for another reason.
LEFT_OUT = ("padded", "empty", "excluded", "skipped")
#: Fields that are numbers of calls or rows.
COUNTS = ("calls", "rows", *LEFT_OUT, "unseen", "provided")


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model.

    Attributes:
        module: qualified name of its attention module.
        heads: number of query heads read.
        status: how far the capture was verified, see :data:`STATUSES`.
        calls: number of attention calls read.
        rows: number of rows read for each head.
        padded: rows left out because their token is padding.
        padded_by: names of the masks that say so; ``masks`` if a token sees no key and no row sees
            it; empty if padding is not known.
        excluded: rows left out because the probe's ``rows=`` does not select them.
        unseen: rows read of tokens that no row sees as a key, if padding is not known.
        empty: rows left out because they see no key.
        error: largest relative difference of a rebuilt output; None if none was rebuilt.
        source: kind of function the calls were captured from.
        chosen: ascending numbers of the heads, if they are not the first ``heads``.
        skipped: rows left out by random sampling.
        provided: calls whose output acutance computed in place of the model.
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
        """Numbers of the heads in their layer."""
        return self.chosen or tuple(range(self.heads))

    def join_heads(self, other: Layer) -> Layer:
        """Combine different heads of the same calls, from ranks that share a layer."""
        numbers = tuple(sorted(self.numbers + other.numbers))
        most = {name: max(getattr(self, name), getattr(other, name)) for name in COUNTS}
        joined = replace(self.merge(replace(other, heads=self.heads, chosen=self.chosen)), **most)
        whole = numbers == tuple(range(len(numbers)))
        return replace(joined, heads=len(numbers), chosen=() if whole else numbers)

    def merge(self, other: Layer) -> Layer:
        """Combine the counts of two records of the same layer and heads."""
        if (self.module, self.heads) != (other.module, other.heads):
            raise ValueError(
                f"only records of the same layer can be merged: {self.module} with "
                f"{self.heads} heads is not {other.module} with {other.heads}"
            )
        if self.numbers != other.numbers:
            raise ValueError(
                "layers can be merged only if they have the same heads or none in common: "
                f"{self.module} has {list(self.numbers)} and {list(other.numbers)}"
            )
        errors = [error for error in (self.error, other.error) if error is not None]
        seen = [layer for layer in (self, other) if layer.calls] or [self]
        masks = {*self.padded_by.split(", "), *other.padded_by.split(", ")} - {""}
        sums = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        return replace(
            self,
            status=max((layer.status for layer in seen), key=list(STATUSES).index),
            padded_by=", ".join(sorted(masks)),
            error=max(errors) if errors else None,
            source=self.source or other.source,
            **sums,
        )

    def times(self, count: int) -> Layer:
        """A copy with counts multiplied, as if ``count`` identical calls had been made.

        Example:
            >>> Layer("attn", 4, calls=1, rows=3).times(5).rows
            15
        """
        return replace(self, **{name: count * getattr(self, name) for name in COUNTS})


#: What records call the weights that did not load.
NOT_LOADED = "weights_not_loaded"
#: Shown above the numbers of a model that :func:`acutance.probing.is_untrained` finds untrained.
UNTRAINED = (
    "Untrained: every norm has its initial gain and the weights look random. The numbers describe "
    "an initialisation, not a trained model."
)


def judged_sentences(about: Mapping[str, Any]) -> list[str]:
    """What changes do to the loss, in sentences, as ``probe --judge`` adds it to a state.

    Example:
        >>> judged_sentences({"judged": ["log_n hurts."]})
        ['log_n hurts.']
    """
    found = about.get("judged")
    return [line for line in found if isinstance(line, str)] if isinstance(found, list) else []


def notices(about: Mapping[str, Any]) -> list[str]:
    """Warnings to show above a table or page; none for a complete run of a trained model.

    Args:
        about: the facts of a summary.

    Example:
        >>> notices({"complete": True, "windows": 8})
        []
        >>> notices({"complete": False, "windows": 28, "windows_in_all": 1092, "tokens": 14336})
        ['Incomplete: 28 of 1,092 windows were read (14,336 tokens); all numbers below refer to
        that part of the text.']
    """
    sentences = []
    if (missing := about.get(NOT_LOADED)) is not None:
        sentences.append(not_loaded_sentence(str(missing)))
    if about.get("complete") is False:
        done, total = about.get("windows"), about.get("windows_in_all")
        tokens, shard = about.get("tokens"), about.get("shard")
        of = f", of shard {shard}" if shard else ""
        amount = "only a part of the windows was read"
        if isinstance(done, int) and isinstance(total, int):
            many = f" ({tokens:,} tokens{of})" if isinstance(tokens, int) else ""
            amount = f"{done:,} of {total:,} windows were read{many}"
        sentences.append(f"Incomplete: {amount}; all numbers below refer to that part of the text.")
    if about.get("untrained") is True:
        sentences.append(UNTRAINED)
    return sentences


def what_was_read(about: Mapping[str, Any]) -> str:
    """The texts and how much of them was read; empty for a probe that was given no text.

    Args:
        about: the facts of a summary.

    Example:
        >>> what_was_read({"text": ["a.txt", "b.txt"], "tokens": 1738, "windows": 4})
        'a.txt, b.txt: 1,738 tokens in 4 windows'
    """
    texts, tokens, windows = (about.get(name) for name in ("text", "tokens", "windows"))
    if not isinstance(texts, (list, tuple)) or not texts:
        return ""
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    amount = ""
    if isinstance(tokens, int) and isinstance(windows, int):
        amount = f": {tokens:,} tokens in {windows:,} window{'s' * (windows != 1)}"
    return f"{', '.join(map(str, texts[:3]))}{more}{amount}"


def not_loaded_sentence(text: str) -> str:
    """A sentence that names the weights that were not loaded.

    Args:
        text: result of :func:`acutance.corpus.load_model.not_loaded`.
    """
    return f"The model did not load: {text}. Missing weights are random numbers."


def coverage_line(modules: Sequence[str], unread: Sequence[str]) -> str:
    """A sentence on how many modules were read, and which were not.

    Args:
        modules: names of the modules read.
        unread: attention not read, each text beginning with the name of its module.

    Example:
        >>> coverage_line(["layers.0", "layers.1"], ["pool: its scores were overwritten"])
        'Coverage: attention read in 2 modules, not in 1: pool.'
    """
    names = dict.fromkeys(text.partition(": ")[0] for text in unread)
    read = f"Coverage: attention read in {len(modules)} module{'s' * (len(modules) != 1)}"
    return f"{read}, not in {len(names)}: {', '.join(names)}." if names else f"{read}."
