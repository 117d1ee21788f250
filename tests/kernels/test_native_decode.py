"""The native kernel for few queries, as in decoding, against the blocked path in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance.kernels import blocked, library, native
from acutance.kernels.call import KernelCall, Sums, accumulate_dtype
from acutance.masks import Masking
from acutance.testing import score_error

FOUND = library.load()
pytestmark = pytest.mark.skipif(isinstance(FOUND, str), reason=str(FOUND))
CPUS = () if isinstance(FOUND, str) else FOUND.cpus
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Around the ends of vectors (2 to 16 keys) and of tiles (128 or 256), and several of these.
LENGTHS = (1, 3, 16, 17, 255, 256, 257, 512, 513, 1300)
B, H, G = 2, 2, 2


def the_library() -> library.Library:
    assert not isinstance(FOUND, str)
    return FOUND


@pytest.fixture(params=CPUS or ("none",))
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with each instruction set of this machine and build."""
    before = the_library().cpu
    the_library().use_cpu(request.param)
    yield request.param
    the_library().use_cpu(before)


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread takes a head's keys in one go; several split them."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def inputs(
    L: int, S: int, E: int, Ev: int, dtype: torch.dtype = torch.float32, group: int = G
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(L + S)
    shapes = ((B, H * group, L, E), (B, H, S, E), (B, H, S, Ev))
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return q, k, v


def masking(q: Tensor, k: Tensor, **options: object) -> Masking:
    heads = k.shape[1]
    plain = Masking(k.shape[0], heads, q.shape[1] // heads, q.shape[2], k.shape[2])
    return replace(plain, **options)  # type: ignore[arg-type]


def masks(q: Tensor, k: Tensor) -> dict[str, Masking]:
    """Every kind of mask; some rows see no key."""
    (rows, heads, L), S = q.shape[:3], k.shape[2]
    generator = torch.Generator().manual_seed(9)
    allowed = torch.rand(rows, heads, L, S, generator=generator) < 0.4
    allowed[0, 1, 0] = False
    added = torch.randn(heads, L, S, generator=generator).to(q.dtype)
    added[0, 0, ::3] = -torch.inf
    padding = torch.rand(rows, S, generator=generator) < 0.7
    documents = torch.arange(S)[None] * 3 // S
    slopes = torch.linspace(0.01, 0.3, heads, dtype=torch.float64)
    return {
        "full": masking(q, k),
        "causal": masking(q, k, causal=True, offset=S - L),
        "early": masking(q, k, causal=True),
        "before": masking(q, k, causal=True, offset=-L),
        "window": masking(q, k, causal=True, offset=S - L, window=20),
        "sides": masking(q, k, offset=S // 2, window=9),
        "boolean": masking(q, k, attn_mask=allowed),
        "columns": masking(q, k, attn_mask=allowed[:1, :1, :, :1]),
        "transposed": masking(q, k, attn_mask=allowed.mT.contiguous().mT),
        "additive": masking(q, k, attn_mask=added, bias=added[:, :1].abs().clamp(max=2.0)),
        "padding": masking(q, k, key_mask=padding),
        "documents": masking(
            q, k, query_documents=documents[:, -L:].expand(1, L), key_documents=documents
        ),
        "slopes": masking(q, k, causal=True, offset=S - L, alibi_slopes=slopes),
    }


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Masking,
    rule: dict[str, Any],
    noise: bool = False,
) -> Sums:
    """Compare every field with the blocked path in float64, and return the native one's.

    A score off by δ puts e = exp(s − m) off by a factor 1 ± 2δ, and so the sums of e and of
    products with it; t = s − m, of size T at most, by 2δ.
    """
    got = native.forward(KernelCall(q, k, v, mask, **rule, noise=noise))
    wide = None if v is None else v.double()
    exact = replace(mask, attn_mask=widened(mask.attn_mask), bias=widened(mask.bias))
    want = blocked.forward(KernelCall(q.double(), k.double(), wide, exact, **rule, noise=noise))
    assert torch.equal(got.n, want.n)
    assert torch.equal(got.first_index, want.first_index)
    added = 400.0 if mask.alibi_slopes is not None else 8.0
    delta = 4.0 * score_error(q, k, rule["scale"], added=added)
    seen = want.n > 0
    far = 1.0 + want.depth.abs() + (want.M2 / want.n.clamp(min=1)).sqrt() * 8.0
    width = 1.0 if v is None else float(v.double().abs().amax())
    half = torch.finfo(q.dtype).eps if accumulate_dtype(q.dtype) != q.dtype else 0.0
    limits = {
        "m": torch.full_like(far, delta) * (1.0 + want.m.abs().nan_to_num(posinf=0.0)),
        "Z": want.Z * delta,
        "U": want.Z * far * delta,
        "W": want.Z * far**2 * delta,
        "Q": want.Q * 2.0 * delta,
        "mean": far * delta,
        "M2": want.n * far**2 * delta,
        "depth": far * delta,
        "first": torch.full_like(far, delta) * (1.0 + want.first.abs()),
        "R2": want.Q * width**2 * 64.0 * v.shape[-1] * delta if v is not None else far,
    }
    for name, limit in limits.items():
        have, expected = getattr(got, name), getattr(want, name)
        if name == "R2" and not noise:
            assert not have.numel()
            continue
        error = torch.where(have == expected, 0.0, (have - expected).abs())
        assert (error <= limit)[seen].all(), name
        assert torch.equal(have[~seen].double(), expected[~seen]), name
    valued = {"out": 1.0, "O": want.Z.unsqueeze(-1), "R1": 1.0} if noise else {"out": 1.0}
    for name, size in valued.items():
        have, expected = getattr(got, name), getattr(want, name)
        if v is None:
            assert not have.numel()
            continue
        step = half * expected.abs() if name == "out" else 0.0
        limit = 2.0 * delta * width * size + step
        assert ((have - expected).abs() <= limit).all(), name
    return got


def widened(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.double()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 3])
def test_every_length_is_the_blocked_path(L: int, dtype: torch.dtype, threads: int) -> None:
    for S in LENGTHS:
        q, k, v = inputs(L, S, 16, 24, dtype)
        check(q, k, v, masking(q, k), {"scale": 0.25})


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_mask_is_the_blocked_path(dtype: torch.dtype, threads: int) -> None:
    for L, S in ((2, 30), (3, 1300)):
        q, k, v = inputs(L, S, 8, 5, dtype)
        for name, mask in masks(q, k).items():
            got = check(
                q, k, v, mask, {"scale": 0.3}, noise=name in ("causal", "boolean", "before")
            )
            if name == "before":
                assert not got.n.any()
                assert not got.out.any()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_and_group_is_the_blocked_path(dtype: torch.dtype) -> None:
    for E, Ev, group, L in ((1, 3, 1, 2), (7, 64, 5, 1), (64, 33, 8, 3), (256, 256, 1, 1)):
        q, k, v = inputs(L, 300, E, Ev, dtype, group)
        check(q, k, v, masking(q, k), {"scale": E**-0.5}, noise=True)
        check(q, k, None, masking(q, k), {"scale": E**-0.5})


@pytest.mark.usefixtures("cpu")
def test_softcap_and_sinks(threads: int) -> None:
    q, k, v = inputs(2, 900, 16, 8)
    sinks = torch.linspace(-2.0, 4.0, H * G, dtype=torch.float64)
    for mask in (masking(q, k), masks(q, k)["boolean"], masks(q, k)["before"]):
        check(q, k, v, mask, {"scale": 0.5, "softcap": 3.0, "sinks": sinks}, noise=True)


@pytest.mark.usefixtures("cpu")
def test_keys_and_values_are_read_where_they_lie(threads: int) -> None:
    """Heads beside each other in a row, and a cache of which a part is filled."""
    q, k, v = inputs(2, 600, 16, 16)
    rule, whole = {"scale": 0.25}, masking(q, k)
    want = native.forward(KernelCall(q, k, v, whole, **rule))
    beside = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (q, k, v)]
    cache = [torch.full((B, H, 4096, 16), torch.nan) for _ in range(2)]
    for room, part in zip(cache, (k, v), strict=True):
        room[:, :, :600] = part
    for given in (beside, [q, *(room[:, :, :600] for room in cache)]):
        got = native.forward(KernelCall(*given, whole, **rule))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.usefixtures("cpu")
def test_runs_are_alike_and_splits_nearly() -> None:
    q, k, v = inputs(1, 20_000, 32, 32)
    mask, before = masking(q, k), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            first, again = (
                native.forward(KernelCall(q, k, v, mask, 0.2, noise=True)) for _ in range(2)
            )
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
            found.append(first)
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for name in Sums._fields:
            a, b = (getattr(sums, name) for sums in (found[0], other))
            # Σ e v is a sum of Z's size, most of which cancels
            size = float(found[0].Z.amax()) if name == "O" else 1.0
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_row(bad: float, threads: int) -> None:
    q, k, v = inputs(3, 900, 8, 8)
    clean = native.forward(KernelCall(q, k, v, masking(q, k), 0.4, noise=True))
    spoilt = q.clone()
    spoilt[1, 2, 1, 5] = bad
    found = native.forward(KernelCall(spoilt, k, v, masking(q, k), 0.4, noise=True))
    keep = torch.ones(q.shape[:3], dtype=torch.bool)
    keep[1, 2, 1] = False
    for name in Sums._fields:
        a, b = getattr(found, name), getattr(clean, name)
        assert torch.equal(a[keep], b[keep]), name
    row = found.out[1, 2, 1]
    assert row.isnan().all()
    assert found.Z[1, 2, 1].isnan()
    assert not found.m[1, 2, 1].isfinite()


@pytest.mark.usefixtures("cpu")
def test_logits_far_apart_in_different_stretches(threads: int) -> None:
    """A maximum 1e4 above all else, in the first, a middle and the last key."""
    S = 3000
    for place in (0, 1500, S - 1):
        scores = torch.linspace(-1e4, 0.0, S)
        scores[place] = 1e4
        k, v = scores.view(1, 1, S, 1), torch.arange(float(S)).view(1, 1, S, 1)
        q = torch.ones(1, 1, 1, 1)
        got = native.forward(KernelCall(q, k, v, masking(q, k), 1.0))
        assert got.out.item() == place
        assert got.Z.item() == 1.0
        assert abs(got.U.item()) < 1e-30
        assert got.W.item() < 1e-25
        exact = scores.double()
        # a sum of S numbers of 1e4, their mean's rounding, and the deviations' own
        assert abs(got.mean.item() - exact.mean()) < 1e4 * 2**-20
        spread = (exact - exact.mean()).square().sum()
        assert abs(got.M2.item() - spread) < 1e-5 * spread
