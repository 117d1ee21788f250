"""Names of a package that load on first use: :func:`lazy`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy(
    package: str,
    names: Collection[str],
    homes: Mapping[str, Collection[str]],
    rest: str | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package whose names load on first use.

    Args:
        package: The package's name.
        names: What it offers.
        homes: By module, the names that are in it; a name may be a module of that package.
        rest: The module with all other names; if None, they are modules of ``package``.

    Returns:
        Two functions, to be assigned to ``__getattr__`` and ``__dir__`` of the package.

    Example:
        >>> load, listed = lazy("math", ["comb"], {"math": ["comb"]})
        >>> load("comb")(5, 2), listed()
        (10, ['comb'])
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = next((home for home, here in homes.items() if name in here), rest)
        if home is not None and hasattr(module := importlib.import_module(home), name):
            value = getattr(module, name)
        else:
            value = importlib.import_module(f"{home or package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted(names)

    return load, listed
