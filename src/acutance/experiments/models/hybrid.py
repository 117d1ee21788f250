"""Decoders whose global layers have no positions: RoPE in windows, and none in global layers.

Layers repeat in fours: three with rotary positions and a sliding window, then one that reads all
keys without positions, as in SWAN (arXiv 2504.08719) and, with chunks for windows, in Llama 4. The
class is transformers' SmolLM3. A model of the same size with rotary positions and all keys in every
layer is for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.experiments.models import texts
from acutance.experiments.models.fitting import Note, Plan, fit
from acutance.experiments.models.small import seeded
from acutance.experiments.models.trained import next_byte_losses

if TYPE_CHECKING:
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

LAYERS = 4
LONGEST = 16  # times the training length that a configuration allows


@dataclass(frozen=True)
class Size:
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


def configuration(size: Size, *, position_free: bool) -> SmolLM3Config:
    """A decoder of bytes with 4 layers, 4 query heads and 2 key heads.

    Args:
        size: of the decoder.
        position_free: windows with rotary positions in three layers and a global layer without
            positions; else rotary positions and all keys in every layer.
    """
    from transformers import SmolLM3Config

    rotary = [int(not position_free or layer % 4 != 3) for layer in range(LAYERS)]
    return SmolLM3Config(
        vocab_size=256,
        hidden_size=size.width,
        intermediate_size=5 * size.width // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST * size.length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=position_free,
        sliding_window=size.window if position_free else None,
        no_rope_layers=rotary,
        layer_types=[
            "sliding_attention" if position_free and one else "full_attention" for one in rotary
        ],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def train(
    size: Size,
    seed: int,
    text: Tensor,
    *,
    position_free: bool,
    keep: Path | None = None,
    note: Note | None = None,
) -> SmolLM3ForCausalLM:
    """Train a decoder from random weights; both kinds read the same batches.

    Args:
        size: of the decoder and its training.
        seed: of initial weights and batches.
        text: bytes, (length,).
        position_free: as in :func:`configuration`.
        keep: file of checkpoints, see :func:`acutance.experiments.models.fitting.fit`.
        note: takes lines of progress.
    """
    from transformers import SmolLM3ForCausalLM

    with seeded(seed):
        model = SmolLM3ForCausalLM(configuration(size, position_free=position_free))

    def loss(model: torch.nn.Module, generator: torch.Generator) -> Tensor:
        batch = texts.sample_windows(text, size.length + 1, size.batch, generator)
        return next_byte_losses(model, batch).mean()

    warm = min(50, size.steps)
    plan = Plan("hybrid", size.steps, 4e-3, seed=seed, warm=warm, fall=0.6, decay=0.1, clip=1.0)
    fit(model, loss, plan, keep=keep, note=note)
    return model
