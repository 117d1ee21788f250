"""Options stand once, as fields of records: flags, help and checks come from there.

Annotations are not postponed here and in modules of commands: evaluating a hundred of them from
text would slow every start.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import MISSING, dataclass, fields
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import check_figure, console, fail, plain_errors, refuse
from acutance.escapes import did_you_mean, visible_lines

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from acutance.corpus.load_model import TextModel
    from acutance.corpus.texts import Text
    from acutance.report.plot_style import Theme
    from acutance.summary.head_summary import HeadSummary

Given = TypeVar("Given", bound="DataclassInstance")
#: What help shows instead of the type of a switch.
NO_TYPE = " "
#: Headings of a help page with many options.
READ, MEASURE, FIT, WRITE = "What to read", "What to measure", "What to fit", "What to write"
LESS, LONG, LOAD = "Time and cost", "Long runs", "How to load the model"
#: Options that several commands have, by the heading below which they stand.
_SHARED = {
    READ: "text length lengths law metric",
    WRITE: "out report json csv parquet figure chart dark save overwrite",
    LESS: "windows batch_size seed",
    LONG: "save_every resume",
    LOAD: "tokenizer attention device trust_remote_code allow_pickle allow_missing",
}


@dataclass(frozen=True)
class Role:
    """What an option is for; :func:`command` checks it before the command runs.

    Attributes:
        file: what the file that it names is used for; empty if it names none.
        choices: the only values that it may have.
        read: makes the value of the field of what is typed, and refuses by a ValueError.
        named: whether ``read`` gives pairs of a name and a value, which become a mapping.
    """

    file: Literal["", "input", "output", "figure", "state"] = ""
    choices: tuple[str, ...] = ()
    read: Callable[[str], Any] | None = None
    named: bool = False


def read_numbers(text: str, kind: type[int] | type[float] = float) -> tuple[Any, ...]:
    """Parse numbers separated by commas.

    Example:
        >>> read_numbers("1,0.5"), read_numbers("16,64", int)
        ((1.0, 0.5), (16, 64))
    """
    try:
        return tuple(kind(number) for number in text.split(","))
    except ValueError:
        word = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"must be {word} separated by commas, got {text!r}") from None


def read_lengths(text: str) -> tuple[int, ...]:
    """Parse ``--lengths``: ascending whole numbers from 2."""
    lengths = read_numbers(text, int)
    if any(n < 2 for n in lengths) or any(b <= a for a, b in pairwise(lengths)):
        raise ValueError(f"lengths must be at least 2 and ascending, got {text}")
    return lengths


def read_pair(text: str, form: str, needed: int, least: Sequence[int]) -> list[int]:
    """Parse whole numbers of an option such as ``--streaming``.

    Args:
        text: what was typed.
        form: what it should have been, with an example.
        needed: how many numbers there are at least.
        least: how small each may be.
    """
    try:
        values = [int(number) for number in text.split(",")]
    except ValueError:
        values = []
    small = any(value < low for value, low in zip(values, least, strict=False))
    if small or not needed <= len(values) <= len(least):
        raise ValueError(f"it must be {form}, got {text!r}")
    return values


_MODEL = (
    "Directory of a saved model, a .gguf file, or a name that transformers can load. 'smollm2' is "
    "the model that 'make llm' installs."
)
Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help=f"{_MODEL} Default: MiniLM, the encoder that 'make demo' installs."
    ),
    Role("input"),
]
#: Of commands that need a language model, which MiniLM is not.
LanguageModel = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL), Role("input")]
InputFile = Annotated[Path | None, typer.Option(metavar="FILE"), Role("input")]
OutputFile = Annotated[Path | None, typer.Option(metavar="FILE"), Role("output")]
#: ``--out``, the file of a command's main result.
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE"), Role("output")]
StateFile = Annotated[Path | None, typer.Option(metavar="FILE"), Role("state")]
Figure = Annotated[Path | None, typer.Option(metavar="FILE"), Role("figure")]
#: ``--figure``, which was ``--plot`` before.
Plot = Annotated[Path | None, typer.Option("--figure", "--plot", metavar="FILE"), Role("figure")]
Count = Annotated[int, typer.Option(min=0)]
Least1 = Annotated[int, typer.Option(min=1)]
Tokens = Annotated[int | None, typer.Option(metavar="N", min=2)]
Lengths = Annotated[
    tuple[int, ...] | None, typer.Option("--lengths", metavar="N,..."), Role(read=read_lengths)
]
SaveEvery = Annotated[int, typer.Option(metavar="WINDOWS", min=1)]
Changes = Annotated[list[str] | None, typer.Option("--law", metavar="LAW"), Role("input")]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ModelOptions:
    """How a model is loaded.

    Attributes:
        model: the model.
        tokenizer: Directory or name of a tokenizer to use instead of the model's.
        attention: transformers' attn_implementation: sdpa, eager, ... Default: the model's.
        device: Device to run on: cpu, cuda, mps, or auto: cuda where there is one.
        trust_remote_code: Allow running code that comes with the model.
        allow_pickle: Allow weights in pickle files, which can run code.
        allow_missing: Continue if the files lack some weights. These are then random.
    """

    model: Model
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME")] = None
    attention: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    allow_pickle: bool = False
    allow_missing: bool = False

    def load(self, **more: Any) -> "TextModel":
        """Load the model, which standard error says meanwhile; ``more`` are keywords of loading."""
        import torch

        from acutance.corpus.load_model import load_model

        given = keywords(load_model, self, **more)
        if given.get("dtype") is not None:
            given["dtype"] = getattr(torch, given["dtype"])
        with console().status("loading the model"):
            return load_model(self.model, **given)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class JsonOptions:
    """A result that may be written as JSON.

    Attributes:
        json: Write all results as JSON; '-' for standard output.
    """

    json: OutputFile = None

    def write_and_show(
        self,
        show: Callable[[], Any],
        record: Callable[[], Any],
        draw: Callable[..., None] | None = None,
        **files: tuple[Path | None, Callable[[Path], object]],
    ) -> None:
        """Write what is asked for, and print a table; see :mod:`acutance.cli.outputs`.

        Args:
            show: returns the table.
            record: returns the JSON record.
            draw: draws the figure of :class:`OutputOptions` to a path, with a keyword ``theme``.
            files: further files.
        """
        if draw is not None and isinstance(self, OutputOptions):
            files["figure"] = self.figure, partial(draw, theme=self.theme)
        write_and_show(show, json=(self.json, record), **files)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunOptions(JsonOptions, ModelOptions):
    """A run of a model over texts that may be resumed.

    Attributes:
        text: Text file to read; repeat for more. Default: the included text.
        seed: Random seed for the choice of windows.
        save: Save the state to this file as windows finish, for --resume.
        resume: Continue from the file given by --save.
        overwrite: Replace an existing state file. Other outputs are always replaced.
    """

    text: Annotated[list[str] | None, typer.Option(metavar="FILE"), Role("input")] = None
    seed: Count = 0
    save: StateFile = None
    resume: bool = False
    overwrite: bool = False

    def texts(self) -> "list[Text]":
        """The files of ``--text``; the included text if there are none."""
        from acutance.corpus import texts

        return texts.read(self.text) if self.text else [texts.bundled()]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class OutputOptions(JsonOptions):
    """Where results are written.

    Attributes:
        figure: Draw a figure as .png or .svg (needs matplotlib).
        dark: Draw the figure in dark colours.
    """

    figure: Figure = None
    dark: bool = False

    @property
    def theme(self) -> "Theme":
        """The colours of the figure."""
        from acutance.report.plot_style import THEMES

        return THEMES["dark" if self.dark else "light"]


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SummaryOptions(OutputOptions):
    """What is written of a summary.

    Attributes:
        report: Write an HTML page with all results.
        csv: Write a table with one row per head as CSV; '-' for standard output.
        parquet: Write the same table as a Parquet file.
        chart: What --figure draws: a heat map of the heads, the mean of each layer, a metric
            against n, or measured against predicted entropy.
    """

    report: Annotated[Path | None, typer.Option(metavar="HTML"), Role("output")] = None
    csv: OutputFile = None
    parquet: OutputFile = None
    chart: Annotated[str, Role(choices=("heads", "layers", "lengths", "theory"))] = "heads"

    def write_summary(
        self,
        summary: "HeadSummary",
        show: Callable[[], Any],
        metric: str | None = None,
        files: Mapping[str, Any] | None = None,
        **more: Mapping[str, Any] | None,
    ) -> None:
        """Write what is asked for of a summary, and print a table.

        Args:
            summary: any head summary.
            show: returns the table.
            metric: what the figure shows; None is what suits it.
            files: further files, as :meth:`write_and_show` takes them.
            more: ``key_norms``, ``judged`` and ``plan`` of :func:`acutance.report.html`.
        """
        from acutance.report.exports import put_csv, summary_record
        from acutance.report.figures import draw
        from acutance.report.html_page.write import write_html

        draw_chart = partial(draw, summary, chart=self.chart, metric=metric, dark=self.dark)
        write_and_show(
            show,
            **(files or {}),
            json=(self.json, partial(summary_record, summary, **more)),
            csv=(self.csv, lambda path: put_csv(summary.to_arrow(), path)),
            parquet=(self.parquet, summary.to_parquet),
            report=(self.report, lambda path: write_html(summary, path, **more)),
            figure=(self.figure, draw_chart),
        )


def keywords(
    function: Callable[..., Any], options: "DataclassInstance", **more: Any
) -> dict[str, Any]:
    """Keywords of a function: the options that it has by the same names, and ``more``.

    Example:
        >>> keywords(lambda dark, file=None: None, OutputOptions(), file="a.png")
        {'dark': False, 'file': 'a.png'}
    """
    names = inspect.signature(function).parameters.keys() & {one.name for one in fields(options)}
    return {name: getattr(options, name) for name in names} | more


class _Option:
    """A field of a record, as typer and the checks need it.

    Attributes:
        name: of the field.
        default: of the field.
        flag: what messages call it.
        hint: its annotation for typer.
        role: what it is for.
    """

    def __init__(self, name: str, default: Any, hint: Any, text: str, panel: str | None) -> None:
        self.name, self.default = name, default
        kind, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        roles = [known for known in more if isinstance(known, Role)]
        self.role = roles[-1] if roles else Role()
        if self.role.read:  # what is typed is text, even where its default is not
            several = any(get_origin(part) is list for part in (kind, *get_args(kind)))
            kind = list[str] | None if several or self.role.named else str | None
        infos = [known for known in more if isinstance(known, ArgumentInfo | OptionInfo)]
        info = copy(infos[-1]) if infos else typer.Option()  # several commands may share it
        info.help = info.help or text
        if isinstance(info, OptionInfo):
            named = () if info.default is ... else (info.default,)
            info.param_decls = (*named, *(info.param_decls or ())) or (f"--{_dashes(name)}",)
            info.default = ...
            info.rich_help_panel = panel
            if kind in (bool, bool | None) and not info.metavar:
                info.metavar = NO_TYPE
            elif self.role.choices:
                info.metavar = "|".join(self.role.choices)
            self.flag = info.param_decls[0].partition("/")[0]
        else:
            self.flag = str(info.metavar)
        self.hint = Annotated[kind, info]

    def parameter(self) -> inspect.Parameter:
        """The parameter of a function for typer; a default that was read stands in its help."""
        default = None if self.role.read and self.default is not MISSING else self.default
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=self.hint,
        )

    def value(self, given: Any) -> Any:
        """The value of the field, of what was typed; refuses it with exit code 2."""
        if self.role.choices and given is not None:
            check_choice(self.flag, given, self.role.choices)
        if self.role.read is None:
            return given
        if given is None:
            return self.default
        try:
            if not isinstance(given, list):
                return self.role.read(given)
            values = [self.role.read(text) for text in given]
            return _by_name(values) if self.role.named else values
        except ValueError as error:
            fail(f"{self.flag}: {error}")
            raise typer.Exit(2) from error


def _by_name(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Values by name, none of which may be given twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = value
    return values


def _dashes(name: str) -> str:
    return name.replace("_", "-")


def _declared(record: type, own: Mapping[str, str]) -> list[_Option]:
    """The options of a record, in the order of the headings that they stand below."""
    panels: dict[str, str] = {}
    for heading in dict.fromkeys((READ, *own, *_SHARED)):
        names = f"{_SHARED.get(heading, '')} {own.get(heading, '')}".split()
        panels |= dict.fromkeys(names, heading)
    panels |= {name: heading for heading, names in own.items() for name in names.split()}
    texts: dict[str, str] = {}
    hints: dict[str, Any] = {}
    for parent in reversed(record.__mro__):
        hints |= inspect.get_annotations(parent, eval_str=True)
        attributes = inspect.cleandoc(parent.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
            texts[name] = " ".join(text.split())
    if unknown := {*" ".join(own.values()).split()} - hints.keys():
        raise ValueError(f"{record.__name__} has no field {', '.join(sorted(unknown))}")
    options = {
        field.name: _Option(
            field.name, field.default, hints[field.name], texts.get(field.name, ""),
            panels.get(field.name),
        )
        for field in fields(record)
    }  # fmt: skip
    ordered = [options.pop(name) for name in panels if name in options]
    return [*options.values(), *ordered]


def command(
    record: type[Given],
    sections: Mapping[str, str] | None = None,
    *,
    code: int = 1,
    interrupted: str = "",
) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Decorator that turns a function of an options record into a command.

    The record's fields become the command's options: a field ``max_cost`` is ``--max-cost``, what
    the record's ``Attributes`` say of it is its help, and its :class:`Role` is checked before the
    function is called. Expected failures end with one sentence and an exit code. A record may have
    ``parts``: ends of the names of the files that its state is kept in.

    Args:
        record: a frozen dataclass; annotations of its fields may have typer's options and a role.
        sections: headings of the help page, each with names of fields, separated by spaces. Fields
            that several commands have stand below a heading without it.
        code: exit code of failures; 2 where 1 means that a difference was found.
        interrupted: what had not happened when Ctrl-C ended the command, as in "before a plan was
            chosen".
    """
    options = _declared(record, sections or {})

    def wrap(action: Callable[[Given], None]) -> Callable[..., None]:
        """The function for typer: its parameters are the fields of the record."""

        def run(**given: Any) -> None:
            when, save = interrupted or "before anything was read", given.get("save")
            with plain_errors(code, when, save if interrupted else None):
                values = record(**{one.name: one.value(given[one.name]) for one in options})
                _check_files(values, options)
                action(values)

        paragraphs = inspect.cleandoc(action.__doc__ or "").split("\n\n")
        # typer keeps the line ends of all but the first
        run.__doc__ = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
        run.__name__ = action.__name__
        run.__annotations__ = {one.name: one.hint for one in options}
        vars(run)["__signature__"] = inspect.Signature([one.parameter() for one in options])
        return run

    return wrap


def _check_files(record: Any, options: Sequence[_Option]) -> None:
    """Refuse outputs that cannot be written or would destroy something, and a lone --resume."""
    named: dict[str, dict[str, Any]] = {kind: {} for kind in ("input", "output", "figure", "state")}
    for option in options:
        if option.role.file:
            named[option.role.file][option.flag] = getattr(record, option.name)
    resume = getattr(record, "resume", None)
    (state, save), *_ = [*named["state"].items(), ("", None)]
    check_outputs(
        named["output"] | named["figure"] | named["state"],
        named["input"],
        state=state,
        parts=getattr(record, "parts", ("",)),
        resume=resume,
        overwrite=getattr(record, "overwrite", False),
    )
    for flag, path in named["figure"].items():
        check_figure(flag, path)
    if resume and save is None:
        refuse("--resume", "needs --save, the file to continue from")


def check_choice(flag: str, given: str, among: Any) -> None:
    """Refuse a name that is not one of a few, naming the nearest."""
    if given in among:
        return
    names = ", ".join(among)
    text = f"must be one of {names}, got {given}{did_you_mean(given, among)}"
    refuse(flag, text)


def check_metrics(names: Iterable[str]) -> None:
    """Refuse an unknown metric, naming the nearest."""
    from acutance.structure import describe

    for name in names:
        try:
            describe(name)
        except ValueError as error:
            refuse("--metric", str(error))


class Command(TyperCommand):
    """A command whose ``--help`` shows no type."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option, without ``<bool>``."""
        return _without_type(super().get_help_option(ctx))


class Group(TyperGroup):
    """The top-level command: acutance's own, each loaded from its module, and other packages'.

    Its ``--help`` shows no types, and messages contain no terminal control characters.
    """

    @property
    def commands(self) -> dict[str, Any]:
        """Every subcommand by name, in the order of the help page."""
        return {name: self.get_command(None, name) for name in (*OWN, *self._hidden, *_added())}

    @commands.setter
    def commands(self, hidden: Mapping[str, Any]) -> None:
        self._hidden = dict(hidden)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand of a name; None if there is none. Only its module is loaded."""
        if cmd_name in OWN:
            return _own_command(cmd_name)
        return _added_command(cmd_name) if cmd_name in _added() else self._hidden.get(cmd_name)

    def get_help_option(self, ctx: Any) -> Any:
        """The option, without ``<bool>``."""
        return _without_type(super().get_help_option(ctx))

    def make_context(self, *args: Any, **given: Any) -> Any:
        """Read the options of all commands."""
        with _visible_misuse():
            return super().make_context(*args, **given)

    def invoke(self, ctx: Any) -> Any:
        """Read the options of one command and run it."""
        with _visible_misuse():
            return super().invoke(ctx)


@contextmanager
def _visible_misuse() -> Iterator[None]:
    """Context that escapes control characters in messages about misused options."""
    try:
        yield
    except Exception as error:
        message = getattr(error, "message", None)
        if hasattr(error, "format_message") and isinstance(message, str):
            vars(error)["message"] = visible_lines(message)
        raise


#: The commands in the order of the help page; each is a function in a module of its name.
OWN = (
    "probe", "merge", "report", "diff", "predict", "temperature", "calibrate", "judge", "budget",
    "plan", "extend", "verify", "compare", "alarms", "info",
)  # fmt: skip


@cache
def _own_command(name: str) -> Any:
    return _single(name, getattr(importlib.import_module(f"acutance.cli.{name}"), name))


@cache
def _added() -> dict[str, Any]:
    """The entry points of the commands that installed packages add, by name."""
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in sorted(entry_points(group="acutance.commands"))}


@cache
def _added_command(name: str) -> Any:
    """The command of an entry point; if its package is broken, one that says so and fails."""
    entry = _added()[name]
    try:
        action = entry.load()
    except Exception as error:  # of code that is not ours
        reason = f"{entry.value} cannot be loaded: {type(error).__name__}: {error}"

        def action() -> None:
            fail(f"the command {name} of {reason}")
            raise typer.Exit(1)

        action.__doc__ = f"Broken: {reason}."
    return _single(name, action)


def _single(name: str, action: Callable[..., None]) -> Any:
    single = typer.Typer(add_completion=False)
    single.command(name, cls=Command)(action)
    return typer.main.get_command(single)


def _without_type(option: Any) -> Any:
    """Hide the type of an option in the help page."""
    if option is not None:
        option.metavar = NO_TYPE
    return option
