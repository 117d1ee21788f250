"""``acutance info``: which kernels run here, and why."""

from dataclasses import asdict, dataclass

from acutance.cli.options import OutputFile, command
from acutance.cli.outputs import write_and_show


@dataclass(frozen=True, repr=False, eq=False)
class InfoOptions:
    """The options of ``acutance info``.

    Attributes:
        json: Write all results as JSON; '-' for standard output.
    """

    json: OutputFile = None


@command(InfoOptions, {})
def info(options: InfoOptions) -> None:
    """Show which kernels are available and which are used."""
    from acutance import kernels

    kernel_info = kernels.info()
    write_and_show(lambda: str(kernel_info), json=(options.json, lambda: asdict(kernel_info)))
