"""A bounded sample of a model's queries, keys and values: a few heads per layer, one sequence.

``acutance compare --from`` runs other attention mechanisms on it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.capture.listener import ProbeError
from acutance.files import write_bytes
from acutance.from_json import checked
from acutance.masks import shows
from acutance.probing.tokens import Reader, SelectedCall
from acutance.summary.files import parse, read, sealed
from acutance.summary.readouts.moments import CallRows

SCHEMA = "acutance.queries_keys/1"
#: Most heads of one layer, and most tokens of one sequence, in a sample.
HEADS_PER_LAYER, TOKENS = 4, 1024
#: Larger numbers have products whose squares overflow in float32; a model that has them is broken.
LARGEST = 1e9


@dataclass(frozen=True)
class QueryKeySample:
    """Queries, keys and values of some heads over one sequence.

    Queries are scaled so that q·k/√E is the model's score, before masks, biases and softcaps.

    Attributes:
        query: (heads, n, E), float32.
        key: (heads, n, E), that of a query head's group where heads share keys.
        value: (heads, n, Ev).
        heads: "module/head" of each.
        is_causal: whether each query sees only the keys up to its own position.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    heads: tuple[str, ...]
    is_causal: bool

    @property
    def length(self) -> int:
        """Number of tokens, n."""
        return self.query.shape[1]

    def spread(self, count: int) -> QueryKeySample:
        """Select at most ``count`` of the heads, evenly spaced over the model.

        Example:
            >>> x = torch.zeros(8, 2, 4)
            >>> sample = QueryKeySample(x, x, x, tuple("abcdefgh"), False)
            >>> sample.spread(3).heads
            ('a', 'd', 'f')
        """
        chosen = _evenly_spaced(len(self.heads), count)
        return QueryKeySample(
            self.query[chosen], self.key[chosen], self.value[chosen],
            tuple(self.heads[index] for index in chosen), self.is_causal,
        )  # fmt: skip

    def key_norm_effect(self) -> Tensor:
        """Share of rows whose top key changes when all keys of a head are given the same norm.

        A key's norm multiplies its score, so a long key can win rows that it does not match.
        Biases, softcaps and masks other than the causal one are ignored.

        Returns:
            Shape (heads,), from 0 (key norms decide nothing) to 1.

        Example:
            >>> query = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
            >>> key = torch.tensor([[[1.0, 0.0], [3.0, 3.0]]])  # the long key is no match
            >>> QueryKeySample(query, key, key, ("a",), is_causal=False).key_norm_effect()
            tensor([1.])
        """
        shares = []
        for query, key in zip(self.query, self.key, strict=True):
            tops = []
            for keys in (key, torch.nn.functional.normalize(key, dim=-1)):
                scores = query @ keys.T
                if self.is_causal:
                    scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
                tops.append(scores.argmax(-1))
            shares.append((tops[0] != tops[1]).float().mean())
        return torch.stack(shares)

    def key_norms(self) -> dict[str, Any]:
        """:meth:`key_norm_effect` by layer and head, in the form ``probe --keep-qk --json`` writes.

        Returns:
            ``tokens``, ``is_causal``, ``mean`` over all heads, and ``layers``, each with its
            ``module``, ``mean`` and ``heads`` (``head``, ``moved``). Shares are from 0 to 1.

        Example:
            >>> query = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
            >>> key = torch.tensor([[[1.0, 0.0], [3.0, 3.0]]])
            >>> sample = QueryKeySample(query, key, key, ("layers.0/5",), is_causal=False)
            >>> sample.key_norms()["layers"]
            [{'module': 'layers.0', 'mean': 1.0, 'heads': [{'head': '5', 'moved': 1.0}]}]
        """
        layers: dict[str, list[dict[str, Any]]] = {}
        moved = self.key_norm_effect().tolist()
        for name, share in zip(self.heads, moved, strict=True):
            module, _, head = name.rpartition("/")
            layers.setdefault(module, []).append({"head": head, "moved": share})
        means = [sum(head["moved"] for head in heads) / len(heads) for heads in layers.values()]
        of_layers = [
            {"module": module, "mean": mean, "heads": heads}
            for (module, heads), mean in zip(layers.items(), means, strict=True)
        ]
        about = {"tokens": self.length, "is_causal": self.is_causal}
        return about | {"mean": sum(moved) / len(moved), "layers": of_layers}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the sample atomically to a safetensors file for :func:`load_queries_keys`."""
        from safetensors.torch import save

        sample = json.dumps({"heads": self.heads, "is_causal": self.is_causal})
        arrays = {"query": self.query, "key": self.key, "value": self.value}
        arrays = {name: array.contiguous().clone() for name, array in arrays.items()}  # none shared
        header = sealed({"schema": SCHEMA, "sample": sample}, arrays)
        write_bytes(path, save(arrays, metadata=header))


def load_queries_keys(path: str | os.PathLike[str]) -> QueryKeySample:
    """Read a file written by :meth:`QueryKeySample.save`.

    Raises:
        FileNotFoundError: if there is no such file.
        OSError: if it cannot be read.
        ValueError: if it is another kind of file, damaged, or has invalid arrays.
    """
    header, parts = read(path, SCHEMA, "sample of queries and keys (probe --keep-qk)")
    try:
        if set(parts) != {"query", "key", "value"}:
            named = ", ".join(sorted(parts)) or "none"
            raise ValueError(f"its arrays must be query, key and value, got {named}")
        sample = checked(QueryKeySample, {**parse(header, "sample"), **parts}, "the sample")
        query, value, count = sample.query, sample.value, len(sample.heads)
        same_shape = query.dim() == value.dim() == 3 and query.shape == sample.key.shape
        if not same_shape or value.shape[:2] != query.shape[:2] or count != len(query):
            shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in parts.items())
            raise ValueError(
                f"query, key and value must have shape ({count}, n, width) for the {count} heads "
                f"that it names, got {shapes}"
            )
        if not min(*query.shape, value.shape[2]):
            raise ValueError(f"its arrays are empty: query has shape {tuple(query.shape)}")
        for name, part in parts.items():
            if part.dtype != torch.float32 or not _is_finite(part):
                raise ValueError(f"{name} must contain float32 numbers of at most {LARGEST:g}")
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)} is not a complete sample of queries and keys, as 'probe --keep-qk' "
            f"writes: {error}"
        ) from error
    return sample


class QueryKeyReader(Reader):
    """Records queries, keys and values of each module's first self-attention call."""

    option = "keep"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._layers: dict[str, QueryKeySample] = {}

    def read(self, selected: SelectedCall, rows: CallRows) -> CallRows:
        """Record the longest sequence of the first self-attention call of each module."""
        call, real = selected.whole, selected.rows.counted
        query, key, value = call.query, call.key, call.value
        is_self_attention = query.shape[2] == key.shape[2] and query.shape[3] == key.shape[3]
        if call.module in self._layers or call.cross or not is_self_attention:
            return rows
        sequence, tokens = 0, torch.arange(query.shape[2], device=query.device)
        if real is not None:
            sequence = int(real.sum(1).argmax())
            tokens = real[sequence].nonzero()[:, 0]
        tokens = tokens[:TOKENS]
        heads = _evenly_spaced(query.shape[1], HEADS_PER_LAYER)
        group = query.shape[1] // key.shape[1]
        shared = [head // group for head in heads]
        scale = 1.0 if call.scale is None else call.scale * query.shape[3] ** 0.5
        causal = call.is_causal or _looks_causal(call.attn_mask, sequence, tokens)
        parts = (query[sequence, heads] * scale, key[sequence, shared], value[sequence, shared])
        query, key, value = (part[:, tokens].detach().float().cpu() for part in parts)
        names = tuple(f"{call.module}/{head}" for head in heads)
        self._layers[call.module] = QueryKeySample(query, key, value, names, causal)
        return rows

    def sample(self, order: list[str]) -> QueryKeySample:
        """Combine the recorded queries and keys into one sample, layers in model order.

        Layers whose shapes differ from those of the first are left out.

        Args:
            order: names of modules, in the order of the summary.

        Raises:
            ProbeError: if nothing was recorded.
        """
        known = [self._layers[name] for name in order if name in self._layers]
        layers = [x for x in known if all(map(_is_finite, (x.query, x.key, x.value)))]
        if not layers:
            raise ProbeError(
                "no queries and keys were recorded: the model must run self-attention over whole "
                "sequences, with finite values, through a function that receives queries and keys"
            )
        shapes = [(layer.query.shape[1:], layer.value.shape[2]) for layer in layers]
        alike = [layer for layer, shape in zip(layers, shapes, strict=True) if shape == shapes[0]]
        triples = zip(*((layer.query, layer.key, layer.value) for layer in alike), strict=True)
        heads = tuple(head for layer in alike for head in layer.heads)
        is_causal = all(layer.is_causal for layer in alike)
        query, key, value = map(torch.cat, triples)
        return QueryKeySample(query, key, value, heads, is_causal)


def _is_finite(part: Tensor) -> bool:
    """Whether all entries are numbers of at most :data:`LARGEST`."""
    return bool((part.abs() <= LARGEST).all())  # False for NaN


def _evenly_spaced(total: int, count: int) -> list[int]:
    """Up to ``count`` evenly spaced indices below ``total``."""
    if count >= total:
        return list(range(total))
    return [round(index * total / count) for index in range(count)]


def _looks_causal(mask: Tensor | None, row: int, tokens: Tensor) -> bool:
    """Whether a mask (B, H, L, S) hides all later tokens of a sequence from its first token."""
    if mask is None or mask.dim() != 4 or mask.shape[2] < 2 or len(tokens) < 2:
        return False
    first_row = mask[min(row, mask.shape[0] - 1), 0, tokens[0], tokens[1:]]
    return not bool(shows(first_row).any())
