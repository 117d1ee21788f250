"""HeadSummary: merging, frames, files."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import acutance
from acutance.probing import SCHEMA, STATUSES, HeadSummary, Layer, Moments, edges

PADDED = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 1 + [True] * 5])


class Model(nn.Module):
    """Two layers of different head counts, registered in the order they do not run in."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x: Any, padded: Any) -> Any:
        for layer in (self.first, self.second):
            x = layer(x, x, x, key_padding_mask=padded, need_weights=False)[0]
        return x


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def read(model: Model, x: Any, padded: Any, **about: Any) -> HeadSummary:
    with acutance.probe(model, verify=True) as probe:
        model(x, padded)
    return probe.summary(about)


@pytest.fixture
def found(model: Model) -> HeadSummary:
    return read(model, torch.randn(3, 6, 8), PADDED, text="a page", seed=3)


def assert_same(left: HeadSummary, right: HeadSummary, *, exact: bool = True) -> None:
    assert left.layers == right.layers
    assert left.metrics == right.metrics
    assert left.unread == right.unread
    for name, tensor in left.moments.tensors().items():
        other = getattr(right.moments, name)
        assert tensor.dtype == other.dtype
        if exact or name in ("count", "histogram"):
            assert torch.equal(tensor, other), name
        else:  # a batch of another size rounds its matrix products otherwise
            assert torch.allclose(tensor, other, rtol=1e-12, atol=1e-12), name
    if not exact:
        a, b = left.moments.std, right.moments.std
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


def without_error(found: HeadSummary) -> HeadSummary:
    layers = tuple(replace(layer, error=None, calls=1) for layer in found.layers)
    return replace(found, layers=layers, about={})


# -- merging --------------------------------------------------------------------------------------


def test_halves_of_a_batch_merge_to_the_whole() -> None:
    torch.manual_seed(0)
    model = Model().double()
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    padded = torch.zeros(3, 6).double().masked_fill(PADDED, -torch.inf)
    whole = read(model, x, padded)
    one, two = read(model, x[:1], padded[:1]), read(model, x[1:], padded[1:])
    for merged in (one.merge(two), two.merge(one)):
        assert [layer.calls for layer in merged.layers] == [2, 2]
        assert_same(without_error(merged), without_error(whole), exact=False)
    assert [(layer.rows, layer.padded) for layer in whole.layers] == [(11, 7), (11, 7)]


def test_merging_with_nothing_changes_nothing(found: HeadSummary) -> None:
    empty = HeadSummary((), found.metrics, Moments.none(0, len(found.metrics)))
    assert_same(found.merge(empty), found)
    assert_same(empty.merge(found), found)
    assert_same(empty.merge(empty), empty)


def test_layers_merge_by_module_and_keep_what_only_one_has(found: HeadSummary) -> None:
    other = replace(
        found, layers=(found.layers[0], replace(found.layers[1], module="third")), unread=("x: y",)
    )
    merged = found.merge(other)
    assert [layer.module for layer in merged.layers] == ["second", "first", "third"]
    assert [layer.rows for layer in merged.layers] == [22, 11, 11]
    assert merged.unread == ("x: y",)
    assert torch.equal(merged.mean("entropy")[2:6], merged.mean("entropy")[6:])
    assert merged.about["text"] == "a page"


def test_summaries_that_do_not_fit_do_not_merge(found: HeadSummary, model: Model) -> None:
    with acutance.probe(model, metrics=["entropy"]) as probe:
        model(torch.randn(1, 6, 8), None)
    with pytest.raises(ValueError, match="merged only if they recorded the same metrics"):
        found.merge(probe.summary())
    swapped = replace(found, layers=tuple(reversed(found.layers)))
    renamed = tuple(
        replace(layer, module=other.module)
        for layer, other in zip(swapped.layers, found.layers, strict=True)
    )
    with pytest.raises(
        ValueError, match="only records of the same layer can be merged: second with 2 heads is not"
    ):
        found.merge(replace(swapped, layers=renamed))


def test_the_worst_status_and_error_are_kept() -> None:
    good = Layer("m", 2, "verified", calls=1, rows=3, error=1e-7)
    for status in STATUSES:
        other = Layer("m", 2, status, calls=2, rows=4, error=None)  # type: ignore[arg-type]
        assert good.merge(other).status == other.merge(good).status == status
    assert good.merge(replace(good, error=0.5)).error == 0.5
    assert good.merge(Layer("m", 2, "captured")).status == "verified"  # it never ran
    assert tuple(STATUSES) == ("verified", "checked", "captured", "unverified", "mismatch")


def test_a_layer_pools_its_heads(found: HeadSummary) -> None:
    pooled = found.layer(1)
    column = found.metrics.index("entropy")
    heads = found.moments.heads(2, 6)
    assert int(pooled.count[0, column]) == 44
    mean = float((heads.mean[:, column] * heads.count[:, column]).sum()) / 44
    assert float(pooled.mean[0, column]) == pytest.approx(mean, rel=1e-12)
    assert torch.equal(pooled.histogram[0, column], heads.histogram[:, column].sum(0))


def test_grid_and_places_follow_the_layers(found: HeadSummary) -> None:
    assert found.places == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [len(row) for row in found.grid("entropy")] == [2, 4]
    assert list(itertools.chain(*found.grid("entropy"))) == found.mean("entropy").tolist()


def test_moments_of_another_size_are_refused(found: HeadSummary) -> None:
    with pytest.raises(
        ValueError, match=r"moments must have shape \(heads, metrics\) = \(2, 24\), got \(6, 24\)"
    ):
        replace(found, layers=found.layers[:1])


# -- frames ---------------------------------------------------------------------------------------


def expected_columns(found: HeadSummary) -> list[str]:
    parts = [f"{name}_{part}" for name in found.metrics for part in ("mean", "std", "min", "max")]
    left_out = ["padded", "empty", "excluded", "skipped", "padded_by", "unseen"]
    return ["layer", "head", "module", "status", "rows", *left_out, *parts, "predicted_entropy"]


def test_columns(found: HeadSummary) -> None:
    columns = found.columns()
    assert list(columns) == expected_columns(found)
    assert {"layer", "head", "rows", "entropy_mean", "entropy_std"} <= set(columns)
    assert columns["layer"] == [0, 0, 1, 1, 1, 1]
    assert columns["head"] == [0, 1, 0, 1, 2, 3]
    assert columns["module"] == ["second"] * 2 + ["first"] * 4  # as registered
    assert columns["rows"] == [11] * 6
    assert columns["entropy_mean"] == found.mean("entropy").tolist()
    assert columns["entropy_std"] == found.std("entropy").tolist()
    for head in range(6):
        low, mean, high = (columns[f"entropy_{part}"][head] for part in ("min", "mean", "max"))
        assert low < mean < high


def test_to_frame_is_pandas_where_there_is_one(found: HeadSummary) -> None:
    frame = found.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == expected_columns(found)
    assert len(frame) == 6
    assert frame["entropy_mean"].tolist() == found.mean("entropy").tolist()


def test_to_frame_is_arrow_where_there_is_none(
    found: HeadSummary, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "pandas" else find(name)
    )
    table = found.to_frame()
    assert isinstance(table, pyarrow.Table)
    assert table.column_names == expected_columns(found)
    assert table.num_rows == 6
    assert table.column("entropy_mean").to_pylist() == found.mean("entropy").tolist()


def test_parquet_round_trip(found: HeadSummary, tmp_path: Path) -> None:
    path = tmp_path / "heads.parquet"
    found.to_parquet(path)
    read, table = pyarrow.parquet.read_table(path), found.to_arrow()
    assert read.schema.equals(table.schema)
    pandas.testing.assert_frame_equal(read.to_pandas(), table.to_pandas())  # NaN equals NaN
    assert [entry.name for entry in tmp_path.iterdir()] == ["heads.parquet"]


def test_the_probe_writes_what_its_summary_does(model: Model, tmp_path: Path) -> None:
    with acutance.probe(model) as probe:
        model(torch.randn(3, 6, 8), PADDED)
    probe.save(tmp_path / "a.safetensors")
    probe.to_json(tmp_path / "a.json")
    assert_same(acutance.load(tmp_path / "a.safetensors"), probe.summary())
    assert json.loads((tmp_path / "a.json").read_text()) == probe.summary().to_dict()
    assert probe.to_frame().equals(probe.summary().to_frame())


# -- JSON -----------------------------------------------------------------------------------------


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_json_is_strict_and_complete(found: HeadSummary, tmp_path: Path) -> None:
    path = tmp_path / "heads.json"
    found.to_json(path)
    record = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert record["schema"] == SCHEMA
    assert record["about"]["text"] == "a page"
    assert record["about"]["torch"] == torch.__version__
    assert [layer["module"] for layer in record["layers"]] == ["second", "first"]
    names = {field.name for field in fields(Layer)}
    assert all(set(layer) == names | {"layer"} for layer in record["layers"])
    assert list(record["metrics"]) == list(found.metrics)
    for name, about in record["metrics"].items():
        assert about["edges"] == edges(name)
        assert set(about) == {"unit", "range", "meaning", "edges"}
    assert [(head["layer"], head["head"]) for head in record["heads"]] == found.places
    for index, head in enumerate(record["heads"]):
        for column, name in enumerate(found.metrics):
            entry = head["metrics"][name]
            assert set(entry) == {"count", "mean", "std", "min", "max", "histogram"}
            assert entry["count"] == int(found.moments.count[index, column])
            assert sum(entry["histogram"]) == entry["count"]
    entropies = [head["metrics"]["entropy"]["mean"] for head in record["heads"]]
    assert entropies == found.mean("entropy").tolist()


def test_numbers_that_json_lacks_become_none(found: HeadSummary, tmp_path: Path) -> None:
    layers = (replace(found.layers[0], error=math.inf), found.layers[1])
    odd = replace(found, layers=layers, about={"rate": math.nan, "seen": [1.5, -math.inf]})
    odd.to_json(tmp_path / "heads.json")
    text = (tmp_path / "heads.json").read_text()
    record = json.loads(text, parse_constant=refuse)
    assert record["layers"][0]["error"] is None
    assert record["layers"][1]["error"] == found.layers[1].error
    assert record["about"] == {"rate": None, "seen": [1.5, None]}


# -- files ----------------------------------------------------------------------------------------


def test_save_and_load_is_exact(found: HeadSummary, tmp_path: Path) -> None:
    odd = replace(
        found,
        layers=(replace(found.layers[0], error=math.inf), found.layers[1]),
        unread=("a: b",),
    )
    odd.save(tmp_path / "state.safetensors")
    loaded = acutance.load(str(tmp_path / "state.safetensors"))
    assert_same(loaded, odd)
    assert dict(loaded.about) == dict(odd.about)
    assert_same(loaded.merge(loaded), odd.merge(odd))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file at .*nowhere\.safetensors"):
        acutance.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(IsADirectoryError, match="is a directory, not a file"):
        acutance.load(tmp_path)


@pytest.mark.parametrize("length", [0, 4, 200, -1])
def test_a_truncated_file(found: HeadSummary, tmp_path: Path, length: int) -> None:
    path = tmp_path / "state.safetensors"
    found.save(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"state\.safetensors is not a complete safetensors file"):
        acutance.load(path)


def test_a_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(
        ValueError, match=r"its schema is None, expected 'acutance\.head_summary/1'"
    ):
        acutance.load(path)
    save_file({"weight": torch.ones(2)}, path, metadata={"schema": "acutance.head_summary/9"})
    with pytest.raises(ValueError, match=r"schema is 'acutance\.head_summary/9', expected"):
        acutance.load(path)
    path.write_text("not tensors at all, but long enough to hold a header's length")
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        acutance.load(path)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"summary": "{"},
        {"summary": "{}"},
        {"summary": "[]"},
        {"summary": '{"metrics": [], "layers": [{"head": 1}], "about": {}, "unread": []}'},
        {"summary": '{"metrics": [], "layers": [], "about": {}, "unread": []}'},
    ],
)
def test_a_damaged_header(found: HeadSummary, tmp_path: Path, header: dict[str, str]) -> None:
    path = tmp_path / "state.safetensors"
    save_file(found.moments.tensors(), path, metadata={"schema": SCHEMA, **header})
    with pytest.raises(ValueError, match=r"state\.safetensors has a damaged header"):
        acutance.load(path)


def test_missing_arrays(found: HeadSummary, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    found.save(path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    del header["sha256"]
    tensors = load_file(path)
    tensors.pop("mean")
    save_file(tensors, path, metadata=header)
    with pytest.raises(ValueError, match=r"damaged header: .*mean.*; write the file again"):
        acutance.load(path)


def test_a_write_into_no_directory(found: HeadSummary, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        found.to_json(tmp_path / "nowhere" / "heads.json")
    assert list(tmp_path.iterdir()) == []


def test_files_have_the_permissions_of_any_new_file(found: HeadSummary, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    found.to_json(tmp_path / "heads.json")
    modes = {entry.name: entry.stat().st_mode for entry in tmp_path.iterdir()}
    assert modes["heads.json"] == modes["plain"]
