"""Classes: attention built to be exactly one, and heads on either side of every threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import acutance
from acutance.probing import CLASSES, HeadSummary, Moments
from acutance.rowstats import METRICS
from acutance.structure import STRUCTURE
from acutance.summary.cells import Parts
from acutance.summary.layer import Layer
from acutance.summary.readouts.distances import Distances


def summary_of(
    *, near: float = 0.2, even: float = 0.1, peak: int = 5, status: str = "captured", **means: float
) -> HeadSummary:
    """One head with these means, half of whose weight near is on the own position."""
    metrics = (*METRICS, *STRUCTURE)
    usual = {"n_keys": 100.0, "normalized_entropy": 0.5, "effective_keys": 10.0}
    values = [{**usual, **means}.get(name, 0.1) for name in metrics]
    rows = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)  # one row is its own mean
    moments = Moments.of(rows, metrics)
    mass, alike = torch.zeros(2, 1, 2, 8).double().unbind(0)
    mass[0, 0, 0], mass[0, 0, 3], mass[0, 1, 6] = near / 2, near / 2, 1 - near
    alike[0, 0, 3], alike[0, 0, 7] = even, 1 - even
    peaks = torch.zeros(1, 17, dtype=torch.int64)
    peaks[0, 4] = peak
    beside = Parts(distances=Distances(torch.tensor([10]), mass, alike, peaks))
    layer = Layer("a", 1, status, calls=1, rows=10)  # type: ignore[arg-type]
    return HeadSummary((layer,), metrics, moments, optional_parts=beside)


def names(summary: HeadSummary) -> list[str]:
    return [one.name for one in acutance.classify(summary)[0]]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sink", lambda x: {"first_weight": x}),
        ("sink", lambda x: {"mass_special": x}),
        ("local", lambda x: {"near": x}),
        ("previous-token", lambda x: {"mass_previous": x}),
        ("diffuse", lambda x: {"normalized_entropy": x}),
        ("dead", lambda x: {"normalized_entropy": x}),
        ("sharp", lambda x: {"top_weight": x}),
    ],
)
def test_a_threshold_is_what_the_table_says(
    name: str, change: Callable[[float], dict[str, float]]
) -> None:
    limit = CLASSES[name].threshold
    assert name in names(summary_of(**change(limit + 1e-6)))
    assert name not in names(summary_of(**change(limit)))
    assert name not in names(summary_of(**change(limit - 1e-6)))
    assert f"{limit:g}" in CLASSES[name].rule


def test_positional_takes_more_than_nine_rows_of_ten() -> None:
    assert "positional" in names(summary_of(peak=10))
    assert "positional" not in names(summary_of(peak=9))
    ((found,),) = [
        [one for one in acutance.classify(summary_of(peak=10))[0] if one.name == "positional"]
    ]
    assert found.numbers == {"position": -4.0, "share": 1.0}
    assert "4 positions back" in found.sentence


def test_what_even_weights_would_do_is_no_class() -> None:
    assert "local" not in names(summary_of(near=0.6, even=0.3))
    assert "local" in names(summary_of(near=0.61, even=0.3))
    assert "sink" not in names(summary_of(first_weight=0.2, n_keys=8.0))


def test_diffuse_ends_where_dead_begins() -> None:
    for share in (0.95, 0.98, 0.981, 1.0):
        found = set(names(summary_of(normalized_entropy=share)))
        assert found == ({"dead"} if share > 0.98 else {"diffuse"})


def test_heads_of_no_class() -> None:
    sharp = {"top_weight": 0.9}
    assert names(summary_of(**sharp)) == ["sharp"]
    assert names(summary_of(**sharp, n_keys=7.9)) == []
    assert names(summary_of(**sharp, status="mismatch")) == []
    bare = replace(summary_of(near=0.9, peak=10), optional_parts=Parts())
    assert names(bare) == []


def test_classes_are_in_frames_and_json() -> None:
    found = summary_of(near=0.9, peak=10, mass_previous=0.8)
    assert found.columns()["classes"] == ["local previous-token positional"]
    (head,) = found.to_dict()["heads"]
    assert [one["name"] for one in head["classes"]] == ["local", "previous-token", "positional"]
    assert found.columns()["mass_octave_3"] == [0.45]
    assert found.columns()["mass_octave_ahead_6"] == [pytest.approx(0.1)]
