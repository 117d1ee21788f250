"""The functions and structures of the native kernels' shared library.

It speaks plain C (``cpu/api.h``): structures of numbers and addresses, written here with
:mod:`struct`, so that one build serves every Python and every torch.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

__all__ = [
    *("ABI", "CALL", "CPU_VARIABLE", "GRADIENTS", "METRIC_BITS", "PLACES", "RAGGED", "SUMS"),
    *("Choice", "Chooser", "Layout", "Library"),
]

#: Version of the structures below; a library of another one is refused.
ABI = 6
#: Environment variable that names the instruction set to use.
CPU_VARIABLE = "ACUTANCE_CPU"

#: Without AVX2 or its like the native kernel is the faster one for so many queries only, as long as
#: it was not timed: with SSE2, float32 and width 64 it takes 0.1 to 1.2 of the blocked path's time
#: up to 64 queries, and 1.3 (causal) to 1.9 (full) at 1024.
MOST_QUERIES_OF_BASELINE = 64


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


class Choice(NamedTuple):
    """The instruction set that the native kernel uses for a pass and dtype, and why.

    Attributes:
        dtype: of queries, keys and values.
        name: of the pass: "forward", "decode" (few queries) or "backward".
        cpu: the instruction set, such as "avx512".
        seconds: measured time of a small call by instruction set; empty if none was timed.
    """

    dtype: str
    name: str
    cpu: str
    seconds: dict[str, float]


class Chooser(Protocol):
    """Protocol of what chooses a library's instruction sets: ``kernels.selection.Selection``.

    Attributes:
        times: seconds of the kernels on this machine, by dtype.
    """

    times: dict[str, dict[str, dict[str, float]]]

    def apply(self, dtype: str) -> None:
        """Make the library use the instruction sets that were fastest for a dtype."""

    def choice(self, dtype: str, name: str) -> Choice:
        """The instruction set in use for the pass ``name`` of a dtype."""

    def choices(self) -> tuple[Choice, ...]:
        """The instruction sets in use for every dtype and pass."""

    def complete(self) -> None:
        """Time the dtypes that have no measured times yet."""


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
        loaded.acutance_choose.argtypes = words
        loaded.acutance_row_cost.argtypes = [ctypes.c_int64, ctypes.c_double]
        loaded.acutance_run.argtypes = [*words[:2], ctypes.c_char_p, ctypes.c_char_p]
        #: The C functions of two packed structures; 0, or the number of a reason.
        self.forward: Callable[[bytes, bytes], int] = loaded.acutance_forward
        self.backward: Callable[[bytes, bytes], int] = loaded.acutance_backward
        self.structure: Callable[[bytes, bytes], int] = loaded.acutance_structure
        self.ragged: Callable[[bytes, bytes], int] = loaded.acutance_ragged
        self.openmp = _openmp()
        if self.openmp is not None:
            loaded.acutance_use_threads(self.openmp)
        #: The instruction set that all calls take, by :meth:`use_cpu`; None where it is chosen.
        self.named: str | None = None
        #: Queries up to which this library is faster than plain PyTorch; infinite if it always is.
        self.most_queries = self._usual_most_queries()
        #: What the kernels took on this machine; None until :func:`load` has looked.
        self.selection: Chooser | None = None

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
        """Use one instruction set, by name, for all calls; None uses the one chosen for each pass.

        Raises:
            ValueError: if this machine or this build does not support it.
        """
        if self._loaded.acutance_use_cpu(None if name is None else name.encode()):
            raise ValueError(
                f"{CPU_VARIABLE} must name an instruction set of this machine and build, one "
                f"of {', '.join(self.cpus)}, got {name!r}"
            )
        self.named = name
        self.most_queries = self._usual_most_queries()
        if name is None and self.selection is not None:
            for dtype in self.selection.times:
                self.selection.apply(dtype)

    def _usual_most_queries(self) -> float:
        """Largest number of queries for the native kernel if it was not measured."""
        return MOST_QUERIES_OF_BASELINE if self.cpu == "baseline" else math.inf

    def choose(self, code: int, dtype: int, place: int) -> None:
        """Use the instruction set ``cpus[place]`` for a pass and dtype, given as their codes.

        Raises:
            ValueError: if there is no such pass, dtype or index.
        """
        if self._loaded.acutance_choose(code, dtype, place):
            raise ValueError(
                f"the native kernel has no pass {code} for dtype {dtype} and instruction set "
                f"{place}"
            )

    def row_cost(self, dtype: int, cost: float) -> None:
        """Set the time of a row computed alone, relative to a row of a tile; 0 is the default.

        Raises:
            ValueError: if there is no such dtype, or the factor is negative or NaN.
        """
        if self._loaded.acutance_row_cost(dtype, cost):
            raise ValueError(
                f"cost must be at least 0, and dtype one of the native kernel's, got cost={cost} "
                f"and dtype={dtype}"
            )

    def run(self, place: int, code: int, call: bytes, result: bytes) -> int:
        """Run one pass with the instruction set ``cpus[place]``, whatever is chosen.

        Args:
            place: index of the instruction set.
            code: of the pass.
            call: the packed C structure of the call.
            result: that of the results, whose memory is written.

        Returns:
            The kernel's status, for :func:`acutance.kernels.native.check`.
        """
        status: int = self._loaded.acutance_run(place, code, call, result)
        return status

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
