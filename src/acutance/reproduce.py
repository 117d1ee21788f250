"""Published claims about attention, tested: prediction, measurement and verdict for each.

One experiment is one file of ``acutance.experiments``. It states its prediction and the verdict it
expects before it runs, measures with what measures everything else in acutance, compares with
:mod:`acutance.theory`, and leaves a record (JSON) and a figure (PNG and SVG, light and dark).
"""

from acutance.experiments import EXPERIMENTS
from acutance.experiments.harness.experiment import Experiment, Run
from acutance.experiments.harness.record import Claim, Judgement, Record, Row, judge
from acutance.experiments.harness.runner import Outcome, load, pick, run, run_one
from acutance.experiments.models import trained
from acutance.experiments.models.trained import decoder

__all__ = [
    "Claim",
    "EXPERIMENTS",
    "Experiment",
    "Judgement",
    "Outcome",
    "Record",
    "Row",
    "Run",
    "decoder",
    "judge",
    "load",
    "pick",
    "run",
    "run_one",
    "trained",
]
