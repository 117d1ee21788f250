"""A language model's rows as experiments read them, against softmax written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from acutance import attention
from acutance.reproduce import Run
from acutance_lab import trained
from acutance_lab.experiments import real

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def reader() -> real.Reader:
    return real.small_reader(Run("", quick=True), windows=2, length=48)


def written_out(reader: real.Reader, ids: Tensor) -> Tensor:
    """Every weight of the model on one window, (layers · heads, n, n)."""

    def weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        scores = scale * (query @ key.mT)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)[0]

    return torch.cat(real.by_layer(reader.model, ids[None], weights))


def test_seen_attention_is_the_models_own_and_is_put_back(reader: real.Reader) -> None:
    ids = reader.windows[:1]
    before = reader.model.config._attn_implementation
    calls: list[int] = []  # queries

    def plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> object:
        calls.append(query.shape[2])
        return attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)

    with torch.no_grad():
        own = reader.model(input_ids=ids).last_hidden_state
        with real.attending(reader.model, plain):
            seen = reader.model(input_ids=ids).last_hidden_state
        with real.attending(reader.model, lambda q, k, v, scale: torch.zeros_like(q)):
            other = reader.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(seen, own, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(other, own, atol=0.1)
    assert calls == [48, 48, 48]
    assert reader.model.config._attn_implementation == before


def test_losses_are_those_of_the_model_with_its_output_layer(reader: real.Reader) -> None:
    ids = reader.windows[0]
    whole = trained.decoder()
    with torch.no_grad():
        logits = whole(input_ids=ids[None]).logits[0, :-1]
    want = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    torch.testing.assert_close(reader.losses(ids[None])[0], want, rtol=1e-4, atol=1e-4)


def test_sinks_are_the_means_of_columns(reader: real.Reader) -> None:
    ids = reader.windows[0]
    rows = torch.arange(48, 0, -1)
    want = written_out(reader, ids).sum(1) / rows
    torch.testing.assert_close(real.weights(reader, ids), want, rtol=1e-3, atol=1e-5)


def test_measured_rows_are_those_of_softmax_written_out() -> None:
    reader, found = real.measured(quick=True, seed=0)
    p = written_out(reader, reader.windows[0]).double()
    H = torch.special.entr(p).sum(-1)
    torch.testing.assert_close(found["entropy"][0].double(), H, rtol=1e-3, atol=1e-4)
    last = p[:, -1].sort(-1, descending=True).values
    exact = (last.cumsum(-1) < 0.99).sum(-1) + 1
    assert (found["exact_keys"][0] - exact).abs().max() <= 1  # rounding at the threshold
    kept = torch.zeros_like(last)
    kept[:, :16] = last[:, :16] / last[:, :16].sum(-1, keepdim=True)
    distance = (last - kept).abs().sum(-1) / 2
    torch.testing.assert_close(found["tv", 16][0], distance, rtol=1e-3, atol=1e-4)
    # every distance of an octave, over the rows from T/2 to T
    length = reader.windows.shape[1] // 2
    rows = range(length // 2, length)
    mean = sum(p[:, i, i - 3] + p[:, i, i - 2] for i in rows) / len(rows)  # type: ignore[misc]
    got = found["octaves", length][0, :, 2].double()
    torch.testing.assert_close(got, mean, rtol=1e-3, atol=1e-5)


def test_a_power_of_distance_has_its_exponent() -> None:
    length, gamma = 2048, 0.9
    weights = torch.arange(1, 1024, dtype=torch.float64) ** -gamma
    sums = [weights[2 ** (k - 1) - 1 : 2**k - 1].sum() for k in range(1, 11)]
    octaves = torch.stack([torch.zeros(()).double(), *sums, torch.zeros(()).double()])
    got = real.exponent(*real.densities(octaves, length))
    assert got.item() == pytest.approx(gamma, abs=0.01)


@pytest.mark.parametrize("deviation", [0.5, 2.0])
def test_the_gaussian_rule_is_that_of_many_draws(deviation: float) -> None:
    logits = deviation * np.random.default_rng(0).standard_normal(1_000_000)
    weights = np.sort(np.exp(logits))[::-1]
    keys = np.searchsorted(weights.cumsum(), 0.99 * weights.sum()) + 1
    rule = float(real.gaussian_share(torch.tensor(deviation)))
    assert keys / len(logits) == pytest.approx(rule, rel=0.01)


def test_changes_of_a_model_are_the_scores_they_say(reader: real.Reader) -> None:
    """Each changes the losses while it is on, and nothing afterwards."""
    losses = real.paired(reader, ("cos_scale", "info_scale"), context=128, length=48)
    own, cosine, info = losses.values()
    assert torch.equal(reader.losses(reader.windows), own)
    assert (cosine - own).abs().max() > 0.1
    assert (info - own).abs().max() > 0
    assert math.isfinite(float(info.sum() + cosine.sum()))
