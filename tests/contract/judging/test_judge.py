"""acutance.judge on models: losses equal the model's own, laws that help and hurt, resuming."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import acutance
from acutance.judging import HeadsOff, LossError, MaskedTokens, NextToken
from acutance.scaling import ClipLogN, LogN
from tests.contract import texts
from tests.contract.trained import decoder

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NO_TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def build(name: str) -> torch.nn.Module:
    """A small model with random weights, far from even predictions."""
    import transformers as hf

    grouped = SIZES | NO_TOKENS | {"num_key_value_heads": 2}
    kinds: dict[str, tuple[Any, Any]] = {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**grouped)),
        "gemma2": (  # caps its logits
            hf.Gemma2ForCausalLM,
            hf.Gemma2Config(**grouped, head_dim=8, final_logit_softcapping=2.0),
        ),
        "granite": (hf.GraniteForCausalLM, hf.GraniteConfig(**grouped, logits_scaling=3.0)),
        "cohere": (hf.CohereForCausalLM, hf.CohereConfig(**grouped, logit_scale=0.25)),
        "gpt2": (
            hf.GPT2LMHeadModel,
            hf.GPT2Config(
                vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1,
                eos_token_id=None,
            ),
        ),
        "bert": (hf.BertForMaskedLM, hf.BertConfig(**SIZES)),
        "bert-base": (hf.BertModel, hf.BertConfig(**SIZES)),
        "t5": (
            hf.T5ForConditionalGeneration,
            hf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4),
        ),
    }  # fmt: skip
    torch.manual_seed(3)
    kind, config = kinds[name]
    model: torch.nn.Module = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def ids(count: int, length: int) -> Tensor:
    return torch.randint(3, 97, (count, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere", "gpt2"])
def test_the_loss_in_pieces_is_the_models_own(name: str) -> None:
    """Token by token and in the mean, whatever a model does to its logits, a few at a time."""
    model, tokens, rows = build(name), ids(2, 24), []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda *given: rows.append(given[2].numel() // 97))
    scored = NextToken(logits=97 * 5).score(model, {"input_ids": tokens})
    handle.remove()
    assert max(rows[1:]) <= 5  # logits at once, after the comparison with the whole
    with torch.no_grad():
        output = model(input_ids=tokens, labels=tokens)
    own = F.cross_entropy(
        output.logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none"
    ).double()
    assert scored.loss[:, 0].isnan().all()
    torch.testing.assert_close(scored.loss[:, 1:], own, atol=1e-5, rtol=0)
    assert float(scored.loss.nanmean()) == pytest.approx(float(output.loss), abs=1e-5)
    assert scored.n[0].tolist() == list(range(24))


def test_padding_has_no_loss_and_no_place() -> None:
    model, tokens = build("llama"), ids(1, 12)
    alone = NextToken().score(model, {"input_ids": tokens})
    for left in (False, True):
        mask = F.pad(torch.ones_like(tokens), (5, 0) if left else (0, 5))
        padded = {
            "input_ids": F.pad(tokens, (5, 0) if left else (0, 5)),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
        found = NextToken().score(model, padded)
        known = ~found.loss.isnan()
        torch.testing.assert_close(found.loss[known], alone.loss[0, 1:], atol=1e-5, rtol=0)
        assert found.n[known].tolist() == list(range(1, 12))


def test_masked_tokens_are_the_same_for_every_law_and_batch() -> None:
    model, tokens = build("bert"), ids(4, 40)
    loss = MaskedTokens(2, special=[5])
    scored = loss.score(model, {"input_ids": tokens})
    masked = ~scored.loss.isnan()
    assert not (masked & (tokens == 5)).any()
    assert masked.sum(1).tolist() == [round(0.15 * int((row != 5).sum())) for row in tokens]
    assert (scored.n == 40).all()
    with torch.no_grad():
        logits = model(input_ids=tokens.masked_fill(masked, 2)).logits
    own = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").double()
    torch.testing.assert_close(scored.loss[masked], own[masked], atol=1e-5, rtol=0)
    for row in range(4):
        one = loss.score(model, {"input_ids": tokens[row : row + 1]}).loss
        torch.testing.assert_close(one, scored.loss[row : row + 1], equal_nan=True)
    other = MaskedTokens(2, seed=1).score(model, {"input_ids": tokens}).loss
    assert not torch.equal(other.isnan(), scored.loss.isnan())


@pytest.fixture(scope="module")
def windows() -> Tensor:
    """Windows of 512 bytes of files that the decoder was not trained on."""
    held_out = texts.read(texts.files("held out"))
    return texts.sample_windows(held_out, 512, 8, torch.Generator().manual_seed(0))


def test_laws_that_help_and_hurt(windows: Tensor) -> None:
    """Beyond its 128 bytes log n helps the decoder; a law that doubles every logit hurts it."""
    model = decoder()
    laws = {
        "clip": ClipLogN(train_length=128),
        "sharp": LogN(base=10.0),
        "one head": HeadsOff({0: [0]}),
    }
    found = acutance.judge(model, windows, laws)
    assert [law.verdict for law in found.laws] == ["helps", "hurts", "hurts"]
    assert (found.windows, found.tokens, found.groups, found.unit) == (8, 8 * 512, 8, "window")
    before = found["clip"].by_position[:4]
    assert before[-1].last == 128
    assert all(part.delta == pytest.approx(0, abs=1e-6) for part in before)
    assert found["clip"].by_position[-1].delta < -0.05
    for law in found.laws:  # the mean over all is that of its parts
        sizes = [part.last - part.first + 1 for part in law.by_position]
        sizes[-1] -= 1  # nothing is predicted from the last byte
        mean = sum(
            size * one.delta for size, one in zip(sizes, law.by_position, strict=True)
        ) / sum(sizes)
        assert mean == pytest.approx(law.delta, abs=1e-9)
    with torch.no_grad():
        logits = model(input_ids=windows).logits[:, :-1]
        with acutance.apply(model, laws["clip"]):
            under = model(input_ids=windows).logits[:, :-1]
    losses = [float(F.cross_entropy(one.flatten(0, 1), windows[:, 1:].flatten()))
              for one in (logits, under)]  # fmt: skip
    assert found["clip"].delta == pytest.approx(losses[1] - losses[0], abs=1e-5)
    assert found.mean_loss == pytest.approx(losses[0], abs=1e-5)


def test_heads_off_is_the_model_without_them() -> None:
    """Zeroing a head's output is zeroing its columns of the output projection."""
    model, tokens = build("llama"), ids(2, 16)
    without: Any = copy.deepcopy(model)
    with torch.no_grad():
        without.model.layers[1].self_attn.o_proj.weight[:, 8:24] = 0.0
        expected = without(input_ids=tokens).logits
        with HeadsOff({1: [1, 2]}).applied(model):
            found = model(input_ids=tokens).logits
    torch.testing.assert_close(found, expected)
    with torch.no_grad():
        assert not torch.equal(model(input_ids=tokens).logits, expected)


def test_windows_are_cut_and_grouped(windows: Tensor) -> None:
    """Parts of one window belong together; texts do from five on."""
    model = decoder()
    windows, law = windows[:6, :96], ClipLogN(train_length=16)
    found = acutance.judge(model, windows[:2], law, lengths=[32, 48])
    assert (found.windows, found.groups, found.lengths) == (2 * 5, 2, (32, 48))
    some = acutance.judge(model, [windows], law, texts=[0, 0, 1, 1, 2, 2])
    assert (some.unit, some.groups) == ("window", 6)
    many = acutance.judge(model, [windows], law, texts=list("abcdde"))
    assert (many.unit, many.groups) == ("text", 5)
    assert many.laws[0].delta == pytest.approx(some.laws[0].delta)


def test_a_loss_of_your_own() -> None:
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def far(model: torch.nn.Module, batch: Any) -> Tensor:
        x = batch["x"]
        return (model(x, x, x)[0] - x).square().mean(-1)

    batches = [{"x": 2 * torch.randn(1, 32, 8)} for _ in range(6)]
    found = acutance.judge(model, batches, ["ssmax"], loss=far)
    assert found.loss.endswith("far")
    with torch.no_grad():
        plain = [far(model, batch).mean() for batch in batches]
        with acutance.apply(model, "ssmax"):
            under = [far(model, batch).mean() for batch in batches]
    expected = torch.stack(under).mean() - torch.stack(plain).mean()
    assert found.laws[0].delta == pytest.approx(float(expected), abs=1e-6)


class Killed(BaseException):
    """Ends a run as SIGKILL does: nothing is written any more."""


@pytest.mark.parametrize(("ends_by", "again"), [(KeyboardInterrupt, 0), (Killed, 1)])
def test_a_stopped_run_goes_on_where_it_was(
    ends_by: type[BaseException], again: int, windows: Tensor, tmp_path: Path
) -> None:
    """The result is the same, and only what was not yet written runs again."""
    model, laws, state = decoder(), ["clip_log_n:train_length=64"], tmp_path / "state"
    windows = windows[:3, :128]
    whole = acutance.judge(model, windows, laws)
    ran = [0]

    def count(module: Any, given: tuple[Tensor, ...], output: Any) -> None:
        ran[0] += given[0].shape[1] == 128  # shorter is the comparison of the head in pieces

    handle = model.model.layers[0].register_forward_hook(count)
    for stop in (1, 4, 99):
        done = [0]

        def advance(tokens: int, ready: int, now: bool, stop: int = stop, done: Any = done) -> None:
            done[0] += 1
            if done[0] == stop:
                raise ends_by

        if stop < 99:
            with pytest.raises(ends_by):
                acutance.judge(model, windows, laws, save=state, resume=True, advance=advance)
    found = acutance.judge(model, windows, laws, save=state, resume=True, advance=advance)
    handle.remove()
    assert found == whole
    assert ran[0] == 3 * 2 + again


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"laws": ["log_n:train_length=64"]},
            "state cannot be resumed: --law was clip_log_n:train_length=32 and is now "
            "log_n:train_length=64$",
        ),
        ({"lengths": [16, 64]}, "--lengths was 64 and is now 16, 64$"),
        ({"windows": "fewer"}, r"the number of windows \(--windows\) was 3 and is now 2$"),
        ({"windows": "other"}, "cannot be resumed: it was written for another text, or other win"),
        ({"model": "other"}, "cannot be resumed: it was written for another MODEL, or for other"),
        ({"damage": True}, "contains no comparison to resume"),
    ],
)
def test_another_run_is_not_resumed(
    change: dict[str, Any], match: str, windows: Tensor, tmp_path: Path
) -> None:
    model, state = decoder(), tmp_path / "state"
    windows, laws = windows[:3, :64], change.get("laws", ["clip_log_n:train_length=32"])
    lengths = change.get("lengths")
    acutance.judge(model, windows, ["clip_log_n:train_length=32"], save=state)
    if "windows" in change:
        windows = windows.flip(0) if change["windows"] == "other" else windows[:2]
    if "model" in change:
        model = copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
    if "damage" in change:
        state.write_bytes(state.read_bytes()[:-3] + b"abc")
    with pytest.raises(FileExistsError, match="resume=True continues it"):
        acutance.judge(model, windows, laws, save=state)
    with pytest.raises(ValueError, match=match):
        acutance.judge(model, windows, laws, lengths=lengths, save=state, resume=True)


@pytest.mark.parametrize(
    ("given", "kind", "match"),
    [
        ({"windows": ids(1, 16)}, ValueError, "at least 2 windows of 16 tokens, got 1"),
        ({"laws": []}, ValueError, "at least one law"),
        ({"laws": "nothing"}, ValueError, "'nothing' is neither a file"),
        ({"laws": ["ssmax", "ssmax"]}, ValueError, "'ssmax' twice"),
        ({"laws": 7}, TypeError, "law must be a scaling or its name"),
        ({"laws": "off:a.b"}, ValueError, "heads must be LAYER.HEAD"),
        ({"laws": "off:0.9"}, ValueError, "no head 9: model.layers.0.self_attn has heads 0 to 3"),
        ({"model": "bert-base", "loss": "next_token"}, LossError, "no language-model head"),
        (
            {"model": "bert"},
            LossError,
            r"predicts masked tokens: pass loss=acutance\.judging\.MaskedTokens",
        ),
        ({"model": "t5"}, LossError, "encoder-decoder"),
        ({"model": "gpt2", "windows": ids(2, 80)}, ValueError, "the model has 64 positions"),
        ({"loss": "loss"}, LossError, "a function of model and batch, got 'loss'"),
        ({"loss": lambda *_: 1.0}, LossError, "one number for each token"),
        ({"texts": [0]}, ValueError, "got 1 names for 2 windows"),
        ({"resume": True}, ValueError, "got save=None"),
    ],
)
def test_bad_input_is_one_sentence(given: dict[str, Any], kind: Any, match: str) -> None:
    given = {"model": "llama", "windows": ids(2, 16), "laws": "ssmax"} | given
    model = build(given.pop("model"))
    with pytest.raises(kind, match=match) as caught:
        acutance.judge(model, given.pop("windows"), given.pop("laws"), **given)
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_no_number_is_refused() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.inf
    with pytest.raises(LossError, match="not finite, without any law"):
        acutance.judge(model, ids(2, 16), "ssmax")
