"""Classes: attention built to be exactly one, and heads on either side of every threshold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance.probing import CLASSES

N = 64


class Attend(nn.Module):
    """Attention of given scores, one map for each head."""

    def __init__(self, scores: Tensor, causal: bool = False) -> None:
        super().__init__()
        self.scores, self.causal = scores, causal
        self.embed = nn.Embedding(10, N)

    def forward(self, ids: Tensor) -> Tensor:
        heads = self.scores.shape[0]
        one = torch.eye(N).expand(len(ids), heads, N, N)
        key, value = self.scores.mT.expand_as(one), self.embed(ids)[:, None].expand_as(one)
        return F.scaled_dot_product_attention(one, key, value, is_causal=self.causal, scale=1.0)


def shifted(by: int, size: float = 1e3) -> Tensor:
    """Scores of which the largest is ``by`` positions from the query, where there is one."""
    return size * torch.diag(torch.ones(N - abs(by)), by)


def classes(scores: Tensor, *, causal: bool = False, special: tuple[int, ...] = ()) -> list[str]:
    model = Attend(scores[None], causal)
    ids = torch.randint(1, 10, (2, N))
    ids[:, N // 2] = 0
    with acutance.probe(model, structure=True, special=special) as probe:
        model(ids)
    ((found),) = acutance.classify(probe.summary())
    assert all(one.sentence and one.numbers for one in found)
    return [one.name for one in found]


def test_a_previous_token_head() -> None:
    assert classes(shifted(-1)) == ["local", "previous-token", "sharp", "positional"]


def test_a_head_that_looks_ahead_is_positional_and_no_previous_token_head() -> None:
    assert classes(shifted(3)) == ["local", "sharp", "positional"]


def test_a_local_head_that_is_not_sharp() -> None:
    distance = (torch.arange(N)[:, None] - torch.arange(N)).abs()
    assert classes(torch.where(distance <= 3, 0.0, -1e3), causal=True) == ["local"]


def test_a_sink_on_the_first_token() -> None:
    scores = torch.zeros(N, N)
    scores[:, 0] = 30
    assert classes(scores) == ["sink", "sharp"]


def test_a_sink_on_special_tokens_is_found_where_they_are_known() -> None:
    scores = torch.zeros(N, N)
    scores[:, N // 2] = 30
    assert classes(scores, special=(0,)) == ["sink", "sharp"]
    assert classes(scores) == ["sharp"]


def test_a_dead_and_a_diffuse_head() -> None:
    assert classes(torch.zeros(N, N)) == ["dead"]
    torch.manual_seed(0)
    diffuse = 0.75 * torch.randn(N, N)  # entropy about log 64 − 0.28, of log 64 = 4.16
    assert classes(diffuse) == ["diffuse"]


def test_a_head_of_no_class() -> None:
    torch.manual_seed(0)
    assert classes(2.0 * torch.randn(N, N)) == []


def test_a_sharp_head_that_follows_content() -> None:
    torch.manual_seed(0)
    scores = torch.zeros(N, N)
    scores[torch.arange(N), torch.randperm(N)] = 30
    assert classes(scores) == ["sharp"]


def test_every_class_is_described() -> None:
    assert list(CLASSES) == [
        "sink", "local", "previous-token", "diffuse", "sharp", "dead", "positional",
    ]  # fmt: skip
    assert all(one.source and one.name == name for name, one in CLASSES.items())
