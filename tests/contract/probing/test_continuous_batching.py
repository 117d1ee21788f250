"""Continuous batching of transformers: rows with keys in a paged cache are read and verified."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import acutance
from tests.versions import older

pytestmark = pytest.mark.skipif(
    older("transformers", "5.20"), reason="its paged cache has another interface"
)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], list(range(3, 63)), [4, 5]]


def model(sliding: bool) -> torch.nn.Module:
    """A decoder with random weights, large enough that its heads differ."""
    torch.manual_seed(0)
    made = (
        MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16))
        if sliding
        else LlamaForCausalLM(LlamaConfig(**SIZES))
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(20.0)
    return made.eval()


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "paged|eager"])
def test_rows_of_a_paged_cache_are_verified_and_equal_single_sequences(
    implementation: str, sliding: bool
) -> None:
    decoder = model(sliding)
    decoder.set_attn_implementation(implementation)
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with acutance.probe(decoder, verify=True) as probe:
        outputs = decoder.generate_batch(
            PROMPTS,
            generation_config=options,
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=32, num_blocks=16, max_batch_tokens=64
            ),
        )
    served = probe.summary()
    assert served.unread == ()
    assert {layer.status for layer in served.layers} == {"verified"}
    sequences = [[*output.prompt_ids, *output.generated_tokens][:-1] for output in outputs.values()]
    assert len(sequences) == 3
    decoder.set_attn_implementation("sdpa")
    with torch.no_grad(), acutance.probe(decoder) as probe:
        for sequence in sequences:
            decoder(torch.tensor([sequence]))
    single = probe.summary()
    assert {layer.rows for layer in served.layers} == {sum(map(len, sequences))}
    for name in ("n_keys", "entropy", "effective_keys", "max_logit"):
        assert_close(served.mean(name), single.mean(name), rtol=1e-4, atol=1e-4)
    assert float(single.mean("entropy").std()) > 0.01  # heads differ, so a mix-up would show
