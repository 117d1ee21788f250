"""Random calls of attention against its definitions: `make fuzz SEED=1 COUNT=10000`.

A call is a dictionary of plain values, drawn from a seed; :func:`build` makes its tensors. What
is right, and how far a result may be off, says :mod:`oracle`.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from guarded import guarded
from oracle import METRICS, oracle
from torch import Tensor

import acutance

Spec = dict[str, Any]
Found = tuple[Tensor, Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTHS = (1, 1, 2, 3, 5, 7, 13, 16, 17, 31, 64, 67, 131)
WIDTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 64, 67)
LAYOUTS = ("plain", "plain", "heads inside", "every second", "offset", "shared")


def draw(seed: int) -> Spec:
    """A call."""
    r = random.Random(seed)

    def chance(p: float) -> bool:
        return r.random() < p

    spec: Spec = {
        "seed": seed,
        "dtype": r.choice(list(DTYPES)),
        "batch": r.choice((1, 1, 2, 3)),
        "heads": r.choice((1, 2, 3)),
        "group": r.choice((1, 1, 2, 3)),
        "queries": r.choice(LENGTHS),
        "keys": r.choice((*LENGTHS, 0) if chance(0.1) else LENGTHS),
        "width": r.choice(WIDTHS),
        "value_width": r.choice(WIDTHS),
        "layout": r.choice(LAYOUTS),
        "size": r.choice((0.0, 1e-3, 1.0, 1.0, 1.0, 10.0)),
        "threads": r.choice((1, 2)),
    }
    if chance(0.15):
        spec["ties"] = True
    if chance(0.4):
        spec["is_causal"] = True
    if chance(0.3):
        spec["query_offset"] = r.choice((-3, -1, 1, 2, 7, spec["keys"] - spec["queries"]))
    if chance(0.25):
        spec["window"] = r.choice((1, 2, 3, 7, 64))
    if chance(0.25):
        spec["key_mask"] = r.choice((0.0, 0.3, 0.9, 1.0))
    if chance(0.2):
        spec["documents"] = r.choice((1, 2, 5))
    if chance(0.4) and "is_causal" not in spec:
        spec["attn_mask"] = r.choice(("bool", "-inf", "min", "-1e9", "-1e4"))
        spec["attn_mask_shape"] = r.choice(("full", "rows", "one", "heads"))
    if chance(0.2):
        spec["bias"] = r.choice(("full", "rows", "one", "heads"))
    if chance(0.2):
        spec["alibi"] = True
    if chance(0.2):
        spec["softcap"] = r.choice((0.5, 5.0, 50.0))
    if chance(0.25):
        spec["sinks"] = r.choice((0.0, 1.0, 20.0))
    if chance(0.2):
        spec["scale"] = r.choice((0.0, 0.1, 1.0, -0.5))
    if chance(0.3) and spec["dtype"] == "float64":
        spec["gradients"] = True
    if chance(0.07):
        spec["how"] = r.choice(("vmap", "vmap", "callers", "callers", "compile"))
    if chance(0.25):
        spec["page"] = r.choice(("start", "end", "end"))
    if chance(0.3) and "key_mask" in spec:
        spec["padding"] = r.choice((math.nan, math.inf, -math.inf))
    if chance(0.1):
        spec["negated"] = r.choice(("query", "key", "value", "attn_mask", "bias", "sinks"))
    if chance(0.2):
        spec["odd_bytes"] = True
    if chance(0.3) and "sinks" in spec:
        spec["no_sink"] = r.choice((0.3, 1.0))
    return spec


def build(spec: Spec) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value, and the options of :func:`acutance.attention`."""
    g = torch.Generator().manual_seed(spec["seed"])
    dtype = DTYPES[spec["dtype"]]
    B, H, group = spec["batch"], spec["heads"], spec["group"]
    L, S, E, Ev = spec["queries"], spec["keys"], spec["width"], spec["value_width"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def coin(p: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=g) < p

    def laid(x: Tensor) -> Tensor:
        kind = spec["layout"]
        if kind == "heads inside":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if kind == "every second":
            return torch.stack([x, x + 99], -1).flatten(-2)[..., ::2]
        if kind == "offset":
            return torch.cat([x.new_full((7,), 99.0), x.flatten()])[7:].view(x.shape)
        return x[:1].expand_as(x) if kind == "shared" else x

    query, key, value = normal(B, H * group, L, E), normal(B, H, S, E), normal(B, H, S, Ev)
    query = query * spec["size"]
    if spec.get("ties"):
        query, key = query.round(), key.round()
    key_mask = coin(spec["key_mask"], B, S) if "key_mask" in spec else None
    if key_mask is not None and "padding" in spec:
        hidden = ~key_mask if spec["layout"] != "shared" else (~key_mask).all(0).expand(B, S)
        key, value = (
            x.masked_fill(hidden[:, None, :, None], spec["padding"]) for x in (key, value)
        )
    tensors = [laid(x.to(dtype)) for x in (query, key, value)]
    options: dict[str, Any] = {"enable_gqa": group > 1}
    options |= {
        k: spec[k] for k in ("is_causal", "query_offset", "window", "softcap", "scale") if k in spec
    }
    shapes = {"full": (B, H * group, L, S), "rows": (L, S), "one": (1, 1, 1, S)}
    shapes["heads"] = (1, H * group, 1, S)
    if "attn_mask" in spec:
        hidden = coin(0.3, *shapes[spec["attn_mask_shape"]])
        kind = spec["attn_mask"]
        low = {"-inf": -math.inf, "min": torch.finfo(dtype).min, "-1e9": -1e9, "-1e4": -1e4}
        if kind == "bool":
            options["attn_mask"] = ~hidden
        else:
            value_low = max(low[kind], torch.finfo(dtype).min) if kind != "-inf" else -math.inf
            added = torch.zeros(hidden.shape, dtype=dtype)
            options["attn_mask"] = added.masked_fill(hidden, value_low)
    if "bias" in spec:
        options["bias"] = normal(*shapes[spec["bias"]]).to(dtype)
    if key_mask is not None:
        options["key_mask"] = key_mask
    if "documents" in spec:
        count = spec["documents"]
        ids = (torch.randint(count, (B, n), generator=g).sort(-1).values for n in (L, S))
        options["document_ids"] = tuple(ids)
    if spec.get("alibi"):
        options["alibi_slopes"] = torch.rand(H * group, generator=g)
    if "sinks" in spec:
        sinks = (normal(H * group) * spec["sinks"]).float()
        none = coin(spec.get("no_sink", 0.0), H * group)
        options["sinks"] = sinks.masked_fill(none, -math.inf)
    if spec.get("odd_bytes"):
        for name, mask in options.items():
            if isinstance(mask, Tensor) and mask.dtype == torch.bool:
                byte = torch.randint(1, 256, mask.shape, generator=g)
                options[name] = (mask * byte).to(torch.uint8).view(torch.bool)
    named = dict(zip(("query", "key", "value"), tensors, strict=True))
    lazy = spec.get("negated")
    for given in (named, options):
        if lazy in given and given[lazy].dtype != torch.bool:
            given[lazy] = torch._neg_view(-given[lazy])  # the values as they were
        if "page" in spec:
            given |= {k: guarded(x, spec["page"]) for k, x in given.items() if torch.is_tensor(x)}
    if "page" in spec and "documents" in spec:
        options["document_ids"] = tuple(guarded(x, spec["page"]) for x in options["document_ids"])
    return list(named.values()), options


def attend(tensors: list[Tensor], options: dict[str, Any]) -> Found:
    """The library."""
    return acutance.attention(*tensors, return_stats=True, **options)


def check(spec: Spec, backend: str, call: Callable[..., Found] = attend) -> str | None:
    """What is wrong with a call, in a line, or None."""
    before = torch.get_num_threads()
    torch.set_num_threads(spec["threads"])
    try:
        return _check(spec, backend, call)
    except Exception as error:  # any: that a legal call raises is a finding
        if backend == "triton" and "cannot take this call" in str(error):
            return None  # it takes no float64, for one
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    finally:
        torch.set_num_threads(before)


def _check(spec: Spec, backend: str, call: Callable[..., Found]) -> str | None:
    tensors, options = build(spec)
    given = {**options, "backend": backend}
    learns = bool(spec.get("gradients"))
    if learns:
        tensors = [x.detach().requires_grad_() for x in tensors]
    how = None if learns else spec.get("how")
    if how == "callers" and backend == "triton":
        how = None  # Triton's interpreter patches its language while a kernel runs
    out, measured = _run(how, tensors, given, call)
    want_out, want = oracle(tensors, options)
    problem = _differs("out", out, want_out, want["±out"])
    for name in METRICS:
        problem = problem or _differs(name, measured[name], want[name], want[f"±{name}"])
    if problem or not learns:
        return problem
    shares = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)

    def total(out: Tensor, entropy: Tensor, lse: Tensor, n: Tensor) -> Tensor:
        rows = torch.where(n > 0, entropy + 0.5 * torch.where(n > 0, lse, 0.0), 0.0)
        return (out * shares).sum() + rows.sum()

    ours = total(out, measured["entropy"], measured["lse"], measured["n_keys"])
    theirs = total(want_out, want["entropy"], want["lse"], want["n_keys"])
    if not theirs.requires_grad:
        return None
    pairs = zip(
        torch.autograd.grad(ours, tensors, allow_unused=True),
        torch.autograd.grad(theirs, tensors, allow_unused=True),
        strict=True,
    )
    for name, (got, right) in zip(("query", "key", "value"), pairs, strict=True):
        if got is None or right is None:
            continue
        reach = (1 + spec["size"]) ** 2 * max(
            1.0, float(right.abs().amax()) if right.numel() else 1
        )
        bound = torch.full_like(right, 1e-10 * reach * spec["width"])
        problem = problem or _differs(f"gradient of {name}", got, right, bound)
    return problem


def _run(
    how: str | None, tensors: list[Tensor], options: dict[str, Any], call: Callable[..., Found]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the metrics of a call: as it is, or mapped, compiled, from three threads."""

    def once(*each: Tensor) -> tuple[Tensor, ...]:
        out, stats = call(list(each), options)
        return out, *(stats[name] for name in METRICS)

    if how == "vmap":
        both = [torch.stack([x + 1, x]) for x in tensors]
        found = tuple(part[1] for part in torch.func.vmap(once)(*both))
    elif how == "compile":
        torch.compiler.reset()
        found = torch.compile(once, backend="aot_eager")(*tensors)
    elif how == "callers":
        with ThreadPoolExecutor(3) as callers:
            first, *others = callers.map(lambda _: once(*tensors), range(6))
        for other in others:
            for one, two in zip(first, other, strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
        found = first
    else:
        found = once(*tensors)
    return found[0], dict(zip(METRICS, found[1:], strict=True))


def _differs(name: str, got: Tensor, want: Tensor, bound: Tensor) -> str | None:
    got, want = got.detach().double(), want.detach()
    if got.shape != want.shape:
        return f"{name} must have shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    same = (got == want) | (got.isnan() & want.isnan())
    wrong = ~(same | ((got - want).abs() <= bound))
    if not bool(wrong.any()):
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{name}{list(at)} is {float(got[at]):.9g}, expected {float(want[at]):.9g} "
        f"± {float(bound[at]):.1e}; {int(wrong.sum())} of {wrong.numel()} wrong"
    )


def shrink(spec: Spec, backend: str, call: Callable[..., Found] = attend) -> Spec:
    """A simpler call that fails too: options left out and sizes made small, one at a time."""
    small = {"batch": 1, "heads": 1, "group": 1, "queries": 1, "keys": 1, "width": 1}
    small |= {"value_width": 1, "layout": "plain", "threads": 1, "size": 1.0, "dtype": "float64"}
    changed = True
    while changed:
        changed = False
        for name in list(spec):
            if name == "seed" or (name in small and spec[name] == small[name]):
                continue
            simpler = {k: v for k, v in spec.items() if k != name}
            if name in small:
                simpler[name] = small[name]
            if name == "attn_mask":
                simpler.pop("attn_mask_shape", None)
            if name != "attn_mask_shape" and check(simpler, backend, call):
                spec, changed = simpler, True
    return spec


def report(spec: Spec, backend: str, problem: str) -> str:
    """A failing call as lines to run from the repository's root."""
    least = shrink(spec, backend)
    return (
        f"# {problem}\n# shrunk: {check(least, backend)}\n"
        f'import sys; sys.path.insert(0, "tests/fuzz"); import fuzz\n'
        f"print(fuzz.check({least!r}, {backend!r}))\n"
    )


def main() -> int:
    """Draw, check, and print what fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--backends", default="native,blocked,dense")
    given = parser.parse_args()
    if "triton" in given.backends and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported; it computes with NumPy
        warnings.simplefilter("ignore", RuntimeWarning)
    failed = 0
    for i in range(given.count):
        spec = draw(given.seed * 1_000_003 + i)
        for backend in given.backends.split(","):
            if problem := check(spec, backend):
                failed += 1
                print(report(spec, backend, problem), flush=True)
    print(f"{given.count} calls on {given.backends}: {failed} wrong", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
