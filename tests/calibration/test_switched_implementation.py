"""A law on a model whose attention implementation is switched between passes."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import acutance
from acutance.scaling import LogN

IDS = torch.arange(40)[None]


@pytest.fixture
def model() -> GPT2LMHeadModel:
    """A GPT-2 whose own softmax, with ``eager``, takes upcast scores."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64, reorder_and_upcast_attn=True
    )
    config._attn_implementation = "sdpa"
    return GPT2LMHeadModel(config).eval()


@torch.no_grad()
def test_a_second_law_follows_what_the_model_runs_now(model: GPT2LMHeadModel) -> None:
    with acutance.apply(model, LogN(train_length=4)):
        expected = model(IDS).logits
    model.set_attn_implementation("eager")
    with acutance.apply(model, LogN(train_length=4)):
        torch.testing.assert_close(model(IDS).logits, expected)


@torch.no_grad()
def test_a_law_follows_a_switch_under_it(model: GPT2LMHeadModel) -> None:
    with acutance.apply(model, LogN(train_length=4)):
        expected = model(IDS).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(IDS).logits, expected)
