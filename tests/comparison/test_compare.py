"""The comparison itself: what is read, how it is predicted, what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from acutance import theory
from acutance.comparison import COMPARED, DEFAULT_MECHANISMS, Step, compare, pick
from acutance.comparison.measured import mean_and_error, measure, query_gradient
from acutance.comparison.predicted import feature_moments, predict_rows
from acutance.comparison.record import Gaussian, Inputs, gaussian
from acutance.comparison.render import legend
from acutance.mechanisms import MECHANISMS
from acutance.mechanisms.entry import Linear
from acutance.probing import QueryKeySample


def inputs(n: int = 64, d: int = 16, **changed: Any) -> Inputs:
    law = changed.pop("law", Gaussian(0.0, 1.0, 0.0, 1.0))
    given = {"heads": 4, "batch": 1, "samples": 8, "seed": 0, "is_causal": False} | changed
    return gaussian(n, d, law, **given)


@pytest.mark.few(8)
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_is_read_in_full(name: str) -> None:
    found = compare(name, n=16, d=8, heads=3, batch=2, samples=4, is_causal=True, costs=False)
    assert found.complete
    assert found.mechanisms == (name,)
    assert found.lengths == (16,)
    for result in found.of(name):
        assert tuple(result.readings) == tuple(COMPARED)
        for reading in result.readings.values():
            missing = math.isnan(reading.measured) or math.isnan(reading.predicted)
            assert missing == bool(reading.why)
            assert math.isnan(reading.predicted) == (reading.kind == "")
        keys = result["effective_keys"]
        assert 1 <= keys.measured <= result.n
        assert (MECHANISMS[name].theory.law is None) == math.isnan(keys.predicted)
        assert math.isnan(result.seconds)


def test_what_is_read_is_what_the_mechanism_gives() -> None:
    given = inputs()
    found = compare("scaled_dot", n=64, d=16, heads=4, samples=8, costs=False)["scaled_dot", 64]
    _, stats = MECHANISMS["scaled_dot"].run(given.query, given.key, given.value, noise=True)
    for name in ("entropy", "sparsity", "effective_keys", "noise_gain", "jacobian_trace"):
        heads = stats[name].double().mean(2).flatten()
        assert found[name].measured == pytest.approx(float(heads.mean()), rel=1e-6)
        assert found[name].error == pytest.approx(float(heads.std()) / 2, rel=1e-5)
    assert found.rows == 32


def test_mechanisms_see_the_same_rows() -> None:
    found = compare(["scaled_dot", "exp", "exp_l2"], n=48, d=8, heads=2, costs=False)
    first, *others = (found[name, 48]["effective_keys"].measured for name in found.mechanisms)
    assert others == pytest.approx([first, first], rel=1e-5)


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


def test_linear_attention_of_given_keys_is_an_identity() -> None:
    draw = torch.Generator().manual_seed(3)
    part = torch.randn(3, 40, 8, generator=draw)
    sample = QueryKeySample(part, 2 * part.roll(1, 1), part, ("a", "b", "c"), is_causal=False)
    for name in ("linear_elu1", "cosformer"):
        found = compare(name, n=40, source=sample, costs=False)[name, 40]["sparsity"]
        assert found.kind == "fixed"
        assert found.deviation == pytest.approx(0, abs=1e-5)


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


def test_time_is_of_one_head_with_n_rows() -> None:
    found = compare(["identity", "linear_elu1"], n=2048, d=16, heads=2, samples=2)
    assert [result.mechanism for result in found.results] == ["identity", "linear_elu1"]
    for result in found.results:
        assert 0 < result.seconds < 60
        assert result.cpu_seconds > 0


def test_an_interrupt_keeps_what_is_done() -> None:
    def stop(step: Step) -> None:
        if step.done == 2:
            raise KeyboardInterrupt

    found = compare(["lru", "decay"], n=[8, 16], d=4, heads=2, costs=False, progress=stop)
    assert not found.complete
    assert [(result.mechanism, result.n) for result in found.results] == [("lru", 8), ("decay", 8)]
    assert json.loads(found.to_json())["complete"] is False

    def at_once(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        compare("dot", n=8, d=4, heads=2, costs=False, progress=at_once)


def test_progress_counts_every_step() -> None:
    steps: list[Step] = []
    compare(["lru", "decay"], n=[16, 8], d=4, heads=2, costs=False, progress=steps.append)
    assert [(step.done, step.total) for step in steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [step.n for step in steps] == [8, 8, 16, 16]


def test_the_record_is_plain_json_and_the_seed_decides() -> None:
    first = compare(["relu2", "lru"], n=16, d=4, heads=2, costs=False)
    record = json.loads(first.to_json())
    assert record["schema"] == "acutance.comparison/1"
    assert record["settings"]["query_std"] == 1.0
    assert record["settings"]["n"] == [16]
    assert set(record["mechanisms"]) == {"relu2", "lru"}
    reading = record["results"][0]["readings"]["entropy"]
    assert reading["measured"] is None
    assert reading["why"] == "The weights are not a distribution."
    assert record["results"][0]["readings"]["sparsity"]["measured"] > 0
    again = compare(["relu2", "lru"], n=16, d=4, heads=2, costs=False)
    other = compare(["relu2", "lru"], n=16, d=4, heads=2, seed=1, costs=False)
    assert again.to_json() == first.to_json()
    assert other["relu2", 16]["sparsity"] != first["relu2", 16]["sparsity"]


def test_names_and_places() -> None:
    assert [entry.name for entry in pick(None)] == list(DEFAULT_MECHANISMS)
    assert [entry.name for entry in pick(["dot", MECHANISMS["dot"]])] == ["dot"]
    assert len(pick("all")) == len(MECHANISMS)
    found = compare("decay", n=8, d=4, heads=1, costs=False)
    with pytest.raises(KeyError, match="relu2"):
        found["relu2", 8]
    with pytest.raises(
        ValueError, match="there is no quantity named 'speed': choose from entropy, "
    ):
        found["decay", 8]["speed"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"mechanisms": "softmaxx"}, "there is no mechanism named 'softmaxx'; did you mean "),
        ({"mechanisms": []}, "mechanisms must name at least one mechanism, got none"),
        ({"n": []}, "n must contain at least one number of keys, got none"),
        ({"n": 1}, "n must be .*at least 2, got 1"),
        ({"n": [64, -3]}, "n must be .*at least 2, got -3"),
        ({"d": 1}, "d must be .*at least 2, got 1"),
        ({"heads": 0}, "heads must be .*at least 1, got 0"),
        ({"samples": 0}, "samples must be .*at least 1, got 0"),
        ({"std": 0.0}, "std .*0.0"),
        ({"std": (1.0, -1.0)}, "std .*-1.0"),
        ({"mean": math.nan}, "mean .*nan"),
        ({"mean": (1.0, 2.0, 3.0)}, "mean must be one number, or one for queries and one for keys"),
        ({"seed": -1}, "seed must be .*at least 0, got -1"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        compare(**({"mechanisms": "dot", "n": 8, "d": 4, "costs": False} | arguments))
    assert "\n" not in str(caught.value)


def test_a_sample_has_only_so_many_tokens() -> None:
    part = torch.zeros(1, 10, 4)
    sample = QueryKeySample(part, part, part, ("a",), is_causal=False)
    with pytest.raises(ValueError, match=r"n must be at most the 10 tokens .* got 11"):
        compare("dot", n=11, source=sample, costs=False)


@pytest.mark.parametrize(("threads", "said"), [(1, "on 1 thread."), (2, "on 2 threads.")])
def test_the_legend_counts_threads(threads: int, said: str) -> None:
    found = compare(["identity"], n=8, d=16)
    settings = found.settings | {"threads": threads}
    timed = [replace(result, seconds=1.0) for result in found.results]
    assert legend(replace(found, settings=settings, results=timed), wide=False)[-1].endswith(said)
