"""``acutance alarms``: replay the log of a training through the alarms of a monitor."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli import options as cli
from acutance.cli.shared import misuse, refuse

if TYPE_CHECKING:
    from acutance.report.table import Table
    from acutance.training.replay import Replay


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class AlarmsOptions(cli.OutputOptions):
    """The options of ``acutance alarms``.

    Attributes:
        log: JSON lines written by AttentionMonitor(log=...), or a trainer_state.json of
            transformers' Trainer.
        false_alarms: Alarms per million steps of healthy training; fewer come later.
    """

    log: Annotated[Path, typer.Argument(metavar="LOG"), cli.Role("input")]
    false_alarms: Annotated[float, typer.Option(metavar="RATE")] = 100.0


@cli.command(AlarmsOptions, {cli.READ: "false_alarms"})
def alarms(options: AlarmsOptions) -> None:
    """Replay the log of a training: when did a monitor warn, or when would it have?"""
    if not 0 < options.false_alarms < math.inf:
        refuse("--false-alarms", f"must be a number above 0, got {options.false_alarms:g}")
    from acutance.training.replay import draw_replay, read_log, replay

    with misuse():
        replayed = replay(read_log(options.log), false_alarms=options.false_alarms)
    table = partial(_table, replayed, options.false_alarms)
    options.write_and_show(table, replayed.to_dict, partial(draw_replay, replayed))


def _table(replayed: "Replay", false_alarms: float) -> "Table":
    """The alarms of a replayed log."""
    from acutance.report.table import Column, Table

    first, last = replayed.steps[0], replayed.steps[-1]
    title = (
        f"{len(replayed.steps)} measurements of {len(replayed.logit_std)} "
        f"layer{'s' * (len(replayed.logit_std) != 1)}, steps {first} to "
        f"{last}. Alarm: the standard deviation of a layer's logits grew by more than a factor of "
        f"{replayed.limit:.3g} in the last quarter of the training ({false_alarms:g} false alarms "
        "per million steps), or its scores are not finite."
    )
    columns = (
        Column("layer", "name"),
        Column("alarm", "name"),
        Column("first alarm"),
        Column("growth", format=".3g"),
        Column("deviation", format=".4g"),
        Column("measurements"),
    )
    rows = [
        (
            alarm.layer or "not in the log",
            alarm.kind.replace("_", " "),
            alarm.step,
            None if math.isnan(alarm.growth) else alarm.growth,
            alarm.logit_std,
            alarm.measurements,
        )
        for alarm in replayed.alarms
    ]
    notes = () if rows else ("No alarm.",)
    return Table(title, columns, rows, notes=notes, keys=2, style="")
