"""CONTENDERS: the ways of computing attention and its statistics that are compared.

Each makes, from :class:`~benchmarks.cpu.inputs.Inputs`, the call that is timed. ``sdpa`` is the
reference of every ratio and gives the output alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.attend import attention, row_statistics
from acutance.kernels import library
from acutance.rowstats.metrics import metric_names
from benchmarks.cpu.cases import Case
from benchmarks.cpu.inputs import Inputs, make_inputs

MAP_BYTES = 4  # an attention map's element: float32, whatever the inputs
#: The statistics that are measured, each a number a row; other metrics are formulas of these.
STATISTICS = (
    *("entropy", "lse", "max_logit", "collision", "varentropy", "top_weight", "first_weight"),
    *("logit_mean", "logit_std"),
)
#: Those whose gradients the backward passes take.
DIFFERENTIATED = tuple(name for name in STATISTICS if name != "top_weight")

Call = Callable[[], Any]


class UnavailableError(Exception):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Result:
    """What a contender computed.

    Attributes:
        output: (B, Hq, L, E), or None.
        metrics: (B, Hq, L) each, by name.
        backend: the kernel of this library that it was.
    """

    output: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    backend: str = ""


@dataclass(frozen=True)
class Contender:
    """One way to do it.

    Attributes:
        meaning: what it does and gives, one line.
        prepare: makes the call that is timed; whatever it does itself is not.
        read: what the call returned, as a result; not timed.
        products: matrix products of its forward pass.
        maps: how many whole (B, Hq, L, S) maps it holds at once, forward.
        entropy_bias: an upper bound of the error its formula makes by design, nats, for a case; the
            gate allows for it and the error is still shown.
        wide: whether it promises float32 metrics of bfloat16 and float16 inputs.
        cpu: instruction set the native kernel is to use; empty for the one in use.
    """

    meaning: str
    prepare: Callable[[Inputs], Call]
    read: Callable[[Any], Result] = lambda result: result
    products: int = 2
    maps: int = 0
    entropy_bias: Callable[[Case], float] = lambda case: 0.0
    wide: bool = False
    cpu: str = ""

    def needs(self, case: Case) -> int:
        """Bytes its maps take; the backward pass keeps about as many again."""
        maps = self.maps * (2 if case.backward else 1)
        return case.batch * case.heads * case.queries * case.keys * MAP_BYTES * maps

    def gflop(self, case: Case) -> float:
        """Operations of its matrix products in what is timed, in 1e9.

        A backward pass has five, one of which makes the scores again; that of a loss without the
        output has three.
        """
        backward = 3 if case.loss == "entropy" and self.products == 1 else 5
        products = self.products * (case.timing != "backward") + backward * case.backward
        return 2e-9 * products * case.pairs * case.width


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Have the native kernel use an instruction set by name, and afterwards the former one.

    Raises:
        UnavailableError: if this machine or build has it not.
    """
    if not name:
        yield
        return
    found = library.load()
    if isinstance(found, str):
        raise UnavailableError(found)
    if name not in found.cpus:
        raise UnavailableError(f"this machine and build have {', '.join(found.cpus)}, not {name}")
    former = found.named
    found.use_cpu(name)
    try:
        yield
    finally:
        found.use_cpu(former)


def sdpa(x: Inputs) -> Call:
    """Attention alone."""
    return partial(F.scaled_dot_product_attention, *x.leaves, **x.sdpa_options)


def ours(
    x: Inputs, *, values: bool = True, read: tuple[str, ...] = STATISTICS, **options: Any
) -> Call:
    """The library's call; the statistics of a loss, or else those in ``read``, are read."""
    options = {**x.options, **options}
    if values:
        options["return_stats"] = True
        call: Call = partial(cast(Any, attention), *x.leaves, **options)
    else:
        call = partial(row_statistics, x.query, x.key, **options)
    if x.case.backward:
        read = ("entropy",) if x.case.loss == "entropy" else DIFFERENTIATED
    if not read:
        return call

    def read_too() -> Result:
        found = call()
        output, stats = found if values else (None, found)
        return Result(output, stats.as_dict(read), _backend(stats))

    return read_too


def read_ours(found: Any, also: tuple[str, ...] = ()) -> Result:
    """What :func:`ours` returned where it left the statistics unread."""
    if isinstance(found, Result):
        return found
    output, stats = found if isinstance(found, tuple) else (None, found)
    return Result(
        output, {name: getattr(stats, name) for name in (*STATISTICS, *also)}, _backend(stats)
    )


def _backend(stats: Any) -> str:
    return str(getattr(stats, "backend", "") or "")


def entropy_trick(x: Inputs) -> Call:
    r"""Output and entropy from two SDPA calls, the second with the keys as values.

    The first call's hidden second result is the row's log-sum-exp; the second gives
    :math:`\sum_j p_j k_j`, so :math:`H = \mathrm{lse} - q \cdot \sum_j p_j k_j / \sqrt E`.
    """
    # Neither bound in torch's stubs nor public; it is what the public call runs on the CPU.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mask = None if x.case.causal and x.case.window is None else x.additive

    def call() -> Result:
        output, lse = flash(*x.leaves, is_causal=x.case.causal and mask is None, attn_mask=mask)
        mean_key = F.scaled_dot_product_attention(x.query, x.key, x.key, **x.sdpa_options)
        return Result(output, {"entropy": lse - x.scale * (x.query * mean_key).sum(-1)})

    return call


def naive(x: Inputs) -> Call:
    """Every map in memory, all heads at once, the entropy by ``log(p + 1e-9)``."""
    additive = x.additive

    def call() -> Result:
        key, value = x.key, x.value
        if x.grouped:
            key, value = (part.repeat_interleave(x.case.groups_of, dim=1) for part in (key, value))
        scores = torch.matmul(x.query, key.transpose(2, 3)) * x.scale
        if additive is not None:
            scores = scores + additive
        weights = F.softmax(scores, dim=-1, dtype=torch.float32)
        del scores
        weights = weights.to(x.query.dtype)
        entropy = -(weights * torch.log(weights + 1e-9)).sum(-1)
        return Result(torch.matmul(weights, value), {"entropy": entropy})

    return call


def flex(x: Inputs) -> Call:
    """FlexAttention, compiled, with the log-sum-exp.

    Raises:
        UnavailableError: where it does not run; the message is its own.
    """
    refusal = _flex_refusal()
    if refusal is not None:
        raise UnavailableError(refusal)
    return _flex(x)


@cache
def _flex_refusal() -> str | None:
    """Why it does not run, tried once on a small input: compiling takes half a minute."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _flex(make_inputs(Case("flex", 128, 128, heads=1)))()
    except Exception as error:  # the compiler's own, and whatever is missing for it
        said = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {said[0]}"
    return None


def _flex(x: Inputs) -> Call:
    from torch.nn.attention import flex_attention as module

    compiled: Any = torch.compile(module.flex_attention)
    mask = None
    if x.case.causal:
        length = x.case.queries
        mask = module.create_block_mask(
            lambda batch, head, i, j: i >= j, None, None, length, length, device="cpu"
        )

    def call() -> Result:
        output, aux = compiled(*x.leaves, block_mask=mask, return_aux=module.AuxRequest(lse=True))
        return Result(output, {"lse": aux.lse})

    return call


def _native(cpu: str) -> Contender:
    return Contender(
        f"acutance, the native kernel on {cpu.upper()}",
        partial(ours, backend="native"),
        wide=True,
        cpu=cpu,
    )


CONTENDERS: dict[str, Contender] = {
    "sdpa": Contender(
        "F.scaled_dot_product_attention: the output alone", sdpa, lambda output: Result(output)
    ),
    "acutance": Contender(
        "attention(…, return_stats=True): the output, and nine statistics read", ours, wide=True
    ),
    "acutance-unread": Contender(
        "the same call alone: the sums are there, their formulas wait until they are read",
        partial(ours, read=()),
        read_ours,
        wide=True,
    ),
    "acutance-metrics": Contender(
        f"the same, every metric read: {len(metric_names())} with those that theory predicts",
        partial(ours, read=metric_names()),
        wide=True,
    ),
    "acutance-avx512": _native("avx512"),
    "acutance-avx2": _native("avx2"),
    "acutance-baseline": _native("baseline"),
    "blocked": Contender(
        'acutance with backend="blocked": plain PyTorch',
        partial(ours, backend="blocked"),
        wide=True,
    ),
    "statistics": Contender(
        "row_statistics(…): nine statistics read, no output",
        partial(ours, values=False),
        products=1,
        wide=True,
    ),
    "gaps": Contender(
        "row_statistics(…, gaps=True): nine read, keys counted by their gaps",
        partial(ours, values=False, gaps=True),
        products=1,
        wide=True,
    ),
    "noise": Contender(
        "attention(…, return_stats=True, noise=True): ten read",
        partial(ours, noise=True, read=(*STATISTICS, "noise_gain")),
        products=3,
        wide=True,
    ),
    "entropy-trick": Contender(
        "two SDPA calls, the second with the keys as values: the output and the entropy",
        entropy_trick,
        products=4,
    ),
    "naive": Contender(
        "maps in memory: scores, softmax, −Σ p log(p + 1e-9), p@v: the output and the entropy",
        naive,
        maps=3,
        # Σ p log(1 + ε/p) ≤ n ε
        entropy_bias=lambda case: case.keys * 1e-9,
    ),
    "flex": Contender(
        "FlexAttention, compiled, with its log-sum-exp: the output and the lse", flex
    ),
}
