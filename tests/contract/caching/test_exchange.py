"""Plans written for other tools and read from them: what arrives, what is lost, what is refused."""

from __future__ import annotations

import json
import runpy
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import acutance
from acutance import CachePlan, HeadPlan
from acutance.caching import PlanError, export_plan, import_plan
from tests.versions import CACHE

from .conftest import build

STREAMING = HeadPlan("streaming", first=4, recent=12)
LONGER = HeadPlan("streaming", first=2, recent=20)
DROPPED = HeadPlan("dropped")
FOUR = HeadPlan(key_bits=4, value_bits=4)


def plan_of(heads: dict[Any, HeadPlan]) -> CachePlan:
    return CachePlan.of(build(), heads)


# -- DuoAttention ---------------------------------------------------------------------------------


def test_duo_attention_loads_the_table_and_it_returns_the_plan(tmp_path: Path) -> None:
    plan = plan_of({(0, 1): STREAMING, 1: STREAMING})
    assert plan.export("duo_attention", tmp_path / "pattern") == ()
    table = (tmp_path / "pattern" / "full_attention_heads.tsv").read_text()
    assert table == "1.0\t0.0\n0.0\t0.0\n"  # a line for each layer, a column for each key head
    settings = json.loads((tmp_path / "pattern" / "config.json").read_text())
    assert settings == {"sink_size": 4, "recent_size": 12}
    assert import_plan(f"duo_attention:{tmp_path / 'pattern'}", build()) == plan


def test_the_share_of_zeros_as_sparsity_returns_the_table(tmp_path: Path) -> None:
    """DuoAttention adds noise of 1e-6 to break ties, and cuts at the quantile of the sparsity."""
    plan = plan_of({(0, 1): STREAMING})
    plan.export("duo_attention", tmp_path)
    values = np.loadtxt(tmp_path / "full_attention_heads.tsv", dtype=float, delimiter="\t")
    share = float((values == 0).mean())
    noisy = values + np.random.default_rng(0).uniform(0, 1e-6, values.shape)
    assert ((noisy >= np.quantile(noisy, share)) == (values == 1)).all()


def test_duo_attention_says_which_heads_lose_what(tmp_path: Path) -> None:
    plan = plan_of({(0, 0): STREAMING, (0, 1): LONGER, (1, 0): FOUR, (1, 1): DROPPED})
    assert plan.export("duo_attention", tmp_path) == (
        "Key heads 1.0 keep 16 bits, as the table has no precisions.",
        "Key heads 1.1 keep 4 first and 20 recent keys instead of nothing.",
        "All key heads of layer 0 keep 4 first and 20 recent keys, more than planned, as the table "
        "has one size for all streaming heads.",
    )


def trained_table(folder: Path) -> Path:
    """A table as DuoAttention trains it, with its settings among many others."""
    folder.mkdir()
    table = folder / "full_attention_heads.tsv"
    table.write_text("6.054687500000000000e-01\t0.0\n2.275390625000000000e-01\t9.96e-01\n")
    settings = {"model_name": "models/Llama", "sink_size": 4, "recent_size": 12, "threshold": 0.5}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("options", "streams"),
    [
        ("", {(0, 1), (1, 0)}),
        (",threshold=0.2", {(0, 1)}),
        (",sparsity=0.75", {(0, 0), (0, 1), (1, 0)}),
        (",sparsity=0.25", {(0, 1)}),
        (",sparsity=0", set()),
        (",sparsity=1", {(0, 0), (0, 1), (1, 0), (1, 1)}),
    ],
)
def test_trained_values_become_heads(
    tmp_path: Path, options: str, streams: set[tuple[int, int]]
) -> None:
    folder = trained_table(tmp_path / "a,b")
    expected = plan_of(dict.fromkeys(streams, STREAMING))
    assert import_plan(f"duo_attention:{folder}{options}", build()) == expected


def test_the_sizes_of_a_table_alone_are_options(tmp_path: Path) -> None:
    folder = trained_table(tmp_path / "pattern")
    (folder / "config.json").unlink()
    table = f"duo_attention:{folder / 'full_attention_heads.tsv'}"
    imported = import_plan(f"{table},first=2,recent=20", build())
    assert imported == plan_of({(0, 1): LONGER, (1, 0): LONGER})
    with pytest.raises(PlanError, match=r"no sizes of streaming heads .* add ,first=N,recent=N"):
        import_plan(table, build())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1.0 0.0\n", r"full_attention_heads.tsv must be numbers separated by tabs"),
        ("1.0\tnan\n", r"must have finite numbers"),
        ("1.0\t0.0\n1.0\n", r"all of as many key heads, got lines of 1 or 2"),
        ("\n", r"all of as many key heads, got lines of none"),
        ("1\t0\n" * 3, r"is for a model of 3 layers of 2 key heads, but LlamaForCausalLM has 2"),
        ("1\t0\t1\n" * 2, r"is for a model of 2 layers of 3 key heads, but Llama.* 2 layers of 2$"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    folder = trained_table(tmp_path / "pattern")
    (folder / "full_attention_heads.tsv").write_text(text)
    with pytest.raises(PlanError, match=sentence):
        import_plan(f"duo_attention:{folder}", build())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (",threshold=2", r"threshold must be a number in \[0, 1\], got '2'"),
        (",sparsity=x", r"sparsity must be a number in \[0, 1\], got 'x'"),
        (",sparsity=0.5,threshold=0.5", r"give threshold or sparsity"),
        (",first=-1", r"first must be a whole number, got '-1'"),
        (",recent=0", r"recent must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: str, sentence: str) -> None:
    folder = trained_table(tmp_path / "pattern")
    with pytest.raises(ValueError, match=sentence):
        import_plan(f"duo_attention:{folder}{options}", build())


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "pattern"
    with pytest.raises(PlanError, match=f"there is no file or directory at {missing}$"):
        import_plan(f"duo_attention:{missing}", build())
    trained_table(missing)
    (missing / "full_attention_heads.tsv").unlink()
    with pytest.raises(OSError, match=r"full_attention_heads\.tsv"):
        import_plan(f"duo_attention:{missing}", build())


# -- layer_types ----------------------------------------------------------------------------------


def qwen(**changes: Any) -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None,
    }  # fmt: skip
    model = Qwen2ForCausalLM(Qwen2Config(**(settings | changes))).eval()
    for part in model.parameters():
        part.data *= 3
    return model


def test_transformers_reads_layer_types_as_the_plan(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = qwen()
    plan = CachePlan.of(model, {1: HeadPlan("streaming", recent=9)})
    assert plan.export("layer_types", tmp_path / "types.json") == ()
    model.save_pretrained(tmp_path / "model")
    changes = json.loads((tmp_path / "types.json").read_text())
    config = AutoConfig.from_pretrained(tmp_path / "model", **changes)
    assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    sliding = AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=config).eval()
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = sliding(ids).logits
        with acutance.apply(model, plan):
            found = model(ids).logits
        assert (model(ids).logits - expected).abs().max() > 1e-2  # the window matters
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert import_plan(f"layer_types:{tmp_path / 'types.json'}", model) == plan


def test_layer_types_says_which_heads_lose_what(tmp_path: Path) -> None:
    heads = {0: STREAMING, (1, 0): STREAMING, (1, 1): FOUR, (2, 0): DROPPED}
    plan = CachePlan.of(qwen(), heads)
    assert plan.export("layer_types", tmp_path / "types.json") == (
        "Key heads 1.1 keep 16 bits, as layer_types has no precisions.",
        "Key heads 2.0 keep all keys, as layer_types drops no heads.",
        "Key heads 1.0 keep all keys, as layer_types lets only whole layers stream.",
        "All key heads of layer 0 lose their first keys, as a sliding window keeps only recent "
        "ones.",
    )
    other = CachePlan.of(
        qwen(), {0: HeadPlan("streaming", recent=9), (1, 0): LONGER, (1, 1): LONGER}
    )
    lost = other.export("layer_types", tmp_path / "types.json")
    assert lost[1] == (
        "All key heads of layer 0 keep 20 recent keys, more than planned, as there is one "
        "sliding_window."
    )


def test_a_class_that_ignores_layer_types_is_named(tmp_path: Path) -> None:
    lost = plan_of({}).export("layer_types", tmp_path / "types.json")
    assert len(lost) == 1
    assert lost[0].startswith("LlamaForCausalLM of transformers")
    assert json.loads((tmp_path / "types.json").read_text())["sliding_window"] is None


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({}, r"config.json has no list layer_types"),
        ({"layer_types": ["linear_attention"] * 2}, r"cannot express layers of 'linear_attention'"),
        ({"layer_types": ["sliding_attention"] * 2}, r"sliding_window of config.json must be at"),
        (
            {"layer_types": ["full_attention"] * 5},
            r"a model of 5 layers, but Llama.* has 2 layers$",
        ),
        ([], r"config.json: it must be a JSON object"),
    ],
)
def test_wrong_layer_types_are_refused(tmp_path: Path, record: Any, sentence: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(record))
    with pytest.raises(PlanError, match=sentence):
        import_plan(f"layer_types:{path}", build())


# -- kvpress --------------------------------------------------------------------------------------


def one_layer() -> torch.nn.Module:
    """Layer 0's keys are the same with any attention, so only what it reads can differ."""
    return build(num_hidden_layers=1, attn_implementation="sdpa")


def test_the_press_masks_what_the_next_token_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = CachePlan.of(one_layer(), {(0, 1): STREAMING})
    plan.export("kvpress", tmp_path / "press.py")
    stand_in = types.ModuleType("kvpress")
    stand_in.BasePress = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvpress", stand_in)
    press = runpy.run_path(str(tmp_path / "press.py"))["press"]
    module = SimpleNamespace(layer_idx=0, masked_key_indices=None)
    for stored in (10, 15, 16, 30):
        layer = SimpleNamespace(keys=torch.zeros(1, 2, stored, 8))
        cache = SimpleNamespace(layers=[layer])
        assert press.forward_hook(module, [], {"past_key_values": cache}, "output") == "output"
        _, heads, masked = module.masked_key_indices
        assert masked.tolist() == list(range(4, stored - 11))  # and the next token's own key
        assert set(heads.tolist()) <= {1}
    with pytest.raises(ValueError, match=r"1 layers of 2 key heads, but .* has 2 of 2"):
        press.post_init_from_model(build())


def test_kvpress_reads_what_the_plan_says(tmp_path: Path) -> None:
    pytest.importorskip("kvpress", reason="the press is run where kvpress is installed")
    from transformers import DynamicCache

    model = one_layer()
    plan = CachePlan.of(model, {(0, 1): STREAMING})
    plan.export("kvpress", tmp_path / "press.py")
    press = runpy.run_path(str(tmp_path / "press.py"))["press"]
    ids = torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with acutance.apply(model, plan):
            cache = model(ids[:, :30]).past_key_values
            expected = [model(ids[:, [t]], **{CACHE: cache}).logits for t in range(30, 40)]
        with press(model):
            cache = DynamicCache()
            model(ids[:, :30], **{CACHE: cache})
            found = [model(ids[:, [t]], **{CACHE: cache}).logits for t in range(30, 40)]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), atol=2e-5, rtol=0)


def test_kvpress_says_which_heads_lose_what(tmp_path: Path) -> None:
    lost = plan_of({0: FOUR, (1, 1): DROPPED}).export("kvpress", tmp_path / "press.py")
    assert lost[:2] == (
        "All key heads of layer 0 keep 16 bits, as kvpress does not round single heads.",
        "Key heads 1.1 read the row's own key and value instead of nothing.",
    )
    assert "full attention" in lost[2]


# -- names ----------------------------------------------------------------------------------------


def test_an_unknown_format_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no format 'gguf'; .* kvpress, duo_attention, layer_types"
    ):
        export_plan(plan_of({}), "gguf", tmp_path / "plan")
    assert not list(tmp_path.iterdir())


def test_a_table_needs_as_many_key_heads_in_all_layers(tmp_path: Path) -> None:
    plan = plan_of({})
    first, second = plan.shapes
    shape = acutance.caching.LayerShape(heads=1, query_heads=4, key_width=8, value_width=8)
    uneven = CachePlan(
        plan.model,
        {first: plan.shapes[first], second: shape},
        {first: plan.layers[first], second: (HeadPlan(),)},
    )
    with pytest.raises(PlanError, match=r"this plan's layers have 1 or 2"):
        uneven.export("duo_attention", tmp_path / "pattern")


def test_a_saved_plan_is_imported_for_its_own_model_alone(tmp_path: Path) -> None:
    plan = plan_of({(0, 1): STREAMING})
    plan.save(tmp_path / "plan.json")
    assert import_plan(tmp_path / "plan.json", build()) == plan
    with pytest.raises(
        PlanError,
        match=r"for another model, LlamaForCausalLM, not for this Qwen2ForCausalLM: it has",
    ):
        import_plan(tmp_path / "plan.json", qwen())


def test_judge_measures_an_imported_plan_as_the_same_plan(tmp_path: Path) -> None:
    model = build()
    plan = plan_of({(0, 1): STREAMING, 1: STREAMING})
    plan.export("duo_attention", tmp_path / "pattern")
    windows = torch.randint(0, 64, (3, 48), generator=torch.Generator().manual_seed(0))
    laws = {"imported": f"duo_attention:{tmp_path / 'pattern'}", "plan": plan}
    imported, same = acutance.judge(model, windows, laws).laws
    assert imported.delta == same.delta != 0.0
    with pytest.raises(PlanError, match=r"is for a model of 2 layers of 2 key heads, but Qwen2For"):
        acutance.judge(qwen(), windows, [laws["imported"]])
