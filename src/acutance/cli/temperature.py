"""``acutance temperature``: a temperature for a softmax of cosines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import WRITE, Dark, JsonTo, command
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import check_figure, misuse, plain_errors


@dataclass(frozen=True, repr=False, eq=False)
class TemperatureOptions:
    """The options of ``acutance temperature``."""

    n: Annotated[int, typer.Option("--n", min=2, help="Number of keys that a row sees.")]
    fraction: Annotated[
        float,
        typer.Option(
            "--fraction",
            help=(
                "Information (log n − entropy) that the softmax should give, as a fraction of "
                "log n."
            ),
        ),
    ] = 0.9
    d: Annotated[float | None, typer.Option("--d", help="Dimension of queries and keys.")] = None
    negatives: Annotated[
        str | None,
        typer.Option(
            "--negatives",
            metavar="box|simplex|random",
            help=(
                "Where the other keys lie: box (cosines anywhere in [−1, 1], a bound on the "
                "temperature), simplex (evenly spaced) or random (needs --d)."
            ),
        ),
    ] = None
    json: JsonTo = None
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure", metavar="FILE", help="Draw information against temperature as .png or .svg."
        ),
    ] = None
    plot: Annotated[Path | None, typer.Option("--plot", hidden=True)] = None
    dark: Dark = False


@command(TemperatureOptions, {WRITE: "json figure dark"})
def temperature(options: TemperatureOptions) -> None:
    """Recommend a temperature for a softmax of cosines, with the reasons."""
    check_outputs({"--json": options.json, "--figure": options.figure, "--plot": options.plot})
    check_figure("--figure", options.figure)
    check_figure("--plot", options.plot)
    with plain_errors():
        from acutance.files import as_json, put_text
        from acutance.report.temperature import advice_table, advise
    with misuse():
        advice = advise(options.n, options.fraction, options.d, options.negatives)
    with plain_errors():

        def draw(path: Path) -> None:
            from acutance.report.plot_style import DARK, LIGHT
            from acutance.report.prediction_figures import draw_temperatures

            draw_temperatures(advice, path, theme=DARK if options.dark else LIGHT)

        text = as_json(advice.to_dict(), indent=1, ascii_only=False) + "\n"
        write_and_show(
            {"--json": lambda path: put_text(text, path), "--figure": draw},
            {"--json": options.json, "--figure": options.figure or options.plot},
            lambda screen: screen.print(advice_table(advice)),
        )
