"""Which backend takes a call: by device, dtype, widths and what the call asks for.

``native`` is the compiled CPU kernel, ``triton`` the CUDA one, ``blocked`` plain PyTorch on any
device and the reference for behaviour, ``dense`` the whole matrix in plain PyTorch.
"""

from __future__ import annotations

import math
import os
from functools import cache
from types import ModuleType
from typing import cast

from torch import Tensor
from torch.compiler import is_compiling

from acutance.compiling import constant
from acutance.kernels import blocked, dense, library, native
from acutance.kernels.backward import Gradients, SumGradients
from acutance.kernels.backward import backward as blocked_backward
from acutance.kernels.blocked import Sums
from acutance.kernels.hidden import all_finite, hides_keys, only_visible_values
from acutance.kernels.tiles import Rule
from acutance.masks import Masking

__all__ = ["BACKENDS", "BACKEND_VARIABLE", "backward", "check_backend", "choose", "forward", "ran"]

#: Names of the backends.
BACKENDS = ("native", "blocked", "triton", "dense")
#: Environment variable that names the backend of calls that leave the choice open.
BACKEND_VARIABLE = "ACUTANCE_BACKEND"


def check_backend(name: object, what: str = "backend") -> str:
    """A backend's name, or "auto".

    Raises:
        ValueError: if it is neither.
    """
    if name != "auto" and name not in BACKENDS:
        allowed = ", ".join(repr(each) for each in ("auto", *BACKENDS))
        raise ValueError(f"{what} is one of {allowed}, got {name!r}")
    return str(name)


@cache
def forced() -> str:
    """What :data:`BACKEND_VARIABLE` says, "auto" if nothing; read once."""
    return check_backend(os.environ.get(BACKEND_VARIABLE) or "auto", BACKEND_VARIABLE)


@constant
def _forced() -> str:
    """The same for a compiler, which must not look into the cache."""
    return forced()


@constant
def _most_queries() -> float:
    found = library.load()
    return math.inf if isinstance(found, str) else found.most_queries


def _native_is_fastest(query: Tensor) -> bool:
    most = _most_queries()
    if most == math.inf or getattr(query, "ndim", 0) != 4:  # what is no query is refused later
        return True
    return query.shape[-2] <= most


def takes_native(backend: str, query: Tensor) -> bool:
    """Whether a call that the native kernel can take is the native kernel's."""
    if backend == "auto":
        backend = _forced()
    return backend == "native" or (backend == "auto" and _native_is_fastest(query))


def why_not(backend: str, query: Tensor, value: Tensor | None, dropout_p: float) -> str | None:
    """Why a backend cannot take a call, in a clause, or None if it can."""
    if backend == "native":
        return native.why_not(query, value, dropout_p)
    if backend == "triton":
        return cast("str | None", _gpu().why_not(query, value, dropout_p))
    if backend == "dense" and dropout_p > 0.0:
        return "dropout"
    return None


def _gpu() -> ModuleType:
    from acutance.kernels import gpu  # imports triton, which takes its time

    return gpu


def choose(backend: str, query: Tensor, value: Tensor | None, dropout_p: float) -> str:
    """The backend that takes a call.

    Args:
        backend: its name, or "auto": then the one that :data:`BACKEND_VARIABLE` names, if it can
            take the call, and otherwise the fastest that can.
        query: (B, Hq, L, E).
        value: (B, H, S, Ev), or None.
        dropout_p: probability of dropping a weight.

    Raises:
        ValueError: if the backend named cannot take the call.
    """
    if backend != "auto":
        reason = why_not(backend, query, value, dropout_p)
        if reason is not None:
            raise ValueError(f"backend={backend!r} cannot take this call: {reason}")
        return backend
    if query.device.type != "cpu":
        fastest = "triton"
    else:
        fastest = "native" if _native_is_fastest(query) else "blocked"
    for name in (_forced(), fastest):
        if name != "auto" and why_not(name, query, value, dropout_p) is None:
            return name
    return "blocked"


def _instead(backend: str, reason: str) -> str:
    """The backend of a call whose configuration the Triton kernels failed on, if it may have one.

    Raises:
        ValueError: if the call names the Triton kernels.
    """
    if backend == "triton":
        raise ValueError(f"backend='triton' cannot take this call: {reason}")
    return "blocked"


def ran(
    chosen: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    masking: Masking,
    rule: Rule,
    noise: bool,
) -> str:
    """The backend that a finished call ran on: "blocked" where Triton's kernels were refused.

    Args:
        chosen: what :func:`choose` said, like the rest as :func:`forward` was given it.
        query: (B, Hq, L, E).
        key: (B, H, S, E).
        value: (B, H, S, Ev), or None.
        masking: which keys each row sees.
        rule: scale, softcap and sinks.
        noise: whether the noise sums were asked for.
    """
    if chosen != "triton" or is_compiling():
        return chosen
    reason = _gpu().refused(query, key, value, masking, rule, noise, warn=False)
    return chosen if reason is None else "blocked"


def forward(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    masking: Masking,
    rule: Rule,
    noise: bool,
) -> Sums:
    """The sums, by the backend that takes the call (:func:`acutance.kernels.blocked.forward`)."""
    chosen = choose(backend, query, value, rule.dropout_p)
    arguments = (query, key, value, masking, rule, noise)
    if chosen == "native":
        return native.forward(*arguments)
    if chosen == "triton":
        reason = _gpu().refused(*arguments, warn=backend != "triton")
        if reason is None:
            return cast(Sums, _gpu().forward(*arguments))
        chosen = _instead(backend, reason)
    chosen_forward = dense.forward if chosen == "dense" else blocked.forward
    sums = chosen_forward(*arguments)
    if value is None or not hides_keys(masking) or all_finite(sums.out):
        return sums
    return only_visible_values(chosen_forward, sums, query, key, value, masking, rule, noise)


def backward(
    backend: str,
    grad: SumGradients,
    sums: Sums,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    masking: Masking,
    rule: Rule,
    wanted: tuple[bool, ...],
) -> Gradients:
    """The gradients (:func:`acutance.kernels.backward.backward`).

    What a backend's backward pass does not cover is the blocked one's: sums mean the same in all.
    """
    chosen = choose(backend, query, value, rule.dropout_p)
    arguments = (grad, sums, query, key, value, masking, rule, wanted)
    if chosen == "native" and native.why_no_gradient(wanted) is None:
        return native.backward(*arguments)
    if chosen == "triton" and _gpu().unsupported_gradient(masking, wanted) is None:
        call = (grad, query, key, value, masking, rule, wanted)
        reason = _gpu().refused_gradient(*call, warn=backend != "triton")
        if reason is None:
            return cast(Gradients, _gpu().backward(*arguments))
        chosen = _instead(backend, reason)
    return dense.backward(*arguments) if chosen == "dense" else blocked_backward(*arguments)
