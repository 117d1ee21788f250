"""Options that several commands have, with the same meaning everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import MISSING, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args

import typer
from typer.core import TyperCommand

from acutance.cli.shared import Commands, fail

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

    from acutance.corpus.load_model import TextModel
    from acutance.scaling import Window

Given = TypeVar("Given", bound="DataclassInstance")
#: What help shows instead of the type of a switch.
NO_TYPE = " "
#: Headings of a help page with many options.
READ, MEASURE, FIT, WRITE = "What to read", "What to measure", "What to fit", "What to write"
LESS, LONG, MANY = "Time and cost", "Long runs", "Long runs, several machines"
CHARTS = ("heads", "layers", "lengths", "theory")

_MODEL = (
    "Directory of a saved model, a .gguf file, or a name that transformers can load. 'smollm2' is "
    "the model that 'make llm' installs."
)
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help=f"{_MODEL} Default: MiniLM, the encoder that 'make demo' installs."
    ),
]
#: Of commands that need a language model, which MiniLM is not.
LanguageModel = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
SaveEvery = Annotated[
    int,
    typer.Option(
        "--save-every",
        metavar="WINDOWS",
        min=1,
        help=(
            "Save the state after this many new windows. Unsaved windows are run again after "
            "an interruption."
        ),
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the file given by --save.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="NAME",
        help="Directory or name of a tokenizer to use instead of the model's.",
    ),
]
AttentionName = Annotated[
    str | None,
    typer.Option(
        "--attention",
        help="transformers' attn_implementation: sdpa, eager, ... Default: the model's.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device", help="Device to run on: cpu, cuda, mps, or auto: cuda where there is one."
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow running code that comes with the model.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Allow weights in pickle files, which can run code.")
]
AllowMissing = Annotated[
    bool,
    typer.Option(
        "--allow-missing",
        help="Continue if the files lack some weights. These are then random.",
    ),
]
Spans = Annotated[
    list[str] | None,
    typer.Option(
        "--span",
        metavar="NAME=START:STOP",
        help=(
            "Also measure each head's weight on tokens START to STOP - 1 of each window; "
            "repeat for more."
        ),
    ),
]
Maps = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="LAYER.HEAD:ROWS",
        help=(
            "Store rows of a head's weights in the page and JSON: 5.3:0,10 is layer 5, head "
            "3, rows 0 and 10; repeat for more."
        ),
    ),
]
ReportTo = Annotated[
    Path | None,
    typer.Option("--report", metavar="HTML", help="Write an HTML page with all results."),
]
JsonTo = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Write all results as JSON; '-' for standard output."
    ),
]
CsvTo = Annotated[
    Path | None,
    typer.Option(
        "--csv",
        metavar="FILE",
        help="Write a table with one row per head as CSV; '-' for standard output.",
    ),
]
ParquetTo = Annotated[
    Path | None,
    typer.Option("--parquet", metavar="FILE", help="Write the same table as a Parquet file."),
]
FigureTo = Annotated[
    Path | None,
    typer.Option(
        "--figure",
        metavar="FILE",
        help="Draw a figure as .png or .svg (needs matplotlib).",
    ),
]
Chart = Annotated[
    str,
    typer.Option(
        "--chart",
        metavar="|".join(CHARTS),
        help=(
            "What --figure draws: a heat map of the heads, the mean of each layer, a metric "
            "against n, or measured against predicted entropy."
        ),
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help=(
            "Metric to show in the table and figure, by its name in acutance.METRICS. Default: "
            "normalized_entropy, if it was recorded."
        ),
    ),
]
ProbeLaw = Annotated[
    str | None,
    typer.Option(
        "--law",
        metavar="LAW",
        help=(
            "Change the attention by a law while probing: a file from 'calibrate -o', or a name "
            "such as ssmax, log_n:train_length=512 or window:size=1024, as for 'judge'."
        ),
    ),
]
TrainLength = Annotated[
    int | None,
    typer.Option(
        "--train-length",
        metavar="N",
        min=2,
        help="Context length in training, in tokens; 'probe --judge' and 'extend' try changes "
        "beyond it. Default: the configuration's.",
    ),
]
Dark = Annotated[bool, typer.Option("--dark", help="Draw the figure in dark colours.")]


def load_model(
    options: Any, device: str, *, head: bool = False, dtype: torch.dtype | None = None
) -> TextModel:
    """Load the model named in the options, on a device, with or without its head."""
    from acutance.corpus.load_model import load

    names = ("tokenizer", "attention", "trust_remote_code", "allow_pickle", "allow_missing")
    arguments = {name: getattr(options, name) for name in names}
    return load(options.model, device=device, head=head, dtype=dtype, **arguments)


def read_lengths(text: str) -> tuple[int, ...]:
    """Parse ``--lengths``: ascending whole numbers from 2."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"must be whole numbers separated by commas, got {text!r}", param_hint="--lengths"
        ) from error
    if any(n < 2 for n in lengths) or any(b <= a for a, b in pairwise(lengths)):
        raise typer.BadParameter(
            f"lengths must be at least 2 and ascending, got {text}", param_hint="--lengths"
        )
    return lengths


def read_window(text: str) -> Window:
    """Parse ``SIZE[,SINKS]`` of ``--window``."""
    from acutance.scaling import Window

    size, _, sinks = text.partition(",")
    try:
        return Window(int(size), sinks=int(sinks or 0))
    except ValueError as error:
        raise typer.BadParameter(
            f"it must be SIZE or SIZE,SINKS, as in 1024,4, got {text!r}", param_hint="--window"
        ) from error


def check_resume(resume: bool, save: Path | None) -> None:
    """Refuse ``--resume`` without ``--save``."""
    if resume and save is None:
        raise typer.BadParameter("needs --save, the file to continue from", param_hint="--resume")


def check_chart(chart: str, metric: str | None = None) -> None:
    """Refuse an unknown figure, or a metric that it cannot show."""
    if chart not in CHARTS:
        raise typer.BadParameter(
            f"must be one of {', '.join(CHARTS)}, got {chart}", param_hint="--chart"
        )
    if chart == "theory" and metric is not None:
        raise typer.BadParameter(
            "'theory' shows entropy only; remove --metric", param_hint="--chart"
        )


def parse_maps(texts: Iterable[str]) -> dict[str, list[int]]:
    """Read ``LAYER.HEAD:ROWS`` of each --map; rows are numbers and ranges, ``0,10,20-29``."""
    maps: dict[str, list[int]] = {}
    for text in texts:
        name, _, places = text.rpartition(":")
        rows: list[int] = []
        for part in places.split(","):
            first, dash, last = part.partition("-")
            plain = all(number.isascii() and number.isdigit() for number in (first, last or first))
            if not (name and plain) or bool(dash) != bool(last) or len(part) > 20:
                raise typer.BadParameter(
                    f"a map is LAYER.HEAD:ROWS, as 5.3:0,10,20-29, got {text}", param_hint="--map"
                )
            rows += range(int(first), min(int(last or first), int(first) + 1000) + 1)
        if name in maps:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--map")
        maps[name] = rows
    return maps


def parse_spans(texts: Iterable[str]) -> dict[str, tuple[int, int | None]]:
    """Read ``NAME=START:STOP`` of each --span; without STOP it goes to the end."""
    spans: dict[str, tuple[int, int | None]] = {}
    for text in texts:
        name, equals, places = text.rpartition("=")
        start, colon, stop = places.partition(":")
        plain = all(part.isascii() and part.isdigit() for part in (start, stop or "0"))
        if not (name and equals and colon and plain) or len(places) > 20:
            raise typer.BadParameter(
                f"a span is NAME=START:STOP, as system=0:31, got {text}", param_hint="--span"
            )
        if name in spans:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--span")
        spans[name] = (int(start), int(stop) if stop else None)
    return spans


def check_metrics(names: Iterable[str]) -> None:
    """Refuse an unknown metric, naming the nearest."""
    from acutance.structure import describe

    for name in names:
        try:
            describe(name)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--metric") from error


def command(
    options: type[Given], sections: Mapping[str, str]
) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Decorator that turns a function of an options record into a command.

    The record's fields become the command's options.

    Annotations are not postponed in modules of commands, since evaluating a hundred of them from
    text would slow every start.

    Args:
        options: a frozen dataclass whose fields have typer annotations.
        sections: headings of the help page, each with names of fields, separated by spaces.
    """
    panels = {name: heading for heading, names in sections.items() for name in names.split()}
    # not get_type_hints: Python 3.10 hides an annotation in Optional where the default is None
    hints = inspect.get_annotations(options, eval_str=True)
    if unknown := panels.keys() - hints.keys():
        raise ValueError(f"{options.__name__} has no field {', '.join(sorted(unknown))}")
    for name, hint in hints.items():
        kind, *more = get_args(hint)
        for info in more:
            if not isinstance(info, typer.models.OptionInfo):
                continue
            shown = copy(info)  # several commands share it
            shown.rich_help_panel = panels.get(name)
            if kind in (bool, bool | None) and not shown.metavar:
                shown.metavar = NO_TYPE
            hints[name] = Annotated[kind, shown]

    def wrap(action: Callable[[Given], None]) -> Callable[..., None]:
        """The function for typer: its parameters are the fields of the options record."""

        def run(**given: Any) -> None:
            action(options(**given))

        paragraphs = inspect.cleandoc(action.__doc__ or "").split("\n\n")
        # typer keeps the line ends of all but the first
        run.__doc__ = "\n\n".join(one.replace("\n", " ") for one in paragraphs)
        run.__annotations__ = hints
        vars(run)["__signature__"] = inspect.Signature(
            [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                    annotation=hints[field.name],
                )
                for field in fields(options)
            ]
        )
        return run

    return wrap


class Command(TyperCommand):
    """A command whose ``--help`` shows no type."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option, without ``<bool>``."""
        return _without_type(super().get_help_option(ctx))


class Group(Commands):
    """The top-level command: its own subcommands, then those that other packages add.

    Its ``--help`` shows no types.
    """

    @property
    def commands(self) -> dict[str, Any]:
        """Every subcommand by name. Entry points are looked up here, not at the start."""
        return self._own | {name: _added_command(name) for name in _entry_points()}

    @commands.setter
    def commands(self, own: Mapping[str, Any]) -> None:
        self._own = dict(own)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand of a name; None if there is none."""
        if cmd_name not in self._own and cmd_name in _entry_points():
            return _added_command(cmd_name)
        return self._own.get(cmd_name)

    def get_help_option(self, ctx: Any) -> Any:
        """The option, without ``<bool>``."""
        return _without_type(super().get_help_option(ctx))


@cache
def _entry_points() -> dict[str, Any]:
    """The entry points of the commands that installed packages add, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in sorted(entry_points(group="acutance.commands"))}


@cache
def _added_command(name: str) -> Any:
    """The command of an entry point; if its package is broken, one that says so and fails."""
    entry = _entry_points()[name]
    try:
        action = entry.load()
    except Exception as error:  # of code that is not ours
        reason = f"{entry.value} cannot be loaded: {type(error).__name__}: {error}"

        def action() -> None:
            fail(f"the command {name} of {reason}")
            raise typer.Exit(1)

        action.__doc__ = f"Broken: {reason}."
    single = typer.Typer(add_completion=False)
    single.command(name, cls=Command)(action)
    return typer.main.get_command(single)


def _without_type(option: Any) -> Any:
    """Hide the type of an option in the help page."""
    if option is not None:
        option.metavar = NO_TYPE
    return option


def check_choice(option: str, given: str, among: Any) -> None:
    """Refuse a name that is not one of a few, naming the nearest."""
    if given in among:
        return
    from acutance.shapes import did_you_mean

    names = ", ".join(among)
    text = f"must be one of {names}, got {given}{did_you_mean(given, among)}"
    raise typer.BadParameter(text, param_hint=option)
