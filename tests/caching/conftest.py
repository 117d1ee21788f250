"""A small decoder."""

from tests.contract.caching.conftest import model

__all__ = ["model"]
