"""Read attention in vLLM: a plugin that samples rows from the paged cache of its layers.

vLLM loads the functions of the group ``vllm.general_plugins`` in each of its processes. Ours does
nothing unless :data:`FOLDER` is set in the environment.
"""

from __future__ import annotations

import os
from pathlib import Path

from acutance.serving.served_rows import ServedRows
from acutance.serving.vllm_reader import VllmReader

#: Environment variables: where to write, one row in how many is read, seconds between writes.
FOLDER, EVERY, SECONDS = "ACUTANCE_VLLM_FOLDER", "ACUTANCE_VLLM_EVERY", "ACUTANCE_VLLM_SECONDS"
_reader: VllmReader | None = None


def register() -> None:
    """The entry point that vLLM calls in each process.

    Raises:
        ValueError: if :data:`EVERY` or :data:`SECONDS` is not a positive number.
    """
    folder = os.environ.get(FOLDER)
    if folder:
        read_vllm(folder, every=_number(EVERY, 16), seconds=_number(SECONDS, 30))


def _number(name: str, default: int) -> int:
    """A positive whole number from the environment."""
    text = os.environ.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ValueError(f"{name} must be a positive whole number, got {text[:40]!r}")
    return int(text)


def read_vllm(
    folder: str | os.PathLike[str] | None = None, *, every: int = 16, seconds: float = 30.0
) -> ServedRows:
    """Read attention layers that vLLM creates from now on in this process.

    Call it before ``vllm.LLM(...)``, with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, to read the
    statistics in the same process. A server starts further processes: set :data:`FOLDER` for it
    instead. A second call changes nothing and returns the first reader's rows.

    Args:
        folder: write ``attention-rank0.prom``, ``.json`` and ``.safetensors`` there; None to write
            nothing. Each worker process writes the files of its rank.
        every: read one row in so many.
        seconds: write so often, and when nothing has run for two seconds, and at the end.

    Returns:
        The rows read so far, which grow while the model runs.

    Raises:
        ImportError: if vLLM is not installed.
        OSError: if the folder cannot be created.
        ValueError: if ``every`` is below 1.
    """
    global _reader
    if _reader is None:
        from vllm.model_executor.layers.attention import Attention

        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        _reader = VllmReader(ServedRows(every=every), folder, seconds)
        _reader.install(Attention)
    return _reader.served
