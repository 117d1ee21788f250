"""The command that compares mechanisms."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import MEASURE, WRITE, Dark, JsonTo, grouped
from acutance.cli.outputs import check_outputs
from acutance.cli.shared import (
    INTERRUPTED,
    check_figure,
    console,
    misuse,
    plain_errors,
)


def compare_command(
    n: Annotated[
        str | None,
        typer.Option("--n", metavar="NUMBERS", help="Keys a row sees. Default: 256,1024,4096."),
    ] = None,
    d: Annotated[int, typer.Option("--d", min=2, help="Width of queries and keys.")] = 64,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism", metavar="NAME", help="Repeat it for more; 'all'. Default: twelve."
        ),
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads, each with own keys.")] = 16,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 1,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Rows of each head.")] = 16,
    mean: Annotated[
        str, typer.Option("--mean", metavar="Q[,K]", help="Mean of queries and keys.")
    ] = "0",
    std: Annotated[
        str, typer.Option("--std", metavar="Q[,K]", help="Their standard deviation.")
    ] = "1",
    causal: Annotated[
        bool, typer.Option("--causal", help="Rows see the keys up to their own place only.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all random numbers.")] = 0,
    state: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="STATE", help="Queries and keys that 'probe --keep-qk' wrote."
        ),
    ] = None,
    costs: Annotated[
        bool, typer.Option("--costs/--no-costs", help="Measure time and peak memory.")
    ] = True,
    json: JsonTo = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Draw effective keys by n: .png or .svg."),
    ] = None,
    dark: Dark = False,
    listing: Annotated[bool, typer.Option("--list", help="Show the mechanisms and end.")] = False,
) -> None:
    """Compare attention mechanisms: concentration measured and predicted, time, memory."""
    check_outputs({"--json": json, "--figure": figure}, {"--from": state})
    check_figure("--figure", figure)
    with plain_errors():
        from acutance.cli import compare_actions
    if listing:
        console(stderr=False).print(compare_actions.listing())
        return
    with plain_errors():
        source = compare_actions.source(state)
    with misuse():
        given = compare_actions.arguments(mechanism or [], n, mean, std, source)
    given |= {"d": d, "heads": heads, "batch": batch, "samples": samples, "is_causal": causal,
              "seed": seed, "costs": costs}  # fmt: skip
    with plain_errors():
        found = compare_actions.run(given, console)
        compare_actions.show(found, json_to=json, figure_to=figure, dark=dark, console=console)
    if not found.complete:
        raise typer.Exit(INTERRUPTED)


grouped(
    compare_command,
    {
        MEASURE: "n d mechanism heads batch samples mean std causal seed state costs",
        WRITE: "json figure dark",
    },
)
