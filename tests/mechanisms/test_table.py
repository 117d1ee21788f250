"""The table of mechanisms: every entry runs, says true things, and nothing is left out."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance import scores, theory
from acutance.mechanisms import FEATURE_MAPS, MECHANISMS, Mechanism, alibi_decays, retnet_decays
from acutance.mechanisms import mechanism as find
from acutance.mechanisms.table import Linear, Recurrence, Rows
from acutance.theory import PREDICTED_MECHANISMS
from acutance.weights import WEIGHTS

QUERY, KEY = torch.zeros(1, 4, 40, 16), torch.zeros(1, 2, 40, 16)
ROWS = {name: entry for name, entry in MECHANISMS.items() if isinstance(entry.form, Rows)}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(heads: int = 2, rows: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    return draw(2, heads, rows, 16, seed=1), draw(2, 2, 40, 16, seed=2), draw(2, 2, 40, 3, seed=3)


def options(entry: Mechanism) -> dict[str, Any]:
    assert isinstance(entry.form, Rows)
    return dict(entry.form.options(QUERY, KEY))


def test_the_table_is_whole_and_cannot_be_changed() -> None:
    assert len(MECHANISMS) >= 36
    assert all(name == entry.name for name, entry in MECHANISMS.items())
    assert acutance.MECHANISMS is MECHANISMS
    with pytest.raises(TypeError, match="does not support item assignment"):
        MECHANISMS["mine"] = MECHANISMS["dot"]  # type: ignore[index]
    with pytest.raises(FrozenInstanceError, match="cannot assign"):
        MECHANISMS["dot"].name = "mine"  # type: ignore[misc]


def test_every_weighting_is_in_the_table() -> None:
    found = {options(entry).get("weights", "softmax") for entry in ROWS.values()}
    names = {chosen if isinstance(chosen, str) else chosen.name for chosen in found}
    assert names == set(WEIGHTS)


def test_every_score_is_in_the_table() -> None:
    modules = {
        scores.GeneralScore: "general",
        scores.AdditiveScore: "additive",
        scores.LocationScore: "location",
    }
    found = {options(entry).get("score", "scaled_dot") for entry in ROWS.values()}
    names = {
        chosen if isinstance(chosen, str) else modules.get(type(chosen)) or chosen.name
        for chosen in found
    }
    assert names == set(scores.SCORES)


def test_every_feature_map_and_decay_is_in_the_table() -> None:
    linear = [entry.form for entry in MECHANISMS.values() if isinstance(entry.form, Linear)]
    assert {form.feature_map for form in linear} == {*FEATURE_MAPS, "cosformer"}
    assert torch.equal(MECHANISMS["retention"].form.decays(4).float(), retnet_decays(4))  # type: ignore[attr-defined]
    assert torch.equal(MECHANISMS["alibi_decay"].form.decays(4).float(), alibi_decays(4))  # type: ignore[attr-defined]
    assert torch.equal(MECHANISMS["decay"].form.decays(2).float(), torch.tensor([0.9, 0.9]))  # type: ignore[attr-defined]
    assert isinstance(MECHANISMS["lru"].form, Recurrence)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("heads", [2, 4])
def test_every_entry_runs(name: str, heads: int) -> None:
    entry = MECHANISMS[name]
    query, key, value = tensors(heads, rows=5)
    out, stats = entry.run(query, key, value, query_offset=35)
    assert out.shape == (2, heads, 5, 3)
    assert bool(torch.isfinite(out).all())
    assert stats.n_keys.dim() == 3
    keys = stats.effective_keys
    assert bool(((keys >= 0.999) & (keys <= 40.001)).all())
    seen = torch.arange(36, 41) if entry.always_causal else torch.full((5,), 40)
    assert torch.equal(stats.n_keys, seen.expand_as(stats.n_keys))


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_last_rows_are_those_of_the_whole_causal_run(name: str) -> None:
    entry = MECHANISMS[name]
    query, key, value = tensors()
    whole, all_rows = entry.run(query, key, value, is_causal=True)
    last, rows = entry.run(query[:, :, 33:], key, value, is_causal=True, query_offset=33)
    torch.testing.assert_close(whole[:, :, 33:], last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        all_rows.effective_keys[..., 33:], rows.effective_keys, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_code_shown_is_what_is_run(name: str) -> None:
    entry = MECHANISMS[name]
    query, key, value = tensors(heads=4)
    given = {"acutance": acutance, "torch": torch, "query": query, "key": key, "value": value}
    code = entry.code.replace("value", "value, enable_gqa=True", 1)
    if ".run(" in code:
        code = entry.code
    torch.manual_seed(0)  # as the table draws parameters
    shown = eval(code, given)
    torch.testing.assert_close(shown, entry.run(query, key, value)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MECHANISMS)
def test_running_an_entry_leaves_random_numbers_alone(name: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = MECHANISMS[name].run(*tensors())[0]
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(MECHANISMS[name].run(*tensors())[0], first)
    assert not first.requires_grad


@pytest.mark.parametrize("name", MECHANISMS)
def test_what_an_entry_says_is_complete(name: str) -> None:
    entry = MECHANISMS[name]
    assert entry.title
    assert entry.formula.count("{") == entry.formula.count("}")
    assert re.search(r"\((19|20)\d\d\)", entry.source), entry.source
    assert re.search(r"arXiv:\d{4}\.\d{4,5}|https://|Neural Computation", entry.source), (
        entry.source
    )
    for sentence in (entry.can_concentrate, entry.theory.how, entry.streaming):
        assert sentence.endswith("."), sentence
        assert "  " not in sentence
    assert all(callable(getattr(theory, function)) for function in entry.theory.functions)
    assert entry.theory.law is None or entry.theory.law in PREDICTED_MECHANISMS
    if entry.theory.law is not None:
        assert f'predict("{entry.theory.law}", n' in entry.theory.how


def test_limits_in_the_sentences_are_those_of_the_theory() -> None:
    def number(name: str, value: float, digits: int = 3) -> None:
        assert f"{value:.{digits}f}" in MECHANISMS[name].can_concentrate

    number("cosine", float(theory.information_range_limit(1.0)), 4)
    for name in ("identity", "l1", "l2", "linear_identity"):
        number(name, float(theory.sparsity_identity(0.0, 1.0)))
    for name in ("relu2", "relu2_sum", "gau"):
        number(name, float(theory.sparsity_relu2(0.0, 1.0)))

    def size(k: float) -> float:  # E|z|^k
        return 2 ** (k / 2) * math.gamma((k + 1) / 2) / math.sqrt(math.pi)

    number("relu", size(1) / 2 / math.sqrt(size(2) / 2))
    number("power", size(2) / math.sqrt(size(4)))


def test_a_wrong_name_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'relu22'; did you mean 'relu2'\?"):
        find("relu22")
    with pytest.raises(ValueError, match="'zzzzz'; choose from scaled_dot, dot, "):
        find("zzzzz")
    with pytest.raises(TypeError, match="a name or a Mechanism, got int"):
        find(3)  # type: ignore[arg-type]
    assert find(MECHANISMS["dot"]) is MECHANISMS["dot"]


@pytest.mark.parametrize("name", ["gau", "retention", "decay", "lru"])
def test_rows_at_the_positions_of_keys_do_not_end_beyond_them(name: str) -> None:
    query, key, value = tensors(rows=5)
    with pytest.raises(ValueError, match="query_offset=38, L=5, S=40"):
        MECHANISMS[name].run(query, key, value, query_offset=38)
