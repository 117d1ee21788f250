"""Judging: what a law, or any other change of attention, does to a model's loss.

:func:`judge` compares losses on the same windows with and without each law. A law that makes
attention look better and the loss worse is no remedy.
"""

from __future__ import annotations

from acutance.calibration import losses
from acutance.calibration.losses import *
from acutance.judging import changes, heads_off, judge_model, paired, proposed, rope
from acutance.judging.changes import *
from acutance.judging.heads_off import *
from acutance.judging.judge_model import *
from acutance.judging.paired import *
from acutance.judging.proposed import *
from acutance.judging.rope import *

__all__ = [
    *changes.__all__,
    *heads_off.__all__,
    *judge_model.__all__,
    *losses.__all__,
    *paired.__all__,
    *proposed.__all__,
    *rope.__all__,
]
