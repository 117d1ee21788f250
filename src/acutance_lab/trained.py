"""Small decoders of bytes: the bundled one, and those whose global layers have no positions.

The bundled decoder is a directory that transformers reads. It knows Python source and its
documentation a little, and was trained on windows of 128 bytes. Its rotary base is so small that
the slowest of the rotations has gone round once within 128 positions: in a longer text no angle is
new, so what changes with length is the number of keys. (With the usual base of 10000 a model
trained as briefly meets angles it has never seen, and no temperature helps it.)

:func:`train_hybrid` makes decoders whose layers repeat in fours: three with rotary positions and a
sliding window, then one that reads all keys without positions, as in SWAN (arXiv 2504.08719) and,
with chunks for windows, in Llama 4. The class is transformers' SmolLM3. A model of the same size
with rotary positions and all keys in every layer is for comparison.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from acutance.plugins import install
from acutance_lab import texts
from acutance_lab.training import Plan, fit, seeded

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

#: The decoders that come with acutance; :func:`train` makes others.
SEEDS = (0,)
#: Bytes of context in training.
TRAIN_LENGTH = 128

_STEPS = 3000


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


def train(seed: int, text: Tensor, *, steps: int = _STEPS, **how: Any) -> LlamaForCausalLM:
    """Train a decoder from random weights; the same text, seed and versions give the same one.

    Args:
        seed: of initial weights and batches.
        text: bytes, (length,), longer than 128.
        steps: of 32 windows each.
        how: ``keep`` and ``note`` of :func:`acutance_lab.training.fit`.
    """
    from transformers import LlamaForCausalLM

    with seeded(seed):
        model = LlamaForCausalLM(configuration())
    size = Size(length=TRAIN_LENGTH, width=96, steps=steps, batch=32)
    _fit("decoder", model, size, seed, text, **how)
    return model


class Size(NamedTuple):
    """How large a decoder is, and how it is trained.

    Attributes:
        length: bytes of context in training.
        width: of tokens; heads are a quarter of it.
        steps: of training.
        batch: windows in each step.
    """

    length: int
    width: int
    steps: int
    batch: int

    @property
    def window(self) -> int:
        """Keys that a row of a sliding-window layer reads: a quarter of the training length."""
        return self.length // 4


def hybrid_configuration(size: Size, *, position_free: bool) -> SmolLM3Config:
    """A decoder of bytes with 4 layers, 4 query heads and 2 key heads.

    Args:
        size: of the decoder.
        position_free: windows with rotary positions in three layers and a global layer without
            positions; else rotary positions and all keys in every layer.
    """
    from transformers import SmolLM3Config

    rotary = [1, 1, 1, 0 if position_free else 1]
    return SmolLM3Config(
        vocab_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        hidden_size=size.width,
        intermediate_size=5 * size.width // 2,
        num_hidden_layers=len(rotary),
        max_position_embeddings=16 * size.length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=position_free,
        sliding_window=size.window if position_free else None,
        no_rope_layers=rotary,
        layer_types=[
            "sliding_attention" if position_free and rotates else "full_attention"
            for rotates in rotary
        ],
    )


def train_hybrid(
    size: Size, seed: int, text: Tensor, *, position_free: bool, **how: Any
) -> SmolLM3ForCausalLM:
    """Train a decoder from random weights; both kinds read the same batches.

    Args:
        size: of the decoder and its training.
        seed: of initial weights and batches.
        text: bytes, (length,).
        position_free: as in :func:`hybrid_configuration`.
        how: ``keep`` and ``note`` of :func:`acutance_lab.training.fit`.
    """
    from transformers import SmolLM3ForCausalLM

    with seeded(seed):
        model = SmolLM3ForCausalLM(hybrid_configuration(size, position_free=position_free))
    _fit("hybrid", model, size, seed, text, **how)
    return model


def _fit(
    name: str, model: torch.nn.Module, size: Size, seed: int, text: Tensor, **how: Any
) -> None:
    """Train a decoder on random windows of a text."""

    def loss(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
        batch = texts.sample_windows(text, size.length + 1, size.batch, generator)
        return next_byte_losses(model, batch).mean()

    warm = min(50, size.steps)
    plan = Plan(name, size.steps, 4e-3, seed=seed, warm=warm, fall=0.6, decay=0.1, clip=1.0)
    fit(model, loss, plan, **how)


def next_byte_losses(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Negative log probability of every byte after the first, in nats; gradients flow through it.

    Args:
        model: a causal language model.
        ids: (B, L + 1) int64.

    Returns:
        (B, L); entry i is the loss of byte i + 1, predicted from bytes 0 to i.
    """
    logits = model(input_ids=ids[:, :-1]).logits.float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
