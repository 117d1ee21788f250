"""The queries, keys and values that every mechanism of a comparison is run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acutance.probing.query_key_sample import QueryKeySample

__all__ = ["Gaussian", "Inputs", "captured", "gaussian"]


@dataclass(frozen=True)
class Gaussian:
    """Means and standard deviations of Gaussian queries and keys.

    Attributes:
        query_mean, query_std: of the queries.
        key_mean, key_std: of the keys.
    """

    query_mean: float
    query_std: float
    key_mean: float
    key_std: float


@dataclass(frozen=True)
class Inputs:
    """A few query rows of every head, with all keys and values.

    The queries are the last rows of their sequence, so that even under a causal mask each sees
    (nearly) all n keys.

    Attributes:
        query: (B, H, rows, E).
        key: (B, H, n, E).
        value: (B, H, n, Ev).
        is_causal: whether a row sees only the keys up to its own position.
        law: distribution that queries and keys were drawn from; None if a model computed them.
        names: of the heads; may be empty.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    law: Gaussian | None = None
    names: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Number of keys."""
        return self.key.shape[2]

    @property
    def offset(self) -> int:
        """Position of the first query row."""
        return self.n - self.query.shape[2]

    @property
    def value_variance(self) -> float:
        """Variance of a value, summed over its components, mean over heads."""
        if self.law is not None:
            return float(self.value.shape[3])
        return float(self.value.double().var(2, correction=0).sum(-1).mean())


def gaussian(
    n: int,
    d: int,
    law: Gaussian,
    *,
    heads: int,
    batch: int,
    samples: int,
    seed: int,
    is_causal: bool,
) -> Inputs:
    """Draw independent Gaussian queries, keys and values; each head has its own keys.

    Args:
        n: keys.
        d: width of queries, keys and values.
        law: means and deviations.
        heads: how many.
        batch: how many sequences.
        samples: rows of each head, at most n.
        seed: of the draws; each n has draws of its own.
        is_causal: whether rows see the keys up to their own place only.
    """
    draw = torch.Generator().manual_seed(seed * 1_000_003 + n)
    key = torch.randn(batch, heads, n, d, generator=draw)
    value = torch.randn(batch, heads, n, d, generator=draw)
    query = torch.randn(batch, heads, min(samples, n), d, generator=draw)
    query = law.query_mean + law.query_std * query
    return Inputs(query, law.key_mean + law.key_std * key, value, is_causal, law)


def captured(
    sample: QueryKeySample, n: int, *, heads: int, samples: int, is_causal: bool
) -> Inputs:
    """Use queries, keys and values of a model: the last rows of its first n tokens.

    Args:
        sample: read by :func:`acutance.probing.load_queries_keys`.
        n: keys.
        heads: at most this many, evenly spaced over the model.
        samples: rows of each head.
        is_causal: whether rows see the keys up to their own place only.

    Raises:
        ValueError: if the sample is shorter than n.
    """
    if n > sample.length:
        raise ValueError(
            f"n must be at most the {sample.length} tokens whose queries and keys were "
            f"recorded, got {n}"
        )
    chosen = sample.spread(heads)
    query = chosen.query[:, max(0, n - samples) : n]
    return Inputs(
        query[None], chosen.key[None, :, :n], chosen.value[None, :, :n], is_causal,
        names=chosen.heads,
    )  # fmt: skip
