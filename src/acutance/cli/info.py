"""``acutance info``: which kernels run here, and why."""

from dataclasses import asdict, dataclass

from acutance.cli import options as cli


@dataclass(frozen=True, repr=False, eq=False)
class InfoOptions(cli.JsonOptions):
    """The options of ``acutance info``."""


@cli.command(InfoOptions)
def info(options: InfoOptions) -> None:
    """Show which kernels are available and which are used."""
    from acutance import kernels

    kernel_info = kernels.info()
    options.write_and_show(lambda: str(kernel_info), lambda: asdict(kernel_info))
