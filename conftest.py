"""A number in an example is a correct rounding: within half a unit of its last digit.

pytest's NUMBER allows a whole unit.
"""

from typing import Any

import _pytest.doctest
import pytest


def half_a_unit(number: float, abs: float) -> Any:
    """What pytest compares a number of an example with; ``abs`` is a unit of its last digit."""
    return pytest.approx(number, abs=0.5000005 * abs)  # a tie may be rounded either way


_pytest.doctest.approx = half_a_unit  # type: ignore[attr-defined]
