"""A laboratory of failing trainings: which signal comes before a divergence, and how often wrongly.

python -m benchmarks.instability run               # every training; goes on where it stopped
python -m benchmarks.instability run --share 0.1   # a tenth of them, evenly spread
python -m benchmarks.instability list
python -m benchmarks.instability report            # what comes before a divergence, and how early
python -m benchmarks.instability remedies          # what to do then, by held-out loss
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from benchmarks.instability import remedies, report
from benchmarks.instability.analysis import judged
from benchmarks.instability.runs import Run, catalogue
from benchmarks.instability.training import EVERY, path_of, record_of

#: Records from one measurement of attention to the next in the report: 8 steps.
BETWEEN = 2
FOLDER = Path(__file__).parent / "records"


def main() -> None:
    """Run the trainings, or list them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instability", description=__doc__)
    parser.add_argument("action", choices=["run", "list", "report", "remedies"])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the records are")
    parser.add_argument("--share", type=float, default=1.0, help="share of the trainings")
    parser.add_argument("--kind", help="only trainings of this kind")
    parser.add_argument("--repeat", type=int, default=0, help="repetition with other seeds")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th training from I on")
    parser.add_argument("--json", type=Path, help="also write the report here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [run for run in catalogue(options.repeat) if options.kind in (None, run.kind)]
    runs = runs[:: max(1, round(1 / options.share))]
    first, parts = map(int, options.part.split("/"))
    runs = runs[first::parts]
    if options.action == "remedies":
        remedies.run_all(options.folder / "remedies.jsonl")
        print(remedies.table(options.folder / "remedies.jsonl"))
        return
    if options.action == "report":
        show(catalogue(1)[:: max(1, round(1 / options.share))], options.folder, options.json)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for number, run in enumerate(runs, 1):
        what = f"{number}/{len(runs)} {run.kind} {run.level:g} from step {run.start}"
        if options.action == "list":
            print(what, run.key)
            continue
        start = time.process_time()
        record = record_of(run, options.folder)
        print(
            f"{what}: {len(record['loss'])} steps, loss {record['loss'][-1]:.2f}, held out "
            f"{record['held_out']:.2f}, {time.process_time() - start:.0f} s",
            flush=True,
        )


def show(second: list[Run], folder: Path, to: Path | None) -> None:
    """Print what comes before a divergence at one false alarm in 10,000 healthy steps.

    Alarms are chosen on the first repetition, and reported on ``second``, trainings of another.
    """
    second = [run for run in second if path_of(run, folder).exists()]
    first = [run for run in catalogue() if path_of(run, folder).exists()]
    records = {run: record_of(run, folder) for run in first + second}
    of = {run: judged(run, record, BETWEEN) for run, record in records.items()}
    sparse = {
        every * EVERY: [judged(run, records[run], every, ["growth"]) for run in second]
        for every in (1, 3)
    }
    results = report.everything([of[run] for run in first], [of[run] for run in second], sparse)
    print(report.text(results))
    if to is not None:
        to.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
