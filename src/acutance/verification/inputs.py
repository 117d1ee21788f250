"""Kinds of input that a model is verified on: plain, padded, packed, and with a cache."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from acutance.capture.find_layers import cache_argument, returned_cache, unwrap
from acutance.corpus.load_model import OptionError, TextModel
from acutance.corpus.texts import Text, special_tokens
from acutance.verification.expectation import Pass, windows_of

#: Names of the kinds of input, and what each is.
KINDS: dict[str, str] = {
    "plain": "the tokens as they are",
    "right padding": "a shorter text, padded at its end",
    "left padding": "a shorter text, padded at its start",
    "packed": "three documents in one row, told apart by position_ids",
    "cache by token": "most of the text at once, then token by token with a cache",
    "cache in chunks": "the text in four chunks with a cache",
    "left padding with cache": "a padded batch, then token by token with a cache",
}
#: In the code of a model: position_ids among the arguments that its masks are made from.
_MASKS_FROM_POSITIONS = re.compile(
    r"[\"']position_ids[\"']:\s*position_ids\b"
    r"|(create_\w*mask|mask_function)\w*\([^)]*\bposition_ids\s*(=\s*position_ids\b|[,)])",
    re.DOTALL,
)
_STEPS = 4  # tokens that are read one by one
_CHUNKS = 4
_SHORT = 96  # tokens of a model without windows
_BEYOND = 32  # tokens beyond the widest window

#: Runs a forward pass: what is known of it, and the model's arguments; returns its output.
Reader = Callable[[Pass, dict[str, Any]], Any]


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        name: one of :data:`KINDS`.
        run: reads it with a :data:`Reader`; returns the last output.
        cached: whether it needs a cache, so that no gradients are computed.
    """

    name: str
    run: Callable[[Reader], Any]
    cached: bool = False


def as_inputs(inputs: Any) -> dict[str, Any]:
    """The arguments of a model: a mapping as it is, a tensor as ``input_ids``.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(inputs, Tensor):
        return {"input_ids": inputs if inputs.dim() > 1 else inputs.unsqueeze(0)}
    if isinstance(inputs, Mapping) and inputs:
        return dict(inputs)
    raise TypeError(
        "inputs must be a tensor of token ids (B, L), or a mapping of the model's arguments, got "
        f"{type(inputs).__name__}"
    )


def kinds_for(model: torch.nn.Module, given: dict[str, Any]) -> Iterator[Kind]:
    """The kinds of input that a model can read.

    Args:
        model: the model.
        given: arguments of its forward pass.
    """
    ids = given.get("input_ids")
    names = set(inspect.signature(unwrap(model).forward).parameters)
    config = getattr(unwrap(model), "config", None)
    is_text = (
        set(given) <= {"input_ids", "attention_mask"}
        and isinstance(ids, Tensor)
        and ids.dim() == 2
        and not ids.is_floating_point()
        and not getattr(config, "is_encoder_decoder", False)
    )
    if not is_text or not isinstance(ids, Tensor):
        yield Kind("plain", lambda read: read(Pass("plain"), given))
        return
    text = _Text(ids, names, given.get("attention_mask"))

    def kind(name: str, **how: Any) -> Kind:
        return Kind(name, partial(text.read, name=name, **how), "sizes" in how)

    yield kind("plain")
    if "attention_mask" in names and ids.shape[1] >= 4:
        yield kind("right padding")
        if "position_ids" in names:
            yield kind("left padding")
    causal = (getattr(module, "is_causal", None) for module in model.modules())
    if {flag for flag in causal if isinstance(flag, bool)} != {True} or ids.shape[1] < 12:
        return
    cache = cache_argument(names)
    if "position_ids" in names and ("use_cache" in names or cache is None):
        yield kind("packed", separates=makes_masks_from_positions(model))
    if cache is not None and "use_cache" in names:
        size = -(-ids.shape[1] // _CHUNKS)
        steps = [ids.shape[1] - _STEPS, *([1] * _STEPS)]
        yield kind("cache by token", sizes=steps)
        yield kind("cache in chunks", sizes=list(map(len, torch.arange(ids.shape[1]).split(size))))
        if {"attention_mask", "position_ids"} <= names:
            yield kind("left padding with cache", sizes=steps)


def makes_masks_from_positions(model: torch.nn.Module) -> bool:
    """Whether a model's code makes masks from position_ids, and so tells documents apart."""
    for module in model.modules():
        try:
            source = inspect.getsource(type(module).forward)
        except (OSError, TypeError):
            continue
        if "create_causal_mask" in source and _MASKS_FROM_POSITIONS.search(source):
            return True
    return False


class _Text:
    """Reads token ids in several ways.

    Args:
        ids: token ids, (B, L).
        names: names of the arguments that the model's forward pass has.
        mask: the mask that was given with them, (B, L); None for none.
    """

    def __init__(self, ids: Tensor, names: set[str], mask: Tensor | None) -> None:
        self._ids, self._names = ids, names
        self._real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()

    def read(
        self, run: Reader, name: str, sizes: Sequence[int] | None = None, separates: bool = False
    ) -> Any:
        """Read the tokens as a kind of input in one pass, or in parts with a cache.

        Args:
            run: runs a pass.
            name: the kind of input, one of :data:`KINDS`.
            sizes: tokens of each part; None for one pass.
            separates: as of :class:`~acutance.verification.expectation.Pass`.
        """
        ids, real, positions, documents = self._arranged(name)
        cache, past, output = None, 0, None
        for size in sizes or [ids.shape[1]]:
            now, seen = slice(past, past + size), real[:, : past + size]
            facts = Pass(name, size, past, seen, positions[:, now], documents, True, separates)
            given: dict[str, Any] = {"input_ids": ids[:, now], "position_ids": positions[:, now]}
            given["use_cache"] = sizes is not None
            if documents is None:
                given["attention_mask"] = seen.long()
            if cache is not None:
                given[cache_argument(self._names) or "past_key_values"] = cache
            given = {key: value for key, value in given.items() if key in self._names}
            output, past = run(facts, given), past + size
            cache = returned_cache(output) if sizes is not None else None
            if cache is None and sizes is not None:
                raise ValueError(
                    f"no cache to go on with after {past} tokens: given use_cache=True, the model "
                    f"returned a {type(output).__name__} without past_key_values"
                )
        return output

    def _arranged(self, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Ids, real tokens and positions of a kind of input, and the ends of its documents.

        The second of two padded texts is shorter.
        """
        ids, real, length = self._ids, self._real, self._ids.shape[1]
        places = torch.arange(length, device=ids.device)
        if name == "packed":
            ends = [0, length // 2, length // 2 + length // 3, length]
            starts = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)]).to(ids.device)
            real = torch.ones_like(ids[:1], dtype=torch.bool)
            return ids[:1], real, starts[None], torch.tensor(ends).to(ids.device)
        if "padding" in name:
            ids = ids[:2].clone() if len(ids) > 1 else ids.repeat(2, 1)
            short = length - max(2, length // 4)
            lengths = torch.tensor([[length], [short]], device=ids.device)
            real = places < lengths
            if name.startswith("left"):
                real = places >= length - lengths
                ids[1, length - short :] = ids[1, :short].clone()
        if "padding" in name or name == "plain":
            return ids, real, (real.long().cumsum(-1) - 1).clamp(min=0), None
        return ids, real, places.expand(ids.shape), None


def token_ids(loaded: TextModel, texts: Sequence[Text], length: int | None) -> Tensor:
    """The first tokens of the first text, (1, L).

    Args:
        loaded: the model.
        texts: what to read.
        length: number of tokens; None reaches 32 tokens beyond the widest window, and reads at
            least 96.

    Raises:
        OptionError: if the text is too short, or the model has fewer positions.
    """
    config: Any = getattr(unwrap(loaded.model), "config", None)
    widest = max(windows_of(config), default=0)
    beyond = f" to reach beyond the sliding window of {widest}" if widest and not length else ""
    wanted = length if length is not None else max(_SHORT, widest + _BEYOND)
    if length is None and loaded.positions is not None:
        wanted = min(wanted, loaded.positions)
    wanted = loaded.window(wanted)
    text = texts[0]
    room = wanted - loaded.tokenizer.num_special_tokens_to_add(pair=False)
    ids = list(islice(chain.from_iterable(text.tokens(loaded.tokenizer)), room))
    if len(ids) < room:
        raise OptionError(
            f"--text {text.name} has {len(ids)} tokens, but {room} are needed{beyond}: give a "
            "longer text, or fewer tokens with --length"
        )
    before, after = special_tokens(loaded.tokenizer)
    pieces = [[*before, *ids, *after]]
    loaded.check_tokens(pieces)
    return torch.tensor(pieces, dtype=torch.int64)
