"""Small decoders of bytes: the bundled one, and those whose global layers have no positions.

The bundled decoder is a directory that transformers reads. It knows Python source and its
documentation a little, and was trained on windows of 128 bytes. Its rotary base is so small that
the slowest of the rotations has gone round once within 128 positions: in a longer text no angle is
new, so what changes with length is the number of keys. (With the usual base of 10000 a model
trained as briefly meets angles it has never seen, and no temperature helps it.)

:func:`hybrid_configuration` has layers that repeat in fours: three with rotary positions and a
sliding window, then one that reads all keys without positions, as in SWAN (arXiv 2504.08719) and,
with chunks for windows, in Llama 4. The class is transformers' SmolLM3. A model of the same size
with rotary positions and all keys in every layer is for comparison.
"""

from __future__ import annotations

import importlib.resources
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from acutance.plugins import install
from acutance_lab import texts
from acutance_lab.training import Plan, fit, seeded

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, SmolLM3Config

#: The decoders that come with acutance; :func:`train` makes others.
SEEDS = (0,)
#: Bytes of context in training.
TRAIN_LENGTH = 128


def directory(seed: int = 0) -> Path:
    """Directory of a bundled decoder, to pass to ``acutance probe`` or transformers.

    Raises:
        ValueError: if none of that seed comes with acutance.

    Example:
        >>> sorted(path.name for path in directory().iterdir())
        ['config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json', \
'training.json']
    """
    if seed not in SEEDS:
        raise ValueError(
            f"the bundled decoder has seed {', '.join(map(str, SEEDS))}, got {seed!r}: train "
            "others with tools/train_decoder.py"
        )
    return Path(str(importlib.resources.files("acutance.data"))) / "decoder" / f"seed{seed}"


def decoder(seed: int = 0) -> LlamaForCausalLM:
    """A trained decoder of 315,552 parameters: 3 layers, 4 query heads on 2 key heads, width 96.

    Args:
        seed: of its initial weights and batches: 0.

    Returns:
        The model, float32, in evaluation mode. Its tokens are the bytes of a text, its training
        length is 128, and it takes up to 4096.

    Raises:
        ValueError: if none of that seed comes with acutance.
        ImportError: without transformers.

    Example:
        >>> import torch
        >>> model = decoder()
        >>> ids = torch.tensor([list(b"for index in ran")])
        >>> bytes(model(input_ids=ids).logits[0, -1:].argmax(-1).tolist())
        b'g'
    """
    try:
        from transformers import LlamaForCausalLM
    except ImportError as error:
        raise ImportError(
            f"acutance.reproduce.decoder() needs transformers; install it with: {install('hf')}"
        ) from error
    weights = load_file(directory(seed) / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]  # tied, stored once
    with seeded(0):  # initial weights that are then replaced; the caller's random numbers stay
        model = LlamaForCausalLM(configuration())
    model.load_state_dict(weights)
    return model.eval()


def configuration() -> LlamaConfig:
    """The bundled decoder's configuration: 3 layers, 4 query heads on 2 key heads, width 96."""
    from transformers import LlamaConfig

    config: LlamaConfig = LlamaConfig.from_pretrained(directory())
    return config


def hybrid_configuration(length: int, width: int, *, position_free: bool) -> SmolLM3Config:
    """A decoder of bytes with 4 layers, 4 query heads and 2 key heads.

    Args:
        length: bytes of context in training.
        width: of tokens.
        position_free: windows of a quarter of ``length`` with rotary positions in three layers, and
            a global layer without positions; else rotary positions and all keys in every layer.
    """
    from transformers import SmolLM3Config

    kinds = ["sliding_attention" if position_free else "full_attention"] * 3 + ["full_attention"]
    return SmolLM3Config(
        vocab_size=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        hidden_size=width, intermediate_size=5 * width // 2, tie_word_embeddings=True,
        num_hidden_layers=len(kinds), num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=16 * length, use_sliding_window=position_free,
        sliding_window=length // 4 if position_free else None,
        no_rope_layers=[1, 1, 1, 0 if position_free else 1], layer_types=kinds,
    )  # fmt: skip


def train(
    name: str, configuration: Any, seed: int, text: Tensor, *,
    length: int = TRAIN_LENGTH, steps: int = 3000, batch: int = 32, **how: Any,
) -> PreTrainedModel:  # fmt: skip
    """Train a decoder from random weights; the same text, seed and versions give the same one.

    Args:
        name: the batches depend on it and the seed.
        configuration: of the decoder.
        seed: of initial weights and batches.
        text: bytes, longer than ``length``.
        length: bytes of context in training.
        steps: how many.
        batch: windows in each step.
        how: ``keep`` and ``note`` of :func:`acutance_lab.training.fit`.
    """
    from transformers import AutoModelForCausalLM

    def loss(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
        windows = texts.sample_windows(text, length + 1, batch, generator)
        return next_byte_losses(model, windows).mean()

    plan = Plan(name, steps, 4e-3, seed=seed, warm=min(50, steps), fall=0.6, decay=0.1)
    return fit(partial(AutoModelForCausalLM.from_config, configuration), loss, plan, **how)


def next_byte_losses(model: torch.nn.Module, ids: Tensor, batch: int | None = None) -> Tensor:
    """Negative log probability of every byte after the first, in nats; gradients flow through it.

    Args:
        model: a causal language model, which returns logits or has them in its output.
        ids: (B, L + 1) int64.
        batch: how many are read at a time; None reads all at once.

    Returns:
        (B, L); entry i is the loss of byte i + 1, predicted from bytes 0 to i.
    """
    losses = []
    for some in ids.split(batch or len(ids)):
        output = model(input_ids=some[:, :-1])
        logits = getattr(output, "logits", output).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), some[:, 1:], reduction="none"))
    return torch.cat(losses)
