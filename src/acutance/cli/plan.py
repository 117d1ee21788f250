"""``acutance plan``: show a plan for the key-value cache, and convert it for other tools."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli.options import (
    READ,
    WRITE,
    AllowMissing,
    AllowPickle,
    AttentionName,
    Device,
    Tokenizer,
    TrustRemoteCode,
    command,
    load_model,
    read_lengths,
)
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import console, plain_errors

if TYPE_CHECKING:
    from acutance.caching import CachePlan


@dataclass(frozen=True, repr=False, eq=False)
class PlanOptions:
    """The options of ``acutance plan``."""

    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN",
            help="File from 'budget -o' or 'budget --json', or, with --model, another tool's plan: "
            "duo_attention:DIR or layer_types:config.json.",
        ),
    ]
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="MODEL", help="Model that the plan is for, as for 'budget'."
        ),
    ] = None
    lengths: Annotated[
        str,
        typer.Option("--lengths", metavar="N,...", help="Tokens at which to count the cache."),
    ] = "1024,4096,16384"
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the plan to this JSON file."),
    ] = None
    export: Annotated[
        list[str] | None,
        typer.Option(
            "--export",
            metavar="FORMAT:PATH",
            help="Write it for another tool; repeat for more. kvpress:press.py is a press for "
            "kvpress, duo_attention:DIR DuoAttention's table of full-attention heads, "
            "layer_types:FILE entries of a transformers configuration.",
        ),
    ] = None
    tokenizer: Tokenizer = None
    attention: AttentionName = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    allow_missing: AllowMissing = False


@command(
    PlanOptions,
    {
        READ: "model lengths tokenizer attention device trust_remote_code allow_pickle "
        "allow_missing",
        WRITE: "out export",
    },
)
def plan(options: PlanOptions) -> None:
    """Show what each key head keeps in the cache under a plan, and convert it for other tools."""
    lengths = read_lengths(options.lengths)
    with plain_errors():
        from acutance.caching.exchange.export_plan import export_plan
        from acutance.caching.exchange.plan_record import plan_table, read_costs

        exports = _exports(options.export or ())
        check_outputs(
            {
                "--out": options.out,
                **{f"--export {name}": _file(name, path) for name, path in exports.items()},
            },
            {"MODEL": options.model, "PLAN": options.plan},
        )
        found = _read(options)
        costs = read_costs(options.plan) if Path(options.plan).is_file() else None
        lost: list[str] = []

        def writer(name: str) -> Callable[[Path], object]:
            def write(path: Path) -> None:
                lost.extend(f"{name}: {one}" for one in export_plan(found, name, path))

            return write

        write_and_show(
            {"plan": found.save, **{name: writer(name) for name in exports}},
            {"plan": options.out, **exports},
            lambda screen: screen.print(plan_table(found, lengths, costs)),
        )
        for sentence in lost:
            console().print(sentence, soft_wrap=True)


def _read(options: PlanOptions) -> "CachePlan":
    """The plan, checked against the model if there is one."""
    from acutance.caching.exchange.import_plan import IMPORTS, import_plan
    from acutance.caching.plan import CachePlan

    if options.model is None:
        if options.plan.partition(":")[0] in IMPORTS and not Path(options.plan).exists():
            raise typer.BadParameter(
                f"{options.plan} does not name its model, so it is needed here",
                param_hint="--model",
            )
        return CachePlan.load(options.plan)
    with console().status("loading the model"):
        loaded = load_model(options, options.device, head=True)
    return import_plan(options.plan, loaded.model)


def _exports(texts: Sequence[str]) -> dict[str, Path]:
    """Parse ``FORMAT:PATH``; paths by format."""
    from acutance.caching.exchange.export_plan import check_export

    found: dict[str, Path] = {}
    for text in texts:
        name, _, path = text.partition(":")
        if not path:
            reason = f"it must be FORMAT:PATH, as in kvpress:press.py, got {text!r}"
            raise typer.BadParameter(reason, param_hint="--export")
        try:
            check_export(name)
        except ValueError as error:
            reason = str(error).removeprefix("export: ")
            raise typer.BadParameter(reason, param_hint="--export") from error
        if name in found:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--export")
        found[name] = Path(path)
    return found


def _file(name: str, path: Path) -> Path:
    """The file that shows whether a path can be written: of a directory, one that goes into it."""
    from acutance.caching.exchange.export_plan import TABLE

    return path / TABLE if name == "duo_attention" and path.is_dir() else path
