"""Names, laws and choices of layers are the same for a model and for the model in wrappers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import acutance
from acutance import training
from acutance.calibration import Identity

pytestmark = pytest.mark.filterwarnings("ignore:.*NO_SHARD")  # FSDP with a single rank
LAW = acutance.scaling.LogN(train_length=2)
NAMES = [f"model.layers.{i}.self_attn" for i in range(3)]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(
        model, checkpoint_wrapper, check_fn=lambda part: isinstance(part, LlamaDecoderLayer)
    )
    return model


def fsdp(model: nn.Module) -> nn.Module:
    parts = [part for part in model.modules() if isinstance(part, LlamaDecoderLayer)]
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, **_: recurse or module in parts,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def fsdp2(model: nn.Module) -> nn.Module:
    for part in model.model.layers:
        fully_shard(part)
    fully_shard(model)
    return model


def compiled_parts(model: nn.Module) -> nn.Module:
    for index, part in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(part, backend="eager")
    return model


Wrap = Callable[[nn.Module], nn.Module]
WRAPPERS: dict[str, Wrap] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "FSDP": fsdp,
    "fully_shard": fsdp2,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "compiled parts": compiled_parts,
    "checkpoint": checkpointed,
    "AveragedModel": AveragedModel,
    "several": lambda model: nn.DataParallel(torch.compile(checkpointed(model), backend="eager")),
}


def probed(model: nn.Module, ids: Tensor, **options: Any) -> acutance.HeadSummary:
    with torch.no_grad(), acutance.probe(model, **options) as probe:
        model(ids)
    return probe.summary()


@pytest.fixture(scope="module")
def calibrated() -> acutance.Calibration:
    return acutance.calibrate(llama(), texts(), lengths=[6, 12], passes=2)


def texts() -> list[Tensor]:
    return [torch.arange(48).view(4, 12) * 7 % 20]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how", ["DataParallel", "DistributedDataParallel", "fully_shard", "FSDP", "checkpoint"]
)
def test_a_wrapped_model_is_calibrated_and_provided_for(
    how: str, calibrated: acutance.Calibration, tmp_path: Path
) -> None:
    model, (ids,) = WRAPPERS[how](llama()), texts()
    found = acutance.calibrate(model, texts(), lengths=[6, 12], passes=2)
    assert found.to_dict() == calibrated.to_dict()
    found.save(tmp_path / "law.json")
    for used in (model, llama()):
        law = acutance.calibration.Law.load(tmp_path / "law.json")
        with torch.no_grad(), acutance.apply(used, law) as applied:
            used(ids)
        assert (list(applied.calls), applied.skipped) == (NAMES, {})
    with torch.no_grad():
        plain = model(ids).logits
        with acutance.probe(model, provide=True, verify=True) as probe:
            given = model(ids).logits
    layers = probe.summary().layers
    assert [(layer.module, layer.provided, layer.status) for layer in layers] == [
        (name, 1, "verified") for name in NAMES
    ]
    torch.testing.assert_close(given, plain)


@pytest.mark.parametrize("how", [name for name in WRAPPERS if name != "FSDP"])
def test_clips_have_the_model_s_names(how: str) -> None:
    model, ids = WRAPPERS[how](llama()), torch.randint(20, (2, 7))
    clip = training.QKClip(model, 1e-6, layers="-1")
    with torch.no_grad(), clip:
        model(ids)
    assert [layer.module for layer in clip.step().layers] == NAMES[2:]


@pytest.mark.parametrize("original", [False, True])
def test_a_plain_model_has_one_identity_in_and_out_of_shards(original: bool) -> None:
    def plain() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2)

    def wraps(module: nn.Module, recurse: bool, **_: Any) -> bool:
        return recurse or isinstance(module, nn.TransformerEncoderLayer)

    sharded = FullyShardedDataParallel(
        plain(),
        auto_wrap_policy=wraps,
        device_id=torch.device("cpu"),
        use_orig_params=original,
    )
    assert Identity.of(sharded) == Identity.of(plain())
    assert Identity.of(nn.DataParallel(plain())) == Identity.of(plain())
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 99, batch_first=True), 2)
    assert Identity.of(sharded) != Identity.of(other)


# -- one language ---------------------------------------------------------------------------------

CHOICES: list[tuple[Any, list[int]]] = [
    (-1, [2]),
    ("-1", [2]),
    ("0-1", [0, 1]),
    ("2", [2]),
    (range(1, 3), [1, 2]),
    (NAMES[1], [1]),
    ("model.layers.1", [1]),
    ("*.self_attn", [0, 1, 2]),
    ("*.layers.?.self_attn", [0, 1, 2]),
]


@pytest.mark.parametrize(("given", "want"), CHOICES)
def test_layers_are_chosen_alike(given: Any, want: list[int], tmp_path: Path) -> None:
    model, ids, names = llama(), torch.randint(20, (2, 7)), [NAMES[i] for i in want]
    assert [layer.module for layer in probed(model, ids, layers=given).layers] == names
    for law in ({given: LAW}, {(given, 1): LAW}):
        with torch.no_grad(), acutance.apply(model, law) as applied:
            model(ids)
        assert list(applied.calls) == names
    with training.AttentionWatch(model, layers=given) as watch:
        model(ids)
    assert [rows.module for rows in watch.rows] == names
    clip = training.QKClip(model, 1e-6, layers=given)
    with clip:
        model(ids)
    assert [layer.module for layer in clip.step().layers] == names
    monitor = training.AttentionMonitor(layers=given, metrics=["entropy"])
    with torch.no_grad(), monitor.watch(model):
        model(ids)
    record = monitor.step()
    assert record is not None
    assert [layer.module for layer in record.summary.layers] == names
    if isinstance(given, str):  # a file that was written by hand
        path = tmp_path / "law.json"
        record = acutance.calibration.Law.of(model, {0: LAW}).record()
        record["layers"] = {given: next(iter(record["layers"].values()))}
        path.write_text(json.dumps(record))
        with torch.no_grad(), acutance.apply(model, acutance.calibration.Law.load(path)) as used:
            model(ids)
        assert list(used.calls) == names


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (7, "=7 is not a layer of the model: it has 3 blocks, 0 to 2"),
        ("2-9", "=2-9 is not a layer of the model: it has 3 blocks, 0 to 2"),
        ("-9", "=-9 is not a layer of the model: it has 3 blocks, 0 to 2"),
        (
            "model.layers.1.self_atn",
            r"is not a layer of the model; did you mean 'model\.layers\.1\.s",
        ),
    ],
)
def test_an_unknown_layer_is_told_alike(given: Any, match: str) -> None:
    model = llama()
    makers: list[Callable[[], Any]] = [
        lambda: acutance.probe(model, layers=given),
        lambda: acutance.apply(model, {given: LAW}),
        lambda: training.AttentionWatch(model, layers=given),
        lambda: training.QKClip(model, layers=given),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=match):
            make()


def test_numbers_without_blocks_are_those_of_attention_layers() -> None:
    model, x = nn.TransformerDecoderLayer(16, 2, batch_first=True).eval(), torch.randn(1, 5, 16)
    with torch.no_grad(), acutance.probe(model, layers=-1) as probe:
        model(x, x)
    assert [layer.module for layer in probe.summary().layers] == ["multihead_attn"]
    with torch.no_grad(), acutance.apply(model, {0: LAW}) as applied:
        model(x, x)
    assert list(applied.calls) == ["self_attn"]
    with pytest.raises(ValueError, match="it has 2 attention layers, 0 to 1"):
        acutance.probe(model, layers=2)
