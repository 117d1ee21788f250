"""QKClip and the regularisers on models whose softmax is written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance import training

VOCABULARY = 97
TAU = 1.0


def built(name: str) -> Any:
    import transformers as hf

    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes: dict[str, dict[str, Any]] = {
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
        "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
        "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
        "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
        "roformer": {**bert, "intermediate_size": 48, "embedding_size": 32},
        "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    }
    config = hf.AutoConfig.for_model(name, vocab_size=VOCABULARY, **sizes[name])
    torch.manual_seed(0)
    model = hf.AutoModel.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8.0)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(7))


#: Of each, the slices of a layer's query weight and bias that belong to one of four heads of 8.
QUERIES: dict[str, Any] = {
    "bloom": lambda m, head: [
        part.view(4, 3, 8, -1)[head, 0]
        for part in (m.query_key_value.weight, m.query_key_value.bias)
    ],
    "gptj": lambda m, head: [m.q_proj.weight.view(4, 8, -1)[head]],
    "mpt": lambda m, head: [m.Wqkv.weight.view(3, 4, 8, -1)[0, head]],
    "openai-gpt": lambda m, head: [m.c_attn.weight.T.reshape(3, 4, 8, -1)[0, head]],
    "xglm": lambda m, head: [m.q_proj.weight.view(4, 8, -1)[head], m.q_proj.bias.view(4, 8)[head]],
    "roformer": lambda m, head: [
        m.query.weight.view(4, 8, -1)[head],
        m.query.bias.view(4, 8)[head],
    ],
}


@pytest.mark.parametrize("name", QUERIES)
def test_every_head_ends_at_or_under_tau_and_the_others_are_untouched(name: str) -> None:
    model, text = built(name), ids()
    clip = training.QKClip(model, tau=TAU)
    with torch.no_grad(), clip:
        model(text)
    tau = sorted(clip._maxima[next(iter(clip._maxima))].tolist())[1] * 1.01
    clip.tau = tau  # so that about half the heads exceed it
    modules = dict(model.named_modules())
    before = {
        (place, head): [part.clone() for part in QUERIES[name](modules[place], head)]
        for place in clip._maxima
        for head in range(4)
    }
    report = clip.step()
    assert 0 < len(report.clipped) < 8
    for layer in report.layers:
        for head, factor in enumerate(layer.factor):
            parts = zip(
                QUERIES[name](modules[layer.module], head), before[layer.module, head], strict=True
            )
            for now, then in parts:
                if factor == 1.0:
                    assert torch.equal(now, then)
                else:
                    torch.testing.assert_close(now, then * factor**0.5)
    clip.settle(lambda: model(text))
    with torch.no_grad(), clip:
        model(text)
    assert clip.step().max_logit <= tau


def test_the_largest_logit_is_that_of_the_products_alone() -> None:
    """Bloom adds ALiBi inside the product; its queries and keys are scored without."""
    model, text = built("bloom"), ids()
    seen = []
    attend = model.h[0].self_attention
    attend.query_key_value.register_forward_hook(lambda _, __, out: seen.append(out.double()))
    clip = training.QKClip(model, tau=TAU)
    with torch.no_grad(), clip:
        model(text)
    query, key, _ = seen[0].unflatten(-1, (4, 3, 8)).movedim(-2, 0).transpose(2, 3)
    products = (query @ key.mT / 8**0.5).masked_fill(torch.ones(14, 14).triu(1).bool(), -torch.inf)
    largest = products.amax((0, 2, 3)).tolist()
    assert clip._maxima["h.0.self_attention"].tolist() == pytest.approx(largest, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("codegen", ValueError, r"h\.0\.attn cannot be clipped.*an unknown order of heads"),
        ("xlnet", acutance.ProbeError, r"its scores are the sum of 2 products of queries and keys"),
    ],
)
def test_what_cannot_be_clipped_is_refused_by_name(
    name: str, error: type[Exception], match: str
) -> None:
    model = built(name)
    before = {part: value.clone() for part, value in model.state_dict().items()}
    clip = training.QKClip(model, tau=TAU)

    def run() -> None:
        with torch.no_grad(), clip:
            model(ids())
        clip.step()

    with pytest.raises(error, match=match):
        run()
    assert all(torch.equal(value, before[part]) for part, value in model.state_dict().items())


class Plain(nn.Module):
    """Causal attention of four heads, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv = 4, nn.Linear(32, 96)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        scores = torch.einsum("bhle,bhse->bhls", query, key) / 8**0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return weights @ value, weights


def test_einsum_with_dots_is_clipped() -> None:
    class Dots(Plain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            query, key, value = (
                part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
            )
            weights = (torch.einsum("... i d, ... j d -> ... i j", query, key) / 8**0.5).softmax(-1)
            return torch.einsum("... i j, ... j d -> ... i d", weights, value), weights

    torch.manual_seed(0)
    model, x = Dots(), 4 * torch.randn(2, 9, 32)
    clip = training.QKClip(model, tau=0.5)
    with torch.no_grad(), clip:
        model(x)
    assert len(clip.step().clipped) == 4
    with torch.no_grad(), clip:
        model(x)
    assert clip.step().max_logit <= 0.5


@pytest.mark.parametrize("which", ["entropy", "z"])
def test_gradients_of_the_regularisers_are_those_of_the_scores(which: str) -> None:
    torch.manual_seed(0)
    model, x = Plain().double(), 2 * torch.randn(2, 9, 32).double()
    regularizer: Any = training.ZLoss(weight=0.5)
    if which == "entropy":
        regularizer = training.EntropyRegularizer(target=1.0, weight=0.5)
    watch = training.AttentionWatch(model)
    with watch:
        model(x)
    loss = regularizer(watch)
    (got,) = torch.autograd.grad(loss, model.qkv.weight)

    query, key, _ = (p.unflatten(-1, (4, 8)).transpose(1, 2) for p in model.qkv(x).chunk(3, -1))
    scores = query @ key.mT / 8**0.5
    scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1)
    entropy = lse - (weights * scores.clamp(min=-1e9)).sum(-1)
    most = torch.arange(1, 10).log().clamp(max=1.0).double()
    want = 0.5 * (lse if which == "z" else entropy - most).square().mean()
    assert loss.item() == pytest.approx(want.item(), rel=1e-9)
    torch.testing.assert_close(got, torch.autograd.grad(want, model.qkv.weight)[0])
