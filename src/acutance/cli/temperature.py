"""``acutance temperature``: a temperature for a softmax of cosines."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from acutance.cli import options as cli
from acutance.cli.shared import misuse


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TemperatureOptions(cli.OutputOptions):
    """The options of ``acutance temperature``.

    Attributes:
        n: Number of keys that a row sees.
        fraction: Information (log n − entropy) that the softmax should give, as a fraction of
            log n.
        d: Dimension of queries and keys.
        negatives: Where the other keys lie: box (cosines anywhere in [−1, 1], a bound on the
            temperature), simplex (evenly spaced) or random (needs --d).
        figure: Draw information against temperature as .png or .svg.
    """

    n: Annotated[int, typer.Option(min=2)]
    fraction: float = 0.9
    d: float | None = None
    negatives: Annotated[str | None, typer.Option(metavar="box|simplex|random")] = None
    figure: cli.Plot = None


@cli.command(TemperatureOptions)
def temperature(options: TemperatureOptions) -> None:
    """Recommend a temperature for a softmax of cosines, with the reasons."""
    from acutance.report.prediction_figures import draw_temperatures
    from acutance.report.temperature import advice_table, advise

    with misuse():
        advice = advise(options.n, options.fraction, options.d, options.negatives)
    options.write_and_show(
        partial(advice_table, advice), advice.to_dict, partial(draw_temperatures, advice)
    )
