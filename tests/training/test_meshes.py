"""QKClip of weights that are distributed over a mesh of ranks with two dimensions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from acutance import training
from acutance.training.across_ranks import multiply
from tests.versions import older

pytestmark = pytest.mark.filterwarnings("ignore")  # what PyTorch warns of while it shards


@contextmanager
def mesh_of(rank: int, shape: tuple[int, ...]) -> Iterator[Any]:
    """A mesh of which this process is one rank, with no other process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = int(torch.tensor(shape).prod())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "cp")[: len(shape)])
    finally:
        dist.destroy_process_group()


def chunks(rows: int, ranks: int) -> list[int]:
    """Where the parts of ``torch.chunk`` begin, of which some may be empty."""
    share = -(-rows // ranks)
    return [min(rank * share, rows) for rank in range(1, ranks)]


def scaled(rows: int, start: int, size: int) -> torch.Tensor:
    """Rows that hold their numbers, some of them a hundredfold."""
    weight = torch.arange(float(rows))[:, None].repeat(1, 3)
    weight[start : start + size] *= 100
    return weight


@pytest.mark.parametrize("rows", [8, 7, 13])
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3)])
def test_each_rank_multiplies_its_part_of_what_fsdp_and_tensor_parallelism_cut(
    rows: int, shape: tuple[int, int]
) -> None:
    parts: dict[int, list[float]] = {}
    for rank in range(shape[0] * shape[1]):
        with mesh_of(rank, shape) as mesh:
            first, second = mesh.get_coordinate()
            mine = scaled(rows, 0, 0).tensor_split(chunks(rows, shape[1]))[second]
            mine = mine.tensor_split(chunks(len(mine), shape[0]))[first].clone()
            before = mine[:, 0].tolist()
            placements = [_StridedShard(0, split_factor=shape[1]), Shard(0)]
            weight = DTensor.from_local(
                mine, mesh, placements, run_check=False, shape=torch.Size((rows, 3)), stride=(3, 1)
            )
            multiply(weight, 0, 2, 4, 100.0)
            for number, value in zip(before, weight.to_local()[:, 0].tolist(), strict=True):
                parts.setdefault(int(number), []).append(value)
    expected = scaled(rows, 2, 4)[:, 0].tolist()
    assert parts == {number: [value] for number, value in enumerate(expected)}, "each row once"


def test_an_order_that_is_not_known_is_refused() -> None:
    with mesh_of(0, (2, 2)) as mesh:
        placements = [_StridedShard(0, split_factor=3), Shard(0)]
        weight = DTensor.from_local(
            torch.ones(2, 3),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size((8, 3)),
            stride=(3, 1),
        )
        with pytest.raises(ValueError, match="not known how its 3 parts are ordered"):
            multiply(weight, 0, 2, 4, 100.0)
        weight = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        short = DTensor.from_local(
            weight.to_local()[:1], mesh, weight.placements, run_check=False,
            shape=weight.shape, stride=weight.stride(),
        )  # fmt: skip
        with pytest.raises(
            ValueError, match=r"has 1 of 8 entries, expected 2: .* cannot be scaled"
        ):
            multiply(short, 0, 2, 4, 100.0)


@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(0)),
        (Shard(0), Replicate()),
        (Shard(1), Replicate()),
    ],
    ids=str,
)
def test_each_rank_multiplies_its_part_of_plain_shards(rows: int, placements: Any) -> None:
    for rank, (first, second) in enumerate(product(range(2), range(2))):
        with mesh_of(rank, (2, 2)) as mesh:
            assert tuple(mesh.get_coordinate()) == (first, second)
            weight = distribute_tensor(scaled(rows, 0, 0), mesh, placements, src_data_rank=None)
            multiply(weight, 0, 1, 3, 100.0)
            expected = distribute_tensor(scaled(rows, 1, 3), mesh, placements, src_data_rank=None)
            assert torch.equal(weight.to_local(), expected.to_local())


class Attention(nn.Module):
    """Grouped queries; the number of heads is what the projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k_proj, self.v_proj = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, 4)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


RANKS = """
import os, sys
sys.modules["transformers"] = None  # none is run here, and its import takes seconds
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module
)
from acutance import training
from tests.training.test_meshes import Attention, data, model_of
rank, way, path = int(sys.argv[1]), sys.argv[3], sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=4)
model = model_of()
x = data()
if way == "tensor parallel":
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    tensor, replica = mesh, None
else:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor, replica = mesh["tp"], mesh["dp"]
    x = x.chunk(2)[replica.get_local_rank()]
plan = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel(),
        "o_proj": RowwiseParallel()}
for layer in model:
    parallelize_module(layer, tensor, plan)
    if way == "both":
        fully_shard(layer, mesh=replica)
if way == "both":
    fully_shard(model, mesh=replica)
clip = training.QKClip(model, 1.0)
with clip:
    model(x)
report = clip.step()
whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
counts = {name: value.tolist() for name, value in clip.clips.items()}
layouts = clip.state_dict()["layouts"]
torch.save((report.layers, whole, counts, layouts), path + f".{rank}")
dist.destroy_process_group()
os._exit(0)  # an object that holds gloo's threads past shutdown would abort it
"""


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention())


def data() -> torch.Tensor:
    return 4 * torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(3))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tensor parallel", "both"])
@pytest.mark.skipif(older("torch", "2.7"), reason="its fully_shard names its ranks otherwise")
def test_four_ranks_clip_as_one(way: str, tmp_path: Any) -> None:
    path = tmp_path / "meet"
    command = [sys.executable, "-W", "ignore", "-c", RANKS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(rank), str(path), way], env=environment)
        for rank in range(4)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0] * 4
    model = model_of()
    untouched = {name: value.clone() for name, value in model.state_dict().items()}
    clip = training.QKClip(model, 1.0)
    with clip:
        model(data())
    alone = clip.step()
    assert 0 < len(alone.clipped) < 16
    for rank in range(4):
        layers, whole, counts, layouts = torch.load(f"{path}.{rank}", weights_only=False)
        for mine, theirs in zip(alone.layers, layers, strict=True):
            assert mine.module == theirs.module
            assert len(theirs.max_logit) == 8, "the heads of all ranks"
            assert mine.max_logit == pytest.approx(theirs.max_logit, rel=1e-5)
            assert mine.factor == pytest.approx(theirs.factor, rel=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(whole[name], value, rtol=1e-5, atol=1e-6)
            if "q_proj" not in name:
                assert torch.equal(whole[name], untouched[name])
        assert counts == {name: value.tolist() for name, value in clip.clips.items()}
        assert layouts == clip.state_dict()["layouts"] == {"0": 0, "1": 0}, "checked on each rank"
