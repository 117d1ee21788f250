"""SageAttention: ``sageattn``, its variants by hardware, and ``sageattn_varlen``.

Tensors are (B, H, L, E) for the layout "HND" and (B, L, H, E) for "NHD". What is read is attention
of the queries and keys as they are passed; the kernel rounds them to 8 bits.
"""

from __future__ import annotations

from acutance.capture.kernel_functions.arguments import Arguments
from acutance.capture.kernel_functions.reading import Kernel, Layout, Reading
from acutance.capture.kernel_functions.sequences import batch_reading, packed, sequence_reading

__all__ = ["SAGE"]

_LAYOUTS = {"HND": Layout(0, 1, 2), "NHD": Layout(0, 2, 1)}
_ROUNDING = ("qk_quant_gran", "pv_accum_dtype", "smooth_k", "smooth_v", "quantization_backend")
_ALIKE = "sageattn with is_causal needs as many keys as queries"


def _read(arguments: Arguments) -> Reading:
    tensors = tuple(arguments.tensor(name) for name in ("q", "k", "v"))
    arguments.ignore(*_ROUNDING, "enable_gqa")
    if arguments["dropout_p"]:  # of a call of SDPA that was redirected here
        raise ValueError("sageattn has no dropout_p")
    layout = _LAYOUTS[arguments["tensor_layout"]]
    causal, scale = bool(arguments["is_causal"]), arguments["sm_scale"]
    if causal and layout.read(tensors[0]).shape[2] != layout.read(tensors[1]).shape[2]:
        raise ValueError(_ALIKE)
    return batch_reading(
        (tensors[0], tensors[1], tensors[2]),
        layout,
        causal=causal,
        scale=None if scale is None else float(scale),
    )


def _read_varlen(arguments: Arguments) -> Reading:
    query, key, value = (arguments.tensor(name) for name in ("q", "k", "v"))
    arguments.ignore(*_ROUNDING)
    bounds = [arguments.tensor(name).long() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    causal, scale = bool(arguments["is_causal"]), arguments["sm_scale"]
    if causal and not bounds[0].equal(bounds[1]):
        raise ValueError(_ALIKE)
    asks, answers = (
        packed(each[:-1], each.diff(), len(part))
        for each, part in zip(bounds, (query, key), strict=True)
    )
    return sequence_reading(
        (query, key, value),
        asks,
        answers,
        causal=causal,
        scale=None if scale is None else float(scale),
    )


#: The functions of SageAttention.
SAGE = (
    *(
        Kernel(name, _read)
        for name in (
            "sageattn",
            "sageattn_qk_int8_pv_fp16_triton",
            "sageattn_qk_int8_pv_fp16_cuda",
            "sageattn_qk_int8_pv_fp8_cuda",
            "sageattn_qk_int8_pv_fp8_cuda_sm90",
        )
    ),
    Kernel("sageattn_varlen", _read_varlen),
)
