"""EntropyRegularizer, ZLoss and AttentionWatch against dense float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acutance
from acutance import training
from acutance.nn import GatedAttentionUnit, MultiheadAttention
from acutance.probing import ProbeError


def pair(requires_grad: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = 2 * torch.randn(2, 2, 3, 7, 4, dtype=torch.float64, generator=generator)
    return query.requires_grad_(requires_grad), key.requires_grad_(requires_grad)


def dense(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy, logsumexp and log n of causal rows, by the whole matrix."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    n = scores.shape[-1]
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    log_p = torch.log_softmax(scores, -1)
    entropy = -(log_p.exp() * log_p.masked_fill(hidden, 0.0)).sum(-1)
    counts = torch.arange(1, n + 1, dtype=torch.float64).log().expand_as(entropy)
    return entropy, torch.logsumexp(scores, -1), counts


@pytest.mark.parametrize(
    ("options", "distance"),
    [
        ({"target": 1.2}, lambda h, m: h - m.clamp(max=1.2)),
        ({"floor": 1.2}, lambda h, m: (m.clamp(max=1.2) - h).clamp(min=0)),
        ({"target": 0.6, "unit": "fraction"}, lambda h, m: h - 0.6 * m),
        ({"floor": 1.2, "margin": 0.3}, lambda h, m: (m.clamp(max=1.2) - h - 0.3).clamp(min=0)),
        ({"target": 1.2, "margin": 0.2}, lambda h, m: ((h - m.clamp(max=1.2)).abs() - 0.2).relu()),
    ],
)
def test_the_entropy_loss_is_that_of_whole_rows(options: dict[str, Any], distance: Any) -> None:
    query, key = pair()
    stats = acutance.row_statistics(query, key, is_causal=True)
    regularizer = training.EntropyRegularizer(**options, weight=0.7)
    loss = regularizer(stats)
    entropy, _, most = dense(query, key)
    want = 0.7 * distance(entropy, most).square().mean()
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
    assert float(want.detach()) > 1e-3
    grads = torch.autograd.grad(loss, (query, key), retain_graph=True)
    for mine, theirs in zip(grads, torch.autograd.grad(want, (query, key)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert regularizer.entropy == pytest.approx(float(entropy.detach().mean()))


def test_the_z_loss_is_that_of_whole_rows() -> None:
    query, key = pair()
    loss = training.ZLoss(0.3)(acutance.row_statistics(query, key, is_causal=True))
    _, lse, _ = dense(query, key)
    torch.testing.assert_close(loss, 0.3 * lse.square().mean(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "loss", [training.EntropyRegularizer(target=0.4), training.ZLoss(1.0)], ids=["entropy", "z"]
)
def test_gradients(loss: nn.Module) -> None:
    query, key = (part[:1, :1, :4].detach().requires_grad_() for part in pair())
    assert torch.autograd.gradcheck(
        lambda q, k: loss(acutance.row_statistics(q, k, is_causal=True)), (query, key)
    )


def test_rows_without_keys_and_padding_leave_no_trace() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0)
    x = torch.randn(2, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    watch, loss = training.AttentionWatch(model), training.EntropyRegularizer(target=0.5, weight=1)
    with watch:
        model(x, src_key_padding_mask=padding)
    whole = loss(watch)
    with watch:
        model(x[:1])
        model(x[1:, :4])
    parts = [rows.statistics.entropy - 0.5 for rows in watch.rows]
    want = torch.cat([part.flatten() for part in parts]).square().mean()
    torch.testing.assert_close(whole, want)
    whole.backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())

    query = torch.randn(1, 1, 3, 4, requires_grad=True)
    stats = acutance.row_statistics(query, query, is_causal=True, query_offset=-1)
    loss(stats).backward()
    assert bool(query.grad.isfinite().all())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.blocks.append(MultiheadAttention(16, 2, batch_first=True))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = (x,) if isinstance(block, nn.TransformerEncoderLayer) else (x, x, x)
            if self.use_reentrant is None:
                out = block(*inputs)
            else:
                out = checkpoint(block, *inputs, use_reentrant=self.use_reentrant)
            x = out[0] if isinstance(out, tuple) else out
        return x


def test_gradients_go_through_checkpointed_layers() -> None:
    x, found = torch.randn(2, 6, 16, requires_grad=True), []
    for use_reentrant in (None, False):
        torch.manual_seed(0)
        model = Checkpointed(use_reentrant)
        with training.AttentionWatch(model) as watch:
            out = model(x)
        assert len(watch.rows) == 3
        loss = training.EntropyRegularizer(target=0.5, weight=1.0)(watch) + training.ZLoss()(watch)
        (out.square().mean() + loss).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*found, strict=True):
        assert torch.equal(plain, checkpointed)
    model = Checkpointed(True)
    with training.AttentionWatch(model) as watch:
        model(x)
    with pytest.raises(ValueError, match="without reentrant checkpointing"):
        training.ZLoss()(watch.rows[:2])


def test_a_model_is_moved_towards_the_floor() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True, dropout=0.0)
    x = 3 * torch.randn(4, 12, 16)
    watch, loss = training.AttentionWatch(model), training.EntropyRegularizer(floor=2.0, weight=1.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    found = []
    for _ in range(30):
        with watch:
            model(x)
        value = loss(watch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(loss.entropy)
    assert found[0] < 1.0
    assert found[-1] > 1.6


def test_a_watched_model_computes_what_it_did() -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True, dropout=0.3)
    x = torch.randn(2, 5, 16)
    outs = []
    for watching in (False, True):
        torch.manual_seed(1)
        if watching:
            with training.AttentionWatch(model):
                outs.append(model(x, x, x, need_weights=False)[0])
        else:
            outs.append(model(x, x, x, need_weights=False)[0])
    assert torch.equal(*outs)


def test_what_cannot_be_regularised_is_said() -> None:
    loss = training.EntropyRegularizer(floor=1.0)
    query, key = pair(requires_grad=False)
    with pytest.raises(ValueError, match="rows have no gradient"):
        loss(acutance.row_statistics(query, key))
    with torch.no_grad():
        assert float(loss(acutance.row_statistics(query, key))) > 0
    with pytest.raises(ValueError, match="at least one row must see a key"):
        loss([])
    with pytest.raises(TypeError, match="got Tensor"):
        loss([query])
    unit = GatedAttentionUnit(16, 2)
    with pytest.raises(ProbeError, match="not a softmax"), training.AttentionWatch(unit):
        unit(torch.randn(1, 4, 16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass either target or floor"),
        ({"target": 1.0, "floor": 1.0}, "pass either target or floor"),
        ({"target": 1.2, "unit": "fraction"}, "target must be a fraction of log n"),
        ({"floor": 1.0, "unit": "bits"}, "unit must be one of nats, fraction"),
        ({"floor": -1.0}, "floor must be a finite number at least 0"),
        ({"floor": 1.0, "weight": -1.0}, "weight must be a finite number at least 0"),
        ({"floor": 1.0, "margin": math.nan}, "margin must be a finite number"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        training.EntropyRegularizer(**options)
    with pytest.raises(ValueError, match="weight must be a finite number at least 0"):
        training.ZLoss(-1.0)
