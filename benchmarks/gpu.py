"""What the statistics cost on a CUDA device, beside PyTorch's fused attention.

    python benchmarks/gpu.py --json gpu.json --markdown gpu.md

Every case passes a correctness gate before it is timed: metrics of some rows of every head against
the float64 oracle, gradients against float64 autograd. Contenders then take turns, timed with CUDA
events, and a ratio is the median over the rounds of (time / time of the fastest fused contender of
that round's medians). ``--check`` stops after the gate.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import acutance
from acutance.rowstats import RowState, RowStatistics, dense_statistics
from acutance.testing import compare, score_error

#: Tokens of a batch: shorter sequences come in larger batches.
TOKENS = 16384
MODEL_WIDTH = 2048
GATE_ROWS = 16
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
FUSED = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
#: Largest share of the device's free memory that whole maps may take.
SHARE = 0.7


@dataclass(frozen=True)
class Case:
    """One size: B batches of H heads, L queries and keys of width E."""

    length: int
    width: int
    causal: bool
    dtype: str
    tokens: int = TOKENS
    model_width: int = MODEL_WIDTH

    @property
    def name(self) -> str:
        return f"{'causal' if self.causal else 'full'}-{self.length}-e{self.width}-{self.dtype}"

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)

    @property
    def heads(self) -> int:
        return max(1, self.model_width // self.width)

    @property
    def flop(self) -> float:
        """Multiplications and additions of the two matrix products, forward."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4.0 * self.batch * self.heads * pairs * self.width

    def tensors(self, device: str) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(self.length)
        shape = (self.batch, self.heads, self.length, self.width)
        return [
            torch.randn(shape, generator=generator, device=device).to(getattr(torch, self.dtype))
            for _ in range(3)
        ]


@dataclass
class Timing:
    """One contender in one pass, or why it was not timed."""

    contender: str
    direction: str
    status: str = "timed"
    milliseconds: list[float] = field(default_factory=list)
    median: float | None = None
    ratio: float | None = None
    teraflops: float | None = None
    peak_mib: float | None = None


Results = list[Tensor]
Call = Callable[[Tensor, Tensor, Tensor], Results]


# -- contenders -----------------------------------------------------------------------------------


def fused(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, backend: Any) -> Results:
    with sdpa_kernel([backend]):
        return [F.scaled_dot_product_attention(query, key, value, is_causal=causal)]


def acutance_call(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Results:
    out, stats = acutance.attention(
        query, key, value, is_causal=causal, return_stats=True, backend="triton"
    )
    assert isinstance(stats, RowStatistics)
    return [out, stats.entropy]


def acutance_statistics(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Results:
    stats = acutance.row_statistics(query, key, is_causal=causal, backend="triton")
    return [stats.entropy]


def materialised(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Results:
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32)
    entropy = -(weights * torch.log(weights + 1e-9)).sum(-1)
    return [weights.to(value.dtype) @ value, entropy]


def flex(case: Case) -> Call:
    """FlexAttention, compiled, with the log-sum-exp and, where it can, the largest score."""
    from torch.nn.attention import flex_attention as module

    compiled = torch.compile(module.flex_attention)
    mask = None
    if case.causal:
        mask = module.create_block_mask(
            lambda batch, head, i, j: i >= j, None, None, case.length, case.length, device="cuda"
        )
    if hasattr(module, "AuxRequest"):
        aux = {"return_aux": module.AuxRequest(lse=True, max_scores=True)}
    else:
        aux = {"return_lse": True}

    def call(query: Tensor, key: Tensor, value: Tensor) -> Results:
        out, extra = compiled(query, key, value, block_mask=mask, **aux)
        return [out, extra if isinstance(extra, Tensor) else extra.lse]

    return call


def contenders(case: Case) -> dict[str, Call]:
    found: dict[str, Call] = {
        name: partial(fused, causal=case.causal, backend=backend) for name, backend in FUSED.items()
    }
    found["acutance"] = partial(acutance_call, causal=case.causal)
    found["acutance-statistics"] = partial(acutance_statistics, causal=case.causal)
    with suppress(ImportError):
        found["flex"] = flex(case)
    found["materialised"] = partial(materialised, causal=case.causal)
    return found


def no_room(case: Case, name: str, backward: bool) -> str | None:
    """Why whole maps cannot be held, or None if they can."""
    if name != "materialised":
        return None
    maps = 5 if backward else 4
    needed = maps * 4 * case.batch * case.heads * case.length**2
    free = SHARE * torch.cuda.mem_get_info()[0]
    return None if needed <= free else f"not run: maps take {needed / 2**30:.0f} GiB"


# -- the gate -------------------------------------------------------------------------------------


def gate(case: Case, device: str) -> dict[str, float]:
    """Largest error of each quantity as a share of its tolerance; all are at most 1 or it is wrong.

    Rows are some of every head; the loss is of these rows alone, so that the gradients of all keys
    and values are exact too.
    """
    leaves = case.tensors(device)
    rows = torch.linspace(0, case.length - 1, min(GATE_ROWS, case.length), device=device)
    rows = rows.round().long()
    mask = None
    if case.causal:
        mask = torch.arange(case.length, device=device) <= rows[:, None]
    ours = [leaf.clone().requires_grad_() for leaf in leaves]
    out, stats = acutance.attention(
        *ours, is_causal=case.causal, return_stats=True, backend="triton"
    )
    assert isinstance(stats, RowStatistics)
    state = RowState(*(part.detach().index_select(2, rows) for part in stats.state))
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    oracle = dense_statistics(exact[0].index_select(2, rows), *exact[1:], attn_mask=mask)
    detached = {name: part.detach() for name, part in oracle.items()}
    delta = score_error(leaves[0].index_select(2, rows), leaves[1])
    found = compare(RowStatistics(state), detached, score_error=delta).ratios

    generator = torch.Generator(device).manual_seed(1)
    d_out = torch.randn(out.shape, generator=generator, device=device).index_select(2, rows)
    d_entropy = torch.randn(stats.entropy.shape, generator=generator, device=device)
    d_entropy = d_entropy.index_select(2, rows)
    loss = (out.index_select(2, rows).float() * d_out).sum()
    loss = loss + (stats.entropy.index_select(2, rows) * d_entropy).sum()
    gradients = torch.autograd.grad(loss, ours)
    wanted = (oracle["output"] * d_out.double()).sum()
    wanted = wanted + (oracle["entropy"] * d_entropy.double()).sum()
    right = torch.autograd.grad(wanted, exact)
    plain = plain_gradients(leaves, rows, mask, d_out, d_entropy)
    eps = torch.finfo(leaves[0].dtype).eps
    found["output"] = share(out.index_select(2, rows), oracle["output"], 2 * eps, None)
    for name, mine, want, low in zip(
        ("query", "key", "value"), gradients, right, plain, strict=True
    ):
        found[f"gradient of {name}"] = share(mine, want, 2 * eps, low)
    return found


def plain_gradients(
    leaves: list[Tensor], rows: Tensor, mask: Tensor | None, d_out: Tensor, d_entropy: Tensor
) -> tuple[Tensor, ...]:
    """What plain attention in the inputs' own precision gives: the measure of what is possible."""
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    query = own[0].index_select(2, rows)
    scores = query @ own[1].mT * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(torch.logical_not(mask), -torch.inf)
    log_weights = scores.log_softmax(-1, dtype=torch.float32)
    weights = log_weights.exp()
    entropy = -(weights * log_weights.masked_fill(scores == -torch.inf, 0.0)).sum(-1)
    out = weights.to(own[2].dtype) @ own[2]
    loss = (out.float() * d_out).sum() + (entropy * d_entropy).sum()
    return torch.autograd.grad(loss, own)


def share(found: Tensor, exact: Tensor, eps: float, plain: Tensor | None) -> float:
    """Error over 2 · (error of plain attention + eps · largest value)."""
    found, exact = found.detach().double(), exact.detach()
    largest = float(exact.abs().amax())
    error = float((found - exact).abs().amax())
    possible = 0.0 if plain is None else float((plain.double() - exact).abs().amax())
    return error / (2 * (possible + eps * largest)) if error == error else float("inf")


# -- timing ---------------------------------------------------------------------------------------


def runner(call: Call, leaves: list[Tensor], backward: bool) -> Callable[[], None]:
    """One call, or one call and its backward pass from gradients of every result."""
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                call(*leaves)

        return forward
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    results = call(*own)
    generator = torch.Generator("cuda").manual_seed(2)
    back = [
        torch.randn(part.shape, generator=generator, device="cuda").to(part.dtype)
        for part in results
    ]
    del results

    def both() -> None:
        results = call(*own)
        torch.autograd.grad(results, own, back, allow_unused=True)

    return both


def milliseconds(run: Callable[[], None], repeats: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / repeats


def time_case(case: Case, backward: bool, rounds: int) -> Iterator[Timing]:
    leaves = case.tensors("cuda")
    direction = "forward + backward" if backward else "forward"
    runs: dict[str, Callable[[], None]] = {}
    repeats: dict[str, int] = {}
    timings: dict[str, Timing] = {}
    for name, call in contenders(case).items():
        timing = timings[name] = Timing(name, direction)
        reason = no_room(case, name, backward)
        if reason is not None:
            timing.status = reason
            continue
        try:
            run = runner(call, leaves, backward)
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            torch.cuda.synchronize()
            timing.peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
            repeats[name] = max(1, min(50, round(20.0 / max(milliseconds(run, 1), 1e-3))))
            runs[name] = run
        except Exception as error:  # a contender that this machine cannot run is reported as such
            lines = str(error).strip().splitlines() or [""]
            timing.status = f"not run: {type(error).__name__}: {lines[0][:120]}"
            torch.cuda.empty_cache()
    for index in range(rounds):
        order = list(runs) if index % 2 == 0 else list(reversed(runs))
        for name in order:
            timings[name].milliseconds.append(milliseconds(runs[name], repeats[name]))
    for name in runs:
        timings[name].median = statistics.median(timings[name].milliseconds)
    medians = {name: timings[name].median for name in FUSED if timings[name].median is not None}
    best = min(medians, key=lambda name: medians[name] or 0.0) if medians else None
    for name, timing in timings.items():
        if timing.median is not None:
            work = case.flop * (3.5 if backward else 1.0)
            timing.teraflops = work / timing.median / 1e9
            if best is not None:
                pairs = zip(timing.milliseconds, timings[best].milliseconds, strict=True)
                timing.ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        if name != "acutance-statistics" or not backward:
            yield timing


# -- the report -----------------------------------------------------------------------------------


def environment(device: str) -> dict[str, str | None]:
    try:
        import triton

        version: str | None = triton.__version__
    except ImportError:
        version = None
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "capability": str(torch.cuda.get_device_capability()) if device == "cuda" else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version,
        "python": platform.python_version(),
        "acutance": acutance.__version__,
    }


def cells(case: str, timing: dict[str, Any]) -> list[str]:
    def number(name: str, pattern: str) -> str:
        return "" if timing[name] is None else format(timing[name], pattern)

    if timing["median"] is None:
        return [case, timing["direction"], timing["contender"], timing["status"], "", "", ""]
    return [
        *(case, timing["direction"], timing["contender"], number("median", ".3f")),
        *(number("ratio", ".2f"), number("teraflops", ".0f"), number("peak_mib", ".0f")),
    ]


COLUMNS = ("case", "pass", "contender", "ms", "ratio", "TFLOP/s", "peak MiB")


def markdown(report: dict[str, Any]) -> str:
    about = ", ".join(f"{name} {part}" for name, part in report["environment"].items() if part)
    lines = [about, "", f"| {' | '.join(COLUMNS)} |", "| :-- | :-- | :-- | --: | --: | --: | --: |"]
    for case in report["cases"]:
        lines += [f"| {' | '.join(cells(case['name'], row))} |" for row in case["timings"]]
    return "\n".join(lines) + "\n"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="B · L of a case")
    parser.add_argument("--no-backward", action="store_true", help="time the forward pass alone")
    parser.add_argument("--check", action="store_true", help="run the gate and time nothing")
    parser.add_argument("--json", type=Path, help="write the report here, case by case")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    console = Console()
    if not torch.cuda.is_available() and not options.check:
        print("error: no CUDA device: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {"environment": environment(device), "cases": []}
    console.print(report["environment"])
    failed = False
    for width in options.widths:
        for length in options.lengths:
            for causal in (False, True):
                case = Case(length, width, causal, options.dtype, options.tokens)
                checks = gate(case, device)
                worst = max(checks, key=lambda name: checks[name])
                right = checks[worst] <= 1.0
                console.print(
                    f"{case.name}: {'right' if right else 'WRONG'}, nearest its tolerance: "
                    f"{worst} at {checks[worst]:.2f}"
                )
                entry = asdict(case) | {"name": case.name, "gate": checks, "timings": []}
                report["cases"].append(entry)
                failed |= not right
                if right and not options.check:
                    for backward in (False, True)[: 1 if options.no_backward else 2]:
                        found = time_case(case, backward, options.rounds)
                        entry["timings"] += [asdict(timing) for timing in found]
                        torch.cuda.empty_cache()
                if options.json:
                    options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    table = Table(*COLUMNS)
    for entry in report["cases"]:
        for timing in entry["timings"]:
            table.add_row(*cells(entry["name"], timing))
    if table.row_count:
        console.print(table)
    if options.markdown:
        options.markdown.write_text(markdown(report), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
