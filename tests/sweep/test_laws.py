"""A model type under a law: what holds, what is refused, and that what is wrong is seen."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import acutance
from acutance.scaling import HeadTable

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "docs/_static/compatibility.json").read_text(encoding="utf-8"))
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize(
    ("model_type", "by"),
    [
        pytest.param("gptj", "queries", id="gptj: by hand"),
        pytest.param("llama", "queries", id="llama: the interface"),
        pytest.param("qwen3", "queries", id="qwen3: the output of a normalisation"),
        pytest.param("gpt_neox", "queries", id="gpt_neox: a part of one projection"),
        pytest.param("convbert", "keys", id="convbert: the query has another use"),
    ],
)
def test_a_law_gives_what_larger_queries_or_keys_give(model_type: str, by: str) -> None:
    from zoo.examine import under_laws
    from zoo.laws import Lawful

    found = under_laws(model_type)
    assert found.pop("seconds") > 0
    law = Lawful(**found)
    assert (law.fault, law.refused, law.failed, law.left) == ("", "", "", "")
    assert law.reached == law.read == law.calls == 2
    assert not law.moved_at_1
    assert law.by == by
    assert law.dtype == "float64"
    assert law.reference is not None
    assert law.moved > 0.01
    assert law.reference < 1e-5 * law.moved  # rotary tables and softmaxes of float32 round


def test_a_refusal_is_recorded_with_its_reason() -> None:
    from zoo.examine import under_laws

    found = under_laws("mgp-str")
    assert "cannot be applied to char_a3_module" in found["refused"]
    assert found["calls"] == 0
    assert found["reference"] is None


def _vit() -> tuple[Any, dict[str, Any]]:
    from zoo import examine

    model, _, _, given = examine.runnable("vit", examine.Examined("vit"))
    return model, given


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (lambda law, factor: HeadTable([factor + 1e-3]), "a factor of 1 moves an output"),
        (lambda law, factor: {0: law}, "1 of 2 modules are not scaled"),
        (lambda law, factor: HeadTable([1.0]), "a factor of 1.5 moves no output"),
        (lambda law, factor: HeadTable([1.0 if factor == 1.0 else 1.49]), "off by .* moves"),
        (
            lambda law, factor: {(0, 0): HeadTable([1.0]), (0, 1): law, (0, 2): law, (1, 0): law},
            "off by .* moves",
        ),
    ],
)
def test_a_law_that_does_something_else_is_a_fault(wrong: Any, fault: str) -> None:
    from zoo import laws

    model, given = _vit()

    def law(model: Any, factor: float) -> Any:
        return acutance.apply(model, wrong(HeadTable([factor]), factor), windowed=True)

    found = laws.lawful(model, given, law=law)
    assert found.failed == ""
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(found.fault)


def test_what_cannot_be_compared_says_why() -> None:
    from zoo import laws

    class Plain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"out": torch.softmax(x @ x.flip(-1).mT, -1) @ x}

    class Normal(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            unit = torch.nn.functional.normalize(x, dim=-1)
            return {"out": torch.softmax(unit @ unit.mT, -1) @ x}

    given = {"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))}
    plain, normal = (laws.lawful(kind(), given) for kind in (Plain, Normal))
    assert (plain.fault, plain.reference) == ("", None)
    assert plain.left == "what makes its queries is not known"
    assert (normal.fault, normal.reference) == ("", None)
    assert normal.left == "queries and keys are normalised where they are multiplied"
    broken = laws.lawful(Plain(), {"y": given["x"]})
    assert broken.failed.startswith("TypeError")
    assert broken.fault == broken.failed


def test_laws_are_put_on_what_was_read_and_judge_nothing_anew(
    sweep: ModuleType, tmp_path: Path
) -> None:
    done: list[str] = []

    def in_process(context: Any, work: Any, name: str) -> dict[str, Any]:
        assert work is sweep._under_laws
        done.append(name)
        return {"calls": len(done), "seconds": 1.0}

    models = {name: RECORD["models"][name].copy() for name in ("bert", "llama", "mamba")}
    for model in models.values():
        model.pop("law", None)
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**sweep._begun(tmp_path / "none", True), "models": models}))
    go_on = partial(sweep.laws, path=path, fresh=False, in_process=in_process)
    go_on([], seconds=1.0)
    assert done == ["bert"]
    go_on([], seconds=None)
    assert done == ["bert", "llama"]
    go_on(["bert"], seconds=None)
    assert done == ["bert", "llama", "bert"]
    after = json.loads(path.read_text())["models"]
    assert [after[name].pop("law")["calls"] for name in ("bert", "llama")] == [3, 2]
    assert after == models
    with pytest.raises(SystemExit, match="the record has no attention read of mamba"):
        sweep.laws(["mamba"], path, fresh=False, seconds=None)


def test_the_guide_has_the_figures_of_the_record() -> None:
    from zoo.laws import Lawful

    laws = {
        name: Lawful(**model["law"]) for name, model in RECORD["models"].items() if model.get("law")
    }
    read = {name for name, model in RECORD["models"].items() if model.get("read")}
    assert set(laws) <= read
    assert len(laws) >= 600
    assert not [name for name, law in laws.items() if law.fault]
    refused = {name for name, law in laws.items() if law.refused}
    held = [law for law in laws.values() if not law.refused and not law.fault]
    agree = [law for law in held if law.agrees]
    guide = " ".join((ROOT / "docs/guide/apply.md").read_text(encoding="utf-8").split())
    assert f"Of the {len(laws)} model types in the {{doc}}`/compatibility` table" in guide
    assert f"{len(held)} run under a law" in guide
    assert f"For {len(agree)} of them" in guide
    assert "mgp-str" in refused
    assert len(refused) <= 21  # biases, scores written in pieces, softcaps
