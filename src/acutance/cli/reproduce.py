"""The command that tests published claims."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import WRITE, grouped
from acutance.cli.outputs import check_outputs
from acutance.cli.shared import console, need, plain_errors


def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Experiments. Default: all of them."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run at small sizes: a minute or two in all.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where records and figures go.")
    ] = Path("acutance-reproduce"),
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**32 - 1, help="Of all random numbers.")
    ] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again, and replace records of other runs.")
    ] = False,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw (needs acutance\\[plots]).")
    ] = True,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all records, '-' for standard output."),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the experiments and end.")] = False,
) -> None:
    """Test published claims about attention: predicted, measured, verdict, figure."""
    check_outputs({"--json": json})
    with plain_errors():
        for part in (out, *out.parents):  # before a long run, not after its first experiment
            if os.path.exists(part) and not os.path.isdir(part):
                raise typer.BadParameter(f"{part} is not a directory", param_hint="--out")
        from acutance.cli import reproduce_actions
        from acutance.reproduce import EXPERIMENTS, pick, render, runner

        try:
            chosen = pick(names or [], EXPERIMENTS)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="NAME") from error
        records = {f"the record of {one.name}": out / f"{one.name}.json" for one in chosen}
        check_outputs({**records, "--json": json} if os.path.isdir(out) else {"--json": json})
        if listing:
            console(stderr=False).print(render.listing(chosen))
            return
        if not force:
            try:
                runner.check_others(chosen, out, quick=quick, seed=seed)
            except ValueError as error:
                raise typer.BadParameter(str(error), param_hint="--out") from error
        if figures:
            need("matplotlib", "plots", "drawing", ", or leave figures out: --no-figures")
        try:
            status = reproduce_actions.reproduce(
                chosen,
                out,
                quick=quick,
                seed=seed,
                force=force,
                figures=figures,
                to_json=json,
                console=console,
            )
        except FloatingPointError as error:  # a training whose loss is no longer finite
            raise RuntimeError(str(error)) from error
    if status:
        raise typer.Exit(status)


grouped(reproduce_command, {WRITE: "out force figures json"})
