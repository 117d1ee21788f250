"""``acutance predict``: every metric of an attention row from theory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from acutance.cli.options import WRITE, Dark, JsonTo, command
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import check_figure, misuse, plain_errors

#: Options that are arguments of :func:`acutance.theory.predict`.
ARGUMENTS = (
    "logit_std", "logit_mean", "scale", "family", "d", "rho", "a", "query_norm", "tau", "lam",
    "mu", "sigma", "first_gap", "first_gap_std", "rest_logit_std", "rest_jensen_gap",
    "value_variance",
)  # fmt: skip


@dataclass(frozen=True, repr=False, eq=False)
class PredictOptions:
    """The options of ``acutance predict``."""

    n: Annotated[int, typer.Option("--n", min=1, help="Number of keys that a row sees.")]
    mechanism: Annotated[
        str,
        typer.Option(
            "--mechanism",
            help=(
                "softmax, scaled_dot, dot, cosine, relu2, identity (the scores themselves as "
                "weights), linear, decay, or trained_head (a softmax whose first key has its own "
                "weight)."
            ),
        ),
    ] = "softmax"
    logit_std: Annotated[
        float | None,
        typer.Option(
            "--logit-std",
            help="Standard deviation of the logits; softmax needs either this or --scale.",
        ),
    ] = None
    logit_mean: Annotated[
        float | None, typer.Option("--logit-mean", help="Mean of the logits.")
    ] = None
    scale: Annotated[
        float | None, typer.Option("--scale", help="Factor on the scores before the softmax.")
    ] = None
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            help=(
                "Distribution of the logits: gaussian, uniform, exponential, laplace, gumbel, "
                "logistic, cosine (needs --d), stretched (needs --rho) or pareto (needs --a)."
            ),
        ),
    ] = None
    d: Annotated[
        float | None,
        typer.Option(
            "--d",
            help="Dimension of queries and keys, for the mechanisms scaled_dot, dot and cosine and "
            "the family cosine.",
        ),
    ] = None
    rho: Annotated[
        float | None, typer.Option("--rho", help="Family stretched: tails fall as exp(-x^rho).")
    ] = None
    a: Annotated[float | None, typer.Option("--a", help="Family pareto: index of the tail.")] = None
    query_norm: Annotated[
        float | None, typer.Option("--query-norm", help="Norm of the query. Default: √d.")
    ] = None
    tau: Annotated[
        float | None, typer.Option("--tau", help="Mechanism cosine: the logits are cosine / tau.")
    ] = None
    lam: Annotated[
        float | None,
        typer.Option(
            "--lam",
            help="Mechanism decay: factor on the weight per position of distance, above 0 and at "
            "most 1.",
        ),
    ] = None
    q: Annotated[
        str | None,
        typer.Option(
            "--q", metavar="NUMBERS", help="Mechanism linear: query features, such as 1,2,0.5."
        ),
    ] = None
    mu: Annotated[
        float | None,
        typer.Option("--mu", help="Mechanism linear: mean of every key feature."),
    ] = None
    sigma: Annotated[
        float | None,
        typer.Option("--sigma", help="Mechanism linear: standard deviation of the key features."),
    ] = None
    first_gap: Annotated[
        float | None,
        typer.Option(
            "--first-gap",
            help=(
                "Mechanism trained_head: mean over rows of log(w / (1 - w)), w the first "
                "key's weight."
            ),
        ),
    ] = None
    first_gap_std: Annotated[
        float | None,
        typer.Option(
            "--first-gap-std", help="Standard deviation of --first-gap over rows. Default: 0."
        ),
    ] = None
    rest_logit_std: Annotated[
        float | None,
        typer.Option(
            "--rest-logit-std",
            help="Mechanism trained_head: standard deviation of the other keys' logits.",
        ),
    ] = None
    rest_jensen_gap: Annotated[
        float | None,
        typer.Option(
            "--rest-jensen-gap",
            help=(
                "Mechanism trained_head: logsumexp of the other keys' logits minus log(n − 1) "
                "minus their mean, averaged over rows."
            ),
        ),
    ] = None
    value_variance: Annotated[
        float | None,
        typer.Option(
            "--value-variance",
            help="Variance of a value vector, summed over its components, for noise_gain. "
            "Default: 1.",
        ),
    ] = None
    sample: Annotated[
        int,
        typer.Option(
            "--sample",
            metavar="ROWS",
            min=0,
            help="Also draw this many random rows and measure them, to check the prediction.",
        ),
    ] = 0
    json: JsonTo = None
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            metavar="FILE",
            help="Draw entropy and effective keys against n as .png or .svg.",
        ),
    ] = None
    plot: Annotated[Path | None, typer.Option("--plot", hidden=True)] = None
    dark: Dark = False


@command(PredictOptions, {WRITE: "json figure dark"})
def predict(options: PredictOptions) -> None:
    """Predict every metric of an attention row from theory."""
    if options.sample == 1:
        raise typer.BadParameter(
            "must be at least 2, to compute a standard error", param_hint="--sample"
        )
    check_outputs({"--json": options.json, "--figure": options.figure, "--plot": options.plot})
    check_figure("--figure", options.figure)
    check_figure("--plot", options.plot)
    with plain_errors():
        from acutance import theory
        from acutance.files import as_json, put_text
        from acutance.report.prediction_table import prediction_record, prediction_table
    with misuse():
        arguments: dict[str, Any] = {
            name: value for name in ARGUMENTS if (value := getattr(options, name)) is not None
        }
        if options.mechanism == "linear" and None in (options.q, options.mu, options.sigma):
            raise ValueError("q, mu, sigma: the mechanism linear needs all three")
        if options.q is not None:
            arguments["q"] = _numbers("q", options.q)
        prediction = theory.predict(options.mechanism, options.n, **arguments)
    with plain_errors():
        measured = None
        record = prediction_record(prediction)
        if options.sample:
            from acutance.report.prediction_sample import sample_rows

            measured = sample_rows(prediction, options.sample)
            record["measured"] = {
                "rows": options.sample,
                "metrics": {
                    name: {"mean": mean, "error": error} for name, (mean, error) in measured.items()
                },
            }

        def draw(path: Path) -> None:
            from acutance.report.plot_style import DARK, LIGHT
            from acutance.report.prediction_figures import draw_prediction

            draw_prediction(prediction, path, theme=DARK if options.dark else LIGHT)

        text = as_json(record, indent=1, ascii_only=False) + "\n"
        write_and_show(
            {"--json": lambda path: put_text(text, path), "--figure": draw},
            {"--json": options.json, "--figure": options.figure or options.plot},
            lambda screen: screen.print(prediction_table(prediction, measured)),
        )


def _numbers(name: str, text: str) -> list[float]:
    """Parse comma-separated numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{name}: must be numbers separated by commas, such as 1,2,0.5, got {text!r}"
        ) from None
