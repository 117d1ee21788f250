"""Small models with random weights."""

from tests.contract.calibration.conftest import built, ids

__all__ = ["built", "ids"]
