"""A readout that a file adds is measured, merged, saved, loaded and exported as those built in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.probing.probe import READERS
from acutance.probing.tokens import Reader, SelectedCall
from acutance.summary.cells import Cells, Parts, array, counts, means, squares
from acutance.summary.readouts import READOUTS, Readout
from acutance.summary.readouts.moments import CallRows
from acutance.summary.state import from_parts


@dataclass(frozen=True)
class Halves(Cells):
    """Mean number of visible keys in the first and second half of each sequence."""

    rows: Tensor = counts("heads halves")
    mean: Tensor = means("heads halves", "rows", least=0)
    M2: Tensor = squares("heads halves", "mean")
    most_keys: Tensor = array("heads halves", rule="high")

    what = " of halves"
    fixed = {"halves": 2}  # noqa: RUF012 (a class variable of the base)

    @staticmethod
    def measure(values: Tensor, rows: CallRows) -> Halves:
        n = rows.stats.state.n.double().transpose(0, 1)  # (heads, B, L)
        halves = [half.flatten(1) for half in n.tensor_split(2, -1)]
        means = torch.stack([half.mean(1) for half in halves], 1)
        return Halves(
            rows=torch.tensor([half.shape[1] for half in halves]).expand(len(n), -1),
            mean=means,
            M2=torch.stack([(half - half.mean(1, True)).square().sum(1) for half in halves], 1),
            most_keys=torch.stack([half.amax(1) for half in halves], 1),
        )

    def columns(self, metrics: tuple[str, ...]) -> dict[str, list[float]]:
        return {"keys_in_first_half": self.mean[:, 0].tolist()}

    def to_dicts(self, metrics: tuple[str, ...]) -> list[Any]:
        return self.mean.tolist()


def causal(tokens: int) -> acutance.HeadSummary:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    x = torch.randn(3, tokens, 8)
    with acutance.probe(layer) as probe:
        layer(x, x, x, attn_mask=hidden)
        layer(x, x, x, attn_mask=hidden)
    return probe.summary()


def test_one_file_adds_a_readout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(READOUTS, "halves", Readout(Halves, "keys_by_half", "", Halves.measure))
    summary = causal(8)
    halves = summary.optional_parts["halves"]
    assert isinstance(halves, Halves)
    assert halves.mean.tolist() == [[2.5, 6.5]] * 2  # 1 to 4 and 5 to 8 keys
    assert halves.rows.tolist() == [[24, 24]] * 2
    assert halves.M2.tolist() == [[30.0, 30.0]] * 2
    merged = summary.merge(causal(16)).optional_parts["halves"]
    assert isinstance(merged, Halves)
    assert merged.mean.tolist() == [[pytest.approx((2.5 + 2 * 4.5) / 3), pytest.approx(10.5)]] * 2
    squares = (1.25 + (2.5 - merged.mean[0, 0]) ** 2) / 3 + 2 * (
        5.25 + (4.5 - merged.mean[0, 0]) ** 2
    ) / 3
    assert float(merged.M2[0, 0] / merged.rows[0, 0]) == pytest.approx(float(squares))
    assert merged.most_keys.tolist() == [[8, 16]] * 2
    assert summary.columns()["keys_in_first_half"] == [2.5, 2.5]
    assert [head["keys_by_half"] for head in summary.to_dict()["heads"]] == [[2.5, 6.5]] * 2
    summary.save(tmp_path / "state")
    loaded = acutance.load(tmp_path / "state").optional_parts["halves"]
    assert {name: part.tolist() for name, part in loaded.tensors().items()} == {
        name: part.tolist() for name, part in halves.tensors().items()
    }
    header, tensors = summary.parts()
    tensors["halves.rows"] = tensors["halves.rows"] - 100
    with pytest.raises(ValueError, match="'rows' of halves has an invalid value at head 0, halve"):
        from_parts(header, tensors)


@dataclass(frozen=True)
class KeyNorms(Cells):
    """Largest norm of the keys of each head."""

    most: Tensor = array("heads", rule="high")

    what = " of key norms"

    def to_dicts(self, metrics: tuple[str, ...]) -> list[Any]:
        return self.most.tolist()


class KeyNormReader(Reader):
    """Reads the norms of a call's keys."""

    def read(self, selected: SelectedCall, rows: CallRows) -> CallRows:
        norms = selected.call.key.norm(dim=-1).amax((0, 2)).double()
        return rows._replace(parts=Parts(rows.parts, key_norms=KeyNorms(norms)))


def test_one_file_adds_a_readout_of_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READOUTS, "key_norms", Readout(KeyNorms, "key_norms"))
    monkeypatch.setitem(READERS, "key_norms", KeyNormReader)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    first, second = torch.randn(2, 3, 5, 8)
    with acutance.probe(layer) as probe:
        layer(first, first, first)
        layer(second, second, second)
    summary = probe.summary()
    _, weight, _ = layer.in_proj_weight.chunk(3)
    keys = (torch.stack([first, second]) @ weight.T).unflatten(-1, (2, 4))
    most = keys.norm(dim=-1).amax((0, 1, 2)).tolist()
    assert summary.optional_parts["key_norms"].tensors()["most"].tolist() == pytest.approx(most)
    assert [head["key_norms"] for head in summary.to_dict()["heads"]] == pytest.approx(most)
