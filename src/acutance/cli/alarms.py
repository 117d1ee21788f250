"""``acutance alarms``: replay the log of a training through the alarms of a monitor."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.options import READ, WRITE, Dark, FigureTo, JsonTo, command
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import check_figure, misuse, plain_errors

if TYPE_CHECKING:
    from acutance.training.replay import Replay


@dataclass(frozen=True, repr=False, eq=False)
class AlarmsOptions:
    """The options of ``acutance alarms``."""

    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG",
            help=(
                "JSON lines written by AttentionMonitor(log=...), or a trainer_state.json of "
                "transformers' Trainer."
            ),
        ),
    ]
    false_alarms: Annotated[
        float,
        typer.Option(
            "--false-alarms",
            metavar="RATE",
            help="Alarms per million steps of healthy training; fewer come later.",
        ),
    ] = 100.0
    json: JsonTo = None
    figure: FigureTo = None
    dark: Dark = False


@command(AlarmsOptions, {READ: "false_alarms", WRITE: "json figure dark"})
def alarms(options: AlarmsOptions) -> None:
    """Replay the log of a training: when did a monitor warn, or when would it have?"""
    targets = {"--json": options.json, "--figure": options.figure}
    check_outputs(targets, {"LOG": options.log})
    check_figure("--figure", options.figure)
    if not 0 < options.false_alarms < math.inf:
        raise typer.BadParameter(
            f"must be a number above 0, got {options.false_alarms:g}", param_hint="--false-alarms"
        )
    with plain_errors():
        from acutance.report.exports import put_json
        from acutance.training.replay import read_log, replay

        with misuse():
            replayed = replay(read_log(options.log), false_alarms=options.false_alarms)

        def draw(path: Path) -> None:
            from acutance.report.plot_style import DARK, LIGHT
            from acutance.training.replay_figure import draw_replay

            draw_replay(replayed, path, theme=DARK if options.dark else LIGHT)

        write_and_show(
            {"--json": lambda path: put_json(replayed.to_dict(), path), "--figure": draw},
            targets,
            lambda screen: _show(replayed, options.false_alarms, screen),
        )


def _show(replayed: "Replay", false_alarms: float, screen: Any) -> None:
    """Print the alarms of a replayed log."""
    from acutance.report.table import Column, Table

    first, last = replayed.steps[0], replayed.steps[-1]
    screen.print(
        f"{len(replayed.steps)} measurements of {len(replayed.logit_std)} "
        f"layer{'s' * (len(replayed.logit_std) != 1)}, steps {first} to "
        f"{last}. Alarm: the standard deviation of a layer's logits grew by more than a factor of "
        f"{replayed.limit:.3g} in the last quarter of the training ({false_alarms:g} false alarms "
        "per million steps), or its scores are not finite."
    )
    if not replayed.alarms:
        screen.print("No alarm.")
        return
    names = (Column(name, "name") for name in ("layer", "alarm"))
    numbers = (Column("growth", format=".3g"), Column("deviation", format=".4g"))
    columns = [*names, Column("first alarm"), *numbers, Column("measurements")]
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
    screen.print(Table("", columns, rows, keys=2))
