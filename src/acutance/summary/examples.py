"""Examples: the sharpest rows of each head, with the tokens they attend to.

Their size is bounded: a few rows of each head, and for each a few keys and the weights along a
stretch of its text. Texts are token ids, with their decoded text if a tokenizer was given.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from acutance.summary.head_arrays import HeadArrays, check_arrays

__all__ = ["CONTEXT", "MOST_ROWS", "TOP_KEYS", "Example", "Examples", "Row"]

#: Attended keys kept of a row, positions of its text, and rows of a head at most.
TOP_KEYS, CONTEXT, MOST_ROWS = 8, 48, 64
NONE = -1
_SIZES = {"keys": TOP_KEYS, "tokens": TOP_KEYS, "weights": TOP_KEYS}
_SIZES |= {"context": CONTEXT, "context_weights": CONTEXT}
_FLOATS = ("information", "entropy", "weights", "context_weights")


@dataclass(frozen=True)
class Example:
    """One row of attention with its tokens as text.

    Attributes:
        position: index of the key at the query's position; −1 if not known.
        n_keys: number of keys that the row sees.
        entropy: entropy of the row, in nats.
        information: log n − entropy, in nats.
        query: text of the query's token.
        attended: (token, position, weight) of the most attended keys.
        context: (token, weight) of a stretch of text around the query.
    """

    position: int
    n_keys: int
    entropy: float
    information: float
    query: str
    attended: tuple[tuple[str, int, float], ...]
    context: tuple[tuple[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "position": self.position,
            "n_keys": self.n_keys,
            "entropy": self.entropy,
            "information": self.information,
            "query": self.query,
            "attended": [
                {"token": token, "position": place, "weight": weight}
                for token, place, weight in self.attended
            ],
            "context": [{"token": token, "weight": weight} for token, weight in self.context],
        }


@dataclass(frozen=True)
class Row:
    """One row of attention before its tokens are decoded.

    Attributes:
        head: number of the head.
        information: log n − entropy, in nats.
        entropy: in nats.
        position: index of the key at the query's position; −1 if not known.
        n_keys: number of keys that the row sees.
        query: id of the query's token; −1 if not known.
        weights: (S,) float64 on the CPU.
        tokens: (S,) ids of the keys; −1 if not known.
        last: index of the last key that the row sees.
    """

    head: int
    information: float
    entropy: float
    position: int
    n_keys: int
    query: int
    weights: Tensor
    tokens: Tensor
    last: int


@dataclass(frozen=True)
class Examples(HeadArrays):
    """The sharpest rows of each head, those with the largest information log n − H first.

    Missing integers are −1 and missing numbers NaN.

    Attributes:
        information: (heads, k), in nats.
        entropy: (heads, k), in nats.
        position: (heads, k), index of the key at the query's position.
        n_keys: (heads, k), number of keys that the row sees.
        query: (heads, k), id of the query's token.
        keys: (heads, k, 8), positions of the most attended keys.
        tokens: (heads, k, 8), their token ids.
        weights: (heads, k, 8), their weights, descending.
        start: (heads, k), position of the first token of ``context``.
        context: (heads, k, 48), token ids of a stretch of text around the query.
        context_weights: (heads, k, 48), the row's weights there.
        words: text of each known token id.
    """

    information: Tensor
    entropy: Tensor
    position: Tensor
    n_keys: Tensor
    query: Tensor
    keys: Tensor
    tokens: Tensor
    weights: Tensor
    start: Tensor
    context: Tensor
    context_weights: Tensor
    words: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def none(heads: int, rows: int) -> Examples:
        """Empty records for heads, with room for ``rows`` rows each."""
        arrays: dict[str, Any] = {}
        for name in _arrays():
            shape = (heads, rows, *([_SIZES[name]] if name in _SIZES else []))
            if name in _FLOATS:
                empty = math.nan if name in ("information", "entropy") else 0.0
                arrays[name] = torch.full(shape, empty, dtype=torch.float64, device="cpu")
            else:
                arrays[name] = torch.full(shape, NONE, dtype=torch.int64, device="cpu")
        return Examples(**arrays)

    @staticmethod
    def from_rows(rows: list[Row], heads: int, most: int) -> Examples:
        """Select the ``most`` rows of each head with the largest information."""
        by_head: dict[int, list[Row]] = {}
        for row in rows:
            by_head.setdefault(row.head, []).append(row)
        deep = max([most, *(len(each) for each in by_head.values())])
        examples = Examples.none(heads, deep)
        for head, each in by_head.items():
            for place, row in enumerate(each):
                examples._set_row(head, place, row)
        return examples._sharpest(most)

    def _set_row(self, head: int, place: int, row: Row) -> None:
        """Store a row as the ``place``-th example of a head."""
        at = (head, place)
        self.information[at], self.entropy[at] = row.information, row.entropy
        self.position[at], self.n_keys[at], self.query[at] = row.position, row.n_keys, row.query
        top = min(TOP_KEYS, len(row.weights))
        best = row.weights.sort(descending=True, stable=True).indices[:top]
        best = best[row.weights[best] > 0]
        self.keys[at][: len(best)] = best
        self.tokens[at][: len(best)] = row.tokens[best]
        self.weights[at][: len(best)] = row.weights[best]
        if row.position < 0:
            return
        end = row.last + 1
        start = max(0, min(row.position - CONTEXT // 2, end - CONTEXT))
        stop = min(end, start + CONTEXT)
        self.start[at] = start
        self.context[at][: stop - start] = row.tokens[start:stop]
        self.context_weights[at][: stop - start] = row.weights[start:stop]

    @property
    def depth(self) -> int:
        """Number of rows recorded per head."""
        return self.information.shape[1]

    @property
    def threshold(self) -> Tensor:
        """Information that a row must exceed to enter the record, (heads,), in nats."""
        lowest = self.information.nan_to_num(-math.inf)
        if not self.depth:
            return lowest.new_full((len(lowest),), math.inf)
        return lowest.amin(1)

    def text(self, token: int) -> str:
        """Text of a token id: the decoded token, else its number; empty for padding."""
        return self.words.get(token, f"#{token}") if token >= 0 else ""

    def rows(self, head: int) -> list[Example]:
        """The examples of a head, sharpest first.

        Args:
            head: index of the head, as in :attr:`HeadSummary.places`.
        """
        rows = []
        for place in range(self.depth):
            at = (head, place)
            if math.isnan(float(self.information[at])):
                continue
            keys = [
                (self.text(token), key, weight)
                for token, key, weight in zip(
                    *(part[at].tolist() for part in (self.tokens, self.keys, self.weights)),
                    strict=True,
                )
                if key >= 0
            ]
            count = int((self.context[at] >= 0).sum())
            stretch = zip(
                self.context[at].tolist()[:count],
                self.context_weights[at].tolist()[:count],
                strict=True,
            )
            rows.append(
                Example(
                    int(self.position[at]),
                    int(self.n_keys[at]),
                    float(self.entropy[at]),
                    float(self.information[at]),
                    self.text(int(self.query[at])),
                    tuple(keys),
                    tuple((self.text(token), weight) for token, weight in stretch),
                )
            )
        return rows

    def merge(self, other: Examples) -> Examples:
        """The sharpest rows of both records, as many as the larger one holds."""
        depth = max(self.depth, other.depth)
        both = {
            name: torch.cat([getattr(self, name), getattr(other, name)], 1) for name in _arrays()
        }
        return Examples(**both, words={**other.words, **self.words})._sharpest(depth)

    def _sharpest(self, most: int) -> Examples:
        """Sort rows by information; ties by position and token, so that merges commute."""
        order = torch.arange(self.depth).expand(self.information.shape)
        keys = (self.keys.select(-1, 0), self.n_keys, self.query, self.position)
        for part in (*keys, -self.information.nan_to_num(-math.inf)):
            order = order.gather(1, part.gather(1, order).argsort(dim=1, stable=True))
        order = order[:, :most]

        def chosen(part: Tensor) -> Tensor:
            index = order if part.dim() == 2 else order.unsqueeze(-1).expand(-1, -1, part.shape[2])
            return part.gather(1, index).contiguous()

        return self._with({name: chosen(getattr(self, name)) for name in _arrays()})

    def _with(self, arrays: dict[str, Tensor]) -> Examples:
        """A copy with other rows and the same token texts."""
        return Examples(**arrays, words=self.words)

    def named(self, word: Callable[[int], str]) -> Examples:
        """A copy with the text of every token id, from ``word``."""
        parts = [self.query, self.tokens, self.context]
        ids = torch.cat([part.flatten() for part in parts]).unique().tolist()
        return replace(self, words={token: word(token) for token in ids if token >= 0})

    def header(self) -> str:
        """The token texts as JSON, for a file's header."""
        return json.dumps({str(token): word for token, word in self.words.items()})

    @classmethod
    def join(cls, parts: list[Examples]) -> Examples:
        """Concatenate records of different heads."""
        depth = max(part.depth for part in parts)
        words: dict[int, str] = {}
        for part in parts:
            words.update(part.words)
        wide = [part.merge(Examples.none(len(part.query), depth)) for part in parts]
        return replace(super().join(wide), words=words)

    @staticmethod
    def checked(tensors: Mapping[str, Tensor], heads: int, words: Mapping[str, Any]) -> Examples:
        """Build a record from the arrays of a file, after checking shapes, dtypes and ranges.

        Raises:
            ValueError: naming the first thing that does not fit.
        """
        depth = tensors["query"].shape[1] if tensors["query"].dim() == 2 else -1
        if not 0 <= depth <= MOST_ROWS:
            raise ValueError(
                f"examples must have between 0 and {MOST_ROWS} rows per head, got {depth}"
            )

        def possible(name: str, part: Tensor) -> Tensor:
            if name not in _FLOATS:
                return part >= NONE
            if name in ("information", "entropy"):
                return ~part.isinf()
            return (part >= 0) & (part <= 1 + 1e-3) if "weights" in name else part >= 0

        check_arrays("examples", tensors, Examples.none(heads, depth), possible)
        known: dict[int, str] = {}
        for token, word in words.items():
            if not (token.isascii() and token.isdigit() and len(token) < 19):
                raise ValueError(f"the keys of 'words' must be token IDs, got {token!r:.60}")
            if not isinstance(word, str):
                raise ValueError(f"the values of 'words' must be strings, got {word!r:.60}")
            known[int(token)] = word
        return Examples(**dict(tensors), words=known)


def _arrays() -> list[str]:
    """Names of the tensor fields of :class:`Examples`."""
    return [each.name for each in fields(Examples) if each.name != "words"]
