"""Keys that hold a share of the weight, through probes, summaries and their files."""

from __future__ import annotations

import torch

import acutance
from acutance.rowstats import RowStatistics
from acutance.structure.statistics import critical_ratio as critical_ratio_of_scores
from tests.contract.probing.test_gaps import probed, weights


def test_structure_gives_the_critical_ratio_of_every_row() -> None:
    """Sixteen rows are sorted without the histogram; with it every row counts, to a bin."""
    sixteen, every = probed(structure=True), probed(structure=True, gaps=True)
    column = every.column("critical_ratio")
    rows = every.moments.count[:, column]
    assert (rows == 80).all()
    assert (sixteen.moments.count[:, sixteen.column("critical_ratio")] < 80).all()
    s = weights().clamp(min=1e-30).log()
    exact = critical_ratio_of_scores(s).double().mean((0, 2))
    torch.testing.assert_close(every.mean("critical_ratio"), exact, rtol=0.1, atol=0.05)
    state = acutance.rowstats.observe(s, gaps=True)
    torch.testing.assert_close(
        every.mean("critical_ratio"),
        RowStatistics(state).critical_ratio().double().mean((0, 2)),
        rtol=0.02,
        atol=0.02,
    )
