"""Random calls of attention against its definitions: `make fuzz SEED=1 COUNT=10000`.

A call is a dictionary of plain values, drawn from a seed; :func:`build` makes its tensors. The
oracle is written from the definitions alone, in float64, and shares no code with the library. How
far a result may be off is derived for each row from the precision of the sums (:func:`bounds`).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import acutance

Spec = dict[str, Any]
Found = tuple[Tensor, Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32}
DTYPES |= {"bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTHS = (1, 1, 2, 3, 5, 7, 13, 16, 17, 31, 64, 67, 131)
WIDTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 64, 67)
LAYOUTS = ("plain", "plain", "heads inside", "every second", "offset", "shared")
METRICS = (
    "n_keys", "max_logit", "lse", "entropy", "varentropy", "effective_keys", "collision",
    "top_weight", "first_weight", "logit_mean", "logit_std", "sink_mass",
)  # fmt: skip


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
    if chance(0.05):
        spec["vmap"] = True
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
    if "key_mask" in spec:
        options["key_mask"] = coin(spec["key_mask"], B, S)
    if "documents" in spec:
        count = spec["documents"]
        ids = (torch.randint(count, (B, n), generator=g).sort(-1).values for n in (L, S))
        options["document_ids"] = tuple(ids)
    if spec.get("alibi"):
        options["alibi_slopes"] = torch.rand(H * group, generator=g)
    if "sinks" in spec:
        options["sinks"] = (normal(H * group) * spec["sinks"]).float()
    return tensors, options


def hides(mask: Tensor) -> Tensor:
    """What an additive value hides, as documented: −inf, −1e9 in its dtype, float16's lowest."""
    if mask.dtype == torch.float16:
        return mask <= torch.finfo(torch.float16).min / 2
    return mask.double() <= torch.tensor(-1e9, dtype=mask.dtype).double()


def oracle(tensors: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and every metric, from their definitions: float64, every score at once."""
    q, k, v = (x.double() for x in tensors)
    B, Hq, L, E = q.shape
    S, group = k.shape[2], Hq // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = options.get("scale", E**-0.5)
    s = scale * torch.einsum("bhie,bhje->bhij", q, k)
    size = abs(scale) * torch.einsum("bhie,bhje->bhij", q.detach().abs(), k.detach().abs())
    if "softcap" in options:
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    seen = torch.ones_like(s, dtype=torch.bool)
    place = torch.arange(L)[:, None] + options.get("query_offset", 0)
    away = place - torch.arange(S)
    added = torch.zeros_like(size)
    for name in ("attn_mask", "bias"):
        mask = options.get(name)
        if mask is not None and mask.dtype == torch.bool:
            seen = seen & mask
        elif mask is not None:
            seen = seen & ~hides(mask)
            part = torch.where(hides(mask), 0.0, mask.double())
            s, added = s + part, added + part.abs()
    if "alibi_slopes" in options:
        part = options["alibi_slopes"].double()[:, None, None] * away.abs()
        s, added = s - part, added + part
    if options.get("is_causal"):
        seen = seen & (away >= 0)
    if "window" in options:
        seen = seen & (away.abs() < options["window"])
    if "key_mask" in options:
        seen = seen & options["key_mask"][:, None, None]
    if "document_ids" in options:
        mine, theirs = options["document_ids"]
        seen = seen & (mine[:, :, None] == theirs[:, None])[:, None]
    n = seen.sum(-1)
    some = n > 0
    s = torch.where(seen, s, -math.inf)
    safe = torch.where(some[..., None], s, 0.0) if S else s
    sink = options.get("sinks")
    extra = safe.new_full((B, Hq, L, 1), -math.inf)
    if sink is not None:
        extra = sink.double().view(1, -1, 1, 1).expand(B, Hq, L, 1)
    every = torch.cat([safe, extra], -1)
    if not S:
        every = torch.cat([torch.zeros_like(extra), extra], -1)
    p = torch.softmax(every, -1)
    keys = torch.where(seen, p[..., :S], 0.0)
    logs = torch.where(p > 0, torch.log(torch.where(p > 0, p, 1.0)), 0.0)
    entropy = -(p * logs).sum(-1)
    away2 = torch.where(p > 0, logs + entropy[..., None], 0.0)
    varentropy = (p * away2.square()).sum(-1)
    collision = p.square().sum(-1)
    plain = torch.where(seen, s, 0.0)
    mean = plain.sum(-1) / n.clamp(min=1)
    spread = torch.where(seen, plain - mean[..., None], 0.0).square().sum(-1) / n.clamp(min=1)
    first = keys.gather(-1, seen.byte().argmax(-1, keepdim=True))[..., 0] if S else mean
    lowest = torch.full_like(mean, -math.inf)
    found = {
        "n_keys": n.double(),
        "max_logit": s.amax(-1) if S else lowest,
        "lse": torch.where(some, torch.logsumexp(every, -1), lowest),
        "entropy": entropy,
        "varentropy": varentropy,
        "effective_keys": 1 / collision,
        "collision": collision,
        "top_weight": keys.amax(-1) if S else mean,
        "first_weight": first,
        "logit_mean": mean,
        "logit_std": spread.clamp(min=0).sqrt(),
        "sink_mass": torch.where(p[..., -1] > 0, p[..., -1], 0.0),
    }
    for name in METRICS[3:]:
        found[name] = torch.where(some, found[name], math.nan)
    out = torch.where(some[..., None], keys @ v, 0.0)
    found |= bounds(tensors[0].dtype, E, size + added, seen, plain, every, p, away2, found, v)
    return out, found


def bounds(
    dtype: torch.dtype, width: int, size: Tensor, seen: Tensor, plain: Tensor,
    every: Tensor, p: Tensor, away: Tensor, found: dict[str, Tensor], v: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """How far each result may be off: "±name", of the rows' shape, "±out" of the output's.

    A score is off by δ: its E products and what is added, in the precision u of the sums. Its
    exponential by ε = δ + rounding of the exponent. Sums of n terms add r = (n + 16) u. A metric f
    is off by Σ |∂f/∂s_j| ε, a rounding r of its own terms, and the higher orders, covered by 2.
    """
    u = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    big = torch.where(seen, size, 0.0).flatten(3).sum(-1) * 0
    if size.shape[-1]:
        big = torch.where(seen, size, 0.0).amax(-1)
    top = every.amax(-1).abs().nan_to_num(0.0, posinf=0.0)
    delta = u * ((width + 8) * big + 4 * top)
    H, V = (found[name].nan_to_num(0.0) for name in ("entropy", "varentropy"))
    eps = delta + 8 * u * (1 + H + V.sqrt() + top * (p < 1).any(-1))
    r = u * (every.shape[-1] + 16)
    slope_H = (p * away.abs()).sum(-1)
    slope_V = (p * (away.square() - V[..., None] + 2 * away).abs()).sum(-1)
    n = found["n_keys"]
    level = torch.where(seen, plain, 0.0).abs().flatten(3).sum(-1) / n.clamp(min=1)
    std = found["logit_std"].nan_to_num(0.0)
    rows = {
        "n_keys": torch.zeros_like(n),
        "max_logit": 2 * delta + 4 * u * top,
        "lse": 2 * (eps + r),
        "entropy": 2 * (eps * (slope_H + eps) + r * (1 + H + slope_H)),
        "varentropy": 2 * (eps * (slope_V + eps) + 4 * r * (1 + V + slope_V)),
        "effective_keys": 2 * (4 * eps + 3 * r) * found["effective_keys"].nan_to_num(1.0),
        "collision": 2 * (4 * eps + 3 * r) * found["collision"].nan_to_num(1.0),
        "top_weight": 2 * (2 * eps + r) * found["top_weight"].nan_to_num(1.0) + u,
        "first_weight": 2 * (2 * eps + r) * found["first_weight"].nan_to_num(1.0) + u,
        "logit_mean": 2 * (delta + r * level) + 4 * u * top,
        "logit_std": 2 * (delta + r * (std + level)) + 16 * u * top,
        "sink_mass": 2 * (2 * eps + r) * found["sink_mass"].nan_to_num(1.0) + u,
    }
    keys = torch.where(seen, p[..., : seen.shape[-1]], 0.0)
    weight = keys @ v.detach().abs()
    narrow = torch.finfo(dtype).eps * weight + torch.finfo(dtype).tiny
    out = 2 * (4 * eps + r).unsqueeze(-1) * weight + 2 * narrow
    return {f"±{name}": part.detach() for name, part in {**rows, "out": out}.items()}


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
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    finally:
        torch.set_num_threads(before)


def _check(spec: Spec, backend: str, call: Callable[..., Found]) -> str | None:
    tensors, options = build(spec)
    given = {**options, "backend": backend}
    learns = bool(spec.get("gradients"))
    if learns:
        tensors = [x.detach().requires_grad_() for x in tensors]
    if spec.get("vmap") and not learns:

        def sliced(*each: Tensor) -> tuple[Tensor, ...]:
            out, stats = call(list(each), given)
            return out, *(stats[name] for name in METRICS)

        both = [torch.stack([x + 1, x]) for x in tensors]
        out, *read = (part[1] for part in torch.func.vmap(sliced)(*both))
        measured = dict(zip(METRICS, read, strict=True))
    else:
        out, stats = call(tensors, given)
        measured = {name: stats[name] for name in METRICS}
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


def _differs(name: str, got: Tensor, want: Tensor, bound: Tensor) -> str | None:
    got, want = got.detach().double(), want.detach()
    if got.shape != want.shape:
        return f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}"
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
