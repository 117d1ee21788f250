"""Texts: read them, cut them into windows of tokens, batch the windows; digests for resuming."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acutance.capture.module_names import module_name, unwrap
from acutance.files import check_regular

__all__ = [
    "Batch",
    "CorpusError",
    "Text",
    "batches",
    "bundled",
    "model_digest",
    "read",
    "text_digest",
    "windows",
    "with_special_tokens",
]


class CorpusError(ValueError):
    """Raised for a text that cannot be read or is empty."""


@dataclass(frozen=True)
class Text:
    """A text and its label.

    Attributes:
        name: file name, ``standard input`` or the bundled text's title.
        content: the text.
    """

    name: str
    content: str


def bundled() -> Text:
    """A page of English prose included in the package.

    Example:
        >>> len(bundled().content.split()) > 1000
        True
    """
    page = importlib.resources.files("acutance.data").joinpath("prose.txt")
    return Text("bundled prose", page.read_text(encoding="utf-8"))


def read(names: Sequence[str]) -> list[Text]:
    """Read files as UTF-8; ``-`` is standard input.

    Raises:
        CorpusError: naming the file, if one is missing, unreadable, not text or empty.
    """
    return [_read_one(name) for name in names]


def _read_one(name: str) -> Text:
    """Read a text file, or standard input for "-"; raises CorpusError if it is not text."""
    label = "standard input" if name == "-" else name
    try:
        if name == "-":
            content = sys.stdin.buffer.read().decode("utf-8")
        else:
            check_regular(name)
            content = Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CorpusError(f"there is no text file at {name}") from None
    except IsADirectoryError:
        raise CorpusError(f"{name} is a directory; pass its files one by one") from None
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{label} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except OSError as error:
        problem = f"{label} cannot be read: {error.strerror}" if error.strerror else str(error)
        pipe = "; pipe it to --text -" if problem.endswith("not a file") else ""
        raise CorpusError(problem + pipe) from None
    if not content.strip():
        raise CorpusError(f"{label} contains no text")
    return Text(label, content)


@dataclass(frozen=True)
class Batch:
    """Windows of one batch, right-padded.

    Attributes:
        input_ids: (windows, length) int64.
        attention_mask: (windows, length) int64, 0 on padding.
    """

    input_ids: Tensor
    attention_mask: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens that are not padding."""
        return int(self.attention_mask.sum())


def windows(texts: Sequence[Text], tokenizer: Any, length: int) -> list[list[int]]:
    """Cut every text into windows of at most ``length`` tokens, special tokens included.

    A text's last window may be shorter; windows never span texts. Windows that contain only special
    tokens are dropped.

    Raises:
        CorpusError: if a text has no tokens.
    """
    pieces: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text.content, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise CorpusError(f"{text.name} contains no token of this model's vocabulary")
        room = length - tokenizer.num_special_tokens_to_add(pair=False)
        if room < 1:
            raise CorpusError(
                f"a window of {length} tokens has no room for text in addition to the model's "
                "special tokens"
            )
        for start in range(0, len(ids), room):
            pieces.append(with_special_tokens(tokenizer, ids[start : start + room]))
    return pieces


def with_special_tokens(tokenizer: Any, ids: list[int]) -> list[int]:
    """Add the tokenizer's special tokens around a window, as around a whole text."""
    if tokenizer.num_special_tokens_to_add(pair=False) == 0:
        return ids
    if hasattr(tokenizer, "build_inputswith_special_tokens"):
        return list(tokenizer.build_inputswith_special_tokens(ids))
    before, after = _special_tokens(tokenizer)
    return [*before, *ids, *after]


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return full[:start], full[start + len(bare) :]


def batches(pieces: Sequence[Sequence[int]], size: int, pad: int) -> Iterator[Batch]:
    """Right-padded batches of at most ``size`` windows, in order.

    Example:
        >>> batch = next(batches([[5, 6, 7], [8]], 2, 0))
        >>> batch.input_ids.tolist(), batch.attention_mask.tolist()
        ([[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    """
    for start in range(0, len(pieces), size):
        chosen = pieces[start : start + size]
        longest = max(len(piece) for piece in chosen)
        ids = torch.full((len(chosen), longest), pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, piece in enumerate(chosen):
            ids[row, : len(piece)] = torch.tensor(piece, dtype=torch.int64)
            mask[row, : len(piece)] = 1
        yield Batch(ids, mask)


_SAMPLED = 64


def model_digest(model: torch.nn.Module) -> str:
    """Sixteen hexadecimal digits that identify a model's configuration and weights.

    The digest covers the name, shape, dtype and 64 evenly spaced entries of each tensor of the
    state dict; one training step changes it. Location, wrappers and the release that wrote the
    configuration do not matter. Every rank of a sharded model must call it.

    Example:
        >>> layer = torch.nn.Linear(3, 2)
        >>> before = model_digest(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(1.5)
        >>> model_digest(layer) == before
        False
    """
    digest = hashlib.sha256()
    config: Any = getattr(unwrap(model), "config", None)
    if hasattr(config, "to_dict"):
        attributes = {
            name: value
            for name, value in config.to_dict().items()
            if not name.startswith("_") and name not in ("transformers_version", "dtype")
        }
        digest.update(json.dumps(attributes, sort_keys=True, default=str).encode())
    named = {module_name(model, name): tensor for name, tensor in model.state_dict().items()}
    for name, tensor in sorted(named.items()):
        if not isinstance(tensor, torch.Tensor):
            continue
        if hasattr(tensor, "full_tensor"):  # sharded by fully_shard: a DTensor
            tensor = tensor.full_tensor()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            last = flat.numel() - 1
            count = min(_SAMPLED, flat.numel())
            places = [last * index // max(1, count - 1) for index in range(count)]
            entries = flat.contiguous().view(torch.uint8).view(flat.numel(), -1)  # of any dtype
            digest.update(entries[places].cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def text_digest(pieces: Sequence[Sequence[int]]) -> str:
    """Sixteen hexadecimal digits that identify the tokens of all windows and their order.

    Example:
        >>> text_digest([[1, 2], [3]]) == text_digest([[1], [2, 3]])
        False
    """
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(array("q", [len(piece), *piece]).tobytes())
    return digest.hexdigest()[:16]
