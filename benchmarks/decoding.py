"""How fast a model decodes from a planned cache, and from a full one.

    python benchmarks/decoding.py attention                    # 30 layers of SmolLM2's shapes
    python benchmarks/decoding.py attention --batch 4 --layers 8 --dtype bfloat16
    python benchmarks/decoding.py generate                     # SmolLM2-135M itself

`attention` times what one token costs in all layers: storing its key and value, and reading the
cache. "transformers" is its DynamicCache with SDPA; "full, with statistics" is the kernel behind
`acutance.attention` on a cache that grows in place; the rest are caches of plans. Before anything
is timed, each plan's output is checked against float64 on what its heads hold. `generate`
times greedy `generate` of SmolLM2-135M from caches filled with random keys, after checking that a
plan that keeps everything has the logits of transformers' cache.

Rounds interleave the contenders, in turn forwards and backwards. Printed are the bytes of each
cache's tensors as a share of transformers', the median milliseconds of process CPU time for one
token, and the median of each round's ratio to the plan that keeps everything.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import acutance
from acutance import CachePlan, HeadPlan
from acutance.caching.run_plan import PlannedCache, PlannedLayer
from acutance.caching.stores import Attend, restore
from acutance.comparison.timing import cpu_seconds
from acutance.corpus.load_model import load_model

HEADS, GROUP, WIDTH, LAYERS = 3, 3, 64, 30  # of SmolLM2-135M
FULL, STREAMING = HeadPlan(), HeadPlan("streaming", first=4, recent=124)
EIGHT = HeadPlan(key_bits=8, value_bits=8)
FOUR = HeadPlan(key_bits=4, value_bits=4)
BASE = "full"


def plans(layers: int) -> dict[str, list[tuple[HeadPlan, ...]]]:
    """What each key head of each layer keeps, by the plan's name."""
    chance = random.Random(0)
    heads = [(layer, head) for layer in range(layers) for head in range(HEADS)]

    def some(share: float, other: HeadPlan, rest: HeadPlan = FULL) -> list[tuple[HeadPlan, ...]]:
        chosen = set(chance.sample(heads, round(share * len(heads))))
        return [
            tuple(other if (layer, head) in chosen else rest for head in range(HEADS))
            for layer in range(layers)
        ]

    return {
        BASE: [(FULL,) * HEADS] * layers,
        "half of the heads stream": some(0.5, STREAMING),
        "half of the layers stream": [
            ((STREAMING if layer % 2 else FULL),) * HEADS for layer in range(layers)
        ],
        "three quarters of the heads stream": some(0.75, STREAMING),
        "8 bits": [(EIGHT,) * HEADS] * layers,
        "4 bits": [(FOUR,) * HEADS] * layers,
        "half stream, half 8 bits": some(0.5, STREAMING, EIGHT),
    }


class Planned:
    """The caches of all layers under a plan."""

    def __init__(self, plan: list[tuple[HeadPlan, ...]], keys: Callable[[int], Any]) -> None:
        self._plan, self._attend = plan, Attend()
        self._layers = [PlannedLayer(32, 32) for _ in plan]
        for place, (layer, heads) in enumerate(zip(self._layers, plan, strict=True)):
            layer.add(heads, *keys(place))

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The output of every layer for a new token."""
        return [
            layer.attend(heads, query, key, value, None, self._attend)
            for layer, heads in zip(self._layers, self._plan, strict=True)
        ]

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise SystemExit unless each layer's output is attention to what its heads hold."""
        most = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[query.dtype]
        for layer, output in zip(self._layers, self.step(query, key, value), strict=True):
            expected = torch.zeros_like(output, dtype=torch.float64).unflatten(1, (HEADS, GROUP))
            queries = query.double().unflatten(1, (HEADS, GROUP))
            for group in layer.held()[0]:
                k, v = (restore(part._replace(buffer=part.buffer.double())) for part in group[1:])
                for place, head in enumerate(group.heads):
                    scores = queries[:, head] @ k[:, place, None].mT * WIDTH**-0.5
                    expected[:, head] = scores.softmax(-1) @ v[:, place, None]
            error = (output.double() - expected.flatten(1, 2)).abs().max().item()
            if not error < most:
                raise SystemExit(f"the output is off by {error:.2g}")

    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for layer in self._layers for tensor in layer.tensors())


class WithStatistics(Planned):
    """A full cache that grows in place, read by the kernel of ``acutance.attention``."""

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """See :class:`Planned`."""
        outputs = []
        for layer, heads in zip(self._layers, self._plan, strict=True):
            layer.add(heads, key, value)
            (group,) = layer.held()[0]
            outputs.append(self._attend(query, group.key.plain, group.value.plain, None, None))
        return outputs


class Transformers:
    """A DynamicCache and transformers' SDPA."""

    def __init__(self, layers: int, keys: Callable[[int], Any]) -> None:
        from transformers import DynamicCache

        self._cache, self._count = DynamicCache(), layers
        for place in range(layers):
            self._cache.update(*keys(place), place)
        self._module = torch.nn.Module()
        self._module.num_key_value_groups = GROUP
        self._module.is_causal = True

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """See :class:`Planned`."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return [
            sdpa_attention_forward(
                self._module,
                query,
                *self._cache.update(key, value, place),
                None,
                scaling=WIDTH**-0.5,
            )[0]
            for place in range(self._count)
        ]

    def bytes(self) -> int:
        """See :class:`Planned`."""
        return dynamic_bytes(self._cache)


def dynamic_bytes(cache: Any) -> int:
    """Bytes of a DynamicCache."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def interleaved(
    runs: dict[str, Callable[[], Any]],
    rounds: int,
    around: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, tuple[float, float]]:
    """Median CPU seconds of each contender, and the median of its ratio to the full cache.

    ``around`` opens what a contender runs in, before the clock starts.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            with around(name):
                start = cpu_seconds()
                runs[name]()
                took = cpu_seconds() - start
            if turn:  # the first warms up
                seconds[name].append(took)
    return {
        name: (
            statistics.median(each),
            statistics.median(a / b for a, b in zip(each, seconds[BASE], strict=True)),
        )
        for name, each in seconds.items()
    }


def attention(given: argparse.Namespace, n: int) -> list[dict[str, Any]]:
    """Attention of one token in all layers."""
    dtype = getattr(torch, given.dtype)
    chance = torch.Generator().manual_seed(0)
    shape = (given.batch, HEADS, n, WIDTH)
    key, value = (torch.randn(shape, generator=chance).to(dtype) for _ in range(2))

    def keys(layer: int) -> tuple[Tensor, Tensor]:
        return key, value

    new = [
        torch.randn(given.batch, heads, 1, WIDTH, generator=chance).to(dtype)
        for heads in (HEADS * GROUP, HEADS, HEADS)
    ]
    contenders: dict[str, Any] = {"transformers": Transformers(given.layers, keys)}
    for name, plan in plans(given.layers).items():
        if name == BASE:
            contenders["full, with statistics"] = WithStatistics(plan, keys)
        contenders[name] = Planned(plan, keys)
    for contender in contenders.values():
        if isinstance(contender, Planned):
            contender.check(*new)
    sizes = {name: contender.bytes() for name, contender in contenders.items()}
    runs = {name: lambda one=one: one.step(*new) for name, one in contenders.items()}
    return [
        {
            "plan": name,
            "n": n,
            "bytes": sizes[name] / sizes["transformers"],
            "milliseconds": 1e3 * median,
            "ratio": ratio,
        }
        for name, (median, ratio) in interleaved(runs, given.rounds).items()
    ]


def filled(model: Any, batch: int, n: int) -> tuple[dict[str, Any], dict[str, CachePlan]]:
    """Caches of n random tokens by contender, and the plans of those that have one."""
    from transformers import DynamicCache

    chance = torch.Generator().manual_seed(0)
    shape = (batch, HEADS, n, WIDTH)
    key, value = (torch.randn(shape, generator=chance).to(model.dtype) for _ in range(2))
    full = CachePlan.of(model)
    caches: dict[str, Any] = {"transformers": DynamicCache()}
    for layer in range(LAYERS):
        caches["transformers"].update(key, value, layer)
    applied: dict[str, CachePlan] = {}
    for name, plan in plans(LAYERS).items():
        applied[name] = replace(full, layers=dict(zip(full.layers, plan, strict=True)))
        caches[name] = PlannedCache(applied[name])
        for layer, heads in zip(caches[name].layers, plan, strict=True):
            layer.add(heads, key, value)
    return caches, applied


def generate(given: argparse.Namespace, n: int) -> list[dict[str, Any]]:
    """Greedy ``generate`` of a few tokens after n."""
    model: Any = load_model("smollm2", dtype=torch.float32, head=True).model
    caches, applied = filled(model, given.batch, 256)
    token = torch.ones(given.batch, 1, dtype=torch.int64)
    expected = model(token, past_key_values=caches["transformers"]).logits
    with acutance.apply(model, applied[BASE]):
        error = (model(token, past_key_values=caches[BASE]).logits - expected).abs().max().item()
    if not error < 5e-3:
        raise SystemExit(f"the logits of a plan that keeps everything are off by {error:.2g}")
    caches, applied = filled(model, given.batch, n)
    sizes = {name: cache.bytes() for name, cache in caches.items() if name != "transformers"}
    sizes["transformers"] = dynamic_bytes(caches["transformers"])
    tokens = {name: torch.ones(given.batch, n + 1, dtype=torch.int64) for name in caches}
    count = 4

    def run(name: str) -> None:
        tokens[name] = model.generate(
            tokens[name], past_key_values=caches[name], max_new_tokens=count, min_new_tokens=count,
            do_sample=False, attention_mask=torch.ones_like(tokens[name]), pad_token_id=0,
        )  # fmt: skip

    def around(name: str) -> AbstractContextManager[Any]:
        return acutance.apply(model, applied[name]) if name in applied else nullcontext()

    runs = {name: partial(run, name) for name in caches}
    found = interleaved(runs, given.rounds, around)
    return [
        {
            "plan": name,
            "n": n,
            "bytes": sizes[name] / sizes["transformers"],
            "milliseconds": 1e3 * median / count,
            "ratio": ratio,
        }
        for name, (median, ratio) in found.items()
    ]


CASES = {"attention": attention, "generate": generate}


def main() -> None:
    """Check and time a case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = []
    with torch.inference_mode():
        for n in given.lengths:
            for row in CASES[given.case](given, n):
                found.append(row)
                print(
                    *(f"{x:.3f}" if isinstance(x, float) else x for x in row.values()),
                    sep=" | ",
                    flush=True,
                )
    if given.json:
        given.json.write_text(
            json.dumps({"options": vars(given) | {"json": None}, "rows": found}, indent=1)
        )


if __name__ == "__main__":
    main()
