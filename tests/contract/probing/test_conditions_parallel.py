"""Models that several processes share out, read by each: DDP, FSDP, FSDP2, tensor parallelism."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import acutance
from acutance.probing import all_reduce_summary

#: Ranks that share a model, and which of them a case is about.
RANKS = ((1, 0), *(pytest.param((2, rank), marks=pytest.mark.slow) for rank in range(2)))
WAYS = ("ddp", "fsdp", "fsdp2", "tensor", "tensor-gqa", "tp_plan", "fsdp2+heads")


def built() -> Any:
    """Weights that are the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def windows() -> Tensor:
    return torch.randint(3, 97, (4, 9), generator=torch.Generator().manual_seed(1))


def tensor_parallel(model: Any, mesh: Any) -> Any:
    """Projections shared out by heads, as torch's guide does."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {f"self_attn.{part}_proj": ColwiseParallel() for part in "qkv"}
    plan |= {"self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def planned(folder: Path) -> Any:
    """The same weights, shared out as transformers plans it."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        built().save_pretrained(folder)
    dist.barrier()
    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=config).eval()


def work(folder: Path) -> None:
    """One rank: every way in turn, each summary in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (size,))
    mine = windows().chunk(size)[rank]
    met: dict[str, Any] = {}

    def probed(way: str, model: Any, ids: Tensor, training: bool, **options: Any) -> None:
        plain = model(ids).logits.detach()
        with acutance.probe(model, verify=True, **options) as probe:
            output = model(ids, labels=ids, use_cache=False)
            if training:
                output.loss.backward()
        assert torch.equal(output.logits.detach(), plain), way
        summary = probe.summary()
        met[way] = [
            [(layer.module, layer.calls, layer.status, layer.numbers) for layer in summary.layers],
            probe.unread,
        ]
        all_reduce_summary(summary).save(folder / f"{way}-{rank}")

    probed("ddp", DistributedDataParallel(built()), mine, True)
    sharded = FullyShardedDataParallel(built(), device_id=torch.device("cpu"), use_orig_params=True)
    probed("fsdp", sharded, mine, True)
    for way, heads in (("fsdp2", None), ("fsdp2+heads", "1-2")):
        model = built()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        probed(way, model, mine, True, heads=heads)
    probed("tensor", tensor_parallel(built(), mesh), windows(), True)
    probed("tensor-gqa", tensor_parallel(built(), mesh), windows(), False, heads=-1)
    probed("tp_plan", planned(folder / "whole"), windows(), False)
    torch.save(met, folder / f"met{rank}")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # an object that holds gloo's threads past shutdown would abort it


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder that a number of ranks wrote to."""
    return cache(lambda size: run(size, tmp_path_factory))


def run(size: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(errors)[-4000:]
    return folder


@pytest.fixture(scope="module")
def entropy_of_each_head() -> Tensor:
    """From the eager weights of the whole model, (layers, heads)."""
    model = built()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(windows(), output_attentions=True).attentions
    rows = [-torch.xlogy(p.double(), p.double()).sum(-1).mean((0, 2)) for p in maps]
    found = torch.stack(rows)
    assert float(found.flatten().sort().values.diff().min()) > 1e-4  # no two heads are alike
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_together_read_the_whole_model(
    found: Callable[[int], Path], entropy_of_each_head: Tensor, way: str, ranks: tuple[int, int]
) -> None:
    size, rank = ranks
    summary = acutance.load(found(size) / f"{way}-{rank}")
    last = tuple(range(4 // size - 1, 4, 4 // size))  # of each rank
    expected = {"tensor-gqa": last, "fsdp2+heads": (1, 2)}.get(way, (0, 1, 2, 3))
    assert [layer.numbers for layer in summary.layers] == [expected] * 2
    assert [head for _, head in summary.places] == list(expected) * 2
    measured = summary.mean("entropy").view(2, -1)
    assert float((measured - entropy_of_each_head[:, list(expected)]).abs().max()) < 1e-5
    assert {layer.status for layer in summary.layers} == {"verified"}
    assert {layer.rows for layer in summary.layers} == {36}


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_read_its_own_part(found: Callable[[int], Path], ranks: tuple[int, int]) -> None:
    size, rank = ranks
    met = torch.load(found(size) / f"met{rank}")
    assert set(met) == set(WAYS)
    for way, (layers, unread) in met.items():
        assert unread == []
        assert [name.split(".")[-3:] for name, *_ in layers] == [
            ["layers", str(index), "self_attn"] for index in range(2)
        ], way
        share = tuple(range(4))[rank * 4 // size : (rank + 1) * 4 // size]
        own = {"tensor": share, "tp_plan": share, "tensor-gqa": share[-1:]}
        heads = own.get(way, (1, 2) if "heads" in way else (0, 1, 2, 3))
        assert {tuple(numbers) for *_, numbers in layers} == {heads}
        assert {(calls, status) for _, calls, status, _ in layers} == {(1, "verified")}


if __name__ == "__main__":
    work(Path(sys.argv[1]))
