"""``acutance info``: which kernels run here, and why."""

from dataclasses import asdict, dataclass

import typer

from acutance.cli.options import JsonTo, command
from acutance.cli.outputs import check_outputs
from acutance.cli.shared import plain_errors


@dataclass(frozen=True, repr=False, eq=False)
class InfoOptions:
    """The options of ``acutance info``."""

    json: JsonTo = None


@command(InfoOptions, {})
def info(options: InfoOptions) -> None:
    """Show which kernels are available and which are used."""
    check_outputs({"--json": options.json})
    with plain_errors():
        from acutance import kernels
        from acutance.files import as_json, finite, put_text

        kernel_info = kernels.info()
        if options.json is None:
            typer.echo(str(kernel_info))
        else:
            put_text(as_json(finite(asdict(kernel_info)), indent=1) + "\n", options.json)
