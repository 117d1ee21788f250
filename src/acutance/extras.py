"""How to install what an extra of acutance adds, from a checkout and from a release alike."""

from __future__ import annotations

import re
from importlib.metadata import requires


def install(extra: str) -> str:
    """The command that installs the packages of an extra, as the installed metadata names them.

    Example:
        >>> install("plots")
        'pip install "matplotlib<4,>=3.9"'
    """
    return "pip install " + " ".join(f'"{name}"' for name in dict.fromkeys(_packages(extra)))


def _packages(extra: str) -> list[str]:
    """Requirements of an extra, with those of the extras that it names."""
    packages: list[str] = []
    for requirement in requires("acutance") or ():
        package, _, marker = requirement.partition(";")
        if not re.search(rf"""extra == ["']{extra}["']""", marker):
            continue
        if nested := re.fullmatch(r"acutance\[(.*)\]", package.strip()):
            packages += [one for name in nested[1].split(",") for one in _packages(name.strip())]
        else:
            packages.append(package.strip())
    return packages
