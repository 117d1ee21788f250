"""``acutance predict``: every metric of an attention row from theory."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import typer

from acutance.cli import options as cli
from acutance.cli.shared import misuse, refuse


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PredictOptions(cli.OutputOptions):
    """The options of ``acutance predict``.

    Attributes:
        n: Number of keys that a row sees.
        mechanism: softmax, scaled_dot, dot, cosine, relu2, identity (the scores themselves as
            weights), linear, decay, or trained_head (a softmax whose first key has its own
            weight).
        logit_std: Standard deviation of the logits; softmax needs either this or --scale.
        logit_mean: Mean of the logits.
        scale: Factor on the scores before the softmax.
        family: Distribution of the logits: gaussian, uniform, exponential, laplace, gumbel,
            logistic, cosine (needs --d), stretched (needs --rho) or pareto (needs --a).
        d: Dimension of queries and keys, for the mechanisms scaled_dot, dot and cosine and the
            family cosine.
        rho: Family stretched: tails fall as exp(-x^rho).
        a: Family pareto: index of the tail.
        query_norm: Norm of the query. Default: √d.
        tau: Mechanism cosine: the logits are cosine / tau.
        lam: Mechanism decay: factor on the weight per position of distance, above 0 and at most 1.
        q: Mechanism linear: query features, such as 1,2,0.5.
        mu: Mechanism linear: mean of every key feature.
        sigma: Mechanism linear: standard deviation of the key features.
        first_gap: Mechanism trained_head: mean over rows of log(w / (1 - w)), w the first key's
            weight.
        first_gap_std: Standard deviation of --first-gap over rows. Default: 0.
        rest_logit_std: Mechanism trained_head: standard deviation of the other keys' logits.
        rest_jensen_gap: Mechanism trained_head: logsumexp of the other keys' logits minus
            log(n − 1) minus their mean, averaged over rows.
        value_variance: Variance of a value vector, summed over its components, for noise_gain.
            Default: 1.
        sample: Also draw this many random rows and measure them, to check the prediction.
        figure: Draw entropy and effective keys against n as .png or .svg.
    """

    n: Annotated[int, typer.Option(min=1)]
    mechanism: str = "softmax"
    logit_std: float | None = None
    logit_mean: float | None = None
    scale: float | None = None
    family: str | None = None
    d: float | None = None
    rho: float | None = None
    a: float | None = None
    query_norm: float | None = None
    tau: float | None = None
    lam: float | None = None
    q: Annotated[
        tuple[float, ...] | None, typer.Option(metavar="NUMBERS"), cli.Role(read=cli.read_numbers)
    ] = None
    mu: float | None = None
    sigma: float | None = None
    first_gap: float | None = None
    first_gap_std: float | None = None
    rest_logit_std: float | None = None
    rest_jensen_gap: float | None = None
    value_variance: float | None = None
    sample: Annotated[cli.Count, typer.Option(min=0, metavar="ROWS")] = 0
    figure: cli.Plot = None


@cli.command(PredictOptions)
def predict(options: PredictOptions) -> None:
    """Predict every metric of an attention row from theory."""
    if options.sample == 1:
        refuse("--sample", "must be at least 2, to compute a standard error")
    from acutance import theory
    from acutance.report.prediction_figures import draw_prediction
    from acutance.report.prediction_table import prediction_record, prediction_table

    with misuse():
        others = {"sample", "figure", *(option.name for option in fields(cli.OutputOptions))}
        names = (option.name for option in fields(options) if option.name not in others)
        given = {name: getattr(options, name) for name in names}
        given = {name: value for name, value in given.items() if value is not None}
        if options.mechanism == "linear" and not {"q", "mu", "sigma"} <= given.keys():
            raise ValueError("q, mu, sigma: the mechanism linear needs all three")
        prediction = theory.predict(**given)
    measured = None
    if options.sample:
        from acutance.report.prediction_sample import sample_rows

        measured = sample_rows(prediction, options.sample)

    def record() -> dict[str, Any]:
        predicted = prediction_record(prediction)
        if measured is None:
            return predicted
        metrics = {name: {"mean": mean, "error": error} for name, (mean, error) in measured.items()}
        return predicted | {"measured": {"rows": options.sample, "metrics": metrics}}

    table = partial(prediction_table, prediction, measured)
    options.write_and_show(table, record, partial(draw_prediction, prediction))
