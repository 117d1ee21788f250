"""Choose the backend of a call by device, dtype, widths and options.

``native`` is the compiled CPU kernel, ``triton`` the CUDA one, ``blocked`` plain PyTorch on any
device and the reference for behaviour.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import cast

from torch.compiler import is_compiling

from acutance.compiling import constant
from acutance.kernels import blocked, native
from acutance.kernels.backward import backward as blocked_backward
from acutance.kernels.call import Gradients, KernelCall, SumGradients, Sums
from acutance.kernels.hidden import all_finite, hides_keys, only_visible_values

#: Names of the backends.
BACKENDS = ("native", "blocked", "triton")
#: Environment variable that names the backend of calls that leave the choice open.
BACKEND_VARIABLE = "ACUTANCE_BACKEND"


def check_backend(name: object, what: str = "backend") -> str:
    """Return ``name`` if it is the name of a backend or "auto"; ``what`` names it in errors.

    Raises:
        ValueError: if it is neither.
    """
    if name != "auto" and name not in BACKENDS:
        allowed = ", ".join(repr(each) for each in ("auto", *BACKENDS))
        raise ValueError(f"{what} must be one of {allowed}, got {name!r}")
    return str(name)


@cache
def forced() -> str:
    """The backend named by :data:`BACKEND_VARIABLE`, "auto" if unset; read once."""
    return check_backend(os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE)


@constant
def _forced() -> str:
    """:func:`forced` as a constant for ``torch.compile``, which cannot trace its cache."""
    return forced()


def why_not(backend: str, call: KernelCall) -> str | None:
    """Why a backend does not support a call, as a clause; None if it does."""
    if backend == "native":
        return native.why_not(call)
    if backend == "triton":
        return cast("str | None", _gpu().why_not(call))
    return None


def _gpu() -> ModuleType:
    """Import the Triton kernels."""
    from acutance.kernels import gpu  # imports triton, which takes its time

    return gpu


def choose(backend: str, call: KernelCall) -> str:
    """The name of the backend for a call.

    Args:
        backend: its name, or "auto": then the first that supports the call of the one that the
            environment variable :data:`BACKEND_VARIABLE` names, the compiled kernel for the device
            and "blocked".
        call: the call.

    Raises:
        ValueError: if the backend named does not support the call.
    """
    if backend != "auto":
        reason = why_not(backend, call)
        if reason is not None:
            raise ValueError(f"backend={backend!r} does not support this call: {reason}")
        return backend
    compiled = "native" if call.query.device.type == "cpu" else "triton"
    for name in (_forced(), compiled):
        if name != "auto" and why_not(name, call) is None:
            return name
    return "blocked"


def _instead(backend: str, reason: str) -> str:
    """The backend "blocked", for a call that the Triton kernels cannot run for some ``reason``.

    Raises:
        ValueError: if ``backend`` is "triton", so that no other may be used.
    """
    if backend == "triton":
        raise ValueError(f"backend='triton' does not support this call: {reason}")
    return "blocked"


def ran(chosen: str, call: KernelCall) -> str:
    """The backend that a finished call ran on: "blocked" where Triton's kernels were refused.

    Args:
        chosen: the answer of :func:`choose`.
        call: the call.
    """
    if chosen != "triton" or is_compiling():
        return chosen
    return "blocked" if _gpu().refusal_reason(call, warn=False) is not None else chosen


def forward(backend: str, call: KernelCall) -> Sums:
    """Output and row sums from a given backend, or from the one that "auto" chooses."""
    chosen = choose(backend, call) if backend == "auto" else backend
    if chosen == "native":
        return native.forward(call)
    if chosen == "triton":
        reason = _gpu().refusal_reason(call, warn=backend != "triton")
        if reason is None:
            return cast(Sums, _gpu().forward(call))
        chosen = _instead(backend, reason)
    sums = blocked.forward(call)
    if call.value is None or not hides_keys(call.masking) or all_finite(sums.out):
        return sums
    return only_visible_values(blocked.forward, sums, call)


def backward(
    backend: str, grad: SumGradients, sums: Sums, call: KernelCall, wanted: tuple[bool, ...]
) -> Gradients:
    """Gradients of a forward call, as of :func:`acutance.kernels.backward.backward`.

    Where the backend's backward pass does not support the call, the blocked one is used, since the
    sums have the same meaning in all backends.
    """
    chosen = choose(backend, call) if backend == "auto" else backend
    if chosen == "native" and native.why_no_gradient(wanted) is None:
        return native.backward(grad, sums, call, wanted)
    if chosen == "triton" and _gpu().unsupported_gradient(call.masking, wanted) is None:
        reason = _gpu().gradient_refusal_reason(grad, call, wanted, warn=backend != "triton")
        if reason is None:
            return cast(Gradients, _gpu().backward(grad, sums, call, wanted))
        chosen = _instead(backend, reason)
    return blocked_backward(grad, sums, call, wanted)
