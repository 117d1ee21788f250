"""Commands of theory: predict, temperature."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acutance.cli.options import WRITE, Dark, JsonTo, grouped
from acutance.cli.outputs import check_outputs
from acutance.cli.shared import check_figure, misuse, plain_errors


def predict_command(
    n: Annotated[int, typer.Option("--n", min=1, help="Keys that a row sees.")],
    mechanism: Annotated[
        str,
        typer.Option(
            "--mechanism",
            help="softmax, scaled_dot, dot, cosine, relu2, identity, linear or decay.",
        ),
    ] = "softmax",
    logit_std: Annotated[
        float | None, typer.Option("--logit-std", help="Standard deviation of the logits.")
    ] = None,
    logit_mean: Annotated[
        float | None, typer.Option("--logit-mean", help="Mean of the logits.")
    ] = None,
    scale: Annotated[float | None, typer.Option("--scale", help="Factor of the scores.")] = None,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            help="Law of a score: gaussian, uniform, exponential, laplace, gumbel, logistic, "
            "cosine (--d), stretched (--rho) or pareto (--a).",
        ),
    ] = None,
    d: Annotated[float | None, typer.Option("--d", help="Dimension of queries and keys.")] = None,
    rho: Annotated[float | None, typer.Option("--rho", help="Exponent of a stretched law.")] = None,
    a: Annotated[float | None, typer.Option("--a", help="Tail index of a Pareto law.")] = None,
    query_norm: Annotated[
        float | None, typer.Option("--query-norm", help="Length of the query; √d if left out.")
    ] = None,
    tau: Annotated[float | None, typer.Option("--tau", help="Temperature of cosines.")] = None,
    lam: Annotated[float | None, typer.Option("--lam", help="Decay per key.")] = None,
    q: Annotated[
        str | None, typer.Option("--q", metavar="NUMBERS", help="Query features: 1,2,0.5.")
    ] = None,
    mu: Annotated[
        str | None, typer.Option("--mu", metavar="NUMBERS", help="Mean of the key features.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option("--sigma", help="Deviation of each key feature.")
    ] = None,
    value_variance: Annotated[
        float | None, typer.Option("--value-variance", help="Variance of the values; 1.")
    ] = None,
    sample: Annotated[
        int, typer.Option("--sample", metavar="ROWS", min=0, help="Measure random rows too.")
    ] = 0,
    json: JsonTo = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure", metavar="FILE", help="Draw entropy and effective keys: a .png or .svg."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", hidden=True)] = None,
    dark: Dark = False,
) -> None:
    """Predict every metric of an attention row from theory."""
    options = {
        "logit_std": logit_std, "logit_mean": logit_mean, "scale": scale, "family": family, "d": d,
        "rho": rho, "a": a, "query_norm": query_norm, "tau": tau, "lam": lam, "q": q, "mu": mu,
        "sigma": sigma, "value_variance": value_variance,
    }  # fmt: skip
    if sample == 1:
        raise typer.BadParameter("a standard error takes 2 rows or more", param_hint="--sample")
    check_outputs({"--json": json, "--figure": figure, "--plot": plot})
    check_figure("--figure", figure)
    check_figure("--plot", plot)
    with plain_errors():
        from acutance.cli import theory_actions
    with misuse():
        row = theory_actions.predicted_row(mechanism, n, options)
    with plain_errors():
        theory_actions.show_prediction(
            row, sample=sample, json_to=json, plot_to=figure or plot, dark=dark
        )


def temperature_command(
    n: Annotated[int, typer.Option("--n", min=2, help="Keys that a row sees.")],
    fraction: Annotated[
        float, typer.Option("--fraction", help="Information wanted, as a share of log n.")
    ] = 0.9,
    d: Annotated[float | None, typer.Option("--d", help="Dimension of queries and keys.")] = None,
    negatives: Annotated[
        str | None,
        typer.Option(
            "--negatives",
            metavar="box|simplex|random",
            help="How the other keys lie: anywhere, evenly, or at random (with --d).",
        ),
    ] = None,
    json: JsonTo = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure", metavar="FILE", help="Draw information by temperature: .png, .svg."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", hidden=True)] = None,
    dark: Dark = False,
) -> None:
    """Recommend a temperature for a softmax of cosines, and say why."""
    check_outputs({"--json": json, "--figure": figure, "--plot": plot})
    check_figure("--figure", figure)
    check_figure("--plot", plot)
    with plain_errors():
        from acutance.cli import theory_actions
    with misuse():
        advice = theory_actions.advice_for(n, fraction, d, negatives)
    with plain_errors():
        theory_actions.show_advice(advice, json_to=json, plot_to=figure or plot, dark=dark)


grouped(predict_command, {WRITE: "json figure dark"})
grouped(temperature_command, {WRITE: "json figure dark"})
