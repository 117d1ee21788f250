"""What a first use loads, seen in a new process: nothing that takes seconds and is not needed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

import pytest
import torch

from acutance import compiling, report

SLOW = (
    *("torch", "torch._dynamo", "transformers", "matplotlib", "pandas"),
    *("scipy.stats", "scipy.optimize", "scipy.integrate", "scipy.interpolate"),
)
COMMAND = "from acutance.cli import app; app({arguments!r}.split(), standalone_mode=False)"

# each costs the start of a process
BACKENDS = ("auto", pytest.param("blocked", marks=pytest.mark.slow))


def loaded(code: str) -> set[str]:
    """Which slow modules a program has loaded at its end."""
    ask = f"import sys, json; print(json.dumps([m for m in {SLOW!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{ask}"],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import acutance.theory", marks=pytest.mark.slow),
        "import acutance; acutance.theory.predict('softmax', 64, logit_std=1.0)",
        pytest.param(
            COMMAND.format(arguments="predict --n 64 --logit-std 1"), marks=pytest.mark.slow
        ),
        COMMAND.format(arguments="predict --mechanism relu2 --n 64 --logit-std 1 --json -"),
        COMMAND.format(arguments="temperature --n 1000"),
        pytest.param("import acutance.cli", marks=pytest.mark.slow),
    ],
)
def test_theory_needs_no_torch(code: str) -> None:
    assert loaded(code) == set()


HELP_OF_TYPER = """
import typer
app = typer.Typer(add_completion=False)
@app.callback()
def root() -> None: ...
@app.command()
def one(number: int = typer.Option(1, help="A number.")) -> None: ...
app(["--help"])
"""


def least_cpu(*programs: tuple[str, ...], runs: int = 5) -> list[float]:
    """The least CPU time of each program's runs, in turns, in seconds: the machine's speed cancels.

    Args:
        programs: arguments of the Python interpreter.
        runs: how often each runs.
    """
    spent: list[list[float]] = [[] for _ in programs]
    for _ in range(runs):
        for program, times in zip(programs, spent, strict=True):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *program], capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return [min(times) for times in spent]


def test_help_is_quick_and_loads_nothing() -> None:
    code = "import sys, acutance.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    plugins = "from importlib.metadata import entry_points; entry_points(group='acutance.commands')"
    base = f"{plugins}\n{HELP_OF_TYPER}"
    help_, of_typer = least_cpu(("-m", "acutance", "--help"), ("-c", base))
    assert help_ < 1.75 * of_typer  # NumPy alone, half as much again, would take it beyond


@pytest.mark.slow
def test_theory_is_quick() -> None:
    base = HELP_OF_TYPER.replace('"--help"', '"one", "--number", "2"')
    base = f"import scipy.special; from rich.console import Console; Console().print(1); {base}"
    commands = ("predict --n 4096 --logit-std 2", "predict --mechanism relu2 --n 64 --logit-std 1")
    run = [("-m", "acutance", *command.split()) for command in commands]
    libraries, *predicting = least_cpu(("-c", base), *run, runs=7)
    assert max(predicting) < 2.5 * libraries


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_call_does_not_load_the_compiler(backend: str) -> None:
    code = f"""
import torch, acutance
query = torch.ones(1, 2, 4, 8)
options = dict(key_mask=torch.ones(1, 4, dtype=torch.bool), backend={backend!r})
out, stats = acutance.attention(query, query, query, **options, return_stats=True)
acutance.row_statistics(query, query, backend={backend!r}).as_dict()
"""
    assert loaded(code) == {"torch"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_gradient_does_not_load_the_compiler(backend: str) -> None:
    code = f"""
import torch, acutance
query = torch.ones(1, 2, 4, 8, requires_grad=True)
options = dict(key_mask=torch.ones(1, 4, dtype=torch.bool), backend={backend!r})
out, stats = acutance.attention(query, query, query, **options, return_stats=True)
(out.sum() + stats.entropy.sum()).backward()
with torch.device("cpu"):  # a mode of functions
    acutance.row_statistics(query, query, backend={backend!r}).entropy.sum().backward()
assert query.grad.isfinite().all()
"""
    assert loaded(code) == {"torch"}


PROBED = """
import sys, torch, acutance
layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
with acutance.probe(layer) as probe:
    layer(*[torch.ones(1, 4, 8)] * 3)[0].sum().backward()
assert probe.summary().layers
"""


def test_a_probe_of_plain_modules_loads_neither_transformers_nor_the_compiler() -> None:
    assert loaded(PROBED) == {"torch"}


@pytest.mark.slow
def test_a_probe_reads_what_is_compiled_while_it_is_open() -> None:
    code = """
calls = []
def backend(graph, inputs):
    calls.append(graph)
    return graph.forward
assert "torch._dynamo" not in sys.modules
with acutance.probe(layer) as probe:
    compiled = torch.compile(layer, backend=backend)
    compiled(*[torch.ones(1, 4, 8)] * 3)
assert probe.summary().layers[0].calls == 1 and not calls
compiled(*[torch.ones(1, 4, 8)] * 3)
assert calls  # the stance is as it was
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("acutance")]
with acutance.probe(layer) as probe:
    compiled(*[torch.ones(1, 4, 8)] * 3)
assert probe.summary().layers[0].calls == 1 and len(calls) == 1
"""
    assert "torch._dynamo" in loaded(PROBED + code)


def test_the_mark_is_the_one_of_the_compiler() -> None:
    """So that a torch which marks constants in another way is noticed."""

    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    torch.compiler.assume_constant_result(theirs)
    assert compiling.constant(ours) is ours
    assert vars(ours) == vars(theirs)


def test_the_report_has_functions_where_files_bear_their_name() -> None:

    wanted: dict[str, Any] = {name: getattr(report, name) for name in report.__all__}
    assert not [name for name, value in wanted.items() if type(value) is type(sys)]
    assert report.findings.__name__ == "findings"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = report.nothing
