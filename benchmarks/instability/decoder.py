"""A small decoder over bytes whose attention can be given a fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance

#: What the attention of the decoder does wrong; "" is nothing.
Fault = Literal[
    "", "scale_1", "bf16_scores", "fp8_scores", "bf16_sums", "mask_future", "mask_first", "window"
]
#: Means over the rows of a head that are recorded, and largest values over its rows.
MEANS = (
    "entropy", "normalized_entropy", "entropy_slope", "effective_keys", "logit_std",
    "jacobian_trace", "noise_gain", "first_weight", "max_logit",
)  # fmt: skip
LARGEST = ("max_logit", "max_gap")
#: Rows of a batch, drawn at random, whose mean deviation of logits is recorded too.
SAMPLED = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        width: of the residual stream.
        layers: number of blocks.
        heads: heads of each block; ``width / heads`` is their width.
        length: tokens of a sequence.
        window: keys that a row sees, itself included; None for all before it.
        qk_norm: normalise queries and keys (RMSNorm with a gain).
        norm: normalise the input of every block and of the last layer (RMSNorm).
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    length: int = 64
    window: int | None = None
    qk_norm: bool = False
    norm: bool = True


def _rounded(x: Tensor, fault: Fault) -> Tensor:
    """X rounded to bfloat16 or to 8 bits (E4M3), with the gradient of no rounding."""
    kind = torch.float8_e4m3fn if fault == "fp8_scores" else torch.bfloat16
    limited = x.clamp(-448, 448) if fault == "fp8_scores" else x
    return x + (limited.to(kind).to(x.dtype) - x).detach()


class Attention(nn.Module):
    """Causal attention with rotary positions; ``fault`` may change while the model trains."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.head_width = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.query_norm = nn.RMSNorm(self.head_width) if shape.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(self.head_width) if shape.qk_norm else nn.Identity()
        self.fault: Fault = ""
        self.temperature = 1.0  # divides the scores
        self.recording = False
        self.means = torch.empty(0)  # (heads, len(MEANS)) of the last recorded pass
        self.largest = torch.empty(0)
        self.sampled = torch.empty(())  # deviation of logits of some rows
        self.generator = torch.Generator().manual_seed(0)

    def visible(self, length: int) -> Tensor:
        """Which keys each row sees, (length, length), under the fault."""
        place = torch.arange(length)
        back = place[:, None] - place
        window = self.shape.window or length
        if self.fault == "window":
            window = max(window - 1, 1)
        seen = (back >= (-1 if self.fault == "mask_future" else 0)) & (back < window)
        if self.fault == "mask_first":
            seen[1:, 0] = False
        return seen

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Output (B, L, width) for inputs (B, L, width)."""
        batch, length, width = x.shape
        folded = (batch, length, self.shape.heads, self.head_width)
        query = rotated(self.query_norm(self.query(x).view(folded)).transpose(1, 2), rotation)
        key = rotated(self.key_norm(self.key(x).view(folded)).transpose(1, 2), rotation)
        value = self.value(x).view(folded).transpose(1, 2)
        scale = 1.0 if self.fault == "scale_1" else self.head_width**-0.5
        scale = scale / self.temperature
        seen = self.visible(length)
        if self.recording:
            self._record(query, key, value, seen, scale)
        if self.fault in ("bf16_scores", "fp8_scores", "bf16_sums"):
            scores = query @ key.transpose(-1, -2) * scale
            if self.fault != "bf16_sums":
                scores = _rounded(scores, self.fault)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            if self.fault == "bf16_sums":  # weights and values rounded, and so is every partial sum
                weights, value = _rounded(weights, self.fault), _rounded(value, self.fault)
                out = torch.zeros_like(value)
                for part in range(0, length, 8):
                    step = weights[..., part : part + 8] @ value[..., part : part + 8, :]
                    out = _rounded(out + step, self.fault)
            else:
                out = weights @ value
        else:
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
        return self.out(out.transpose(1, 2).reshape(batch, length, width))

    @torch.no_grad()
    def _record(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float
    ) -> None:
        stats = acutance.row_statistics(query, key, value, attn_mask=seen, scale=scale, noise=True)
        rows = slice(1, None)  # row 0 sees one key
        self.means = torch.stack(
            [getattr(stats, name)[:, :, rows].mean((0, 2)) for name in MEANS], -1
        )
        self.largest = torch.stack(
            [getattr(stats, name)[:, :, rows].amax((0, 2)) for name in LARGEST], -1
        )
        deviations = stats.logit_std[:, :, rows].mean(1).flatten()
        order = torch.randperm(len(deviations), generator=self.generator)
        self.sampled = deviations[order[:SAMPLED]].mean()


class Decoder(nn.Module):
    """Pre-norm blocks of attention and a GELU layer of four times the width."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(256, shape.width)
        self.attention = nn.ModuleList(Attention(shape) for _ in range(shape.layers))
        norm = nn.RMSNorm if shape.norm else nn.Identity
        self.attention_norm = nn.ModuleList(norm(shape.width) for _ in range(shape.layers))
        self.hidden = nn.ModuleList(
            nn.Sequential(
                norm(shape.width),
                nn.Linear(shape.width, 4 * shape.width),
                nn.GELU(),
                nn.Linear(4 * shape.width, shape.width),
            )
            for _ in range(shape.layers)
        )
        self.norm = norm(shape.width)
        self.head = nn.Linear(shape.width, 256, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        nn.init.normal_(self.embedding.weight, std=0.5)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, L, 256) of the next byte."""
        x = self.embedding(tokens)
        rotation = angles(tokens.shape[1], self.shape.width // self.shape.heads)
        for norm, attention, hidden in zip(
            self.attention_norm, self.attention, self.hidden, strict=True
        ):
            x = x + attention(norm(x), rotation)
            x = x + hidden(x)
        return self.head(self.norm(x))

    def set_fault(self, fault: Fault) -> None:
        """Give every layer this fault."""
        for attention in self.attention:
            attention.fault = fault

    def record(self, on: bool) -> None:
        """Whether the next passes record statistics."""
        for attention in self.attention:
            attention.recording = on


def angles(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, (length, width / 2)."""
    rates = 1000.0 ** -(torch.arange(0, width, 2) / width)
    turned = torch.arange(length)[:, None] * rates
    return turned.cos(), turned.sin()


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of the two halves of the last dimension by the position's angles."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)
