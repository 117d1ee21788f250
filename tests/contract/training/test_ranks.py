"""Two processes: exact maxima and gathered negatives over ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from acutance import training

RANKS = """
import os, sys
sys.modules["transformers"] = None  # none is run here, and its import takes seconds
import torch, torch.distributed as dist
from acutance import training
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
torch.manual_seed(0)
attend = torch.nn.MultiheadAttention(16, 4, batch_first=True)
clip = training.QKClip(torch.nn.ModuleDict({"a": attend, "b": torch.nn.Linear(2, 2)}), 3.0)
x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(3)) * 6
with clip:
    attend(x[2 * rank : 2 * rank + 2], x[2 * rank : 2 * rank + 2], x[2 * rank : 2 * rank + 2])
first = clip.step()
torch.save((first.layers, attend.in_proj_weight), sys.argv[2] + f".{rank}")
if rank == 0:  # a layer that one rank alone sees
    with clip:
        attend(x[:2], x[:2], x[:2])
second = clip.step()
assert len(second.layers) == 1 and second.max_logit <= 6.0, second
criterion = training.InfoNCE("fixed", tau=0.2, symmetric=True, gather=True)
mine = x[2 * rank : 2 * rank + 2, 0].clone().requires_grad_()
other = x[2 * rank : 2 * rank + 2, 1]
loss = criterion(mine, other)
loss.backward()
torch.save((float(loss), mine.grad), sys.argv[2] + f".nce{rank}")
from torch.distributed.fsdp import fully_shard
for backward in (True, False):
    torch.manual_seed(0)
    attend = torch.nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)
    model = torch.nn.Sequential()
    model.add_module("attend", attend)
    model.forward = lambda x: model.attend(x, x, x)[0]
    fully_shard(model)
    clip = training.QKClip(model, 3.0)
    with clip:
        out = model(x[2 * rank : 2 * rank + 2])
    if backward:
        out.sum().backward()
    clip.step()
    whole = {name: value.full_tensor() for name, value in attend.state_dict().items()}
    torch.save(whole, sys.argv[2] + f".sharded{backward}{rank}")
dist.destroy_process_group()
os._exit(0)  # an object that holds gloo's threads past shutdown would abort it
"""


@pytest.mark.slow
def test_two_ranks_take_the_maximum_over_both(tmp_path: Any) -> None:
    where = tmp_path / "meet"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", RANKS]
    processes = [
        subprocess.Popen([*command, str(rank), str(where)], env=environment) for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    (layers, weight), (others, other_weight) = (
        torch.load(f"{where}.{rank}", weights_only=False) for rank in range(2)
    )
    assert layers == others
    assert torch.equal(weight, other_weight)

    torch.manual_seed(0)  # one process with both ranks' rows
    attend = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(3)) * 6
    clip = training.QKClip(attend, 3.0)
    with clip:
        attend(x, x, x)
    alone = clip.step().layers[0]
    assert layers[0].max_logit == pytest.approx(alone.max_logit, rel=1e-6)
    torch.testing.assert_close(weight, attend.in_proj_weight)

    torch.manual_seed(0)
    attend = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)
    before = {name: value.clone() for name, value in attend.state_dict().items()}
    clip = training.QKClip(attend, 3.0)
    with clip:
        attend(x, x, x)
    assert clip.step().clipped
    for backward in (True, False):
        for rank in range(2):
            sharded = torch.load(f"{where}.sharded{backward}{rank}")
            for name, value in attend.state_dict().items():
                torch.testing.assert_close(sharded[name], value)
    assert not torch.equal(attend.in_proj_weight, before["in_proj_weight"])

    both = x[:, 0].clone().requires_grad_()
    loss = training.InfoNCE("fixed", tau=0.2, symmetric=True)(both, x[:, 1])
    loss.backward()
    parts = [torch.load(f"{where}.nce{rank}", weights_only=False) for rank in range(2)]
    assert sum(part[0] for part in parts) / 2 == pytest.approx(float(loss.detach()), rel=1e-6)
    # each rank's gradient is of the sum of both losses, which averaging over ranks makes the mean
    torch.testing.assert_close(torch.cat([part[1] for part in parts]) / 2, both.grad)
