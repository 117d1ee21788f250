"""GGUF files: read and check the header before transformers loads the weights.

Only names, sizes and offsets of the tensors are read; transformers reads and dequantises the
tensors.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from acutance.extras import install

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: What transformers' loader imports, beside torch.
_PACKAGES = ("gguf", "accelerate")
#: struct formats of the values of fixed size, by their number in the format.
_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


class GgufError(ValueError):
    """Raised for a GGUF file that cannot be read; the message is a clause that gives the reason."""


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
        metadata: numbers and strings by key; for arrays their length.
        tensors: names of the tensors.

    Source:
        The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """

    metadata: Mapping[str, Any]
    tensors: frozenset[str]

    @property
    def architecture(self) -> str:
        """The name of the architecture, such as ``llama``; empty if there is none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file has a vocabulary."""
        return bool(self.metadata.get("tokenizer.ggml.tokens"))

    @property
    def weights(self) -> str:
        """How the weights are stored, as text.

        Example:
            >>> GgufFile({"general.file_type": 3}, frozenset()).weights
            'GGUF, mostly Q4_1'
        """
        import gguf

        try:
            name = gguf.LlamaFileType(self.metadata.get("general.file_type", -1)).name
        except ValueError:
            return "GGUF"
        return "GGUF, " + name.replace("MOSTLY_", "mostly ").replace("ALL_", "all ")

    def unread_positions(self, config: Any) -> str | None:
        """The scaling of rotary positions in the file that the configuration lacks.

        Args:
            config: the configuration that transformers derived from the file.

        Returns:
            The name of a tensor with frequencies or factors if there is one, else the metadata
            key; None if the file scales nothing or the configuration scales too.
        """
        stored = sorted(name for name in self.tensors if re.search("rope_(freqs|factors)", name))
        key = f"{self.architecture}.rope.scaling.type"
        if self.metadata.get(key, "none") != "none":
            stored.append(key)
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        return stored[0] if stored and not _is_scaled(rope) else None


def _is_scaled(rope: Any) -> bool:
    """Whether a configuration scales rotary positions, in all layers or in some."""
    if not isinstance(rope, Mapping):
        return False
    kind = rope.get("rope_type", "default")
    return kind != "default" or any(map(_is_scaled, rope.values()))


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a name ends in ``.gguf``, as transformers requires."""
    return str(path).lower().endswith(".gguf")


def starts_as_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a file starts with the GGUF magic bytes, whatever its name."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file and check that the tensors it announces are there.

    Raises:
        GgufError: if a package is missing, or the file is not a GGUF file, of a version that is not
            read, truncated, damaged, or one part of several.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise GgufError(
            f"is a GGUF file, and reading it needs {' and '.join(missing)}; install with: "
            + install("gguf")
        )
    if split := _PART.search(path.name):
        raise GgufError(
            f"is one of {int(split[1])} parts of a model; join them with: llama-gguf-split --merge"
        )
    try:
        with open(path, "rb") as file:
            if not path.stat().st_size:
                raise GgufError("is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(data).read()
    except OSError as error:
        raise GgufError(f"cannot be read: {error.strerror or error}") from error


class _Header:
    """Parser of the header of a memory-mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._place = data, 0

    def read(self) -> GgufFile:
        """Parse the header; raises :class:`GgufError` if it is invalid or truncated."""
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise GgufError("is not a GGUF file: its first four bytes are not GGUF")
        self._place = len(_MAGIC)
        try:
            version = self._number("I")
            if version not in _VERSIONS:
                raise GgufError(
                    f"has GGUF version {version}; only little-endian versions "
                    f"{' and '.join(map(str, _VERSIONS))} are supported"
                )
            count, keys = self._number("Q"), self._number("Q")
            metadata = {self._string(): self._value(self._number("I")) for _ in range(keys)}
            tensors, end = set(), 0
            for _ in range(count):
                name = self._string()
                shape = self._numbers("Q", self._number("I"))
                kind, start = self._number("I"), self._number("Q")
                tensors.add(name)
                end = max(end, start + _bytes(name, kind, prod(shape)))
            step = metadata.get("general.alignment", 32)
            end += -(-self._place // step) * step if tensors else 0
        except struct.error:
            raise self._truncated("its header is incomplete") from None
        except (UnicodeDecodeError, KeyError, TypeError, ZeroDivisionError) as error:
            raise GgufError(f"is damaged: its header is invalid at byte {self._place:,}") from error
        if end > len(self._data):
            raise self._truncated(f"{end - len(self._data):,} bytes of its tensors are missing")
        return GgufFile(metadata, frozenset(tensors))

    def _truncated(self, where: str) -> GgufError:
        """Error for a file that ends inside ``where``."""
        return GgufError(f"is truncated at byte {len(self._data):,}: {where}; copy it again")

    def _number(self, form: str) -> Any:
        """Read one number of a struct format."""
        return self._numbers(form, 1)[0]

    def _numbers(self, form: str, count: int) -> tuple[Any, ...]:
        """Read several numbers of a struct format."""
        layout = f"<{count}{form}"
        start = self._skip(struct.calcsize(layout))
        return struct.unpack_from(layout, self._data, start)

    def _string(self) -> str:
        """Read a length-prefixed string."""
        start = self._skip(self._number("Q"))
        return self._data[start : self._place].decode("utf-8")

    def _skip(self, length: int) -> int:
        """Skip a number of bytes and return their start."""
        if length > len(self._data) - self._place:
            raise struct.error
        self._place += length
        return self._place - length

    def _value(self, kind: int) -> Any:
        """Read a metadata value; for an array only its length, since vocabularies are long."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_FORMATS[kind])
        inner, count = self._number("I"), self._number("Q")
        if inner in _FORMATS:
            self._skip(count * struct.calcsize(f"<{_FORMATS[inner]}"))
            return count
        for _ in range(count):
            if inner == _STRING:
                self._skip(self._number("Q"))
            else:
                self._value(inner)
        return count


def _bytes(name: str, kind: int, elements: int) -> int:
    """The size of a tensor in the file.

    Raises:
        GgufError: for a type that the gguf package does not know.
    """
    import gguf

    try:
        block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise GgufError(
            f"stores {name} in type {kind}, which the installed gguf package does not support"
        ) from None
    return elements // block * width


@contextmanager
def read_once() -> Iterator[None]:
    """Context in which transformers' loader parses a GGUF file once instead of three times.

    Configuration, tokenizer and weights otherwise each create a reader. Progress bars are disabled
    too.
    """
    import gguf
    import transformers.modeling_gguf_pytorch_utils as loader

    changes: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (gguf, "GGUFReader", functools.cache),
        (gguf, "get_tensor_name_map", functools.cache),
        (loader, "tqdm", lambda bar: functools.partial(bar, disable=True)),
    ]
    with ExitStack() as before:
        for owner, name, change in changes:
            if (plain := getattr(owner, name, None)) is not None:
                before.callback(setattr, owner, name, plain)
                setattr(owner, name, change(plain))
        yield
