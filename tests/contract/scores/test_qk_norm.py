"""Normalised queries and keys: formulas, starts, gradients, which side."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from acutance.scores import (
    HenryGain,
    QKNorm,
    SwinGain,
    cosine,
    dot_tile,
    l2_norm,
    layer_norm,
    rms_norm,
)

E, EPS = 6, 1e-6


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def plain(kind: str, x: Tensor) -> Tensor:
    """The normalisation without parameters, written out."""
    if kind == "l2":
        return x / x.square().sum(-1, keepdim=True).sqrt()
    if kind == "rms":
        return x / (x.square().sum(-1, keepdim=True) / E + EPS).sqrt()
    centred = x - x.sum(-1, keepdim=True) / E
    return centred / (centred.square().sum(-1, keepdim=True) / E + EPS).sqrt()


def test_functions_are_torchs_own() -> None:
    x, weight, bias = rand(3, 5, E), rand(E), rand(E)
    torch.testing.assert_close(rms_norm(x, weight), nn.functional.rms_norm(x, (E,), weight, EPS))
    torch.testing.assert_close(layer_norm(x, weight, bias),
                               nn.functional.layer_norm(x, (E,), weight, bias, EPS))  # fmt: skip
    torch.testing.assert_close(l2_norm(x), nn.functional.normalize(x, dim=-1))


def test_a_head_norm_loads_into_the_norms_of_language_models() -> None:
    """Qwen 3's q_norm: root mean square over the head's width, a weight shared by the heads."""
    pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    theirs = Qwen3RMSNorm(E, eps=EPS)
    with torch.no_grad():
        theirs.weight.copy_(torch.rand(E))
    norm = QKNorm(E, "rms", sides="query")
    norm.load_state_dict({"query_weight": theirs.weight})
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(1, 2, 3, E).to(dtype)
        got, key = norm(query, query)
        assert got.dtype == dtype
        assert torch.equal(key, query)
        # Qwen rounds to the dtype before its weight, this after: one rounding more or less
        torch.testing.assert_close(got, theirs(query).to(dtype), atol=1e-6,
                                   rtol=2 * torch.finfo(dtype).eps)  # fmt: skip


@pytest.mark.parametrize("length", [2, 64, 1024])
def test_henry_starts_at_his_formula(length: int) -> None:
    norm = QKNorm(E, "l2", gain=HenryGain(length, dtype=torch.float64))
    query, key = rand(1, 3, 4, E), rand(1, 3, 5, E)
    want = math.log2(length**2 - length) * cosine(query, key)
    torch.testing.assert_close(dot_tile(norm, query, key), want, rtol=1e-12, atol=1e-12)


def test_swin_starts_at_ten_and_stops_at_a_hundred() -> None:
    gain = SwinGain(2, dtype=torch.float64)
    norm = QKNorm(E, "l2", gain=gain)
    query, key = rand(1, 2, 4, E), rand(1, 1, 5, E)
    torch.testing.assert_close(dot_tile(norm, query, key), 10 * cosine(query, key))
    with torch.no_grad():
        gain.log_gain.copy_(torch.tensor([99.0, 200.0], dtype=torch.float64).log())
    got = dot_tile(norm, query, key)
    want = cosine(query, key) * torch.tensor([99.0, 100.0]).double()[:, None, None]
    torch.testing.assert_close(got, want)
    got.square().sum().backward()
    assert gain.log_gain.grad is not None
    assert gain.log_gain.grad[0] != 0
    assert gain.log_gain.grad[1] == 0


@pytest.mark.parametrize("function", [l2_norm, rms_norm, layer_norm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_normalised_in_float32(function, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """The square of 300 is no float16, and 64 squares of 1 add up to no more than that."""
    x = (torch.randn(4, 64) * 300).to(dtype)
    got = function(x)
    assert got.dtype == dtype
    want = function(x.double()).to(dtype)
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("function", [l2_norm, rms_norm, layer_norm])
def test_a_zero_vector_stays_zero(function) -> None:  # type: ignore[no-untyped-def]
    x = torch.zeros(2, 4, requires_grad=True)
    got = function(x)
    assert (got == 0).all()
    got.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_short_vectors_fade_instead_of_jumping() -> None:
    direction = torch.tensor([0.6, 0.8], dtype=torch.float64)
    lengths = torch.tensor([0.0, 1e-7, 5e-7, 1e-6, 1e-5, 1.0]).double()
    got = l2_norm(lengths[:, None] * direction).norm(dim=-1)
    torch.testing.assert_close(got, (lengths / 1e-6).clamp(max=1.0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: QKNorm(4, "l1"), ValueError, "kind must be one of l2, rms, layer, got 'l1'"),
        (
            lambda: QKNorm(4, sides="value"),
            ValueError,
            "sides must be one of both, query, key",
        ),
        (lambda: QKNorm(0), ValueError, "width must be at least 1, got 0"),
        (lambda: QKNorm(4, eps=0.0), ValueError, "eps must be a finite number above 0, got 0.0"),
        (lambda: HenryGain(1), ValueError, "length must be at least 2, got 1"),
        (
            lambda: SwinGain(2, start=0.0),
            ValueError,
            "start must be a finite number above 0, got 0.0",
        ),
        (
            lambda: QKNorm(4)(torch.ones(1, 1, 2, 5), torch.ones(1, 1, 2, 5)),
            ValueError,
            "query and key must have the width E=4 of the normalisation",
        ),
        (
            lambda: QKNorm(5, gain=SwinGain(2))(torch.ones(1, 3, 2, 5), torch.ones(1, 1, 2, 5)),
            ValueError,
            r"the gain must be one number or \(Hq,\) = \(3,\), got \(2,\)",
        ),
    ],
)
def test_bad_input_is_named(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call()


def test_no_affine_leaves_no_parameters() -> None:
    norm = QKNorm(E, "layer", affine=False)
    assert not list(norm.parameters())
    x = torch.randn(1, 1, 3, E)
    torch.testing.assert_close(norm(x, x)[0], plain("layer", x))
    assert repr(norm) == "QKNorm(6, 'layer', sides='both', scale=0.408248)"
