"""The record of the sweep, the page that is written from it, and going on where one stopped."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/_static/compatibility.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
FEWEST = {"verified": 600, "unverified": 100, "attention-free": 65}
MOST_LEFT = 25  # neither built nor run
READ = {"diffusers": 15, "x-transformers": 15, "torchvision": 9, "open_clip": 45, "timm": 50}


def test_the_page_is_the_records(sweep: ModuleType) -> None:
    from zoo import page

    assert page.render(*sweep.records()) == PAGE


def test_nothing_is_wrong_and_no_output_moved() -> None:
    from zoo.examine import VERDICTS

    models = RECORD["models"].values()
    counts = Counter(model["verdict"] for model in models)
    assert set(counts) <= set(VERDICTS)
    assert counts["wrong"] == 0
    assert not any(model.get("moved") for model in models)
    assert all(counts[verdict] >= fewest for verdict, fewest in FEWEST.items())
    assert counts["not built"] + counts["not run"] <= MOST_LEFT
    for model in models:
        assert model["verdict"] in ("verified", "unverified", "attention-free") or model["reason"]
        assert model.get("worst", 0.0) <= 1.0 or model["verdict"] == "caught"


def test_nothing_of_other_libraries_is_wrong(sweep: ModuleType) -> None:
    from zoo.libraries import LIBRARIES

    _, others = sweep.records()
    assert set(READ) <= set(others) <= set(LIBRARIES)
    for library, record in others.items():
        models = record["models"].values()
        assert library in record["versions"]
        assert not any(model["verdict"] == "wrong" or model.get("moved") for model in models)
        assert sum(model["read"] > 0 for model in models if "read" in model) >= READ[library]
        for model in models:
            assert (
                model["verdict"] in ("verified", "unverified", "attention-free") or model["reason"]
            )


def test_the_guide_to_verify_has_the_counts_of_its_record() -> None:
    record = json.loads((ROOT / "docs/_static/verification.json").read_text(encoding="utf-8"))
    guide = (ROOT / "docs/guide/verify.md").read_text(encoding="utf-8")
    models = record["models"]
    left_out = ("not built", "not run")
    ran = {name for name, one in RECORD["models"].items() if one["verdict"] not in left_out}
    assert set(models) == ran
    counts = Counter(one["status"] for one in models.values())
    assert set(counts) == {"clean", "finding", "not verified"}
    checks = sum(one["checks"] for one in models.values())
    assert f"on the {len(models)} model types" in guide
    assert f"In {counts['clean'] + counts['finding']} of them verify can compare" in guide
    assert f"{checks:,} checks" in guide
    assert f"{counts['clean']} model types have no finding.\n{counts['finding']} have one" in guide
    table = guide.partition("| finding |")[2].partition("In five")[0]
    named = {name for row in table.splitlines() for name in row.split("|")[1:2]}
    listed = {name.strip(" `") for names in named for name in names.split(",") if "`" in name}
    assert listed == {name for name, one in models.items() if one["status"] == "finding"}


def test_the_model_types_are_those_of_that_release() -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if transformers.__version__ != RECORD["versions"]["transformers"]:
        pytest.skip("another release of transformers registers others")
    assert set(RECORD["models"]) <= set(CONFIG_MAPPING_NAMES)
    assert RECORD["registered"] == len(CONFIG_MAPPING_NAMES)
    assert f"{len(RECORD['models'])} of {RECORD['registered']} examined" in PAGE


def test_reasons_cannot_break_the_page() -> None:
    from zoo import page

    model = {"model_type": "x", "verdict": "not run", "reason": "a | b\\ <script> `c` *d* $e$"}
    versions = {"torch": "2", "transformers": "5", "python": "3"}
    text = page.render({"versions": versions, "models": {"x": model}})
    (line,) = [line for line in text.splitlines() if line.startswith("| `x`")]
    assert line == r"| `x` | a \| b\\ \<script\> \`c\` \*d\* \$e\$ |"


def test_a_sweep_goes_on_where_it_stopped(sweep: ModuleType, tmp_path: Path) -> None:
    done: list[str] = []

    def examined(context: Any, name: str) -> dict[str, Any]:
        if len(done) == 2:
            raise RuntimeError("the machine goes off")
        done.append(name)
        return {"model_type": name, "verdict": "verified", "reason": "", "seconds": 1.0}

    path = tmp_path / "record.json"
    sweep_on = partial(sweep.sweep, path=path, fresh=False, examined=examined)
    with pytest.raises(RuntimeError, match="goes off"):
        sweep_on([], seconds=None)
    first = list(done)
    assert sorted(json.loads(path.read_text())["models"]) == first
    done.clear()
    sweep_on([], seconds=2.0)
    assert len(done) == 2
    assert not set(done) & set(first)

    record = json.loads(path.read_text())
    record["versions"]["torch"] = "0.1"  # what was found with another release is found again
    path.write_text(json.dumps(record))
    done.clear()
    sweep_on([], seconds=2.0)
    assert done == first
    with pytest.raises(SystemExit, match="transformers has no model type lama"):
        sweep_on(["lama"], seconds=None)


def test_a_model_that_takes_its_process_along_is_recorded(sweep: ModuleType) -> None:
    import multiprocessing

    found = sweep._examined(multiprocessing.get_context("fork"), "llama", _dies)
    assert found["verdict"] == "not built"
    assert found["reason"] == "its process ended with exit code 3"


def _dies(name: str, pipe: Any) -> None:
    import os

    os._exit(3)
