"""The shared library of the native kernels, in this folder, loaded on first use."""

from __future__ import annotations

import os
import struct
from functools import cache
from pathlib import Path

from acutance.kernels.bindings import CPU_VARIABLE, Library

#: Environment variable: the folder in which the library is, if not this one.
FOLDER_VARIABLE = "ACUTANCE_LIBRARY"
_NAMES = ("libacutance.so", "libacutance.dll")


@cache
def load() -> Library | str:
    """Load the library of native kernels once; return it, or a sentence that says why it failed.

    Raises:
        ValueError: if :data:`CPU_VARIABLE` names an instruction set that is not available.
    """
    if struct.calcsize("P") != 8:
        return "the native kernels need a 64-bit machine"
    folder = Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent)
    found = [folder / name for name in _NAMES if (folder / name).is_file()]
    if not found:
        return "acutance was installed without its native kernels, because no compiler built them"
    try:
        library = Library(found[0])
    except (OSError, AttributeError) as problem:
        return f"the native kernels cannot be loaded: {problem}"
    library.use_cpu(os.environ.get(CPU_VARIABLE) or None)
    return library
