"""Examples: the sharpest rows of each head, with the tokens they attend to.

Their size is bounded: a few rows of each head, and for each a few keys and the weights along a
stretch of its text. Texts are token ids, with their decoded text if a tokenizer was given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from acutance.summary.cells import Cells, array, indices

#: Attended keys kept of a row, positions of its text, and rows of a head at most.
TOP_KEYS, CONTEXT, MOST_ROWS = 8, 48, 64
_LARGEST = torch.finfo(torch.float64).max


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
        columns = ("token", "position", "weight")
        attended = [dict(zip(columns, row, strict=True)) for row in self.attended]
        context = [{"token": token, "weight": weight} for token, weight in self.context]
        return {**vars(self), "attended": attended, "context": context}


@dataclass(frozen=True)
class Examples(Cells):
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

    information: Tensor = array("heads rows", empty=math.nan, least=-_LARGEST)
    entropy: Tensor = array("heads rows", empty=math.nan, least=-_LARGEST)
    position: Tensor = indices("heads rows")
    n_keys: Tensor = indices("heads rows")
    query: Tensor = indices("heads rows")
    keys: Tensor = indices("heads rows keys")
    tokens: Tensor = indices("heads rows keys")
    weights: Tensor = array("heads rows keys", most=1 + 1e-3)
    start: Tensor = indices("heads rows")
    context: Tensor = indices("heads rows tokens")
    context_weights: Tensor = array("heads rows tokens", most=1 + 1e-3)
    words: Mapping[int, str] = field(default_factory=dict)

    what = " of examples"
    axes = ("heads", "rows")
    fixed: ClassVar = {"keys": TOP_KEYS, "tokens": CONTEXT}
    grows = "rows"
    most = MOST_ROWS
    room = f"between 0 and {MOST_ROWS} rows per head"
    text_field = "words"

    def put(
        self, at: tuple[int, int], weights: Tensor, tokens: Tensor, last: int, **numbers: float
    ) -> None:
        """Store a row in place.

        Args:
            at: its head, and its index among the head's rows.
            weights: (S,) float64 on the CPU.
            tokens: (S,) ids of the keys; −1 if not known.
            last: index of the last key that the row sees.
            numbers: the row's ``information``, ``entropy``, ``position`` and ``n_keys``.
        """
        for name, number in numbers.items():
            getattr(self, name)[at] = number
        position = int(self.position[at])
        best = weights.sort(descending=True, stable=True).indices[:TOP_KEYS]
        best = best[weights[best] > 0]
        self.keys[at][: len(best)] = best
        self.tokens[at][: len(best)] = tokens[best]
        self.weights[at][: len(best)] = weights[best]
        if position < 0:
            return
        if position < len(tokens):
            self.query[at] = tokens[position]
        start = max(0, min(position - CONTEXT // 2, last + 1 - CONTEXT))
        stop = min(last + 1, start + CONTEXT)
        self.start[at] = start
        self.context[at][: stop - start] = tokens[start:stop]
        self.context_weights[at][: stop - start] = weights[start:stop]

    @property
    def depth(self) -> int:
        """Number of rows recorded per head."""
        return self.information.shape[1]

    @property
    def threshold(self) -> Tensor:
        """Information that a row must exceed to enter the record, (heads,), in nats."""
        if not self.depth:
            return self.information.new_full((len(self.information),), math.inf)
        return self.information.nan_to_num(-math.inf).amin(1)

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
            row: dict[str, Any]
            row = {name: values[head, place].tolist() for name, values in self.tensors().items()}
            if math.isnan(row["information"]):
                continue
            known = sum(token >= 0 for token in row["context"])
            texts = map(self.text, row["tokens"])
            keys = zip(texts, row["keys"], row["weights"], strict=True)
            attended = tuple(entry for entry in keys if entry[1] >= 0)
            context = list(zip(map(self.text, row["context"]), row["context_weights"], strict=True))
            row["query"] = self.text(row["query"])
            names = ("position", "n_keys", "entropy", "information", "query")
            numbers = {name: row[name] for name in names}
            rows.append(Example(**numbers, attended=attended, context=tuple(context[:known])))
        return rows

    def merge(self, other: Examples) -> Examples:
        """The sharpest rows of both records, as many as the larger one holds.

        Rows are sorted by information; ties by position and token, so that merges commute.
        """
        depth = max(self.depth, other.depth)
        theirs = other.tensors()
        both = {name: torch.cat([x, theirs[name]], 1) for name, x in self.tensors().items()}
        order = torch.arange(both["query"].shape[1]).expand(both["query"].shape)
        keys = (both["keys"].select(-1, 0), both["n_keys"], both["query"], both["position"])
        for part in (*keys, -both["information"].nan_to_num(-math.inf)):
            order = order.gather(1, part.gather(1, order).argsort(dim=1, stable=True))
        heads = torch.arange(len(order)).unsqueeze(1)
        sharpest = {name: x[heads, order[:, :depth]] for name, x in both.items()}
        return Examples(**sharpest, words={**other.words, **self.words})

    def named(self, word: Callable[[int], str]) -> Examples:
        """A copy with the text of every token id, from ``word``."""
        parts = [self.query, self.tokens, self.context]
        ids = torch.cat([part.flatten() for part in parts]).unique().tolist()
        return replace(self, words={token: word(token) for token in ids if token >= 0})

    def texts(self) -> dict[str, str] | None:
        """The token texts by id, for a file's header."""
        return {str(token): word for token, word in self.words.items()} or None

    def to_dicts(self, metrics: tuple[str, ...]) -> list[list[dict[str, Any]]]:
        """Each head's rows as JSON values."""
        return [[row.to_dict() for row in self.rows(head)] for head in range(len(self.query))]

    @classmethod
    def join(cls, records: list[Examples]) -> Examples:
        """Concatenate records of different heads."""
        words = {token: word for record in records for token, word in record.words.items()}
        return replace(super().join(records), words=words)

    @classmethod
    def read_texts(cls, texts: Any) -> dict[str, Any]:
        """The token texts of a file's header.

        Raises:
            ValueError: if they are not texts of token ids.
        """
        words: dict[int, str] = {}
        for token, word in texts.items():
            if not (token.isascii() and token.isdigit() and len(token) < 19):
                raise ValueError(f"the keys of 'words' must be token IDs, got {token!r:.60}")
            if not isinstance(word, str):
                raise ValueError(f"the values of 'words' must be strings, got {word!r:.60}")
            words[int(token)] = word
        return {"words": words}
