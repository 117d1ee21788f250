"""The shared library of the native kernels, in this folder, loaded on first use.

It speaks plain C (``cpu/api.h``): structures of numbers and addresses, written here with
:mod:`struct`, so that one build serves every Python and every torch.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

#: Version of the structures below; a library of another one is refused.
ABI = 6
#: Environment variable that names the instruction set to use.
CPU_VARIABLE = "ACUTANCE_CPU"
#: Environment variable: the folder in which the library is, if not this one.
FOLDER_VARIABLE = "ACUTANCE_LIBRARY"
_NAMES = ("libacutance.so", "libacutance.dll")


class Layout:
    """A C structure whose every member has eight bytes, packed by name.

    Example:
        >>> pair = Layout("count q", "at 2q")
        >>> len(pair.pack(count=3, at=(1, 2))), pair.words
        (24, 3)
    """

    def __init__(self, *members: str) -> None:
        split = [member.split() for member in members]
        self.names = [name for name, _ in split]
        self._counts = [int(code[:-1] or 1) for _, code in split]
        self._codes = [code for _, code in split]
        self.words = sum(self._counts)
        #: The structure of every word in order, which is faster than by name.
        self.words_packed = struct.Struct("=" + self.code_until(self.names[-1])).pack

    def code_until(self, name: str) -> str:
        """Format characters of :mod:`struct` for all members up to ``name``, inclusive."""
        codes = self._codes[: self.names.index(name) + 1]
        return "".join(codes).replace("P", "Q")

    def words_until(self, name: str) -> int:
        """Number of words of eight bytes in all members up to ``name``, inclusive."""
        return sum(self._counts[: self.names.index(name) + 1])

    def pack(self, **values: int | float | tuple[int | float, ...]) -> bytes:
        """The structure's bytes from values by member name; members not given are 0 or null."""
        flat: list[int | float] = []
        for name, count in zip(self.names, self._counts, strict=True):
            value = values.pop(name, 0)
            if isinstance(value, tuple):
                flat.extend(value)
            else:
                flat.extend([value] * count if value == 0 else [value])
        if values:
            raise TypeError(f"no member of the structure: {', '.join(values)}")
        return self.words_packed(*flat)


def _additive(name: str) -> tuple[str, ...]:
    """Members of the C structure for an additive mask."""
    return f"{name} P", f"{name}_stride 4q", f"{name}_limit d", f"{name}_dtype q"


#: ``acutance_call``: what a call attends with.
CALL = Layout(
    *("abi q", "dtype q", "batch q", "heads q", "group q", "queries q", "keys q"),
    *("width q", "value_width q", "query P", "key P", "value P"),
    *("query_stride 3q", "key_stride 3q", "value_stride 3q", "scale d", "softcap d"),
    *("causal q", "offset q", "window q", "allowed P", "allowed_stride 4q"),
    *_additive("bias"),
    *_additive("mask"),
    *("key_mask P", "key_mask_stride 2q", "query_documents P", "key_documents P"),
    *("query_documents_stride 2q", "key_documents_stride 2q", "slopes P", "sinks P", "threads q"),
)
#: ``acutance_sums``: where the forward pass writes.
SUMS = Layout(
    *("out P", "out_stride 3q", "n P", "m P", "Z P", "U P", "W P", "Q P", "mean P", "M2 P"),
    *("depth P", "first P", "first_index P", "O P", "R1 P", "R2 P", "noise q", "gaps P"),
)
#: ``acutance_gradients``: what the backward pass reads and writes.
GRADIENTS = Layout(
    *("m P", "grad_out P", "grad_out_stride 3q", "inverse P", "constant P", "linear P"),
    *("square P", "weight P", "slope P", "plain P", "first P", "largest P", "first_index P"),
    *("query P", "key P", "value P"),
)
#: ``acutance_places``: what is asked of where rows put their weight, and where it is written.
PLACES = Layout(
    *("positions P", "position_stride 2q", "tokens P", "asked P", "token_stride 2q"),
    *("asked_stride 2q", "special P", "special_stride 2q", "octaves q", "by_head q", "every q"),
    *("distance P", "on_self P", "on_previous P", "on_same P", "on_special P"),
    *("mass P", "even P", "peak P", "scores P"),
)
#: ``acutance_ragged_call``: a query that reads heads which hold keys of their own number.
RAGGED = Layout(
    *("abi q", "dtype q", "batch q", "heads q", "group q", "width q", "value_width q", "query P"),
    *("key P", "value P", "out P", "query_stride 2q", "key_stride 2q", "value_stride 2q"),
    *("scale d", "tokens q", "channels q", "threads q"),
)
#: Metrics that :attr:`Library.metrics` computes, each by the bit that asks for it.
METRIC_BITS = {
    name: 1 << place
    for place, name in enumerate(
        [
            *("entropy", "normalized_entropy", "information", "effective_keys", "sparsity"),
            *("collision", "top_weight", "first_weight", "sink_mass", "lse", "logit_mean"),
            *("logit_std", "varentropy", "entropy_slope", "mean_field_entropy", "jensen_gap"),
            *("max_gap", "gaussian_entropy", "first_gap", "rest_logit_std", "rest_jensen_gap"),
            "jacobian_trace",
        ]
    )
}


class Library:
    """The loaded shared library of native kernels."""

    def __init__(self, path: Path) -> None:
        """Load the library and let it run its work on torch's threads.

        Raises:
            OSError: if it cannot be loaded, or is of another version.
        """
        self.path = path
        loaded = ctypes.CDLL(os.fspath(path))
        self._loaded = loaded
        loaded.acutance_abi.restype = ctypes.c_int64
        if (abi := loaded.acutance_abi()) != ABI:
            raise OSError(f"{path.name} has interface {abi}, expected {ABI}: reinstall acutance")
        for name in ("acutance_cpu", "acutance_cpus", "acutance_compiler"):
            getattr(loaded, name).restype = ctypes.c_char_p
        loaded.acutance_use_cpu.argtypes = [ctypes.c_char_p]
        for name in ("forward", "backward", "structure", "ragged"):
            getattr(loaded, f"acutance_{name}").argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        loaded.acutance_exp.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        loaded.acutance_exp.argtypes += [ctypes.c_int64]
        words = [ctypes.c_int64] * 3
        #: Writes metrics of rows in one pass: their bits, 1 for float64, the number of rows, the
        #: sums, the table of the Gaussian entropy, the numbers.
        self.metrics = loaded.acutance_metrics
        self.metrics.argtypes = [*words, *[ctypes.c_void_p] * 3]
        #: The C functions of two packed structures; 0, or the number of a reason.
        self.forward: Callable[[bytes, bytes], int] = loaded.acutance_forward
        self.backward: Callable[[bytes, bytes], int] = loaded.acutance_backward
        self.structure: Callable[[bytes, bytes], int] = loaded.acutance_structure
        self.ragged: Callable[[bytes, bytes], int] = loaded.acutance_ragged
        self.openmp = _openmp()
        if self.openmp is not None:
            loaded.acutance_use_threads(self.openmp)
        #: The instruction set named by :meth:`use_cpu`; None for the processor's usual one.
        self.named: str | None = None

    @property
    def cpu(self) -> str:
        """Name of the instruction set in use."""
        return str(self._loaded.acutance_cpu().decode())

    @property
    def cpus(self) -> tuple[str, ...]:
        """Names of the instruction sets that machine and build both support, widest first."""
        return tuple(self._loaded.acutance_cpus().decode().split())

    @property
    def compiler(self) -> str:
        """The compiler that built the library."""
        return str(self._loaded.acutance_compiler().decode())

    def use_cpu(self, name: str | None) -> None:
        """Use an instruction set by name; None uses the processor's usual one.

        Raises:
            ValueError: if this machine or this build does not support it.
        """
        if self._loaded.acutance_use_cpu(None if name is None else name.encode()):
            raise ValueError(
                f"{CPU_VARIABLE} must name an instruction set of this machine and build, one "
                f"of {', '.join(self.cpus)}, got {name!r}"
            )
        self.named = name

    def usual_cpu(self, vendor: str, family: int) -> str:
        """The instruction set that a processor with these :attr:`cpus` uses if none is named.

        Args:
            vendor: as its CPUID states it, such as "AuthenticAMD".
            family: likewise; 25 is Zen 3 and 4.
        """
        place: int = self._loaded.acutance_usual_cpu(vendor.encode(), family)
        return self.cpus[place]

    def exp(self, numbers: torch.Tensor) -> torch.Tensor:
        """The native kernels' own exponential of float32 or float64 numbers, for tests of it."""
        numbers = numbers.contiguous()
        result = torch.empty_like(numbers)
        dtype = 1 if numbers.dtype == torch.float64 else 0
        self._loaded.acutance_exp(dtype, numbers.data_ptr(), result.data_ptr(), numbers.numel())
        return result


def _openmp() -> Any:
    """The function ``GOMP_parallel`` of the OpenMP library that torch uses; None if it uses none.

    It is looked up through torch's library and its dependencies: a second OpenMP library in the
    process would start its own threads.
    """
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).is_file():
            return getattr(ctypes.CDLL(os.fspath(folder / name)), "GOMP_parallel", None)
    return None


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
