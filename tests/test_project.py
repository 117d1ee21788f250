"""What is said in several files of the project agrees: versions, tools, Python releases."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from acutance.kernels import info

ROOT = Path(__file__).parents[1]
#: Development tools, of which any version will do, and what `make integrations` runs with; the
#: oldest environment has no Ray and no Triton.
ANY_VERSION = {
    "ray[data]", "triton", "myst-parser", "furo", "latex2mathml", "hypothesis", "mypy", "ruff",
    "pytest", "pytest-xdist", "peft", "trl", "torchtitan", "wandb", "mlflow-skinny", "trackio",
    "litgpt",
}  # fmt: skip


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lower_bounds(pyproject: str) -> dict[str, str]:
    """The oldest version of every requirement, "" where it names none."""
    start, end = pyproject.index("\ndependencies = ["), pyproject.index("\n[project.urls]")
    found: dict[str, str] = {}
    for requirement in re.findall(r"""^    ["']([^"';]+)""", pyproject[start:end], re.MULTILINE):
        name = re.split(r"[<>=]", requirement)[0]
        bound = re.search(r">=([0-9.]+)", requirement)
        if not name.startswith("acutance["):
            found[name] = bound[1] if bound else ""
    return found


def pins(constraints: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([0-9.]+)$", constraints, re.MULTILINE))


def disagreements(pyproject: str, constraints: str) -> list[str]:
    """Requirements whose lower bound is not the version that the oldest environment has."""
    pinned = pins(constraints)
    return [
        f"{name}: {bound or 'no bound'}, {pinned.get(name.split('[')[0], 'no pin')}"
        for name, bound in lower_bounds(pyproject).items()
        if name not in ANY_VERSION
        and (not bound or not f"{pinned.get(name.split('[')[0], '')}.".startswith(f"{bound}."))
    ]


def test_the_oldest_environment_has_the_lower_bounds() -> None:
    assert disagreements(text("pyproject.toml"), text("constraints-oldest.txt")) == []
    example = '\ndependencies = [\n    "a>=1.2,<2",\n    "b>=1",\n    "c",\n]\n[project.urls]'
    assert disagreements(example, "a==1.2.0\nb==2.0") == ["b: 1, 2.0", "c: no bound, no pin"]


def test_hooks_and_make_run_the_same_pinned_tools() -> None:
    hooks = text(".pre-commit-config.yaml")
    make = text("Makefile")
    entries = re.findall(r"^ +entry: (.+)$", hooks, re.MULTILINE)
    tools = {entry.split()[0] for entry in entries}
    assert tools == {".venv/bin/ruff", ".venv/bin/mypy"}
    assert len(entries) == 3
    assert "rev:" not in hooks  # a version of its own
    assert "VENV := .venv\n" in make
    for command in ("ruff format", "ruff check", "mypy"):
        assert f"\t$(BIN)/{command}" in make
        assert sum(entry.startswith(f".venv/bin/{command}") for entry in entries) == 1
    assert {"ruff", "mypy"} <= pins(text("constraints.txt")).keys()
    others = ("pyproject.toml", "Makefile", ".pre-commit-config.yaml", "constraints-oldest.txt")
    assert [name for name in others if re.search(r"(ruff|mypy)==", text(name))] == []


def test_the_workflow_runs_the_python_releases_of_the_classifiers() -> None:
    workflow, pyproject = text(".github/workflows/check.yml"), text("pyproject.toml")
    (matrix,) = re.findall(r"python: \[(.+)\]", workflow)
    releases = re.findall(r'"([\d.]+)"', matrix)
    assert releases == re.findall(r"Python :: (3\.\d+)", pyproject)
    (oldest,) = re.findall(r'requires-python = ">=(.+)"', pyproject)
    assert oldest == releases[0]
    _, job = workflow.split("\n  oldest:\n")
    assert f'python-version: "{oldest}"' in job


def test_the_workflow_calls_targets_that_exist_and_pinned_actions() -> None:
    workflow, make = text(".github/workflows/check.yml"), text("Makefile")
    targets = re.findall(r"- run: make (?:\S+=\S+ )*([a-z]+)$", workflow, re.MULTILINE)
    assert targets == ["check", "portable", "oldest", "wheel"]
    assert [target for target in targets if not re.search(f"^{target}:", make, re.M)] == []
    actions = re.findall(r"uses: (.+)", workflow)
    assert [a for a in actions if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v[\d.]+", a)] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_a_wheel_without_the_native_kernel_is_refused(tmp_path: Path) -> None:
    lines = subprocess.run(
        ["make", "-n", "wheel"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    (code,) = re.findall(r"python -c '(.+)'$", lines, re.MULTILINE)
    done = subprocess.run(  # from a folder that holds no kernel
        [sys.executable, "-c", code], env={**os.environ, "ACUTANCE_LIBRARY": str(tmp_path)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("the wheel has no native kernel: acutance was installed without")
    why = info().why_not
    with pytest.raises(SystemExit, match=why or "^$"):
        exec(code, {})


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("CITATION.cff", r"^version: (.+)$"), ("CHANGELOG.md", r"^## ([\d.]+) – \d{4}-\d\d-\d\d$")],
)
def test_the_version_is_the_project_s(name: str, pattern: str) -> None:
    (version,) = re.findall(r'^version = "(.+)"$', text("pyproject.toml"), re.MULTILINE)
    assert re.findall(pattern, text(name), re.MULTILINE)[0] == version
