"""Text, the same under every version of Python."""

from tests.contract.extending.conftest import windows

__all__ = ["windows"]
