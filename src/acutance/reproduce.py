"""Published claims about attention, tested: prediction, measurement and verdict for each.

One experiment is one function of :mod:`acutance_lab`, a package that comes with acutance, and what
it is decorated with: its prediction and the verdict it expects, stated before it runs. It measures
with what measures everything else in acutance, compares with :mod:`acutance.theory`, and leaves a
record (JSON) and a figure (PNG and SVG, light and dark).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acutance.lazy import lazy

if TYPE_CHECKING:
    from acutance_lab import texts, trained
    from acutance_lab.experiment import Experiment, Run
    from acutance_lab.record import Claim, Judgement, Record, Row, judge, load
    from acutance_lab.run import EXPERIMENTS, Outcome, pick, run, run_one
    from acutance_lab.trained import decoder

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
    "texts",
    "trained",
]

#: The names of each module. They load on first use.
_HOMES = {
    "acutance_lab": ("texts", "trained"),
    "acutance_lab.record": ("Claim", "Judgement", "Record", "Row", "judge", "load"),
    "acutance_lab.experiment": ("Experiment", "Run"),
    "acutance_lab.run": ("EXPERIMENTS", "Outcome", "pick", "run", "run_one"),
    "acutance_lab.trained": ("decoder",),
}
__getattr__, __dir__ = lazy(__name__, __all__, _HOMES)
