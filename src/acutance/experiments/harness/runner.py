"""Run experiments one after another, store each as it finishes, and continue where a run ended."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from acutance.corpus.load_model import DECODER_PACKAGE, install_decoder
from acutance.experiments.harness.experiment import Experiment, Run
from acutance.experiments.harness.record import (
    SCHEMA,
    Claim,
    Estimate,
    Record,
    Relation,
    Row,
    Value,
    judge,
    untested_row,
)
from acutance.experiments.models.fitting import Note
from acutance.extras import install
from acutance.files import tidy
from acutance.from_json import checked, read_json
from acutance.report import plot_style
from acutance.shapes import did_you_mean


@dataclass(frozen=True)
class Outcome:
    """The result of one experiment of a run.

    Attributes:
        record: its results.
        resumed: whether it was read from an earlier run's file, not measured now.
        files: paths of its record and figures.
    """

    record: Record
    resumed: bool
    files: tuple[Path, ...]


def pick(names: Sequence[str], experiments: Mapping[str, Experiment]) -> list[Experiment]:
    """The experiments with these names, each once, in the order of the catalogue; all if no name.

    Raises:
        ValueError: if a name is unknown; it gives the nearest name.
    """
    for name in names:
        if name not in experiments:
            hint = did_you_mean(name, experiments, f"; there are: {', '.join(experiments)}")
            raise ValueError(f"there is no experiment {name!r}{hint}")
    return [one for name, one in experiments.items() if not names or name in names]


def missing(experiment: Experiment, *, quick: bool) -> str:
    """Import name of the first package that is not installed and needed at this size, or ""."""
    for package in (experiment.needs, "" if quick else experiment.full_needs):
        if package and importlib.util.find_spec(package) is None:
            return package
    return ""


def run_one(
    experiment: Experiment,
    *,
    quick: bool = False,
    seed: int = 0,
    keep: Path | None = None,
    note: Note | None = None,
) -> Record:
    """Measure an experiment and judge its claims; no record is written.

    Args:
        experiment: which.
        quick: run at the small size.
        seed: of its random numbers.
        keep: directory for checkpoints of the models it trains, so that an interrupted training
            continues; None stores none.
        note: takes lines of progress from experiments that train.

    Returns:
        The record. With the same seed and size it is the same on the same versions.
    """
    with _one_thread():
        start = time.perf_counter()
        measured = experiment.measure(Run(experiment.name, quick, seed, keep, note))
        seconds = time.perf_counter() - start
    claims = experiment.tested(quick=quick)
    tested = {"", *(claim.key for claim in claims)}
    # what this size cannot decide is recorded, and not judged
    rows = tuple(row if row.claim in tested else row.without_verdict() for row in measured)
    return Record(
        name=experiment.name,
        title=experiment.title,
        prediction=experiment.prediction,
        judgements=tuple(judge(claim, rows) for claim in claims),
        rows=rows,
        seed=seed,
        quick=quick,
        seconds=round(seconds, 3),
        about=_about(experiment),
    )


def run(
    experiments: Iterable[Experiment],
    out: str | os.PathLike[str],
    *,
    quick: bool = False,
    seed: int = 0,
    force: bool = False,
    figures: bool = True,
    note: Note | None = None,
) -> Iterator[Outcome]:
    """Run experiments, writing each one's record and figures before the next begins.

    An experiment whose record in ``out`` has the same seed, size, code and versions is not run
    again; figures that are missing are drawn from the record.

    Args:
        experiments: which.
        out: directory of records and figures, created if needed.
        quick: run at the small size, seconds each.
        seed: of all random numbers.
        force: measure again even if a record exists, and replace records of other runs.
        figures: draw; needs matplotlib.
        note: takes lines of progress from experiments that train models. Those models stay in
            ``out/models``: a training that was stopped continues, a finished one is only read.

    Yields:
        The outcome of each experiment as it finishes.

    Raises:
        ImportError: before anything runs, if figures are asked for without matplotlib, or an
            experiment needs a package that is not installed.
        ValueError: before anything runs, if ``out`` holds a record of another seed, or of full size
            where this run is quick.
    """
    if figures:
        try:
            plot_style.new_figure("")  # fails here rather than after a measurement
        except ImportError as error:
            raise ImportError(
                f"figures need matplotlib; install it with: {install('plots')}, or "
                "skip them with --no-figures (in Python, figures=False)"
            ) from error
    experiments = list(experiments)
    for experiment in experiments:
        if package := missing(experiment, quick=quick):
            size = "" if package == experiment.needs else " at full size"
            raise ImportError(
                f"the experiment {experiment.name} needs {package}{size}; install it with: "
                + (install_decoder() if package == DECODER_PACKAGE else install("hf"))
            )
    directory = Path(out)
    if not force:
        check_others(experiments, directory, quick=quick, seed=seed)
    directory.mkdir(parents=True, exist_ok=True)
    for experiment in experiments:
        path = directory / f"{experiment.name}.json"
        for file in (path, *_pictures(directory, experiment.name)):
            tidy(file)
        record = None if force else _earlier(experiment, path, quick=quick, seed=seed)
        resumed = record is not None
        if record is None:
            record = run_one(
                experiment, quick=quick, seed=seed, keep=directory / "models", note=note
            )
            for old in _pictures(directory, experiment.name):
                old.unlink(missing_ok=True)  # never a figure of other numbers beside a record
            record.save(path)
        files = [path]
        if figures:
            files += draw(experiment, record, directory)
        yield Outcome(record, resumed, tuple(files))


def check_others(
    experiments: Iterable[Experiment], directory: Path, *, quick: bool, seed: int
) -> None:
    """Raise ValueError if this run would replace records of another run in ``directory``.

    Raises:
        ValueError: naming the first record with another seed, or of full size where this run is
            quick, and the option that replaces it. Full size may replace quick.
    """

    def named(quick: bool, seed: int) -> str:
        return f"seed {seed} at {'quick' if quick else 'full'} size"

    for experiment in experiments:
        path = directory / f"{experiment.name}.json"
        try:
            record = load(path)
        except (OSError, ValueError):
            continue
        if record.seed != seed or (quick and not record.quick):
            raise ValueError(
                f"{path} is a record of {named(record.quick, record.seed)}, but this run is "
                f"for {named(quick, seed)}: write to another directory, or replace it with "
                "--force (in Python, force=True)"
            )


def draw(experiment: Experiment, record: Record, directory: Path) -> list[Path]:
    """Draw the figures of a record that do not exist yet; return the paths of all of them."""
    paths = _pictures(directory, experiment.name)
    for theme, pair in ((plot_style.LIGHT, paths[:2]), (plot_style.DARK, paths[2:])):
        if not all(path.exists() for path in pair):
            figure = experiment.draw(record, theme)
            for path in pair:
                plot_style.save(figure, path)
    return paths


def _pictures(directory: Path, name: str) -> list[Path]:
    return [directory / f"{name}{ending}" for ending in (".png", ".svg", "-dark.png", "-dark.svg")]


def _earlier(experiment: Experiment, path: Path, *, quick: bool, seed: int) -> Record | None:
    """The stored record, if its size, seed, code and versions are those of this run; else None."""
    try:
        record = load(path)
    except (OSError, ValueError):
        return None
    same = (
        record.name == experiment.name
        and record.quick == quick
        and record.seed == seed
        and dict(record.about) == _about(experiment)
        and tuple(judgement.claim for judgement in record.judgements)
        == experiment.tested(quick=quick)
    )
    return record if same else None


def _about(experiment: Experiment) -> dict[str, str]:
    """Versions of the packages used, and a hash of the experiment's source file."""
    source = Path(inspect.getsourcefile(experiment.measure) or "").read_bytes()
    versions = {name: version(name) for name in ("acutance", "torch", "numpy", "scipy")}
    return versions | {"code": hashlib.sha256(source).hexdigest()[:16]}


@contextmanager
def _one_thread() -> Iterator[None]:
    """A context in which PyTorch computes with one thread.

    Experiments work on blocks that fit the cache, which several threads do not make faster.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load(path: str | os.PathLike[str]) -> Record:
    """Read a record that :meth:`Record.save` wrote.

    Whether each row agrees, and the verdicts, are computed again from the stored numbers.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a record, is damaged, or has another schema.
    """
    try:
        read = read_json(path)
        if (schema := read.pop("schema", None)) != SCHEMA:
            raise ValueError(f"its schema is {schema!r:.60}, but this version reads {SCHEMA}")
        for name in ("verdict", "as_expected"):  # judged again
            read.pop(name, None)
        claims = read.get("claims")
        if isinstance(claims, list) and all(isinstance(claim, dict) for claim in claims):
            kept = Claim.__dataclass_fields__
            read["claims"] = [{key: c[key] for key in kept if key in c} for c in claims]
        return checked(_Stored, read).judged()
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)} is not a record of acutance reproduce: {error}"
        ) from error


@dataclass(frozen=True)
class _StoredRow:
    """A row as stored in a file, where numbers that are not finite are text."""

    claim: str
    quantity: str
    condition: Mapping[str, Value]
    relation: Relation
    predicted: float | str
    measured: float | str
    error: float | str
    allowed: float | str
    agrees: bool
    samples: int = 0
    skewness: float = 0.0

    def judged(self, claims: Mapping[str, Claim]) -> Row:
        """The row, with ``agrees`` computed again from its claim."""
        predicted, value, error = (
            _decode(name, getattr(self, name)) for name in ("predicted", "measured", "error")
        )
        if error < 0:
            raise ValueError(f"a standard error must be at least 0, got {error}")
        if self.samples < 0:
            raise ValueError(f"samples must be at least 0, got {self.samples}")
        measured = Estimate(value, error, self.samples, self.skewness)
        if not self.claim:
            return untested_row(self.quantity, measured, self.condition)
        if self.claim not in claims:
            raise ValueError(
                f"a row of {self.quantity!r:.60} tests the claim {self.claim!r:.60}, but the "
                f"record has only {', '.join(claims):.60}"
            )
        claim = claims[self.claim]
        bound = self.condition.get(claim.bound) if claim.bound else 0
        words = isinstance(bound, str) and bound not in ("inf", "-inf")
        if bound is None or (words and claim.sense != "in"):
            raise ValueError(
                f"a row of the claim {self.claim!r:.60} must have a number as condition "
                f"{claim.bound!r:.60}, got {bound!r:.60}"
            )
        return claim.row(self.quantity, predicted, measured, self.condition)


@dataclass(frozen=True)
class _Stored:
    """A record as stored in a file."""

    name: str
    title: str
    prediction: str
    claims: tuple[Claim, ...]
    rows: tuple[_StoredRow, ...]
    seed: int
    quick: bool
    seconds: float
    about: Mapping[str, str]

    def judged(self) -> Record:
        """The record, with every row and claim judged again."""
        claims = {claim.key: claim for claim in self.claims}
        if not claims:
            raise ValueError("it has no claims")
        rows = tuple(row.judged(claims) for row in self.rows)
        return Record(
            self.name, self.title, self.prediction,
            tuple(judge(claim, rows) for claim in self.claims),
            rows, self.seed, self.quick, self.seconds, self.about,
        )  # fmt: skip


def _decode(name: str, value: float | str) -> float:
    """The number that :func:`~acutance.experiments.harness.record._encode` stored."""
    if isinstance(value, str) and value not in ("inf", "-inf", "nan"):
        raise ValueError(
            f"{name!r} of a row must be a number, 'inf', '-inf' or 'nan', got {value!r:.60}"
        )
    return float(value)
