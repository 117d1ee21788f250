"""xFormers, TransformerEngine, SageAttention and FlashInfer: verified, with the right entropies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract.kernel_functions.checks import (
    GROUPS,
    HEADS,
    WIDTH,
    assert_listed,
    assert_read,
    cumulative,
    packed,
    tensor,
    tensors,
)
from tests.contract.kernel_functions.stand_ins import flashinfer_decode as decode
from tests.contract.kernel_functions.stand_ins import flashinfer_prefill as prefill
from tests.contract.kernel_functions.stand_ins import sage
from tests.contract.kernel_functions.stand_ins import xformers_fmha as fmha
from tests.contract.kernel_functions.stand_ins.transformer_engine import DotProductAttention

# -- xFormers --------------------------------------------------------------------------------------


def same_heads(queries: int, keys: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((batch, queries), (batch, keys), (batch, keys))
    first, second, third = (tensor(*s, HEADS, WIDTH, seed=i) for i, s in enumerate(shapes))
    return first, second, third


BIASES = {
    "none": None,
    "tensor": tensor(2, HEADS, 4, 6),
    "tensor of one head": tensor(1, 4, 6),
    "causal": fmha.LowerTriangularMask(),
    "causal with a bias": fmha.LowerTriangularMaskWithTensorBias(tensor(2, HEADS, 4, 6)),
    "bottom right": fmha.LowerTriangularFromBottomRightMask(),
    "window": fmha.LowerTriangularFromBottomRightLocalAttentionMask(2),
    "two sides": fmha.LocalAttentionFromBottomRightMask(2, 1),
}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_xformers(bias: Any) -> None:
    query, key, value = same_heads(4, 6)
    run = fmha.memory_efficient_attention
    assert_read(lambda: run(query, key, value, bias, 0.0, 0.3), "memory_efficient_attention")


def test_xformers_shapes() -> None:
    query, key, value = tensors(2, 4, 6)
    grouped = [query.unflatten(2, (GROUPS, 2))]
    grouped += [part.unsqueeze(3).expand(-1, -1, -1, 2, -1) for part in (key, value)]
    run, bias = fmha.memory_efficient_attention, fmha.LowerTriangularFromBottomRightMask()
    assert_read(lambda: run(*grouped, attn_bias=bias))
    several = [grouped[0], *(part.contiguous() for part in grouped[1:])]
    assert_read(lambda: run(*several, attn_bias=tensor(2, GROUPS, 2, 4, 6)))
    one_head = [part[:, :, 0] for part in (query, key, value)]
    assert_read(lambda: run(*one_head, attn_bias=tensor(2, 4, 6)))


def info(lengths: list[int], space: list[int] | None = None) -> fmha.SeqLenInfo:
    if space is None:
        return fmha.SeqLenInfo(cumulative(lengths))
    return fmha.SeqLenInfo(cumulative(space), torch.tensor(lengths))


QUERIES, KEYS = [3, 1, 4], [4, 2, 5]
PADDED = info([3, 2, 5], [5, 5, 5])
GAPPY = info([3, 2, 5], [4, 2, 9])
BLOCKS = {
    "alike": fmha.BlockDiagonalMask(info(QUERIES), info(QUERIES)),
    "causal alike": fmha.BlockDiagonalCausalMask(info(QUERIES), info(QUERIES)),
    "blocks": fmha.BlockDiagonalMask(info(QUERIES), info(KEYS)),
    "causal": fmha.BlockDiagonalCausalMask(info(QUERIES), info(KEYS)),
    "bottom right": fmha.BlockDiagonalCausalFromBottomRightMask(info(QUERIES), info(KEYS)),
    "window": fmha.BlockDiagonalCausalLocalAttentionMask(info(QUERIES), info(KEYS), 2),
    "window, bottom right": fmha.BlockDiagonalCausalLocalAttentionFromBottomRightMask(
        info(QUERIES), info(KEYS), 2
    ),
    "padded": fmha.BlockDiagonalPaddedKeysMask(info(QUERIES), PADDED),
    "padded, causal": fmha.BlockDiagonalCausalWithOffsetPaddedKeysMask(info(QUERIES), PADDED),
    "padded, two sides": fmha.BlockDiagonalLocalAttentionPaddedKeysMask(
        info(QUERIES), PADDED, 1, 1
    ),
    "padded, window": fmha.BlockDiagonalCausalLocalAttentionPaddedKeysMask(
        info(QUERIES), PADDED, 2
    ),
    "gaps": fmha.BlockDiagonalGappyKeysMask(info(QUERIES), GAPPY),
    "gaps, causal": fmha.BlockDiagonalCausalWithOffsetGappyKeysMask(info(QUERIES), GAPPY),
}


@pytest.mark.parametrize("bias", BLOCKS.values(), ids=BLOCKS)
def test_blocks_of_xformers(bias: Any) -> None:
    total = int(bias.k_seqinfo.seqstart[-1])
    query, key, value = same_heads(sum(QUERIES), total, batch=1)
    assert_read(lambda: fmha.memory_efficient_attention(query, key, value, bias))


def test_other_biases_of_xformers_are_listed() -> None:
    query, key, value = same_heads(8, 11, batch=1)
    run, bias = fmha.memory_efficient_attention, fmha.PagedBlockDiagonalPaddedKeysMask
    pages = bias(info(QUERIES), info(KEYS))
    words = "memory_efficient_attention", "PagedBlockDiagonalPaddedKeysMask"
    assert_listed(lambda: run(query, key, value, pages), *words)
    mine = type("BlockDiagonalMask", (fmha.AttentionBias,), {})()
    assert_listed(lambda: run(query, key, value, mine), "BlockDiagonalMask")


# -- TransformerEngine -----------------------------------------------------------------------------

KINDS = ["no_mask", "causal", "causal_bottom_right", "padding", "padding,causal"]


@pytest.mark.few(10)
@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 1)])
@pytest.mark.parametrize("kind", [*KINDS, "padding_causal_bottom_right"])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_transformer_engine(form: str, kind: str, window: Any, softmax: str) -> None:
    if window is not None and ("causal" in kind) != (window[1] == 0):
        window = (-1, 0) if "causal" in kind else None
    attend = DotProductAttention(
        HEADS, WIDTH, GROUPS, qkv_format=form, attn_mask_type=kind, softmax_type=softmax
    ).eval()
    given = tensors(2, 4, 6)
    options: dict[str, Any] = {"window_size": window}
    if "padding" in kind:
        options |= {"cu_seqlens_q": cumulative([4, 2]), "cu_seqlens_kv": cumulative([5, 6])}
    if form == "sbhd":
        given = tuple(part.transpose(0, 1).contiguous() for part in given)  # type: ignore[assignment]
    assert_read(lambda: attend(*given, **options), "DotProductAttention.forward")


def test_transformer_engine_masks_and_biases() -> None:
    query, key, value = tensors(2, 4, 4)
    attend = DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format="bshd", softmax_scale=0.5).eval()
    hidden = torch.arange(4).expand(2, 1, 1, 4) >= torch.tensor([4, 2]).view(2, 1, 1, 1)
    padded = {"attn_mask_type": "padding_causal", "attention_mask": hidden}
    assert_read(lambda: attend(query, key, value, **padded))
    cross = {"attn_mask_type": "padding", "attention_mask": (hidden, hidden.flip(0))}
    assert_read(lambda: attend(query, key, value, **cross))
    any_mask = {"attn_mask_type": "arbitrary", "attention_mask": tensor(2, 1, 4, 4) > 2.0}
    assert_read(lambda: attend(query, key, value, **any_mask))
    for kind in ("pre_scale_bias", "post_scale_bias"):
        bias = {"core_attention_bias_type": kind, "core_attention_bias": tensor(1, HEADS, 4, 4)}
        assert_read(lambda bias=bias: attend(query, key, value, **bias))  # type: ignore[misc]
    slopes = {"core_attention_bias_type": "alibi", "alibi_slopes": tensor(HEADS).abs()}
    assert_read(lambda: attend(query, key, value, **slopes))
    words = "DotProductAttention", "alibi_slopes"
    assert_listed(lambda: attend(query, key, value, core_attention_bias_type="alibi"), *words)
    assert_listed(lambda: attend(query, key, value, score_mod=len), "score_mod")
    assert_listed(lambda: attend(query, key, value, inference_params=1), "inference_params")


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_packed_sequences_of_transformer_engine(kind: str) -> None:
    attend = DotProductAttention(HEADS, WIDTH, GROUPS, qkv_format="thd", attn_mask_type=kind).eval()
    query, key, value, asks, answers = packed([3, 2], [4, 5])
    lengths = {"cu_seqlens_q": asks, "cu_seqlens_kv": answers}
    assert_read(lambda: attend(query, key, value, **lengths))
    inside = {"cu_seqlens_q": cumulative([2, 1]), "cu_seqlens_kv": cumulative([3, 4])}
    gaps = {"cu_seqlens_q_padded": asks, "cu_seqlens_kv_padded": answers}
    assert_read(lambda: attend(query, key, value, **inside, **gaps))


# -- SageAttention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_sage(layout: str, causal: bool) -> None:
    given = tensors(2, 5, 5 if causal else 7)
    if layout == "HND":
        given = tuple(part.transpose(1, 2) for part in given)  # type: ignore[assignment]
    assert_read(lambda: sage.sageattn(*given, layout, causal), "sageattn")
    exact = sage.sageattn_qk_int8_pv_fp16_cuda
    assert_read(lambda: exact(*given, layout, causal, sm_scale=0.2, smooth_v=True))


def test_sage_in_place_of_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", sage.sageattn)
    given = [part.transpose(1, 2) for part in tensors(2, 5, 5)]
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True}
    assert_read(lambda: F.scaled_dot_product_attention(*given, **options), "sageattn")
    options["dropout_p"] = 0.1
    assert_listed(lambda: F.scaled_dot_product_attention(*given, **options), "dropout_p")
    scaled = {"is_causal": True, "scale": 0.3}  # which the kernel ignores
    assert_listed(lambda: F.scaled_dot_product_attention(*given, **scaled), "scale=0.3")


def test_packed_sequences_of_sage() -> None:
    query, key, value, asks, answers = packed([2, 4], [5, 3])
    run = sage.sageattn_varlen
    assert_read(lambda: run(query, key, value, asks, answers, 4, 5), "sageattn_varlen")
    same = packed([2, 4], [2, 4])
    assert_read(lambda: run(*same, 4, 4, is_causal=True))
    assert_listed(lambda: run(query, key, value, asks, answers, 4, 5, True), "as many keys")
    mask = torch.ones(1)
    assert_listed(lambda: sage.sageattn(*tensors(1, 2, 2), attn_mask=mask), "sageattn", "attn_mask")


# -- FlashInfer ------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"window_left": 2},
    {"logits_soft_cap": 3.0, "sm_scale": 0.6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_request_of_flashinfer(layout: str, options: dict[str, Any]) -> None:
    query, key, value = (part[0] for part in tensors(1, 4, 6))
    if layout == "HND":
        key, value = key.transpose(0, 1), value.transpose(0, 1)
    run = prefill.single_prefill_with_kv_cache
    name = "single_prefill_with_kv_cache"
    assert_read(lambda: run(query, key, value, causal=True, kv_layout=layout, **options), name)
    assert_read(lambda: run(query, key, value, k_scale=0.5, v_scale=2.0, kv_layout=layout))
    one = decode.single_decode_with_kv_cache
    assert_read(lambda: one(query[0], key, value, layout, q_scale=2.0, v_scale=3.0, **options))


def test_a_window_of_flashinfer_without_the_causal_mask() -> None:
    query, key, value = (part[0] for part in tensors(1, 4, 6))
    run = prefill.single_prefill_with_kv_cache
    assert_read(lambda: run(query, key, value, window_left=1))


def test_masks_and_scales_of_flashinfer() -> None:
    query, key, value = (part[0] for part in tensors(1, 4, 6))
    run, mask = prefill.single_prefill_with_kv_cache, tensor(4, 6) > -1.0
    assert_read(lambda: run(query, key, value, custom_mask=mask))
    scales = {"scale_q": tensor(HEADS).abs(), "scale_v": tensor(GROUPS).abs()}
    assert_read(lambda: run(query, key, value, causal=True, **scales))
    words = "single_prefill_with_kv_cache", "ROPE_LLAMA"
    assert_listed(lambda: run(query, key, value, pos_encoding_mode="ROPE_LLAMA"), *words)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_caches_of_flashinfer(layout: str, options: dict[str, Any]) -> None:
    shape = (7, 4, GROUPS, WIDTH) if layout == "NHD" else (7, GROUPS, 4, WIDTH)
    cache = tensor(*shape, seed=5), tensor(*shape, seed=6)
    places = cumulative([2, 3]), torch.tensor([6, 1, 0, 3, 4]), torch.tensor([3, 1])
    query, sizes = tensor(5, HEADS, WIDTH), (HEADS, GROUPS, WIDTH, 4)
    wrapper = prefill.BatchPrefillWithPagedKVCacheWrapper(None, layout)

    def run() -> Any:
        wrapper.plan(cumulative([2, 3]), *places, *sizes, causal=True, **options)
        return wrapper.run(query, cache, sinks=tensor(HEADS), k_scale=0.7, v_scale=2.0)

    assert_read(run, "BatchPrefillWithPagedKVCacheWrapper.run")
    decoder = decode.BatchDecodeWithPagedKVCacheWrapper(None, layout)

    def one_token() -> Any:
        decoder.begin_forward(*places, *sizes, **options)
        return decoder.run(query[:2], torch.stack(cache, 1))

    assert_read(one_token, "BatchDecodeWithPagedKVCacheWrapper.run")


def test_packed_keys_of_flashinfer_and_its_plans() -> None:
    query, key, value, asks, answers = packed([2, 3], [4, 6])
    wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper(None)
    wrapper.plan(asks, answers, HEADS, GROUPS, WIDTH)
    name = "BatchPrefillWithRaggedKVCacheWrapper.run"
    assert_listed(lambda: wrapper.run(query, key, value), name, "call plan again")

    def run() -> Any:
        wrapper.plan(asks, answers, HEADS, GROUPS, WIDTH, causal=True, window_left=3)
        return wrapper.run(query, key, value)

    assert_read(run, name)
    paged = prefill.BatchPrefillWithPagedKVCacheWrapper(None)
    cache, last = tensor(3, 2, 4, GROUPS, WIDTH), torch.tensor([2])

    def deprecated() -> Any:
        places = torch.tensor([0, 5]), torch.tensor([0, 2]), torch.tensor([0, 2]), last
        paged.plan(*places, HEADS, GROUPS, WIDTH, 4)
        return paged.forward(query, cache)

    assert_listed(deprecated, "BatchPrefillWithPagedKVCacheWrapper.forward", "call run")
