"""Names, laws and choices of layers are the same for a model and for the model in wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import acutance
from acutance import training
from acutance.calibration.law import Identity
from acutance.capture import find_layers
from tests.contract.training.test_wrapped import (
    LAW,
    NAMES,
    WRAPPERS,
    llama,
    probed,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD")  # FSDP with a single rank


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.slow)
        if how in ("compile", "compiled parts", "several")
        else how
        for how in WRAPPERS
    ],
)
def test_a_wrapped_model_is_the_model(how: str, tmp_path: Path) -> None:
    plain, model, ids = llama(), WRAPPERS[how](llama()), torch.randint(20, (2, 7))
    whole, summary = probed(plain, ids), probed(model, ids)
    assert [layer.module for layer in summary.layers] == NAMES
    assert summary.about["model"] == "LlamaForCausalLM"
    torch.testing.assert_close(summary.mean("entropy"), whole.mean("entropy"))
    assert [layer.module for layer in probed(model, ids, layers=-1).layers] == NAMES[-1:]
    assert [layer.module for layer in probed(model, ids, layers=NAMES[:1]).layers] == NAMES[:1]

    assert Identity.of(model) == Identity.of(plain)
    assert list(find_layers.attention_layers(model)) == NAMES

    law = {"-1": LAW, (NAMES[0], 1): LAW}
    for saved, used in ((plain, model), (model, plain), (model, model)):
        acutance.calibration.Law.of(saved, law).save(tmp_path / "law.json")
        read = acutance.calibration.Law.load(tmp_path / "law.json")
        assert list(read.check(used).placed(used)) == [NAMES[2], NAMES[0]]
        with torch.no_grad(), acutance.apply(used, read) as applied:
            used(ids)
        assert applied.calls == {NAMES[2]: 1, NAMES[0]: 1}

    with training.AttentionWatch(model, layers="0-1") as watch:
        model(ids)
    assert [rows.module for rows in watch.rows] == NAMES[:2]

    monitor = training.AttentionMonitor(layers="*.2.*", metrics=["entropy"])
    with torch.no_grad(), monitor.watch(model):
        model(ids)
    record = monitor.step()
    assert record is not None
    assert f"attention/{NAMES[2]}/entropy" in record.scalars
    assert f"attention/{NAMES[0]}/entropy" not in record.scalars


def test_a_parameter_has_its_name_too() -> None:
    model = nn.ModuleDict({"module": nn.DataParallel(nn.Linear(2, 2))})  # named as wrappers do
    assert find_layers.module_name(model, "module.module.weight") == "module.weight"
    assert [name for name, _ in find_layers.named_modules(model)] == [
        "ModuleDict",
        "module",
        "module",
    ]
