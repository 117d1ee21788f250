"""What a benchmark says: frozen records, and their JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any, Literal

from acutance.files import as_json, finite
from acutance.from_json import checked, parse_json, sealed_json
from benchmarks.cpu.cases import Case

FORMAT = 2
Status = Literal["timed", "weighed", "failed", "not run", "unfinished"]


@dataclass(frozen=True)
class Progress:
    """One step about to begin.

    Attributes:
        done: steps before it.
        total: steps of the whole run.
        message: what the step is, one line.
    """

    done: int
    total: int
    message: str


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of one number per round."""

    median: float
    q1: float
    q3: float

    def __post_init__(self) -> None:
        if not 0 <= self.q1 <= self.median <= self.q3:
            raise ValueError(f"quartiles lie around the median, from 0 on, got {astuple(self)}")

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value; quartiles interpolate within the data.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0, 4.0, 10.0])
            Spread(median=3.0, q1=2.0, q3=4.0)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3)


@dataclass(frozen=True)
class Check:
    """One comparison with the float64 reference, or of the whole output with SDPA's.

    Attributes:
        quantity: "output", a metric's name, "output beside sdpa", or "gradient of query", "… key",
            "… value".
        error: largest absolute error over the rows compared; None where it is not finite.
        tolerance: the largest that passes.
    """

    quantity: str
    error: float | None
    tolerance: float

    def __post_init__(self) -> None:
        _at_least(0, self, "error", "tolerance")

    @property
    def passed(self) -> bool:
        """Whether the error is finite and within the tolerance."""
        return self.error is not None and self.error <= self.tolerance


@dataclass(frozen=True)
class Row:
    """One contender in one case.

    Attributes:
        contender: its name.
        status: "timed"; "weighed" (of memory alone); "failed" (the gate refused it: no times); "not
            run" (it cannot run here, or has no room); "unfinished" (interrupted before a round of
            it was complete).
        reason: why it failed, was not run, or lacks its memory; otherwise empty.
        checks: the gate's comparisons.
        milliseconds: wall time of a call.
        cpu_milliseconds: CPU time of a call, summed over the process's threads.
        ratio: wall time over the reference's of the same round.
        cpu_ratio: CPU time over the reference's of the same round.
        rounds: how many rounds the four above summarise.
        gflop: floating-point operations of its matrix products, in 1e9, of one call.
        peak_mib: memory at the call's peak above what its inputs take, results included, MiB.
        mib_above_reference: that peak less the reference's, MiB.
        backend: which kernel took its calls, where it is one of this library.
    """

    contender: str
    status: Status
    reason: str = ""
    checks: tuple[Check, ...] = ()
    milliseconds: Spread | None = None
    cpu_milliseconds: Spread | None = None
    ratio: Spread | None = None
    cpu_ratio: Spread | None = None
    rounds: int = 0
    gflop: float = 0.0
    peak_mib: float | None = None
    mib_above_reference: float | None = None
    backend: str = ""

    def __post_init__(self) -> None:
        _at_least(0, self, "rounds", "gflop", "peak_mib")
        if self.status == "timed" and None in (self.ratio, self.cpu_ratio, self.milliseconds):
            raise ValueError(f"the row of {self.contender!r:.60} is timed and has no times")

    def error(self, quantity: str) -> float | None:
        """The error of one quantity, or None if it was not compared."""
        return next((check.error for check in self.checks if check.quantity == quantity), None)


@dataclass(frozen=True)
class CaseResult:
    """One case at one number of threads: a row per contender, and whether it was finished."""

    case: Case
    threads: int
    rows: tuple[Row, ...]
    complete: bool

    def __post_init__(self) -> None:
        _at_least(1, self, "threads")
        names = [row.contender for row in self.rows]
        if len(set(names)) != len(names):
            raise ValueError(f"case {self.case.name!r:.60} has a contender twice")
        if self.complete and (left := sorted(set(self.case.contenders) - set(names))):
            raise ValueError(f"case {self.case.name!r:.60} has no row of {left[0]!r:.60}")

    def row(self, contender: str) -> Row:
        """The row of one contender."""
        return next(row for row in self.rows if row.contender == contender)

    def ratio(self, row: Row) -> Spread | None:
        """A contender's time over the reference's: CPU time with one thread, wall time with more.

        With one thread the two agree on a quiet machine; on a busy one CPU time is the steadier.
        """
        return row.cpu_ratio if self.threads == 1 else row.ratio

    def time(self, row: Row) -> Spread | None:
        """The time that :meth:`ratio` is of, milliseconds."""
        return row.cpu_milliseconds if self.threads == 1 else row.milliseconds


@dataclass(frozen=True)
class Peak:
    """What the machine can do, measured beside the cases.

    Attributes:
        threads: with so many threads.
        gflops: by dtype, 1e9 operations a second in the fastest product or convolution found.
        exps: exponentials a second, in 1e9.
    """

    threads: int
    gflops: dict[str, float]
    exps: float

    def __post_init__(self) -> None:
        _at_least(1, self, "threads")
        rates = [self.exps, *self.gflops.values()]
        if "float32" not in self.gflops or not all(rate > 0 for rate in rates):
            raise ValueError(
                (f"peaks must be positive rates, float32's among them, got {self}")[:200]
            )

    def of(self, dtype: str) -> float:
        """The most that inputs of a dtype can be multiplied with: their own, or float32's."""
        return max(self.gflops.get(dtype, 0.0), self.gflops.get("float32", 0.0))

    def floor(self, case: Case, gflop: float) -> float:
        """Milliseconds of the products at the peak rate, and of an exponential for every pair.

        Example:
            >>> Peak(1, {"float32": 100.0}, 5.0).floor(Case("small", 1000, 1000), gflop=2.0)
            21.6
        """
        return 1e3 * (gflop / self.of(case.dtype) + case.pairs / 1e9 / self.exps)


@dataclass(frozen=True)
class Settings:
    """How the numbers were taken; see :func:`benchmarks.cpu.runner.run`."""

    rounds: int
    memory: bool


@dataclass(frozen=True)
class Environment:
    """Where the numbers were taken.

    Attributes:
        acutance: version, as torch and python.
        torch: version.
        python: version.
        platform: operating system and architecture.
        processor: model name.
        cores: logical cores.
        cpu: instruction set of the native kernel, or empty where there is none.
        compiler: what built it, or why there is none.
        memory_method: how peak memory is read here.
        date: start, UTC, ISO 8601.
        load: the system's load when it started, processes; None where it is not known.
        torch_cpu: instruction set of PyTorch's own kernels, as it calls it; empty in records from
            before it was kept.
    """

    acutance: str
    torch: str
    python: str
    platform: str
    processor: str
    cores: int
    cpu: str
    compiler: str
    memory_method: str
    date: str
    load: float | None
    torch_cpu: str = ""

    @property
    def reference_cpu(self) -> str:
        """Instruction set of SDPA: PyTorch's; in older records that of the native kernel.

        Example:
            >>> Environment(*["?"] * 5, 2, "avx512_bf16", *["?"] * 3, None).reference_cpu
            'AVX512'
        """
        return self.torch_cpu or self.cpu.partition("_")[0].upper()

    def same_place(self, other: Environment) -> bool:
        """Whether numbers of the two may stand in one table: all but date and load agree."""
        return replace(self, date="", load=None) == replace(other, date="", load=None)


@dataclass(frozen=True)
class BenchReport:
    """Everything one run found.

    Attributes:
        settings: how the numbers were taken.
        environment: where.
        peaks: what the machine can do, for each number of threads.
        results: the cases in the order asked for, for each number of threads.
        complete: False if the run was interrupted; the cases that were not reached are missing.
    """

    settings: Settings
    environment: Environment
    peaks: tuple[Peak, ...]
    results: tuple[CaseResult, ...]
    complete: bool

    def result(self, name: str, threads: int = 1) -> CaseResult:
        """The result of one case."""
        found = (each for each in self.results if each.case.name == name)
        return next(each for each in found if each.threads == threads)

    def peak(self, threads: int) -> Peak | None:
        """What the machine can do with so many threads."""
        return next((peak for peak in self.peaks if peak.threads == threads), None)

    def to_json(self) -> str:
        """The report as JSON text; :meth:`from_json` reads it back."""
        return as_json(sealed_json({"format": FORMAT, **finite(asdict(self))})) + "\n"

    @classmethod
    def from_json(cls, text: str) -> BenchReport:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: if the text is not such a report.
        """
        try:
            data = parse_json(text)
            if (found := data.pop("format", None)) != FORMAT:
                raise ValueError(f"format {found!r:.60}, this version reads {FORMAT}")
            return checked(cls, data, "the report")
        except ValueError as error:
            raise ValueError(f"not a benchmark report: {error}") from error


def case_from_dict(data: dict[str, Any]) -> Case:
    """The inverse of :func:`dataclasses.asdict` on a case that went through JSON."""
    return checked(Case, data, "the case")


def _at_least(least: float, record: object, *names: str) -> None:
    """Refuse numbers that no measurement gives.

    Raises:
        ValueError: naming the first.
    """
    for name in names:
        value = getattr(record, name)
        if value is not None and not value >= least:
            kind = type(record).__name__.lower()
            raise ValueError(f"{name} of a {kind} is at least {least}, got {value}")
