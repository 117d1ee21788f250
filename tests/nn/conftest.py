"""One thread."""

from tests.contract.nn.conftest import one_thread

__all__ = ["one_thread"]
