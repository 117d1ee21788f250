"""Scale laws and scales in closed form against exact solves, sampling and tables."""

import dataclasses
import math

import numpy as np
import pytest

from acutance.theory import (
    families,
    hazard_scale,
    scales,
    scaling_exponent,
)
from tests.contract.theory.test_laws import FAMILIES, FAMILY_IDS


def test_constants_of_the_poisson_limit():
    """1.233 for uniform logits; 1/m for the exponential tail that many dimensions tend to."""
    for keys in (1.1, 2.0, 5.0):
        exponential = scaling_exponent("exponential", effective_keys=keys).constant
        assert exponential == pytest.approx(keys / (keys - 1))
        assert scales._edge_constant(1e6, keys) == pytest.approx(exponential, rel=1e-4)
    uniform = [scales._edge_constant(1.0, keys) for keys in (1.1, 2.0, 5.0)]
    assert uniform == pytest.approx([10.2966954, 1.2328105, 0.3901535], rel=1e-6)
    assert scaling_exponent("uniform").constant == pytest.approx(1.2328105 / 2, rel=1e-6)


@pytest.mark.parametrize("a", [0.5, 3.5])
def test_constants_by_sampling_the_poisson_limit(a):
    rng = np.random.default_rng(5)
    gaps = np.cumsum(rng.exponential(size=(4000, 1000)), axis=1) ** (1 / a)
    weights = np.exp(-scales._edge_constant(a, 2.0) * a * (gaps - gaps[:, :1]))
    collision = (weights**2).sum(1) / weights.sum(1) ** 2
    assert collision.mean() == pytest.approx(0.5, abs=4 * collision.std() / math.sqrt(4000))


@pytest.mark.parametrize(("family", "parameter", "law"), FAMILIES, ids=FAMILY_IDS)
def test_families_by_name_and_as_objects(family, parameter, law):
    kind = families.as_family(family, **parameter)
    n = np.array([16, 4096, 1e12])
    assert (hazard_scale(kind, n) == hazard_scale(family, n, **parameter)).all()
    assert hazard_scale(families.as_family(law), n).tolist() == hazard_scale(law, n).tolist()
    for target in ("effective_keys", "entropy_fraction"):
        by_name = scaling_exponent(family, target, **parameter)
        assert dataclasses.asdict(scaling_exponent(kind, target)) == dataclasses.asdict(by_name)


def test_every_family_of_independent_logits_has_a_law():
    assert set(scales._WITH_LAWS) - set(families.FAMILIES) == {"two_level", "planted"}
