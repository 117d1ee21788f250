"""Options that several commands have, with the same meaning everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

#: Headings of a help page with many options.
READ, WRITE, LESS, MANY = "What to read", "What to write", "Spend less", "Many machines, long runs"
CHARTS = ("heads", "layers", "lengths", "theory")

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]",
        help="Directory of a saved model, or a name transformers can load. "
        "Left out: the MiniLM that comes with acutance\\[demo].",
    ),
]
SaveEvery = Annotated[
    int,
    typer.Option(
        "--save-every",
        metavar="WINDOWS",
        min=1,
        help="New windows after which the state is written: fewer than so many, and the batch "
        "under way, are run again after a kill.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from what the file of --save holds.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME",
        help="Directory or name of a tokenizer, in place of the model's own.",
    ),
]
AttentionName = Annotated[
    str | None, typer.Option("--attention", help="Attention implementation: sdpa, eager, ...")
]
Device = Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, mps.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors.")
]
AllowMissing = Annotated[
    bool,
    typer.Option(
        "--allow-missing",
        help="Go on where weights of the model did not load; random numbers stand for them.",
    ),
]
ReportTo = Annotated[
    Path | None, typer.Option("--report", metavar="HTML", help="Write a page with the heat map.")
]
JsonTo = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write every number as JSON, '-' for standard output."
    ),
]
CsvTo = Annotated[
    Path | None,
    typer.Option(
        "--csv", metavar="FILE", help="Write a table, one row per head, '-' for standard output."
    ),
]
ParquetTo = Annotated[
    Path | None,
    typer.Option("--parquet", metavar="FILE", help="The same table as a Parquet file."),
]
FigureTo = Annotated[
    Path | None,
    typer.Option("--figure", metavar="FILE", help="Draw a .png or .svg (needs acutance\\[plots])."),
]
Chart = Annotated[
    str,
    typer.Option(
        "--chart",
        metavar="|".join(CHARTS),
        help="What --figure draws: heat map, layer profile, a metric against n, or measured "
        "against predicted entropy.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option("--metric", metavar="NAME", help="What table and figure show."),
]
Dark = Annotated[bool, typer.Option("--dark", help="Draw on a dark page.")]


def check_resume(resume: bool, save: Path | None) -> None:
    """Refuse to go on from nothing."""
    if resume and save is None:
        raise typer.BadParameter("it goes on from the file of --save", param_hint="--resume")


def check_chart(chart: str, metric: str | None = None) -> None:
    """Refuse a figure that nothing draws."""
    if chart not in CHARTS:
        raise typer.BadParameter(f"one of {', '.join(CHARTS)}, got {chart}", param_hint="--chart")
    if chart == "theory" and metric is not None:
        raise typer.BadParameter(
            "it is of entropy alone, so leave out --metric", param_hint="--chart"
        )


def grouped(command: Callable[..., None], panels: Mapping[str, str]) -> Callable[..., None]:
    """The same command, its options under headings in its help, and switches without a type.

    Args:
        command: a command whose options are annotated.
        panels: the heading of each parameter's name.
    """
    command.__annotations__ = get_type_hints(command, include_extras=True)
    for name, hint in command.__annotations__.items():
        kind, *more = get_args(hint) or (hint,)
        for info in more:
            if isinstance(info, typer.models.OptionInfo):
                info.rich_help_panel = panels.get(name, info.rich_help_panel)
                if kind in (bool, bool | None) and not info.metavar:
                    info.metavar = " "
    return command


def check_choice(option: str, given: str, among: Any) -> None:
    """Refuse a name that is none of a few, and name the nearest."""
    if given in among:
        return
    near = difflib.get_close_matches(given, list(among), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise typer.BadParameter(f"one of {', '.join(among)}, got {given}{hint}", param_hint=option)
