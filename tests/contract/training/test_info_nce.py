"""InfoNCE against cross-entropy and softmax over the whole matrix, in float64."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from acutance import training


def embeddings(rows: int = 9, width: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(size, width, dtype=torch.float64, generator=generator).requires_grad_()
        for size in (rows, rows, 4)
    ]


def dense(anchor: Tensor, positive: Tensor, extra: Tensor | None, scale: float) -> Tensor:
    """Logits (B, B or B + M)."""
    keys = positive if extra is None else torch.cat([positive, extra])
    return scale * normalize(anchor, dim=-1) @ normalize(keys, dim=-1).T


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("further", [False, True])
def test_loss_gradients_and_report_are_those_of_the_whole_matrix(
    symmetric: bool, further: bool
) -> None:
    anchor, positive, extra = embeddings()
    negatives = extra if further else None
    criterion = training.InfoNCE("fixed", tau=0.2, symmetric=symmetric)
    loss = criterion(anchor, positive, negatives)
    rows = torch.arange(9)
    sides = [dense(anchor, positive, negatives, 5.0)]
    if symmetric:
        sides.append(dense(positive, anchor, None, 5.0))
    want = torch.stack([cross_entropy(logits, rows) for logits in sides]).mean()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    inputs = [anchor, positive, *([extra] if further else [])]
    grads = torch.autograd.grad(loss, inputs, retain_graph=True)
    for mine, theirs in zip(grads, torch.autograd.grad(want, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)

    report = criterion.report
    assert report is not None
    entropies, effective, weights, right = [], [], [], []
    for logits in sides:
        own = torch.eye(9, logits.shape[1], dtype=torch.bool)
        p = torch.softmax(logits.detach().masked_fill(own, -torch.inf), -1)
        entropies.append(torch.special.entr(p).sum(-1).mean())
        effective.append((1 / p.square().sum(-1)).mean())
        weights.append(torch.softmax(logits.detach(), -1)[own].mean())
        right.append((logits.argmax(-1) == rows).double().mean())
    assert report.negatives == 8 + 4 * further
    assert report.temperature == pytest.approx(0.2, rel=1e-6)
    assert report.loss == pytest.approx(float(want.detach()))
    for name, parts in (
        ("negative_entropy", entropies),
        ("effective_negatives", effective),
        ("positive_weight", weights),
        ("accuracy", right),
    ):
        assert getattr(report, name) == pytest.approx(float(torch.stack(parts).mean()), rel=1e-9)


def test_gradcheck() -> None:
    anchor, positive, extra = (part.detach().requires_grad_() for part in embeddings(4, 3))
    criterion = training.InfoNCE("learned", tau=0.5, symmetric=True).double()
    assert torch.autograd.gradcheck(
        lambda a, p, e, _: criterion(a, p, e),
        (anchor, positive, extra, criterion.log_scale),
    )


def test_a_dominant_positive_does_not_spoil_the_negatives() -> None:
    """Taken out of the sums of all keys they would have cancelled: the positive has e⁸⁰ of them."""
    anchor = torch.eye(6)
    criterion = training.InfoNCE("fixed", tau=0.0125)
    criterion(anchor, anchor)
    assert criterion.report is not None
    assert criterion.report.effective_negatives == pytest.approx(5.0, rel=1e-6)
    assert criterion.report.negative_entropy == pytest.approx(math.log(5), rel=1e-6)


def test_the_learned_temperature_is_bounded_and_comes_back() -> None:
    criterion = training.InfoNCE("learned", tau=0.02, minimum=0.02).double()
    anchor, positive, _ = embeddings()
    for sign in (1, -1):
        criterion.zero_grad()
        (sign * criterion(anchor, positive)).backward()
        grad = criterion.log_scale.grad
        assert grad is not None
        # random pairs want a higher temperature; a descent step that would lower it is cut
        assert bool(grad > 0) if sign == 1 else bool(grad == 0)


def test_log_n_follows_the_number_of_candidates() -> None:
    criterion = training.InfoNCE("log_n", coefficient=3.5)
    for rows in (8, 64):
        criterion(*torch.randn(2, rows, 5))
        assert criterion.report is not None
        assert criterion.report.temperature == pytest.approx(1 / (3.5 * math.log(rows)), rel=1e-6)
    assert list(criterion.parameters()) == []


@pytest.mark.parametrize("target", [0.3, 0.7])
def test_the_target_entropy_is_met(target: float) -> None:
    torch.manual_seed(0)
    anchor, positive = torch.randn(2, 200, 24)
    criterion = training.InfoNCE("entropy_target", tau=0.5, target=target)
    for _ in range(12):
        criterion(anchor, positive)
    assert criterion.report is not None
    assert criterion.report.negative_entropy == pytest.approx(target * math.log(199), abs=1e-3)
    criterion.eval()
    before = criterion.log_scale.clone()
    criterion(anchor[:20], positive[:20])
    assert torch.equal(criterion.log_scale, before)


def test_both_directions_have_one_temperature_and_meet_the_target_together() -> None:
    """Few pairs, whose directions differ: a step between the two would leave 0.21, not 0.2."""
    generator = torch.Generator().manual_seed(1)
    anchor = torch.randn(16, 4, generator=generator)
    positive = anchor + 0.5 * torch.randn(16, 4, generator=generator)
    criterion = training.InfoNCE("entropy_target", target=0.2, symmetric=True)
    scales = []
    for _ in range(20):
        scales.append(float(criterion.log_scale.exp()))
        criterion(anchor, positive)
        assert criterion.report is not None
        assert criterion.report.temperature == pytest.approx(1 / scales[-1], rel=1e-6)
    report = criterion.report
    assert report.negative_entropy == pytest.approx(0.2 * math.log(15), rel=1e-4)
    fixed = training.InfoNCE("fixed", tau=report.temperature, symmetric=True)
    assert float(fixed(anchor, positive)) == pytest.approx(report.loss, rel=1e-5)


def test_rows_of_zeros_have_no_direction_and_no_gradient() -> None:
    anchor, positive, _ = (part.detach().clone() for part in embeddings())
    anchor[2], positive[4] = 0.0, 0.0
    anchor.requires_grad_()
    positive.requires_grad_()
    loss = training.InfoNCE("fixed", tau=0.2)(anchor, positive)
    want = cross_entropy(dense(anchor, positive, None, 5.0), torch.arange(9))
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
    loss.backward()
    for part, dead in ((anchor, 2), (positive, 4)):
        assert part.grad is not None
        assert not part.grad[dead].any()
        assert float(part.grad.abs().max()) < 10  # by a length of 1e-12 it would be 1e12


@pytest.mark.parametrize("size", [1e-30, 1e25])
def test_cosines_do_not_depend_on_the_length(size: float) -> None:
    anchor, positive, _ = (part.detach().float() for part in embeddings())
    criterion = training.InfoNCE("fixed")
    assert float(criterion(size * anchor, positive)) == pytest.approx(
        float(criterion(anchor, size * positive)), rel=1e-6
    )
    assert float(criterion(size * anchor, positive)) == pytest.approx(
        float(criterion(anchor, positive)), rel=1e-5
    )


@pytest.mark.parametrize("tau", [0.1, 0.07, 0.01])
def test_collapsed_embeddings_find_nothing(tau: float) -> None:
    """All cosines are 1, but for rounding of two kinds of product."""
    same = torch.randn(1, 6, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    criterion = training.InfoNCE("fixed", tau=tau)
    assert float(criterion(same, same)) == pytest.approx(math.log(8), rel=1e-4)
    assert criterion.report is not None
    assert criterion.report.accuracy == 0.0


def test_state_goes_on_elsewhere() -> None:
    anchor, positive = torch.randn(2, 20, 4)
    first = training.InfoNCE("entropy_target", target=0.4)
    first(anchor, positive)
    second = training.InfoNCE("entropy_target", target=0.4)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert torch.equal(first(anchor, positive), second(anchor, positive))
    assert list(training.InfoNCE("learned").state_dict()) == ["log_scale"]


def test_half_precision_is_widened_under_autocast_too() -> None:
    anchor, positive = torch.randn(2, 16, 8)
    exact = training.InfoNCE("fixed")(anchor, positive)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(training.InfoNCE("fixed")(anchor, positive), exact)
    half = training.InfoNCE("fixed")(anchor.bfloat16(), positive.bfloat16())
    assert half.dtype == torch.float32


def test_memory_is_that_of_the_rows() -> None:
    """No tensor of the graph has as many entries as the matrix."""
    sizes: list[int] = []
    anchor, positive = (torch.randn(2048, 4, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        training.InfoNCE("fixed", symmetric=True)(anchor, positive).backward()
    assert sizes
    assert max(sizes) <= 2048 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"temperature": "cosine"},
            "temperature must be one of fixed, learned, log_n, entropy_target",
        ),
        ({"tau": 0.0}, "tau must be a finite number at least 0.001"),
        ({"tau": 0.005}, "tau must be at least minimum=0.01"),
        ({"target": 1.0}, "target must be a finite number above 0 and below 1"),
        ({"coefficient": 0.0}, "coefficient must be a finite number above 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.InfoNCE(**options)


def test_bad_inputs() -> None:
    criterion, x = training.InfoNCE(), torch.randn(3, 4)
    with pytest.raises(TypeError, match="symmetric must be True or False"):
        training.InfoNCE(symmetric=1)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"positive must be a floating-point tensor, got torch\.int64"
    ):
        criterion(x, torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="positive must have the dtype and device"):
        criterion(x, x.double())
    with pytest.raises(ValueError, match=r"positive must have shape \(rows, d\)"):
        criterion(x, torch.randn(3, 5))
    with pytest.raises(ValueError, match="anchor and positive must contain at least one pair"):
        criterion(x, torch.randn(2, 4))
    with pytest.raises(ValueError, match="a row must have at least one negative"):
        criterion(x[:1], x[:1])
    with pytest.raises(ValueError, match="symmetric needs at least two pairs"):
        training.InfoNCE(symmetric=True)(x[:1], x[:1], x)
    assert float(criterion(x[:1], x[:1], x[1:]).detach()) >= 0


RANKS = """
import os, sys
sys.modules["transformers"] = None  # none is run here, and its import takes seconds
import torch, torch.distributed as dist
from acutance import training
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(3))
criterion = training.InfoNCE("entropy_target", tau=0.5, gather=True)
for step in range(4):
    criterion(x[rank], x[2 + rank], torch.cat([x[1 - rank]] * (1 + 8 * rank)))
    torch.save(criterion.log_scale, sys.argv[2] + f".{rank}{step}")
dist.destroy_process_group()
os._exit(0)  # an object that holds gloo's threads past shutdown would abort it
"""


@pytest.mark.slow
def test_ranks_with_unlike_numbers_of_negatives_keep_one_temperature(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    command = [sys.executable, "-W", "ignore", "-c", RANKS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([*command, str(rank), store], env=environment) for rank in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    for step in range(4):
        first, second = (torch.load(f"{store}.{rank}{step}") for rank in range(2))
        assert torch.equal(first, second)
