"""The ``acutance`` command. Every command imports what it needs when it runs, so help is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="acutance",
    help="How sharply does attention focus? Measure it on any model, for every head and row.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130


def _version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        typer.echo(f"acutance {version('acutance')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """How sharply does attention focus? Measure it on any model, for every head and row."""


@app.command("probe")
def probe_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Directory of a saved model, or a name transformers can load. "
            "Left out: the MiniLM that comes with acutance\\[demo].",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text to read, '-' for standard input; repeat it for more.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", min=2, help="Tokens in a window. Default: the model's longest, at most 512."
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, help="Windows run at once.")
    ] = 8,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="HTML", help="Write a page with the heat map."),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write every number as JSON, '-' for standard output."
        ),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option("--parquet", metavar="FILE", help="Write a table, one row per head."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Keep the state, as it grows: to merge, resume, reload."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what the file of --save holds.")
    ] = False,
    save_every: Annotated[
        int,
        typer.Option(
            "--save-every", metavar="WINDOWS", min=1, help="Write the state less often than that."
        ),
    ] = 1,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard", metavar="I/N", help="Probe the I-th of N parts of the text; then 'merge'."
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure", metavar="PNG", help="Draw the heat map (needs acutance\\[plots])."
        ),
    ] = None,
    keep_qk: Annotated[
        Path | None,
        typer.Option(
            "--keep-qk", metavar="FILE", help="Write some queries and keys, for 'compare --from'."
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Rebuild each output and compare.")
    ] = True,
    noise: Annotated[bool, typer.Option("--noise", help="Also measure noise_gain.")] = False,
    attention: Annotated[
        str | None, typer.Option("--attention", help="Attention implementation: sdpa, eager, ...")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where to run: cpu, cuda, mps.")] = "cpu",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load weights that are not safetensors.")
    ] = False,
) -> None:
    """Show how sharply every head of a model focuses on a text."""
    targets = {
        "--report": report,
        "--json": json,
        "--parquet": parquet,
        "--save": save,
        "--figure": figure,
        "--keep-qk": keep_qk,
    }
    _check_targets(targets)
    if resume and save is None:
        raise typer.BadParameter("it goes on from the file of --save", param_hint="--resume")
    if resume and keep_qk is not None:
        raise typer.BadParameter(
            "it may skip the first windows, which --keep-qk reads", param_hint="--resume"
        )
    with _plain_errors():
        from acutance.probing import distributed
        from acutance.report import probe_commands

        ranks = ExitStack()
        world = ranks.enter_context(distributed.world())
    with ranks, _plain_errors():  # what went wrong is said before the other ranks are let go
        finished = probe_commands.probe(
            model,
            text or [],
            world=world,
            length=length,
            batch_size=batch_size,
            shard=shard,
            save_every=save_every,
            resume=resume,
            verify=verify,
            noise=noise,
            attention=attention,
            device=device,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            targets=targets,
            console=_console,
        )
    if not finished:
        raise typer.Exit(INTERRUPTED)


@app.command("merge")
def merge_command(
    states: Annotated[
        list[Path],
        typer.Argument(metavar="SHARD...", help="States that 'probe --save' wrote."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the joint state.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="HTML", help="Write a page with the heat map."),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write every number as JSON, '-' for standard output."
        ),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option("--parquet", metavar="FILE", help="Write a table, one row per head."),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure", metavar="PNG", help="Draw the heat map (needs acutance\\[plots])."
        ),
    ] = None,
) -> None:
    """Join the states of shards that were probed apart: one run, no window twice."""
    targets = {
        "--out": out,
        "--report": report,
        "--json": json,
        "--parquet": parquet,
        "--figure": figure,
    }
    _check_targets(targets)
    with _plain_errors():
        from acutance.report import probe_commands

        probe_commands.merge(states, targets=targets, console=_console)


def _check_targets(targets: dict[str, Path | None]) -> None:
    """Refuse what cannot be written before a long run, not after it."""
    for option, path in targets.items():
        if path is None or str(path) == "-":
            continue
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a directory", param_hint=option)
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no directory {path.parent}", param_hint=option)


def _check_ending(option: str, path: Path | None) -> None:
    """Refuse a figure in a format that is not drawn."""
    if path is not None and path.suffix.lower() not in (".png", ".svg"):
        raise typer.BadParameter(f"a figure ends in .png or .svg, got {path}", param_hint=option)


@contextmanager
def _misuse() -> Iterator[None]:
    """What the theory refuses, with the names of its arguments as options, is misuse: exit 2."""
    try:
        yield
    except (TypeError, ValueError) as error:
        names, colon, rest = str(error).partition(": ")
        if colon and all(name.isidentifier() for name in names.split(", ")):
            names = ", ".join(f"--{name.replace('_', '-')}" for name in names.split(", "))
        _fail(f"{names}{colon}{rest}")
        raise typer.Exit(2) from error


@app.command("predict")
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
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the record, '-' for standard output."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw entropy and effective keys: a .png or .svg."
        ),
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Draw on a dark page.")] = False,
) -> None:
    """Predict every metric of an attention row from theory."""
    options = {
        "logit_std": logit_std, "logit_mean": logit_mean, "scale": scale, "family": family, "d": d,
        "rho": rho, "a": a, "query_norm": query_norm, "tau": tau, "lam": lam, "q": q, "mu": mu,
        "sigma": sigma, "value_variance": value_variance,
    }  # fmt: skip
    if sample == 1:
        raise typer.BadParameter("a standard error takes 2 rows or more", param_hint="--sample")
    _check_targets({"--json": json, "--plot": plot})
    _check_ending("--plot", plot)
    with _plain_errors():
        from acutance.report import theory_commands
    with _misuse():
        row = theory_commands.predicted_row(mechanism, n, options)
    with _plain_errors():
        theory_commands.show_prediction(row, sample=sample, json_to=json, plot_to=plot, dark=dark)


@app.command("temperature")
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
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the advice, '-' for standard output."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw information by temperature: .png, .svg."),
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Draw on a dark page.")] = False,
) -> None:
    """Recommend a temperature for a softmax of cosines, and say why."""
    _check_targets({"--json": json, "--plot": plot})
    _check_ending("--plot", plot)
    with _plain_errors():
        from acutance.report import theory_commands
    with _misuse():
        advice = theory_commands.advice_for(n, fraction, d, negatives)
    with _plain_errors():
        theory_commands.show_advice(advice, json_to=json, plot_to=plot, dark=dark)


@app.command("compare")
def compare_command(
    n: Annotated[
        str | None,
        typer.Option("--n", metavar="NUMBERS", help="Keys a row sees. Default: 256,1024,4096."),
    ] = None,
    d: Annotated[int, typer.Option("--d", min=2, help="Width of queries and keys.")] = 64,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism", metavar="NAME", help="Repeat it for more; 'all'. Default: twelve."
        ),
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Heads, each with own keys.")] = 16,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences.")] = 1,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Rows of each head.")] = 16,
    mean: Annotated[
        str, typer.Option("--mean", metavar="Q[,K]", help="Mean of queries and keys.")
    ] = "0",
    std: Annotated[
        str, typer.Option("--std", metavar="Q[,K]", help="Their standard deviation.")
    ] = "1",
    causal: Annotated[
        bool, typer.Option("--causal", help="Rows see the keys up to their own place only.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all random numbers.")] = 0,
    state: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="STATE", help="Queries and keys that 'probe --keep-qk' wrote."
        ),
    ] = None,
    costs: Annotated[
        bool, typer.Option("--costs/--no-costs", help="Measure time and peak memory.")
    ] = True,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the record, '-' for standard output."),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Draw effective keys by n: .png or .svg."),
    ] = None,
    dark: Annotated[bool, typer.Option("--dark", help="Draw on a dark page.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show the mechanisms and end.")] = False,
) -> None:
    """Compare attention mechanisms: concentration measured and predicted, time, memory."""
    _check_targets({"--json": json, "--figure": figure})
    _check_ending("--figure", figure)
    with _plain_errors():
        from acutance.comparison import command
    if listing:
        _console(stderr=False).print(command.listing())
        return
    with _plain_errors():
        source = command.source(state)
    with _misuse():
        given = command.arguments(mechanism or [], n, mean, std, source)
    given |= {"d": d, "heads": heads, "batch": batch, "samples": samples, "is_causal": causal,
              "seed": seed, "costs": costs}  # fmt: skip
    with _plain_errors():
        found = command.run(given, _console)
        command.show(found, json_to=json, figure_to=figure, dark=dark, console=_console)
    if not found.complete:
        raise typer.Exit(INTERRUPTED)


@app.command("reproduce")
def reproduce_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Experiments. Default: all of them."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run at small sizes: a minute or two in all.")
    ] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where records and figures go.")
    ] = Path("acutance-reproduce"),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of all random numbers.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again what an earlier run has measured.")
    ] = False,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw (needs acutance\\[plots]).")
    ] = True,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all records, '-' for standard output."),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the experiments and end.")] = False,
) -> None:
    """Test published claims about attention: predicted, measured, verdict, figure."""
    _check_targets({"--json": json})
    with _plain_errors():
        from acutance.reproduce import EXPERIMENTS, command, pick, render

        try:
            chosen = pick(names or [], EXPERIMENTS)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="NAME") from error
        if listing:
            _console(stderr=False).print(render.listing(chosen))
            return
        status = command.reproduce(
            chosen,
            out,
            quick=quick,
            seed=seed,
            force=force,
            figures=figures,
            to_json=json,
            console=_console,
        )
    if status:
        raise typer.Exit(status)


@app.command("bench")
def bench_command(
    case: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CASE]...", help="Cases, groups or sets. Default: all."),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option("--group", metavar="NAME,...", help="Groups of cases, see --list."),
    ] = None,
    threads: Annotated[
        str, typer.Option("--threads", metavar="N,...", help="Threads torch may use: 1,2 is both.")
    ] = "1",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few small cases, three rounds: a minute.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", min=1, help="Interleaved rounds a case: 7, with --quick 3."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")
    ] = True,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the record, case by case.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep what the file of --json has finished.")
    ] = False,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables.")
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option("--figure", metavar="FILE", help="Draw (.svg, .png), light and dark."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Measure nothing: show this record."),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show the cases and end.")] = False,
    info: Annotated[
        bool, typer.Option("--info", help="Only say which kernels run here, and why.")
    ] = False,
) -> None:
    """Check, then time, attention with statistics against PyTorch's own and the usual ways."""
    _check_targets({"--json": json, "--markdown": markdown, "--figure": figure})
    if info:
        with _plain_errors():
            from acutance import kernels

            typer.echo(str(kernels.info()))
        return
    with _plain_errors():
        from acutance.bench import command

        status = command.bench(
            [*(case or ()), *(group.split(",") if group else ())],
            threads=threads,
            quick=quick,
            rounds=rounds,
            memory=memory,
            to_json=json,
            resume=resume,
            to_markdown=markdown,
            to_figure=figure,
            record=record,
            listing=listing,
            console=_console,
        )
    if status:
        raise typer.Exit(status)


def _console(*, stderr: bool = True) -> Any:
    from rich.console import Console

    return Console(stderr=stderr)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Expected failures end with one sentence on standard error and exit code 1."""
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted before anything was read")
        raise typer.Exit(INTERRUPTED) from None
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        _fail(str(error) or type(error).__name__)
        raise typer.Exit(1) from error


def _fail(message: str) -> None:
    sys.stderr.write(f"acutance: {' '.join(message.split())}\n")


def main() -> None:
    """Entry point of the ``acutance`` command."""
    if sys.argv[1:2] == ["probe"] and os.environ.get("RANK", "0") != "0":
        # one of torchrun's: the first rank says what there is to say, once
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    app()


if __name__ == "__main__":
    main()
