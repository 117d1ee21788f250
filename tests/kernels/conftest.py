"""What the kernels' tests share."""

from tests.contract.kernels.conftest import backend, poison

__all__ = ["backend", "poison"]
