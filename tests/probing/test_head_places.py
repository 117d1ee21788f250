"""Which dimension of scores is heads, where more than one has their number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import acutance

HEADS, WIDTH = 4, 8


class RowAttention(nn.Module):
    """Of rows of an alignment, tied, with heads first: as ESM's MSA transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:  # (rows, columns, batch, heads, width)
        scores = torch.einsum("rinhd,rjnhd->hnij", x, x) / (WIDTH * x.shape[0]) ** 0.5
        return torch.einsum("hnij,rjnhd->rinhd", scores.softmax(-1), x)


class HeadsThird(nn.Module):
    """Scores of (B, L, H, S)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, heads, width)
        scores = torch.einsum("blhd,bshd->blhs", x, x) / WIDTH**0.5
        return torch.einsum("blhs,bshd->blhd", scores.softmax(-1), x)


def alignment(batch: int, columns: int = 7) -> Tensor:
    return 2.0 * torch.randn(3, columns, batch, HEADS, WIDTH)


def tokens(batch: int, count: int) -> Tensor:
    return 2.0 * torch.randn(batch, count, HEADS, WIDTH)


def entropy_of(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, RowAttention):
        scores = torch.einsum("rinhd,rjnhd->nhij", x, x) / (WIDTH * x.shape[0]) ** 0.5
    else:
        scores = torch.einsum("blhd,bshd->bhls", x, x) / WIDTH**0.5
    return torch.distributions.Categorical(logits=scores).entropy().sum((0, 2))


def test_heads_come_first_where_only_they_fit() -> None:
    torch.manual_seed(0)
    model, x = RowAttention(), alignment(batch=2)
    with acutance.probe(model, verify=True) as probe:
        model(x)
    summary = probe.summary()
    assert ([layer.heads for layer in summary.layers], probe.unread) == ([HEADS], [])
    wanted = entropy_of(model, x) / summary.layers[0].rows
    torch.testing.assert_close(summary.mean("entropy").float(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "telling", "doubtful"),
    [
        (RowAttention(), alignment(batch=2), alignment(batch=HEADS)),
        (HeadsThird(), tokens(2, 9), tokens(2, HEADS)),
    ],
)
def test_a_call_that_fits_twice_is_read_as_others_are(
    model: nn.Module, telling: Tensor, doubtful: Tensor
) -> None:
    with acutance.probe(model, verify=True) as probe:
        model(telling)
        model(doubtful)
    summary = probe.summary()
    assert probe.unread == []
    (layer,) = summary.layers
    wanted = (entropy_of(model, telling) + entropy_of(model, doubtful)) / layer.rows
    torch.testing.assert_close(summary.mean("entropy").float(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "doubtful"),
    [(RowAttention(), alignment(batch=HEADS)), (HeadsThird(), tokens(2, HEADS))],
)
def test_what_no_call_decides_is_listed(model: nn.Module, doubtful: Tensor) -> None:
    with acutance.probe(model) as probe:
        model(doubtful)
    (line,) = probe.unread
    assert f"fits its {HEADS} heads in more than one way" in line
    assert "the second dimension was taken for heads" in line
