"""What the contract's tests share."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from acutance import testing


@pytest.fixture
def run() -> Callable[..., testing.CommandResult]:
    """Run the command with these arguments, which may be paths and numbers."""
    return lambda *arguments: testing.run(
        [
            argument if isinstance(argument, os.PathLike) else str(argument)
            for argument in arguments
        ],
        columns=160,
    )
