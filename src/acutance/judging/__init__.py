"""Judging: what a law, or any other change of attention, does to a model's loss.

:func:`judge` compares losses on the same windows with and without each law. A law that makes
attention look better and the loss worse is no remedy.
"""

from __future__ import annotations

from acutance.calibration.losses import Loss, LossError, MaskedTokens, NextToken, Scored
from acutance.judging.apply_change import AppliedChange, apply
from acutance.judging.judge_model import judge
from acutance.judging.paired import LawComparison, LossComparison, Part
from acutance.judging.proposed import Proposals, proposed_remedies
from acutance.judging.remedies import HeadsOff, LawRemedy, PlanRemedy, Remedy
from acutance.judging.rope import RopeRemedy

__all__ = [
    "AppliedChange",
    "HeadsOff",
    "LawComparison",
    "LawRemedy",
    "PlanRemedy",
    "Loss",
    "LossComparison",
    "LossError",
    "MaskedTokens",
    "NextToken",
    "Part",
    "Proposals",
    "Remedy",
    "RopeRemedy",
    "Scored",
    "apply",
    "judge",
    "proposed_remedies",
]
