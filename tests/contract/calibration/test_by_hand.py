"""A law on attention that is written by hand in the plain form, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acutance
from acutance import scaling
from tests.versions import CACHE

LAW = scaling.LogN(train_length=3, n_min=2)  # by default, rows of up to 16 keys are alike
DIM, HEADS = 16, 4
WIDTH = DIM // HEADS


class ByHand(nn.Module):
    """Causal attention, whose scores a subclass makes of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (HEADS, WIDTH)) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        """The truth, in the plainest way; ``factor`` multiplies the queries."""
        query, key, value = (part.transpose(1, 2) for part in self.parts(x))
        scores = (query * factor) @ key.mT / math.sqrt(WIDTH)
        scores = scores.masked_fill(later(x.shape[1]), -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def later(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class Baddbmm(ByHand):
    """Batches of heads, and the mask inside the product."""

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.transpose(1, 2).reshape(-1, length, WIDTH) for part in self.parts(x))
        mask = later(length).to(x.dtype) * torch.finfo(x.dtype).min / 2
        scores = mask.expand(batch * HEADS, -1, -1).baddbmm(
            q, k.transpose(1, 2), beta=1.0, alpha=1 / math.sqrt(WIDTH)
        )
        scores = scores.view(batch, HEADS, length, length)
        weights = F.softmax(scores, dim=-1, dtype=x.dtype).view(-1, length, length)
        return torch.bmm(weights, v).unflatten(0, (batch, HEADS)).transpose(1, 2).flatten(2)


class ThreeDimensions(ByHand):
    """Batches of heads through the softmax too."""

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.transpose(1, 2).reshape(-1, length, WIDTH) for part in self.parts(x))
        scores = torch.bmm(q, k.mT).mul_(1 / math.sqrt(WIDTH))
        scores.masked_fill_(later(length), -1e30)
        out = nn.Softmax(dim=-1)(scores) @ v
        return out.unflatten(0, (batch, HEADS)).transpose(1, 2).flatten(2)


class Where(ByHand):
    """The key-query product turned round, with a mask by ``where``."""

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        q, k, v = self.parts(x)
        scores = torch.einsum("bshe,blhe->bhls", k, q / math.sqrt(WIDTH))
        scores = torch.where(later(x.shape[1]), -math.inf, scores)
        return torch.einsum("bhls,bshe->blhe", scores.softmax(dim=3), v).flatten(2)


class QueriesFirst(ByHand):
    """(L, B, H, S), as in fairseq's ways."""

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        q, k, v = self.parts(x)
        scores = torch.einsum("blhe,bshe->bhls", q, k) / math.sqrt(WIDTH)
        scores = scores.masked_fill(later(x.shape[1]), -1e30)
        weights = torch.exp(torch.log_softmax(scores.permute(0, 2, 1, 3), -1))
        return torch.einsum("blhs,bshe->blhe", weights, v).flatten(2)


class Wrapped(ByHand):
    """With a softmax that is a module, and a product that is another."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)
        self.score = Score()

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.parts(x))
        scores = self.score(query, key)
        scores = scores.masked_fill(later(x.shape[1]), -torch.inf)
        return (self.softmax(scores) @ value).transpose(1, 2).flatten(2)


class Score(nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(WIDTH)


def made(kind: type[ByHand], dtype: torch.dtype = torch.float64) -> tuple[ByHand, Tensor]:
    torch.manual_seed(1)
    model = kind().to(dtype).eval()
    return model, 3 * torch.randn(2, 11, DIM, dtype=dtype)


KINDS = [ByHand, Baddbmm, ThreeDimensions, Where, QueriesFirst, Wrapped]


@pytest.mark.parametrize("kind", KINDS)
def test_the_factor_of_each_row_multiplies_its_scores(kind: type[ByHand]) -> None:
    model, x = made(kind)
    factor = LAW.factor(torch.arange(1, 12), dtype=torch.float64).unsqueeze(-1)
    with torch.no_grad():
        want, plain = ByHand.forward(model, x, factor), ByHand.forward(model, x)
        torch.testing.assert_close(model(x), plain)
        with acutance.apply(model, LAW) as applied, acutance.probe(model) as probe:
            got = model(x)
        with acutance.apply(model, scaling.HeadTable([1.0])):
            assert torch.equal(model(x), model(x))
            one = model(x)
    assert (want - plain).abs().max() > 0.1
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert torch.equal(one, model(x))
    assert applied.calls == {kind.__name__: 1}
    name = [layer.module for layer in probe.summary().layers]
    assert name == [kind.__name__]  # as the probe calls it, which then sees the scaled scores
    with acutance.probe(model) as before:
        model(x)
    entropy = [each.summary().columns()["entropy_mean"] for each in (probe, before)]
    assert all(sharp < flat for sharp, flat in zip(*entropy, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_and_laws_that_need_the_entropy(kind: type[ByHand]) -> None:
    """The factor of a law that reads each row's entropy is that of the row as it was."""
    model, x = made(kind)
    law = {(0, 1): scaling.AdaptivePoly(), (0, 3): scaling.HeadTable([2.0])}
    query, key, _ = (part.transpose(1, 2) for part in model.parts(x))
    scores = query @ key.mT / math.sqrt(WIDTH)
    weights = scores.masked_fill(later(11), -torch.inf).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    n = torch.arange(1, 12).expand(2, HEADS, 11)
    factor = torch.ones(2, HEADS, 11, dtype=torch.float64)
    adapted = scaling.AdaptivePoly().factor(n, entropy=entropy, dtype=torch.float64)
    factor[:, 1] = adapted[:, 1]
    factor[:, 3] = 2.0
    with torch.no_grad():
        want = ByHand.forward(model, x, factor.unsqueeze(-1))
        with acutance.apply(model, law):
            got = model(x)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [ByHand, Baddbmm, ThreeDimensions, Where])
def test_gradients_are_those_of_a_scaled_query(kind: type[ByHand]) -> None:
    """Into weights and the law's own parameters; rerun under checkpointing alike."""
    model, x = made(kind)
    learned = scaling.LearnedSSMax(num_heads=HEADS).double()
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        model.zero_grad()
        learned.zero_grad()
        with acutance.apply(model, learned):
            run(x).square().sum().backward()
        found.append([p.grad.clone() for p in (*model.parameters(), *learned.parameters())])
    model.zero_grad()
    learned.zero_grad()
    factor = learned.factor(torch.arange(1, 12), dtype=torch.float64).unsqueeze(-1)
    ByHand.forward(model, x, factor).square().sum().backward()
    want = [p.grad for p in (*model.parameters(), *learned.parameters())]
    for grads in found:
        assert all(grad.isfinite().all() for grad in grads)
        for got, expected in zip(grads, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_scores_are_scaled_to_their_rounding(dtype: torch.dtype) -> None:
    """And a key hidden in float16 stays hidden after the scores are made wider."""

    class Upcast(ByHand):
        def forward(self, x: Tensor, _: Any = None) -> Tensor:
            query, key, value = (part.transpose(1, 2) for part in self.parts(x))
            scores = query @ key.mT / math.sqrt(WIDTH)
            scores = scores.masked_fill(later(x.shape[1]), torch.finfo(x.dtype).min)
            weights = scores.float().softmax(-1).to(x.dtype)
            return (weights @ value).transpose(1, 2).flatten(2)

    model, x = made(Upcast, dtype)
    wide, _ = made(ByHand)
    wide.load_state_dict({name: part.double() for name, part in model.state_dict().items()})
    factor = LAW.factor(torch.arange(1, 12), dtype=torch.float64).unsqueeze(-1)
    with torch.no_grad():
        want = wide(x.double(), factor)
        with acutance.apply(model, LAW):
            got = model(x).double()
    # roundings of scores of some ten, of λ up to 2.2 times as much, and of the weights
    assert (got - want).abs().max() < 40 * torch.finfo(dtype).eps * want.abs().max()


# -- real models ----------------------------------------------------------------------------------

VOCABULARY, LENGTH = 97, 12


def decoder(name: str) -> Any:
    import transformers as hf

    sizes: dict[str, dict[str, Any]] = {
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
        "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
        "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
        "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    }
    own = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = hf.AutoConfig.for_model(name, **sizes[name], **own)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return model


def ids(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)


@pytest.mark.parametrize("name", ["gptj", "codegen", "xglm"])
def test_a_row_of_a_cache_has_the_factor_of_its_position(name: str) -> None:
    model, text = decoder(name), ids()
    with torch.no_grad():
        plain = model(text).logits
        with acutance.apply(model, scaling.HeadTable([1.0])):
            assert torch.equal(model(text).logits, plain)
        with acutance.apply(model, LAW) as applied:
            whole = model(text).logits
            past, steps = None, []
            for cut in text.split([5, 1, 1, 5], 1):
                step = model(cut, **{CACHE: past}, use_cache=True)
                past = step.past_key_values
                steps.append(step.logits)
            padded = F.pad(text, (0, 3))
            mask = F.pad(torch.ones_like(text), (0, 3))
            right = model(padded, attention_mask=mask).logits[:, :LENGTH]
        assert torch.equal(model(text).logits, plain)
    assert (whole - plain).abs().max() > 0.05
    assert len(applied.calls) == 2
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=2e-4)
    torch.testing.assert_close(right, whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", ["gptj", "xglm"])
def test_generation_with_and_without_a_cache(name: str) -> None:
    model, text = decoder(name), ids()

    def generated(cache: bool) -> tuple[Tensor, Tensor]:
        out = model.generate(
            text, attention_mask=torch.ones_like(text), max_new_tokens=12, do_sample=False,
            use_cache=cache, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return out.sequences, torch.stack(out.logits, 1)

    with acutance.apply(model, LAW):
        (cached, first), (uncached, second) = generated(True), generated(False)
    assert torch.equal(cached, uncached)
    torch.testing.assert_close(first, second, rtol=0, atol=2e-4)
    assert (generated(True)[1] - first).abs().max() > 0.05


@pytest.mark.parametrize(
    ("name", "place", "slices"),
    [
        ("gptj", "attn", lambda module: [module.q_proj.weight]),
        ("xglm", "self_attn", lambda module: [module.q_proj.weight, module.q_proj.bias]),
        ("openai-gpt", "c_attn", lambda module: [module.weight[:, :32], module.bias[:32]]),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.* hides keys with a number above -1e9")  # openai-gpt's -1e4
def test_a_constant_factor_is_one_on_the_query_projection(
    name: str, place: str, slices: Callable[[Any], list[Tensor]]
) -> None:
    model, text = decoder(name), ids()
    with torch.no_grad():
        with acutance.apply(model, scaling.HeadTable([1.7])):
            got = model(text).logits
        plain = model(text).logits
        for full, module in model.named_modules():
            if full.endswith(place):
                for part in slices(module):
                    part.mul_(1.7)
        want = model(text).logits
    assert (want - plain).abs().max() > 0.05
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4)


def test_a_law_of_a_model_with_attention_by_hand_is_kept_in_a_file(tmp_path: Any) -> None:
    model, text = decoder("gptj"), ids()
    laws = {(0, 1): LAW, ("transformer.h.1.attn", 2): scaling.SSMax(s=0.5)}
    law = acutance.Law.of(model, laws)
    assert law.model.layers == 2
    law.save(tmp_path / "law.json")
    with torch.no_grad(), acutance.apply(model, laws):
        want = model(text).logits
    with torch.no_grad(), acutance.apply(model, acutance.Law.load(tmp_path / "law.json")):
        assert torch.equal(model(text).logits, want)


def test_calibration_holds_the_entropy() -> None:
    model = decoder("gptj")
    generator = torch.Generator().manual_seed(1)
    text = [torch.randint(3, VOCABULARY, (4, 64), generator=generator) for _ in range(3)]
    law = acutance.calibrate(model, text, lengths=[16, 32, 64])
    assert {head.module for head in law.heads} == {
        f"transformer.h.{layer}.attn" for layer in (0, 1)
    }
    for head in law.heads:
        assert head.status == ("held",) * len(head.status)
        assert head.after == pytest.approx(head.target, rel=0.05)
    assert max(head.factors[-1] for head in law.heads) > 1.05
    with acutance.apply(model, law), acutance.probe(model, metrics=["entropy"]) as probe:
        model(text[0])
    assert len(probe.summary().layers) == 2


# -- what is refused, and what is no attention -------------------------------------------------


class Capped(ByHand):
    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.parts(x))
        scores = 5 * torch.tanh(query @ key.mT / 5)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Additive(ByHand):
    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.parts(x))
        scores = torch.tanh(query[:, :, :, None] + key[:, :, None]).sum(-1)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class Alibi(ByHand):
    """A bias that falls with distance, and a mask in the product's own function."""

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.parts(x))
        place = torch.arange(x.shape[1])
        scores = query @ key.mT - 0.5 * (place - place[:, None]).abs()
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class LearnedBias(ByHand):
    """Zeros so far, but with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HEADS, 1, 11))

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        query, key, value = (part.transpose(1, 2) for part in self.parts(x))
        return ((query @ key.mT + self.bias).softmax(-1) @ value).transpose(1, 2).flatten(2)


class HeadsLast(ByHand):
    """A softmax over the second dimension of keys, heads last."""

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        q, k, v = self.parts(x)
        scores = torch.einsum("blhe,bshe->blsh", q, k)
        return torch.einsum("blsh,bshe->blhe", scores.softmax(dim=2), v).flatten(2)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Capped, "its scores go through tanh"),
        (Additive, "its scores are not a product of queries and keys"),
        (Alibi, "its scores have numbers added that are no mask, such as a bias"),
        (LearnedBias, "its scores have numbers added that are no mask, such as a bias"),
        (HeadsLast, r"its softmax is over dimension 2 of \(2, 11, 11, 4\)"),
    ],
)
def test_scores_that_cannot_be_scaled_are_refused_by_name(kind: type[ByHand], why: str) -> None:
    model, x = made(kind)
    match = (
        f"the law cannot be applied to {kind.__name__}: {why}; to exclude it, give the law by layer"
        "; to scale it, use F.scaled_dot_product_attention"
    )
    with pytest.raises(acutance.ApplyError, match=match), acutance.apply(model, LAW):
        model(x)
    with acutance.probe(model) as probe:
        model(x)
    assert len(probe.summary().layers) == 1  # which reads them


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_alibi_is_refused(name: str) -> None:
    model = decoder(name)
    match = "self_attention|attn: its scores have numbers added"
    with pytest.raises(acutance.ApplyError, match=match), acutance.apply(model, LAW):
        model(ids())


class Mixed(nn.Module):
    """A router and an attention over channels beside attention that a law scales."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = ByHand()
        self.route = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.matmul(x, self.route.weight.T).softmax(-1)
        return self.attend(x) * shares[..., :1]


def test_softmaxes_of_other_kinds_are_left_alone() -> None:
    torch.manual_seed(2)
    model, x = Mixed().double().eval(), 3 * torch.randn(2, 11, DIM).double()
    with torch.no_grad(), acutance.apply(model, LAW) as applied:
        got = model(x)
    factor = LAW.factor(torch.arange(1, 12), dtype=torch.float64).unsqueeze(-1)
    shares = (x @ model.route.weight.T).softmax(-1)
    torch.testing.assert_close(got, model.attend(x, factor) * shares[..., :1], rtol=0, atol=1e-12)
    assert applied.calls == {"attend": 1}


def test_windows_by_hand_are_skipped_unless_asked_for() -> None:
    import transformers as hf

    own = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    config = hf.GPTNeoConfig(
        **own, hidden_size=32, num_layers=2, num_heads=4, window_size=5, max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]], attn_implementation="eager",
    )  # fmt: skip
    model = hf.GPTNeoForCausalLM(config).eval()
    with torch.no_grad(), acutance.apply(model, LAW) as applied:
        model(ids())
    assert list(applied.calls) == ["transformer.h.0.attn.attention"]
    assert list(applied.skipped) == ["transformer.h.1.attn.attention"]
    with torch.no_grad(), acutance.apply(model, LAW, windowed=True) as applied:
        model(ids())
    assert len(applied.calls) == 2
