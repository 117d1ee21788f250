"""Where queries and keys are made: layouts told from a forward, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from acutance import training
from tests.versions import any_global_hook

HEADS, WIDTH = 4, 8


class Attend(nn.Module):
    """Attention with separate projections; the kinds below make queries and keys in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)

    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (B, H, L, E)."""
        q, k = (p(x).unflatten(-1, (HEADS, WIDTH)).mT.mT for p in (self.q_proj, self.k_proj))
        return q.transpose(1, 2), k.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.products(x)
        return functional.scaled_dot_product_attention(query, key, key)

    def largest(self, x: Tensor) -> Tensor:
        """Largest logit of each head, by hand."""
        with torch.no_grad():
            query, key = (part.double() for part in self.products(x))
        return (query @ key.mT / WIDTH**0.5).amax((0, 2, 3))


class Packed(Attend):
    def __init__(self) -> None:
        super().__init__()
        del self.q_proj, self.k_proj
        self.qkv = nn.Linear(32, 96)


class Blocks(Packed):
    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        return parts[0], parts[1]


class Interleaved(Packed):
    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.qkv(x).unflatten(-1, (HEADS, 3, WIDTH)).permute(3, 0, 2, 1, 4)
        return parts[0], parts[1]


class FeaturesFirst(Packed):
    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.qkv(x).unflatten(-1, (HEADS, WIDTH, 3)).permute(4, 0, 2, 1, 3)
        return parts[0], parts[1]


class Normalised(Attend):
    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().products(x)
        return 4 * functional.normalize(query, dim=-1), key


class Added(Attend):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(HEADS, 1, WIDTH))

    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().products(x)
        return query + self.offset, key


class Clamped(Attend):
    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().products(x)
        return query, key.clamp(-0.5, 0.5)


class Scaled(Attend):
    """A factor of each position and head, as a law on the scores has, and rotated keys."""

    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = super().products(x)
        by_place = 1 + torch.arange(x.shape[1]).log1p()[:, None]
        by_head = torch.tensor([1.0, 2.0, 3.0, 0.5])[:, None, None]
        return query * by_place * by_head, key.flip(-1)


class TimeFirst(Attend):
    """Projections of (L, B, D), as fairseq has them."""

    def products(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = (
            p(x.transpose(0, 1)).unflatten(-1, (HEADS, WIDTH)).permute(1, 2, 0, 3)
            for p in (self.q_proj, self.k_proj)
        )
        return query, key


class Tied(Attend):
    def __init__(self) -> None:
        super().__init__()
        self.k_proj = self.q_proj


def attending(kind: type[Attend], batch: int) -> tuple[Attend, Tensor]:
    generator = torch.Generator().manual_seed(batch)
    torch.manual_seed(3)
    return kind(), 3 * torch.randn(batch, 9, 32, generator=generator)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [Attend, Blocks, Interleaved, Scaled, TimeFirst, Tied])
def test_hot_heads_end_at_tau_and_others_are_as_they_were(kind: type[Attend], batch: int) -> None:
    model, x = attending(kind, batch)
    before = model.largest(x)
    tau = float(before.sort().values[1:3].mean())
    over = before > tau
    assert int(over.sum()) == 2
    clip = training.QKClip(model, tau)
    with clip:
        model(x)
    clip.step()
    after = model.largest(x)
    assert bool((after <= tau).all())
    torch.testing.assert_close(after[over], torch.full((2,), tau).double(), rtol=1e-4, atol=0)
    assert torch.equal(after[~over], before[~over])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [FeaturesFirst, Normalised, Added, Clamped])
def test_what_a_factor_on_the_weights_does_not_reach_is_refused(
    kind: type[Attend], batch: int
) -> None:
    model, x = attending(kind, batch)
    before = copy.deepcopy(model.state_dict())
    clip = training.QKClip(model, 1e-3)
    with clip:
        model(x)
    with pytest.raises(ValueError, match="not just rotated or scaled outputs"):
        clip.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_hooks_are_gone_after_the_first_forward_and_the_layout_stays() -> None:
    model, x = attending(Interleaved, 2)
    clip = training.QKClip(model, 1e9)
    for _ in range(2):
        with clip:
            model(x)
        assert not any_global_hook()
        clip.step()
    other = training.QKClip(model, 1e9)
    other.load_state_dict(clip.state_dict())
    assert other.state_dict()["layouts"] == clip.state_dict()["layouts"]
    single = model.largest(x[:1, :1])  # one token tells nothing
    with other:
        model(x[:1, :1])
    tau = float(single.max()) / 2
    assert tau > 0
    other.tau = tau
    other.step()
    assert float(model.largest(x[:1, :1]).max()) <= tau


def test_shared_weights_are_scaled_once_by_the_smallest_factor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attend(), nn.Flatten(2), nn.Linear(9 * WIDTH, 32), Attend())
    model[3].q_proj = model[0].q_proj
    x = 3 * torch.randn(2, 9, 32)
    weight = model[0].q_proj.weight.detach().clone()
    clip = training.QKClip(model, 1e-2)
    with clip:
        model(x)
    first, second = clip.step().layers
    want = torch.tensor([first.factor, second.factor]).amin(0).sqrt()
    got = (model[0].q_proj.weight / weight).view(HEADS, -1)
    torch.testing.assert_close(got, want[:, None].expand_as(got), rtol=1e-5, atol=0)


def hub(name: str) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
    falcon = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bias": True}
    if name == "persimmon":
        config = transformers.PersimmonConfig(
            **sizes, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, qk_layernorm=False,
        )  # fmt: skip
        return transformers.PersimmonModel(config)
    if name == "bigcode":
        config = transformers.GPTBigCodeConfig(
            **sizes, n_embd=32, n_layer=2, n_head=4, n_positions=32, multi_query=False
        )
        return transformers.GPTBigCodeModel(config)
    kinds: dict[str, dict[str, Any]] = {
        "falcon-one-key": {"multi_query": True, "new_decoder_architecture": False},
        "falcon-own-keys": {"multi_query": False, "new_decoder_architecture": False},
        "falcon-grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
    }
    return transformers.FalconModel(transformers.FalconConfig(**sizes, **falcon, **kinds[name]))


@pytest.mark.parametrize(
    "name", ["persimmon", "bigcode", "falcon-one-key", "falcon-own-keys", "falcon-grouped"]
)
def test_layouts_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Largest logits are taken from the arguments of PyTorch's function, in float64."""
    torch.manual_seed(1)
    model = hub(name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0) if parameter.dim() > 1 else parameter.add_(0.1)
    ids = torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(7))
    found: list[Tensor] = []
    attend = functional.scaled_dot_product_attention

    def measured(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        scores = query.double() @ key.double().repeat_interleave(groups, 1).mT
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores * options["scale"] if options.get("scale") else scores / WIDTH**0.5
        found.append(scores.masked_fill(hidden, -torch.inf).amax((0, 2, 3)))
        return attend(query, key, *rest, **options)

    def largest() -> Tensor:
        found.clear()
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(functional, "scaled_dot_product_attention", measured)
            model(ids)
        return found[0]

    before = largest()
    tau = float(before.sort().values[1:3].mean())
    over = before > tau
    clip = training.QKClip(model, tau, layers=[0])
    with clip:
        model(ids)
    clip.step()
    after = largest()
    assert bool((after <= tau).all())
    torch.testing.assert_close(after[over], torch.full((2,), tau).double(), rtol=1e-4, atol=0)
    assert torch.equal(after[~over], before[~over])
