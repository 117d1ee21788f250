"""Profiles against numpy, and slopes against lines that are known."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import acutance
from acutance.probing import Profile
from acutance.report import html
from acutance.summary.readouts.by_octave import MOST_OCTAVES
from tests.contract.probing.test_profile import Fixed
from tests.page_data import unpack


def test_counts_beyond_all_octaves_are_in_the_last() -> None:
    values, kept = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 2, dtype=torch.bool)
    found = Profile.of(values, torch.tensor([[[1 << 40, 1]]]), kept)
    assert found.rows.tolist() == [[1, *[0] * (MOST_OCTAVES - 2), 1]]


def test_a_head_that_one_key_dominates_has_no_prediction_and_says_so(tmp_path: Path) -> None:
    model = Fixed()
    with acutance.probe(model) as probe:
        model(0)
    summary = probe.summary()
    heads = summary.predict()
    assert heads.impossible.tolist() == [False, False, False, True]
    expected = heads.predicted["entropy"].tolist()
    assert summary.columns()["predicted_entropy"][:3] == expected[:3]
    assert np.isnan(summary.to_frame()["predicted_entropy"]).tolist() == [False] * 3 + [True]
    written = [head["predicted_entropy"] for head in summary.to_dict()["heads"]]
    assert written == [*expected[:3], None]
    summary.to_json(tmp_path / "x.json")
    assert '"predicted_entropy": null' in (tmp_path / "x.json").read_text()
    for head, found in zip(summary.to_dict()["heads"][:3], written, strict=False):
        assert head["metrics"]["entropy"]["mean"] == pytest.approx(found, abs=0.1)
    script = re.search(r"<script[^>]*>(.*?)</script>", html(summary), re.DOTALL)
    assert script is not None
    theory = unpack(script[1])[0]["theory"]
    assert theory["impossible"] == [3]
    assert theory["predicted"][3] is None
