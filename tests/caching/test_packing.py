"""Codes of 8, 4 and 2 bits: what is restored, and how far off it may be."""

from __future__ import annotations

import pytest
import torch

from acutance.caching.stores import dequantise, pack, quantise, unpack


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_are_packed_without_loss(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, 16, 5), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, 16 * bits // 8, 5)
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("channels", [None, 4])
@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_a_number_is_off_by_half_a_step_of_its_group(
    bits: int, channels: int | None, shift: float
) -> None:
    x = torch.randn(2, 3, 16, 8) + shift
    x[..., 2] *= 30  # one large channel
    packed = quantise(x, bits, channels)
    restored = dequantise(*packed, bits, torch.float32).view_as(x)
    groups = x.unflatten(-1, (8, 1) if channels is None else (-1, channels))
    dim = -3 if channels is None else -1
    least, most = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    # scale and zero point are float16: the zero lies up to 2^-9 below the least number
    step = (most - least + least.abs() * 2.0**-9) / (2**bits - 1) * (1 + 2.0**-9)
    error = (restored.view_as(groups) - groups).abs()
    assert bool((error <= step / 2 + 1e-6).all())
    assert error.max() > step.min() / 4


@pytest.mark.parametrize("channels", [None, 8])
def test_equal_numbers_stay(channels: int | None) -> None:
    x = torch.full((1, 16, 8), 0.5)
    restored = dequantise(*quantise(x, 2, channels), 2, torch.float32)
    assert torch.allclose(restored, x[0], atol=1e-3)
    zeros = dequantise(*quantise(x * 0, 2, channels), 2, torch.bfloat16)
    assert torch.equal(zeros, x[0].bfloat16() * 0)
