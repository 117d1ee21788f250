"""The check of a configuration before its first use in a process.

Nobody can try these kernels on every device, driver and Triton release. So the first call of a kind
(dtype, widths, masks, sinks, noise, gradients) runs a small call of that kind, and compares it with
the blocked path in float64. What disagrees, or does not compile, is refused for the rest of the
process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.kernels import backward as blocked_backward
from acutance.kernels import blocked
from acutance.kernels.call import Gradients, KernelCall, SumGradients, Sums
from acutance.kernels.gpu.arguments import flags, supported
from acutance.kernels.gpu.key_moments import FEWEST_CHUNKS, chunk_size, has_moments
from acutance.kernels.gpu.language import interpreted
from acutance.kernels.gpu.passes import backward, forward

#: Rows, keys and window of the small call: for tiles of 128 × 128 two blocks of rows, and whole
#: tiles between two edges; and for the interpreter's tiles of 16 × 32. So few keys are not summed.
SIZES, SMALL_SIZES = (150, 511, 400), (20, 135, 88)
#: Largest difference allowed, as a share of the largest value: of sums, which are float32, and in
#: units of the dtype's epsilon of outputs and gradients, whose terms are rounded to that dtype.
TOLERANCE, OUTPUT_STEPS, GRADIENT_STEPS = 1e-4, 2.0, 8.0
#: Share of keys that may be counted in another bin.
MOVED = 1e-3

#: Of each configuration why it is refused, None if it is not, and what to warn of once: the
#: configuration, or the kind of failure, which many configurations may share.
_verdicts: dict[tuple[Any, ...], tuple[str | None, object]] = {}
_warned: set[object] = set()
_lock = threading.RLock()


def refusal_reason(
    call: KernelCall,
    grad: SumGradients | None = None,
    wanted: tuple[bool, ...] = (),
    *,
    warn: bool = True,
) -> str | None:
    """Why the first-use check refuses the kernels of a pass for a call; None if it does not.

    The first call of each configuration is checked against the blocked path; the result is cached.

    Args:
        call: as of :func:`acutance.kernels.gpu.passes.forward`.
        grad: gradients of the sums, for the backward kernels; None for the forward kernel.
        wanted: which gradients are requested.
        warn: issue a warning if the configuration is refused.

    Returns:
        One clause, such as ``"its n differs from the blocked path's by …"``, or None.
    """
    if grad is not None:
        call = call._replace(noise=False, gaps=False)
    if interpreted() or supported(call) is not None:
        return None  # the interpreter's results are the tests' to judge
    given = () if grad is None else tuple(x is not None and x.numel() > 0 for x in grad)
    kind = (*_kind(call), given, wanted)
    if kind not in _verdicts:
        if _capturing(call.query):
            return "its first call is inside a CUDA graph's capture: run it once before"
        with _lock:
            if kind not in _verdicts:  # no other thread was first
                try:
                    with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
                        _verdicts[kind] = _check(call, given, wanted), kind
                except torch.OutOfMemoryError:
                    return "no memory is left for the check before its first use"
                except Exception as error:  # whatever a compiler or a driver raises
                    kernels = "the forward pass" if grad is None else "the backward pass"
                    name = type(error).__name__
                    first = (str(error).strip() or "no message").splitlines()[0][:200]
                    _verdicts[kind] = f"{kernels} does not compile or run ({name}: {first})", name
    reason, cause = _verdicts[kind]
    if reason is not None and warn:
        with _lock:
            new = cause not in _warned
            _warned.add(cause)
        if new:
            warnings.warn(
                f"backend='triton' is not used for {_named(call)}: {reason}; the blocked"
                f" path takes its calls. Please report this with the GPU's name and the versions"
                f" of torch and triton.",
                RuntimeWarning,
                stacklevel=1,
            )
    return reason


def forget() -> None:
    """Clear the cached results, so that every configuration is checked again at its next use."""
    with _lock:
        _verdicts.clear()
        _warned.clear()


def _capturing(query: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return query.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _named(call: KernelCall) -> str:
    """A description of a call's configuration for messages."""
    query, masking = call.query, call.masking
    masks = {
        "causal": masking.causal,
        "a window": masking.window is not None,
        "a mask": masking.attn_mask is not None,
        "a bias": masking.bias is not None,
        "padding": masking.key_mask is not None,
        "documents": masking.query_documents is not None,
        "ALiBi": masking.alibi_slopes is not None,
    }
    kinds = [name for name, there in masks.items() if there]
    dtype = str(query.dtype).removeprefix("torch.")
    return f"{', '.join([f'{dtype} of width {query.shape[-1]}', *kinds])} on {query.device}"


def _kind(call: KernelCall) -> tuple[Any, ...]:
    """The configuration of a call: everything that decides its kernels and tile sizes."""
    query, value, masking = call.query, call.value, call.masking
    masks = (masking.attn_mask, masking.bias, masking.alibi_slopes)
    given = (*masks, masking.query_documents, masking.key_documents, call.sinks)
    return (
        query.device,
        query.dtype,
        query.shape[-1],
        None if value is None else value.shape[-1],
        (min(query.shape[2], SIZES[0]) - 1).bit_length(),
        tuple(None if part is None else part.dtype for part in given),
        call.noise,
        call.gaps,
        masking.group > 1,
        has_moments(call),
        flags(call),
    )


def _check(call: KernelCall, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> str | None:
    """Check the kernels of a pass on a small call; why they are refused, or None.

    Args:
        call: the forward call.
        given: for each sum, whether it has a gradient; none for the forward kernel.
        wanted: which gradients are requested.
    """
    query = call.query
    small = _small_call(call)
    exact = _exact(small)
    sums = blocked.forward(exact)
    if not given:
        return _differing(forward(small), sums, query.dtype, _largest(small.value), OUTPUT_STEPS)
    draw = _Draw(query.device, 7)
    dtypes = (query.dtype, *[torch.float32] * (len(given) - 1))
    like = (sums.out, *[sums.Z] * (len(given) - 1))
    grad = SumGradients(
        *(
            draw.normal(tensor.shape, dtype) if there else None
            for there, tensor, dtype in zip(given, like, dtypes, strict=True)
        )
    )
    want = blocked_backward.backward(SumGradients(*map(_wide, grad)), sums, exact, wanted)
    rounded = Sums(*(x.float() if x.is_floating_point() else x for x in sums))
    rounded = rounded._replace(out=sums.out.to(query.dtype))
    results = backward(grad, rounded, small, wanted)
    reason = _differing(results, want, query.dtype, 0.0, GRADIENT_STEPS)
    return None if reason is None else f"the backward pass: {reason}"


def _differing(
    found: Iterable[Tensor | None],
    want: Sums | Gradients,
    dtype: torch.dtype,
    least: float,
    steps: float,
) -> str | None:
    """Name of the first result that differs by more than rounding, as a clause; None if none does.

    Args:
        found: results of the kernels.
        want: results of the blocked path in float64.
        dtype: of the call.
        least: absolute difference that is always allowed.
        steps: allowed difference in rounding steps of the dtype.
    """
    gradients = isinstance(want, Gradients)
    for name, ours, theirs in zip(want._fields, found, want, strict=True):
        if ours is None or theirs is None or not theirs.numel():
            continue
        if name == "gaps":  # a score may be rounded across the edge of its bin
            moved, most = float((ours - theirs).abs().sum()), MOVED * float(theirs.sum())
            if moved > most:
                return (
                    f"its {name} differ from the blocked path's by {moved:g}, of {most:g} allowed"
                )
            continue
        if not theirs.is_floating_point():
            wrong = int((ours != theirs).sum())
            if wrong:
                return f"its {name} is another than the blocked path's in {wrong} rows"
            continue
        finite = theirs.isfinite()
        same = torch.equal(ours.isfinite(), finite) and torch.equal(
            ours[~finite].double().nan_to_num(7.0), theirs[~finite].double().nan_to_num(7.0)
        )
        if not same:
            return f"its {name} is not finite where the blocked path's is, or the other way round"
        if not finite.any():
            continue
        rounds = gradients or name == "out"
        share = max(TOLERANCE, steps * torch.finfo(dtype).eps if rounds else 0.0)
        size = max(_largest(theirs[finite]), least if name == "out" else 0.0)
        error = _largest(ours[finite].double() - theirs[finite])
        if error > share * size:
            return (
                f"its {'gradient of ' if gradients else ''}{name} differs from the blocked path's"
                f" by {error:.2g}, where {share * size:.2g} is rounding"
            )
    return None


def _largest(tensor: Tensor | None) -> float:
    """Largest absolute value; 0 for an empty tensor or None."""
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().amax())


class _Draw:
    """Random numbers with a fixed seed, from a generator of their own."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._generator = device, torch.Generator("cpu").manual_seed(seed)

    def normal(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Standard normal numbers."""
        drawn = torch.randn(tuple(shape), generator=self._generator, device="cpu")
        return drawn.to(self._device, dtype)

    def likely(self, shape: Iterable[int], share: float) -> Tensor:
        """Booleans that are True with probability ``share``."""
        drawn = torch.rand(tuple(shape), generator=self._generator, device="cpu")
        return (drawn < share).to(self._device)


def _small_call(call: KernelCall) -> KernelCall:
    """A small call of the same configuration, with random queries, keys and values."""
    query, _, value, masking, *_ = call
    rows, keys, window = SMALL_SIZES if query.device.type == "cpu" else SIZES
    if has_moments(call):  # two chunks of keys for the first rows
        rows, keys = SIZES[0], FEWEST_CHUNKS * chunk_size(query.shape[-1]) + SIZES[0]
    rows = min(query.shape[2], rows)  # few rows take other tile sizes
    group = 2 if masking.group > 1 else 1
    draw = _Draw(query.device, 3)
    width, dtype = query.shape[-1], query.dtype
    full = (1, group, rows, keys)

    def ids(like: Tensor | None, count: int) -> Tensor | None:
        if like is None:
            return None
        place = torch.arange(count, device=query.device)
        return (place * 3 // count)[None].to(like.dtype)

    mask, bias, slopes = masking.attn_mask, masking.bias, masking.alibi_slopes
    if mask is not None:
        shown = draw.likely(full, 0.8)
        if mask.dtype != torch.bool:
            shown = draw.normal(full, mask.dtype).masked_fill(~shown, -torch.inf)
        mask = shown
    small = replace(
        masking,
        batch=1,
        heads=1,
        group=group,
        queries=rows,
        keys=keys,
        attn_mask=mask,
        bias=None if bias is None else draw.normal(full, bias.dtype),
        key_mask=None if masking.key_mask is None else draw.likely((1, keys), 0.8),
        query_documents=ids(masking.query_documents, rows),
        key_documents=ids(masking.key_documents, keys),
        alibi_slopes=None if slopes is None else draw.normal((group,), slopes.dtype).abs() / 20,
        offset=keys - rows,
        window=None if masking.window is None else window,
    )
    scale = width**-0.5 * (-1.0 if call.scale < 0.0 else 1.0)
    sinks = None if call.sinks is None else draw.normal((group,), call.sinks.dtype)
    return call._replace(
        query=draw.normal((1, group, rows, width), dtype),
        key=draw.normal((1, 1, keys, width), dtype),
        value=None if value is None else draw.normal((1, 1, keys, value.shape[-1]), dtype),
        masking=small,
        scale=scale,
        softcap=None if call.softcap is None else 3.0,
        sinks=sinks,
    )


def _wide(value: Any) -> Any:
    """A floating tensor in float64; anything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _exact(call: KernelCall) -> KernelCall:
    """Convert a call to float64."""
    masking = call.masking
    masking = replace(
        masking,
        attn_mask=_wide(masking.attn_mask),
        bias=_wide(masking.bias),
        alibi_slopes=_wide(masking.alibi_slopes),
    )
    return KernelCall(*map(_wide, call._replace(masking=masking)))
