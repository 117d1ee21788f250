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


class Multiplied(nn.Module):
    """Scores of (B, L, H, S) whose weights are turned before a batched product, and dropped."""

    def __init__(self, heads: int | None = HEADS) -> None:
        super().__init__()
        if heads is not None:
            self.num_heads = heads
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("blhd,bshd->blhs", x, x) / WIDTH**0.5
        weights = self.dropout(scores.softmax(-1)).transpose(1, 2)
        return weights @ x.transpose(1, 2)


class Copied(nn.Module):
    """Heads first, with values laid out anew: what the product takes tells only queries."""

    def __init__(self, heads: int | None = HEADS, *, projected: bool = False) -> None:
        super().__init__()
        if heads is not None:
            self.num_heads = heads
        self.value = nn.Linear(HEADS * WIDTH, HEADS * WIDTH) if projected else None

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, heads, width)
        x = x.permute(2, 0, 1, 3).contiguous()
        return (x @ x.mT / WIDTH**0.5).softmax(-1) @ x


def read(model: nn.Module, *calls: Tensor) -> tuple[int, Tensor, list[str]]:
    """Heads, entropy summed over each head's rows, and what is listed."""
    with acutance.probe(model.eval(), verify=True) as probe:
        for x in calls:
            model(x)
    summary = probe.summary()
    (layer,) = summary.layers
    return layer.heads, summary.mean("entropy").float() * layer.rows, probe.unread


@pytest.mark.parametrize(
    ("model", "doubtful"),
    [
        (RowAttention(), alignment(batch=HEADS)),
        (HeadsThird(), tokens(2, HEADS)),
        (HeadsThird(), tokens(HEADS, HEADS)),
        (Multiplied(), tokens(2, HEADS)),
        (Multiplied(), tokens(HEADS, HEADS)),
        (Multiplied(heads=None), tokens(2, 7)),
        (Multiplied(heads=None), tokens(3, HEADS)),
    ],
)
def test_the_product_that_follows_decides(model: nn.Module, doubtful: Tensor) -> None:
    heads, entropy, unread = read(model, doubtful)
    assert (heads, unread) == (HEADS, [])
    torch.testing.assert_close(entropy, entropy_of(model, doubtful), atol=1e-4, rtol=1e-4)


def test_projections_tell_the_number_of_heads() -> None:
    x = tokens(2, 7)
    heads, entropy, unread = read(Copied(heads=None, projected=True), x)
    assert (heads, unread) == (HEADS, [])
    torch.testing.assert_close(entropy, entropy_of(HeadsThird(), x), atol=1e-4, rtol=1e-4)
    assert read(Copied(heads=None), x)[0] == 2  # nothing tells: the second dimension


def test_weights_laid_out_anew_say_nothing() -> None:
    class Anew(Multiplied):
        def forward(self, x: Tensor) -> Tensor:
            scores = torch.einsum("blhd,bshd->blhs", x, x) / WIDTH**0.5
            return scores.softmax(-1).transpose(1, 2).contiguous() @ x.transpose(1, 2)

    (line,) = read(Anew(), tokens(2, HEADS))[2]
    assert f"fits its {HEADS} heads in more than one way" in line


@pytest.mark.parametrize("first", [False, True])
def test_a_call_that_fits_twice_is_read_as_others_are(first: bool) -> None:
    telling, doubtful = tokens(2, 9), tokens(HEADS, 9)
    calls = (doubtful, telling) if first else (telling, doubtful)
    heads, entropy, unread = read(Copied(), *calls)
    assert (heads, len(unread)) == (HEADS, int(first))
    wanted = sum(entropy_of(HeadsThird(), x) for x in calls)
    assert torch.allclose(entropy, wanted, atol=1e-4) is not first


def test_one_head_in_a_batch_of_one_is_read_alike_either_way() -> None:
    class One(nn.Module):
        num_heads = 1

        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT / WIDTH**0.5).softmax(-1) @ x

    x = 2.0 * torch.randn(1, 1, 9, WIDTH)
    heads, entropy, unread = read(One(), x)
    assert (heads, unread) == (1, [])
    wanted = torch.distributions.Categorical(logits=x @ x.mT / WIDTH**0.5).entropy().sum()
    torch.testing.assert_close(entropy[0], wanted, atol=1e-4, rtol=1e-4)


def test_what_no_call_decides_is_listed() -> None:
    (line,) = read(Copied(), tokens(HEADS, 9))[2]
    assert f"fits its {HEADS} heads in more than one way" in line
    assert "the second dimension was assumed to be heads" in line
