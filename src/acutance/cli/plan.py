"""``acutance plan``: show a plan for the key-value cache, and convert it for other tools."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli import options as cli
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import refuse, tell

if TYPE_CHECKING:
    from acutance.caching import CachePlan


def _export(text: str) -> tuple[str, Path]:
    """Parse ``FORMAT:PATH``."""
    name, _, path = text.partition(":")
    if not path:
        raise ValueError(f"it must be FORMAT:PATH, as in kvpress:press.py, got {text!r}")
    return name, Path(path)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PlanOptions(cli.ModelOptions):
    """The options of ``acutance plan``.

    Attributes:
        plan: File from 'budget -o' or 'budget --json', or, with --model, another tool's plan:
            duo_attention:DIR or layer_types:config.json.
        model: Model that the plan is for, as for 'budget'.
        lengths: Tokens at which to count the cache. Default: 1024,4096,16384.
        out: Write the plan to this JSON file.
        export: Write it for another tool; repeat for more. kvpress:press.py is a press for kvpress,
            duo_attention:DIR DuoAttention's table of full-attention heads, layer_types:FILE entries
            of a transformers configuration.
    """

    plan: Annotated[str, typer.Argument(metavar="PLAN"), cli.Role("input")]
    model: Annotated[str | None, typer.Option(metavar="MODEL"), cli.Role("input")] = None
    lengths: cli.Lengths = (1024, 4096, 16384)
    out: cli.Out = None
    export: Annotated[
        dict[str, Path] | None,
        typer.Option(metavar="FORMAT:PATH"),
        cli.Role(read=_export, named=True),
    ] = None


@cli.command(PlanOptions, {cli.READ: "model", cli.WRITE: "export"})
def plan(options: PlanOptions) -> None:
    """Show what each key head keeps in the cache under a plan, and convert it for other tools."""
    from acutance.caching.frontier import plan_table, read_costs
    from acutance.caching.plan import TABLE, check_export, export_plan

    exports = options.export or {}
    exported = {"--out": options.out}
    for name, path in exports.items():
        try:
            check_export(name)
        except ValueError as error:
            reason = str(error).removeprefix("export: ")
            refuse("--export", reason)
        folder = name == "duo_attention" and path.is_dir()
        exported[f"--export {name}"] = path / TABLE if folder else path
    check_outputs(exported, {"MODEL": options.model, "PLAN": options.plan})
    found = _read(options)
    costs = read_costs(options.plan) if Path(options.plan).is_file() else None
    lost: list[str] = []

    def export(name: str, path: Path) -> None:
        lost.extend(f"{name}: {reason}" for reason in export_plan(found, name, path))

    write_and_show(
        partial(plan_table, found, options.lengths or (), costs),
        plan=(options.out, found.save),
        **{name: (path, partial(export, name)) for name, path in exports.items()},
    )
    for sentence in lost:
        tell(sentence)


def _read(options: PlanOptions) -> "CachePlan":
    """The plan, checked against the model if there is one."""
    from acutance.caching.plan import IMPORTS, CachePlan, import_plan

    if options.model is not None:
        return import_plan(options.plan, options.load(head=True).model)
    if options.plan.partition(":")[0] in IMPORTS and not Path(options.plan).exists():
        refuse("--model", f"{options.plan} does not name its model, so it is needed here")
    return CachePlan.load(options.plan)
