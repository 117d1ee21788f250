"""Texts: read them, cut them into windows of tokens, batch the windows; digests for resuming."""

from __future__ import annotations

import codecs
import hashlib
import importlib.resources
import io
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from acutance.capture.find_layers import module_name, unwrap
from acutance.files import check_regular

#: Token ids in four bytes each; a list of them takes about 36.
Tokens = array  # of type code "i"
#: Characters that are tokenised at once, and those next to a cut that must not change its tokens.
_PIECE, _BESIDE = 1 << 16, 256
#: Line ends, then spaces, at which a cut is tried.
_TRIED = 16


class CorpusError(ValueError):
    """Raised for a text that cannot be read or is empty."""


@dataclass(frozen=True)
class Text:
    """A text and its label.

    Attributes:
        name: file name, ``standard input`` or the bundled text's title.
        content: the text, a UTF-8 file or the bytes of one, or its tokens.
        advance: called with the number of bytes, or characters, whenever some were read.
    """

    name: str
    content: str | Path | io.BytesIO | Tokens[int]
    advance: Callable[[int], object] = field(default=lambda _: None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """What ``advance`` is called with in all."""
        if isinstance(self.content, Path):
            return self.content.stat().st_size
        if isinstance(self.content, str):
            return len(self.content)
        return 0 if isinstance(self.content, array) else len(self.content.getbuffer())

    def blocks(self) -> Iterator[str]:
        """The text in parts, of which only one is in memory.

        Raises:
            CorpusError: if the file is not UTF-8 text.
        """
        if isinstance(self.content, str):
            for start in range(0, len(self.content), _PIECE):
                yield (block := self.content[start : start + _PIECE])
                self.advance(len(block))
            return
        assert not isinstance(self.content, array)
        content, decoder = self.content, codecs.getincrementaldecoder("utf-8")()
        is_path = isinstance(content, Path)
        with content.open("rb") if isinstance(content, Path) else nullcontext(content) as file:
            lines = io.IncrementalNewlineDecoder(decoder, translate=is_path)
            file.seek(0)
            while True:
                data = file.read(_PIECE)
                try:
                    yield lines.decode(data, not data)
                except UnicodeDecodeError as error:
                    place = file.tell() - len(error.object) + error.start
                    raise CorpusError(
                        f"{self.name} is not UTF-8 text: {error.reason} at byte {place}"
                    ) from None
                if not data:
                    return
                self.advance(len(data))

    def tokens(self, tokenizer: Any) -> Iterator[Sequence[int]]:
        """The tokens of the text in parts, without special tokens.

        A long text is tokenised in pieces that end where the tokens of the 256 characters before
        do not depend on the 256 after, at a line end, else a space; each with the 256 before it.
        The tokens are then those of the whole text at once, for any tokenizer whose tokens depend
        on no text farther away. If a tokenizer allows no such cut, pieces are as long as it takes.

        Raises:
            CorpusError: if the text cannot be read, or has no tokens.
        """
        if isinstance(self.content, array):
            yield self.content
            return

        def ids(text: str) -> list[int]:
            found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return found

        text, known, most, empty = "", 0, _PIECE, True
        for block in self.blocks():
            text += block
            while len(text) >= known + most + _BESIDE:
                cut = _place(ids, text, known + most)
                if cut is None:
                    most *= 2
                    continue
                part = ids(text[:cut])[len(ids(text[:known])) if known else 0 :]
                empty = empty and not part
                yield part
                text, known, most = text[max(0, cut - _BESIDE) :], min(cut, _BESIDE), _PIECE
        part = ids(text)[len(ids(text[:known])) if known else 0 :]
        if empty and not part:
            raise CorpusError(f"{self.name} contains no token of this model's vocabulary")
        yield part

    def tokenised(self, tokenizer: Any) -> Tokens[int]:
        """All tokens of the text, without special tokens."""
        if isinstance(self.content, array):
            return self.content
        whole: Tokens[int] = array("i")
        for part in self.tokens(tokenizer):
            whole.extend(part)
        return whole


def _place(ids: Callable[[str], list[int]], text: str, stop: int) -> int | None:
    """The last place to cut before ``stop`` where the tokens before do not depend on those after.

    None if none is found in the second half.
    """
    for mark in ("\n", " "):
        found = stop
        for _ in range(_TRIED):
            found = text.rfind(mark, stop // 2, found)
            if found < 0:
                break
            for cut in (found + 1, found):
                beside = text[max(0, cut - _BESIDE) : cut]
                if beside.isspace():  # tokens of a run of blanks depend on where it begins
                    continue
                before, both = ids(beside), ids(beside + text[cut : cut + _BESIDE])
                if both[: len(before)] == before:
                    return cut
    return None


def bundled() -> Text:
    """A page of English prose included in the package.

    Example:
        >>> len(bundled().content.split()) > 1000
        True
    """
    page = importlib.resources.files("acutance.data").joinpath("prose.txt")
    return Text("bundled prose", page.read_text(encoding="utf-8"))


def read(names: Sequence[str]) -> list[Text]:
    """Check that files are UTF-8 text and not empty; ``-`` is standard input, kept in memory.

    Raises:
        CorpusError: naming the file, if one is missing, unreadable, not text or empty.
    """
    texts = []
    for name in names:
        label = "standard input" if name == "-" else name
        try:
            if name == "-":
                text = Text(label, io.BytesIO(sys.stdin.buffer.read()))
            else:
                check_regular(name)
                text = Text(label, Path(name))
            blank = not sum(bool(block.strip()) for block in text.blocks())
        except FileNotFoundError:
            raise CorpusError(f"there is no text file at {name}") from None
        except IsADirectoryError:
            raise CorpusError(f"{name} is a directory; pass its files one by one") from None
        except OSError as error:
            problem = f"{label} cannot be read: {error.strerror}" if error.strerror else str(error)
            pipe = "; pipe it to --text -" if problem.endswith("not a file") else ""
            raise CorpusError(problem + pipe) from None
        if blank:
            raise CorpusError(f"{label} contains no text")
        texts.append(text)
    return texts


def windows(texts: Iterable[Text], tokenizer: Any, length: int) -> list[Tokens[int]]:
    """All windows of :func:`each_window`."""
    return list(each_window(texts, tokenizer, length))


def each_window(texts: Iterable[Text], tokenizer: Any, length: int) -> Iterator[Tokens[int]]:
    """Cut every text into windows of at most ``length`` tokens, special tokens included.

    A text's last window may be shorter; windows never span texts. Windows that contain only special
    tokens are dropped.

    Raises:
        CorpusError: if a text has no tokens.
    """
    room = length - tokenizer.num_special_tokens_to_add(pair=False)
    if room < 1:
        raise CorpusError(
            f"a window of {length} tokens has no room for text in addition to the model's "
            "special tokens"
        )
    before, after = special_tokens(tokenizer)
    for text in texts:
        held: Tokens[int] = array("i")
        for part in text.tokens(tokenizer):
            held.extend(part)
            whole = len(held) // room * room
            for start in range(0, whole, room):
                yield before + held[start : start + room] + after
            del held[:whole]
        if held:
            yield before + held + after


def special_tokens(tokenizer: Any) -> tuple[Tokens[int], Tokens[int]]:
    """The special tokens that the tokenizer adds before and after a text."""
    if tokenizer.num_special_tokens_to_add(pair=False) == 0:
        return array("i"), array("i")
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return array("i", full[:start]), array("i", full[start + len(bare) :])


def padded(pieces: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Windows of one batch, right-padded, and their mask, 0 on padding; (windows, length) int64.

    Example:
        >>> ids, mask = padded([[5, 6, 7], [8]], 0)
        >>> ids.tolist(), mask.tolist()
        ([[5, 6, 7], [8, 0, 0]], [[1, 1, 1], [1, 0, 0]])
    """
    rows = [torch.tensor(piece, dtype=torch.int64) for piece in pieces]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad)
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)


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
