"""The comparison itself: what is read, how it is predicted, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from acutance import theory
from acutance.comparison import compare
from acutance.comparison.runner import (
    Gaussian,
    Inputs,
    feature_moments,
    mean_and_error,
    measure,
    predict_rows,
    query_gradient,
)
from acutance.mechanisms import MECHANISMS
from acutance.mechanisms.table import Linear


def inputs(n: int = 64, d: int = 16, **changed: Any) -> Inputs:
    law = changed.pop("law", Gaussian(0.0, 1.0, 0.0, 1.0))
    given = {"heads": 4, "batch": 1, "samples": 8, "seed": 0, "is_causal": False} | changed
    return law.draw(n, d, **given)


def test_what_is_read_is_what_the_mechanism_gives() -> None:
    given = inputs()
    found = compare("scaled_dot", n=64, d=16, heads=4, samples=8, costs=False)["scaled_dot", 64]
    _, stats = MECHANISMS["scaled_dot"].run(given.query, given.key, given.value, noise=True)
    for name in ("entropy", "sparsity", "effective_keys", "noise_gain", "jacobian_trace"):
        heads = stats[name].double().mean(2).flatten()
        assert found[name].measured == pytest.approx(float(heads.mean()), rel=1e-6)
        assert found[name].error == pytest.approx(float(heads.std()) / 2, rel=1e-5)
    assert found.rows == 32


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("law", "name"),
    [
        (Gaussian(0.0, 1.0, 0.0, 1.0), "scaled_dot"),
        (Gaussian(0.5, 2.0, 0.3, 3.0), "dot"),
        (Gaussian(1.0, 0.5, -0.2, 1.0), "relu2"),
        (Gaussian(1.0, 1.0, 0.4, 2.0), "identity"),
    ],
)
def test_each_row_is_predicted_from_its_own_query(law: Gaussian, name: str) -> None:
    given = inputs(n=100, law=law)
    found = predict_rows(MECHANISMS[name], given, measure(MECHANISMS[name], given))
    scale = 0.25 if name != "dot" else 1.0
    for head, row in ((0, 0), (1, 5), (3, 7)):
        q = given.query[0, head, row].double()
        mean, std = scale * law.key_mean * float(q.sum()), scale * law.key_std * float(q.norm())
        parameters = {"logit_std": std} | ({} if "dot" in name else {"logit_mean": mean})
        there = theory.predict(
            MECHANISMS[name].theory.law or "", 100, value_variance=16.0, **parameters
        )
        for quantity in found.values:  # a spline between few exact points
            assert float(found.values[quantity][head, row]) == pytest.approx(
                there[quantity], rel=5e-3
            ), quantity
    assert set(found.kinds.values()) == {"mean"}


def test_a_scaling_is_part_of_the_prediction() -> None:
    given = inputs(n=100)
    found = predict_rows(MECHANISMS["ssmax"], given, measure(MECHANISMS["ssmax"], given))
    norm = given.query.double().norm(dim=-1).mean()
    factor = 0.43 * math.log(100)
    assert found.parameters["logit_std"] == pytest.approx(float(norm) / 4 * factor, rel=1e-6)


def test_scores_without_a_law_are_predicted_from_what_was_measured() -> None:
    given = inputs(n=256)
    for name in ("additive", "location", "gau"):
        found = predict_rows(MECHANISMS[name], given, measure(MECHANISMS[name], given))
        assert set(found.kinds.values()) == {"plug-in"}
        statistics = measure(MECHANISMS[name], given).statistics
        std = float(statistics.logit_std.double().mean())
        assert found.parameters["logit_std"] == pytest.approx(std, rel=1e-6)
    shifted = inputs(law=Gaussian(0.0, 1.0, 0.5, 1.0))  # directions that are not uniform
    cosine = predict_rows(MECHANISMS["cosine"], shifted, measure(MECHANISMS["cosine"], shifted))
    assert cosine.kinds["entropy"] == "plug-in"


@pytest.mark.parametrize(
    "name", ["linear_elu1", "linear_relu", "linear_relu2", "linear_exp", "linear_softmax",
             "linear_hedgehog"]
)  # fmt: skip
def test_moments_of_features_are_those_of_many_keys(name: str) -> None:
    law = Gaussian(0.0, 1.0, 0.3, 0.7)
    form = MECHANISMS[name].form
    assert isinstance(form, Linear)
    q, mean, covariance, of_keys = feature_moments(form, inputs(law=law, d=8))
    assert not of_keys
    many = inputs(n=60_000, law=law, d=8, heads=1, samples=1)
    captured = Inputs(many.query, many.key, many.value, False)
    _, sampled_mean, sampled_covariance, of_keys = feature_moments(form, captured)
    assert of_keys
    spread = sampled_covariance[0].diagonal().sqrt()
    assert bool(((mean[0] - sampled_mean[0]).abs() < 6 * spread * (1 / 60_000 + 1 / 32_768) ** 0.5)
                .all())  # fmt: skip
    size = float(spread.max()) ** 2
    torch.testing.assert_close(covariance[0], sampled_covariance[0], rtol=0, atol=0.06 * size)
    assert q.shape[:2] == (4, 8)


def test_the_gradient_is_one_for_what_is_linear_and_none_for_what_is_frozen() -> None:
    given = inputs(n=32, d=16, samples=4)
    found = query_gradient(MECHANISMS["identity"], given, seed=7)
    u = torch.randn(1, 4, 4, 16, generator=torch.Generator().manual_seed(7)).double()
    query, key, value = (part.double() for part in (given.query, given.key, given.value))
    jacobian = key.mT @ value  # of q·(kᵀv), up to a factor that cancels
    out = query @ jacobian
    wanted = (u @ jacobian.mT).norm(dim=-1) * query.norm(dim=-1) / out.norm(dim=-1) / 4
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-6)
    frozen = inputs(law=Gaussian(0.0, 300.0, 0.0, 1.0))
    assert float(query_gradient(MECHANISMS["dot"], frozen).median()) < 1e-3
    assert float(query_gradient(MECHANISMS["decay"], given).abs().max()) == 0


def test_errors_count_heads_not_rows() -> None:
    values = torch.tensor([[1.0, 3.0, math.nan], [4.0, 4.0, 4.0]], dtype=torch.float64)
    assert mean_and_error(values) == (3.0, 1.0)
    assert mean_and_error(values, fixed=True) == (3.0, 0.0)
    mean, error = mean_and_error(values[:1])
    assert mean == 2.0
    assert math.isnan(error)
    assert all(map(math.isnan, mean_and_error(values[:, 2:][:1])))
    alone = compare("retention", n=16, d=4, heads=2, costs=False)["retention", 16]
    assert math.isnan(alone["effective_keys"].error)  # its heads differ


@pytest.mark.parametrize(("threads", "said"), [(1, "on 1 thread."), (2, "on 2 threads.")])
def test_the_legend_counts_threads(threads: int, said: str) -> None:
    found = compare(["identity"], n=8, d=16)
    settings = found.settings | {"threads": threads}
    timed = [replace(result, seconds=1.0) for result in found.results]
    shown = replace(found, settings=settings, results=timed).table()
    assert shown.columns[-1].note.endswith(said)
