"""Published claims about attention, tested: prediction, measurement and verdict for each.

One experiment is one function of :mod:`acutance_lab`, a package that comes with acutance, and what
it is decorated with: its prediction and the verdict it expects, stated before it runs. It measures
with what measures everything else in acutance, compares with :mod:`acutance.theory`, and leaves a
record (JSON) and a figure (PNG and SVG, light and dark).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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

#: The module of acutance_lab that holds each name; "" for its modules. They load on first use.
_HOMES = {
    "record": ("Claim", "Judgement", "Record", "Row", "judge", "load"),
    "experiment": ("Experiment", "Run"),
    "run": ("EXPERIMENTS", "Outcome", "pick", "run", "run_one"),
    "trained": ("decoder",),
}


def __getattr__(name: str) -> Any:
    if name in ("texts", "trained"):
        value: Any = importlib.import_module(f"acutance_lab.{name}")
    elif home := next((home for home, names in _HOMES.items() if name in names), None):
        value = getattr(importlib.import_module(f"acutance_lab.{home}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
