"""Every form of linear attention is the quadratic definition, forward, gradient and statistics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance import theory
from acutance.mechanisms import (
    FEATURE_MAPS,
    CosFormer,
    decay_attention,
    linear_attention,
    linear_state,
    linear_step,
    retnet_decays,
)
from acutance.rowstats import METRICS, WeightStatistics, observe_weights

M = 1200.0
MAPS = sorted(FEATURE_MAPS)
SIGNED = {"identity"}


def definition(name: str, x: Tensor) -> Tensor:
    """Feature maps as their papers write them (cosFormer's relu; its cosine is in the weights)."""
    if name == "elu1":
        return torch.nn.functional.elu(x) + 1
    if name == "hedgehog":
        e = torch.cat([x.exp(), (-x).exp()], -1)
        return e / e.sum(-1, keepdim=True)
    if name == "softmax":
        return x.exp() / x.exp().sum(-1, keepdim=True)
    if name == "exp":
        return x.exp()
    if name in ("relu", "cosformer"):
        return x * (x > 0)
    return {"identity": x, "relu2": (x * (x > 0)) ** 2}[name]


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    name: str = "elu1",
    is_causal: bool = False,
    offset: int = 0,
    decay: Tensor | None = None,
    key_mask: Tensor | None = None,
    normalize: bool | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, weights (B, Hq, L, S) and what is visible, in float64, materialised."""
    group = query.shape[1] // key.shape[1]
    q = definition(name, query.double())
    k = definition(name, key.double()).repeat_interleave(group, 1)
    a = scale * torch.einsum("bhie,bhje->bhij", q, k)
    i = torch.arange(q.shape[2])[:, None] + offset
    j = torch.arange(k.shape[2])
    if name == "cosformer":
        a = a * torch.cos(math.pi / 2 * (i - j).double() / M)
    if decay is not None:
        a = a * decay.double().view(-1, 1, 1) ** (i - j).abs()
    seen = torch.ones(a.shape, dtype=torch.bool)
    if is_causal:
        seen &= j <= i
    if key_mask is not None:
        seen &= key_mask[:, None, None]
    a = torch.where(seen, a, 0.0)
    out = a @ value.double().repeat_interleave(group, 1)
    if normalize or (normalize is None and name not in SIGNED):
        total = a.sum(-1, keepdim=True)
        out = torch.where(total == 0, 0.0, out / torch.where(total == 0, 1.0, total))
    return out, a, seen


def tensors(
    L: int, S: int, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(L * 1000 + S)
    shapes = ((2, heads[0], L, 5), (2, heads[1], S, 5), (2, heads[1], S, 3))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def the_map(name: str) -> Any:
    return CosFormer(length=M) if name == "cosformer" else name


def assert_close_to_largest(found: Tensor, want: Tensor, tolerance: float) -> None:
    """Equal within ``tolerance`` of the largest wanted number: sums of signed terms cancel."""
    size = float(want.detach().abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(found.double(), want, rtol=0, atol=tolerance * max(1.0, size))


PADDING = torch.ones(2, 41, dtype=torch.bool)
PADDING[0, :7] = False
PADDING[1, 20:] = False


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_each_map_is_its_definition_forward_and_gradient(
    name: str, is_causal: bool, dtype: torch.dtype
) -> None:
    assert len(MAPS) == 8
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    inputs = [x.requires_grad_() for x in tensors(41, 41, dtype=dtype)]
    out = linear_attention(
        *inputs,
        feature_map=the_map(name),
        is_causal=is_causal,
        enable_gqa=True,
        key_mask=PADDING,
        chunk=8,
    )
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want, _, _ = dense(*exact, name=name, is_causal=is_causal, key_mask=PADDING)
    assert out.dtype == dtype
    assert_close_to_largest(out, want, tolerance)
    upstream = torch.randn(want.shape, dtype=torch.float64)
    found = torch.autograd.grad(out, inputs, upstream.to(dtype))
    wanted = torch.autograd.grad(want, exact, upstream.to(dtype).double())
    for one, two in zip(found, wanted, strict=True):
        assert_close_to_largest(one, two, tolerance)


OFFSETS = [(13, 13, 0), (5, 17, 12), (5, 17, 3), (5, 17, 40), (9, 6, 0), (9, 6, -4), (4, 6, -9)]


@pytest.mark.parametrize("decay", [None, 0.8, "heads"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("L", "S", "offset"), OFFSETS)
def test_any_offset_and_decay_with_its_statistics(
    L: int, S: int, offset: int, is_causal: bool, decay: Any
) -> None:
    query, key, value = tensors(L, S)
    mask = torch.rand(2, S) > 0.3
    options: dict[str, Any] = {
        "is_causal": is_causal,
        "query_offset": offset,
        "key_mask": mask,
        "enable_gqa": True,
        "scale": 0.7,
        "chunk": 4,
    }
    lam = None
    if decay is None:
        out, stats = linear_attention(query, key, value, return_stats=True, **options)
    else:
        lam = (
            torch.tensor([1.0, 0.9, 0.5, 0.1]).double()
            if decay == "heads"
            else torch.tensor([decay] * 4, dtype=torch.float64)
        )
        out, stats = decay_attention(
            query,
            key,
            value,
            decay=lam if decay == "heads" else decay,
            feature_map="elu1",
            return_stats=True,
            **options,
        )
    want, a, seen = dense(
        query, key, value, is_causal=is_causal, offset=offset, decay=lam, key_mask=mask, scale=0.7
    )
    assert_close_to_largest(out, want, 1e-12)
    exact = WeightStatistics(observe_weights(a, seen, first_key=0))
    assert stats.available == (
        "n_keys",
        "effective_keys",
        "sparsity",
        "collision",
        "first_weight",
        "sink_mass",
    )
    for name in stats.available:
        torch.testing.assert_close(stats[name], exact[name], rtol=1e-10, atol=0, equal_nan=True)
    torch.testing.assert_close(stats.sums.first, exact.sums.first)
    assert torch.equal(stats.sums.first_index, exact.sums.first_index)
    assert set(METRICS) > set(stats.available)
    assert stats.entropy.isnan().all()


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_formed_in_blocks_know_everything(
    name: str, is_causal: bool
) -> None:  # blocks have 256 rows and 1,024 keys
    query, key, value = tensors(300, 1100)
    decay = torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)
    padding = torch.arange(1100) < torch.tensor([[1100], [1050]])
    options: dict[str, Any] = {"is_causal": is_causal, "key_mask": padding}
    _, stats = decay_attention(
        query,
        key,
        value,
        decay=decay,
        feature_map=the_map(name),
        enable_gqa=True,
        return_stats=True,
        rows="blockwise",
        **options,
    )
    _, a, seen = dense(query, key, value, name=name, decay=decay, **options)
    exact = WeightStatistics(observe_weights(a, seen, distribution=name not in SIGNED))
    assert stats.available == exact.available
    assert ("entropy" in stats.available) == (name not in SIGNED)
    for metric in stats.available:
        torch.testing.assert_close(
            stats[metric], exact[metric], rtol=1e-9, atol=1e-12, equal_nan=True
        )


def test_statistics_carry_their_gradient() -> None:
    inputs = [x.requires_grad_() for x in tensors(7, 7, (2, 1))]
    decay = torch.tensor([0.9, 0.6], dtype=torch.float64, requires_grad=True)

    def read(*given: Tensor, rows: str = "sums", exact: bool = False) -> tuple[Tensor, ...]:
        *qkv, lam = given
        if exact:
            _, a, seen = dense(*qkv, decay=lam, is_causal=True)
            stats = WeightStatistics(observe_weights(a, seen, distribution=True))
        else:
            _, stats = decay_attention(
                *qkv,
                decay=lam,
                feature_map="elu1",
                enable_gqa=True,
                return_stats=True,
                rows=rows,  # type: ignore[arg-type]
                chunk=3,
            )
        names = ["sparsity", "effective_keys", "collision", "first_weight"]
        return tuple(stats[name] for name in names + ["entropy"] * (rows == "blockwise"))

    leaves = [*inputs[:2], decay]

    def gradients(**options: Any) -> list[Tensor]:
        found = read(*inputs, decay, **options)
        total = sum((part * (i + 1)).sin().sum() for i, part in enumerate(found))
        return list(torch.autograd.grad(total, leaves))

    for rows in ("sums", "blockwise"):
        for one, two in zip(gradients(rows=rows), gradients(rows=rows, exact=True), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_gradients_agree_with_finite_differences_twice() -> None:
    inputs = [x[:1, ..., :2].detach().requires_grad_() for x in tensors(4, 5, (2, 1))]
    decay = torch.tensor([0.999, 0.6], dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, lam: Tensor) -> Any:
        return decay_attention(
            q, k, v, decay=lam, feature_map="elu1", query_offset=1, enable_gqa=True, chunk=2
        )

    assert torch.autograd.gradcheck(run, (*inputs, decay))
    assert torch.autograd.gradgradcheck(run, (*inputs, decay))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("decay", [None, "heads"])
def test_a_prompt_then_pieces_then_tokens_is_one_causal_call(name: str, decay: Any) -> None:
    query, key, value = tensors(41, 41)
    shared: dict[str, Any] = {"feature_map": the_map(name)}
    lam = retnet_decays(4, dtype=torch.float64) if decay else None
    prompt, edges = 11, [11, 24, 25, 26, 40, 41]
    state = linear_state(
        key[:, :, :prompt],
        value[:, :, :prompt],
        decay=lam,
        key_mask=PADDING[:, :prompt],
        statistics=True,
        **shared,
    )
    outs, found = [], []
    for a, b in itertools.pairwise(edges):
        part = slice(a, b)
        out, state, stats = linear_step(
            state,
            query[:, :, part],
            key[:, :, part],
            value[:, :, part],
            decay=lam,
            key_mask=PADDING[:, part],
            enable_gqa=True,
            return_stats=True,
            chunk=3,
            **shared,
        )
        outs.append(out)
        found.append(stats)
    options: dict[str, Any] = {"key_mask": PADDING, "enable_gqa": True, "return_stats": True}
    if lam is None:
        want, whole = linear_attention(query, key, value, is_causal=True, **shared, **options)
    else:
        want, whole = decay_attention(query, key, value, decay=lam, **shared, **options)
    assert_close_to_largest(torch.cat(outs, 2), want[:, :, prompt:], 1e-12)
    for metric in whole.available:
        joint = torch.cat([stats[metric] for stats in found], 2)
        torch.testing.assert_close(
            joint, whole[metric][:, :, prompt:], rtol=1e-9, atol=1e-12, equal_nan=True
        )
    assert int(state.position) == 41
    assert state.n.tolist() == PADDING.sum(-1).tolist()


def test_an_empty_state_starts_at_the_first_token() -> None:
    query, key, value = tensors(3, 3, (2, 2))
    state = linear_state(key[:, :, :0], value[:, :, :0])
    outs = []
    for i in range(3):
        token = slice(i, i + 1)
        out, state = linear_step(state, query[:, :, token], key[:, :, token], value[:, :, token])
        outs.append(out)
    assert_close_to_largest(
        torch.cat(outs, 2), linear_attention(query, key, value, is_causal=True), 1e-13
    )


@pytest.mark.parametrize("is_causal", [False, True])
def test_what_hides_may_hold_anything(is_causal: bool) -> None:
    query, key, value = tensors(41, 41)
    want = linear_attention(
        query, key, value, is_causal=is_causal, enable_gqa=True, key_mask=PADDING
    )
    hidden = ~PADDING[:, None, :, None]
    key = key.masked_fill(hidden, torch.nan).requires_grad_()
    value = value.masked_fill(hidden, torch.inf).requires_grad_()
    out = linear_attention(
        query, key, value, is_causal=is_causal, enable_gqa=True, key_mask=PADDING
    )
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    for grad in torch.autograd.grad(out.sum(), (key, value)):
        assert (grad.masked_select(hidden.expand_as(grad)) == 0).all()
    if is_causal:
        assert (out[0, :, :7] == 0).all()


def test_half_precision_is_summed_in_float32() -> None:
    inputs = tensors(600, 600, (2, 2), torch.bfloat16)
    out, stats = linear_attention(*inputs, is_causal=True, return_stats=True)
    want, a, _ = dense(*inputs, is_causal=True)
    assert out.dtype == torch.bfloat16
    assert stats.sparsity.dtype == torch.float32
    torch.testing.assert_close(out, want.to(torch.bfloat16), rtol=2**-7, atol=1e-6)
    exact = WeightStatistics(observe_weights(a, a > 0))
    torch.testing.assert_close(stats.sparsity.double(), exact.sparsity, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["elu1", "identity"])
def test_long_float32_rows_keep_their_digits_across_segments(name: str) -> None:
    inputs = [x[:1, :1] for x in tensors(9000, 9000, (1, 1), torch.float32)]
    lam = torch.tensor([0.999])
    out, stats = decay_attention(*inputs, decay=lam, feature_map=name, return_stats=True)
    rows = torch.tensor([4095, 4096, 8999])
    want, a, seen = dense(inputs[0][:, :, rows], *inputs[1:], name=name, normalize=False)
    distance = rows[:, None] - torch.arange(9000)
    a = torch.where(distance >= 0, a * lam.double() ** distance.clamp(min=0), 0.0)
    want = a @ inputs[2].double()
    if name == "elu1":
        want = want / a.sum(-1, keepdim=True)
        exact = WeightStatistics(observe_weights(a, seen & (distance >= 0)))
        torch.testing.assert_close(
            stats.effective_keys[..., rows].double(), exact.effective_keys, rtol=1e-5, atol=0
        )
    assert_close_to_largest(out[:, :, rows], want, 1e-5)


def test_retention_is_the_published_parallel_form() -> None:
    query, key, value = tensors(30, 30, (4, 4))
    decays = 1 - 2.0 ** (-5 - torch.arange(4, dtype=torch.float64))
    n, m = torch.arange(30)[:, None], torch.arange(30)
    D = torch.where(n >= m, decays[:, None, None] ** (n - m).clamp(min=0), 0.0)
    want = (query @ key.mT * 5**-0.5 * D) @ value
    found = decay_attention(
        query, key, value, decay=retnet_decays(4, dtype=torch.float64), scale=5**-0.5, chunk=7
    )
    assert_close_to_largest(found, want, 1e-13)


def test_signed_weights_say_what_sums_alone_cannot() -> None:
    inputs = tensors(20, 20, (2, 2))
    _, stats = linear_attention(*inputs, feature_map="identity", return_stats=True)
    assert stats.available == ("n_keys", "sink_mass")
    _, a, _ = dense(*inputs, name="identity")
    torch.testing.assert_close(stats.sums.T, a.sum(-1))
    torch.testing.assert_close(stats.sums.Q, a.square().sum(-1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_map": "hegehog"}, "did you mean 'hedgehog'"),
        ({"feature_map": "zzz"}, "choose from identity, elu1"),
        ({"feature_map": "identity", "normalize": True}, "can be 0 for signed ones"),
        ({"rows": "dense"}, "rows must be 'sums' or 'blockwise', got 'dense'"),
        (
            {"key_mask": torch.ones(2, 5, dtype=torch.bool)},
            r"key_mask must have shape \(B, S\) = \(2, 6\)",
        ),
        ({"enable_gqa": False}, "pass enable_gqa=True"),
        ({"eps": -1.0}, "eps must be a finite number at least 0"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"scale": math.inf}, "scale must be a finite number"),
        ({"feature_map": CosFormer(length=4)}, r"must be in \[0, length=4\], got 0 to 5"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    query, key, value = tensors(6, 6)
    with pytest.raises(ValueError, match=message):
        linear_attention(query, key, value, **({"enable_gqa": True} | change))


@pytest.mark.parametrize(
    ("decay", "message"),
    [
        (0.0, r"decay must be in \(0, 1\], got 0"),
        (1.5, "got 1.5"),
        (-0.5, "got -0.5"),
        (math.nan, "got nan"),
        (torch.tensor([0.5, 0.5, 2.0, 0.5]), "got 2"),
        (
            torch.tensor([0.5, 0.5]),
            r"decay must be one number or have shape \(Hq,\) = \(4,\), got \(2,\)",
        ),
    ],
)
def test_a_decay_outside_its_range_is_named(decay: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decay_attention(*tensors(6, 6), decay=decay, enable_gqa=True)


def test_a_wrong_kind_is_named() -> None:
    query, key, value = tensors(6, 6)
    with pytest.raises(
        TypeError,
        match="feature_map must be a name, a FeatureMap or a function of a tensor, got int",
    ):
        linear_attention(query, key, value, feature_map=3, enable_gqa=True)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="decay must be a number or a floating-point tensor, got str"
    ):
        decay_attention(query, key, value, decay="fast", enable_gqa=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is_causal must be True or False, got 1"):
        linear_attention(query, key, value, is_causal=1, enable_gqa=True)  # type: ignore[arg-type]


def test_a_step_that_does_not_fit_its_state_is_named() -> None:
    query, key, value = tensors(6, 6)
    state = linear_state(key, value)
    token = slice(0, 1)
    one = query[:, :, token], key[:, :, token], value[:, :, token]
    with pytest.raises(ValueError, match="create the state with linear_state"):
        linear_step(state, *one, enable_gqa=True, return_stats=True)
    with pytest.raises(ValueError, match="different heads, widths, feature map or decay"):
        linear_step(state, *one, enable_gqa=True, feature_map="hedgehog")
    with pytest.raises(ValueError, match="a step must have a key for each query"):
        linear_step(state, query, *one[1:], enable_gqa=True)
    with pytest.raises(ValueError, match="a multiple of the key heads H=2, got 3"):
        linear_state(key, value, decay=torch.tensor([0.5, 0.5, 0.5]))


def test_theory_predicts_the_sparsity_of_random_features() -> None:
    """q' given, k' of independent components: S = (1 + (σ/μ)² ‖q‖²/‖q‖₁²)^(−1/2)."""
    generator = torch.Generator().manual_seed(5)
    query = torch.rand(1, 1, 3, 8, generator=generator, dtype=torch.float64)
    key = torch.rand(1, 1, 65536, 8, generator=generator, dtype=torch.float64)
    _, stats = linear_attention(query, key, key, feature_map="relu", return_stats=True)
    for row in range(3):
        want = theory.predict("linear", 65536, q=query[0, 0, row].numpy(), mu=0.5, sigma=12**-0.5)
        # the relative error of a second moment over 65536 keys is about 1/256 of 1 − S²
        assert stats.sparsity[0, 0, row].item() == pytest.approx(want.sparsity, rel=2e-3)
