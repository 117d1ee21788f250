"""Laws of the row state: any split, in any order, is the whole row."""

from __future__ import annotations

import torch

from acutance.rowstats import (
    RowState,
    RowStatistics,
    empty,
    merge,
    observe,
)
from acutance.rowstats.state import NO_KEY, has_noise


def test_the_empty_row_is_what_a_row_without_keys_observes() -> None:
    seen = observe(torch.full((2, 4), -torch.inf), None, torch.ones(4, 3))
    for name, part, want in zip(RowState._fields, seen, empty((2,), 3), strict=True):
        torch.testing.assert_close(part, want, msg=name)
    assert seen.first_index.eq(NO_KEY).all()


def test_values_are_kept_only_where_both_sides_carry_them() -> None:
    row, value = torch.zeros(1, 4), torch.ones(4, 3)
    with_values, without = observe(row, None, value), observe(row)
    assert has_noise(with_values)
    assert not has_noise(without)
    assert has_noise(merge(with_values, with_values))
    assert not has_noise(merge(with_values, without))
    assert not has_noise(merge(without, with_values))
    assert "noise_gain" not in RowStatistics(without).available
    assert RowStatistics(with_values).merge(RowStatistics(with_values)).n_keys.item() == 8
