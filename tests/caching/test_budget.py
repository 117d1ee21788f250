"""The search for a cache plan: least sums of costs, losses as judged, resumed runs."""

from __future__ import annotations

import itertools
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import acutance
from acutance.caching import Budget, HeadPlan, budget, cache_shapes, recall
from acutance.caching.find_plan import (
    HeadReach,
    Option,
    Rounded,
    cheapest,
    propose,
    read_reach,
)
from acutance.caching.frontier import sentences
from acutance.caching.stores import dequantise, quantise
from acutance.calibration.loss_table import read_windows
from acutance.calibration.losses import MaskedTokens
from acutance.capture.attention_call import AttentionCall
from acutance_lab.trained import decoder
from tests.contract.caching.conftest import build
from tests.contract.caching.test_budget import LONG, SHORT, windows


@pytest.fixture(scope="module")
def found() -> Budget:
    return budget(decoder(), windows(8), keep=0.6, plans=[SHORT, LONG], shares=[0.75, 0.3])


def test_the_sum_of_costs_is_the_least_of_its_size() -> None:
    """Against all combinations of the options of five heads."""
    generator = torch.Generator().manual_seed(0)
    options = {}
    for head in range(5):
        sizes = torch.randint(1, 40, (3,), generator=generator).tolist()
        costs = torch.rand(3, generator=generator).tolist()
        options["layer", head] = [Option(HeadPlan(), 40, 0.0)] + [
            Option(HeadPlan("streaming", recent=index + 1), size, cost)
            for index, (size, cost) in enumerate(zip(sizes, costs, strict=True))
        ]

    def total(plan: dict[Any, HeadPlan]) -> tuple[int, float]:
        picked = [
            next(one for one in options[place] if one.plan == kept) for place, kept in plan.items()
        ]
        return sum(one.bytes for one in picked), sum(one.cost for one in picked)

    every = [
        (sum(one.bytes for one in some), sum(one.cost for one in some))
        for some in itertools.product(*options.values())
    ]
    sizes = set()
    for plan in cheapest(options, range(200, 20, -5)):
        size, cost = total(plan)
        assert cost == pytest.approx(min(cost for bytes_, cost in every if bytes_ <= size))
        sizes.add(size)
    assert len(sizes) > 5
    assert total(cheapest(options, [0])[0])[0] == min(size for size, _ in every)


def test_how_far_heads_read_is_that_of_their_weights() -> None:
    """Against the eager weights of the same windows, and the metric of all rows of each."""
    model, tokens = decoder(), windows(2)
    model.set_attn_implementation("eager")
    parts, needed = [], []
    for window in tokens.split(1):
        with torch.no_grad(), acutance.probe(model, gaps=True, verify=False) as probe:
            parts.append(torch.stack(model(window, output_attentions=True).attentions, 1))
        needed.append(probe.summary().mean("keys_95"))
    weights = torch.cat(parts).double()
    keys_95 = torch.stack(needed).view(weights.shape[:3])
    read = read_windows(model, tokens, None, None)
    shapes = cache_shapes(model)
    reach = read_reach(read, read.units, shapes)
    share = next(iter(shapes.values())).queries_per_key
    back = torch.arange(128)[:, None] - torch.arange(128)
    for layer, name in enumerate(shapes):
        for head in range(shapes[name].heads):
            p = weights[:, layer, head * share : (head + 1) * share]
            one = reach[name, head]
            beyond = p[..., back >= 32].sum(-1).mean() / 128 - p[..., 0].mean() * 0.75
            assert one.beyond(32) == pytest.approx(max(0.0, float(beyond)), abs=1e-5)
            exact = float((p * ((back >= 32) & (torch.arange(128) > 0))).sum(-1).mean())
            assert one.beyond(32) == pytest.approx(exact, abs=0.05)
            assert one.first == pytest.approx(float(p[..., 0].mean()), abs=1e-5)
            most = keys_95[:, layer, head * share : (head + 1) * share].amax(1)
            assert one.keys_95 == pytest.approx(float(most.mean()))
            # keys are counted in bins of 1/4 nat, whose ends change odds of 19 to 1 by that factor
            least, more = (
                ((p.sort(-1, descending=True)[0].cumsum(-1) < odds / (1 + odds)).sum(-1) + 1)
                .double().mean(2).amax(1).mean()
                for odds in (19 * math.exp(-0.25), 19 * math.exp(0.25))
            )  # fmt: skip
            assert least <= one.keys_95 <= more


@pytest.mark.parametrize("several", ["cuts of a masked model", "batches"])
def test_reach_is_a_mean_over_the_batches_of_a_window(several: str) -> None:
    """All weight of a row lies in some octave: sums over the batches would count it repeatedly."""
    model, tokens = decoder(), windows(2)
    given: Any = (
        tokens if several == "cuts of a masked model" else {64: tokens.view(4, 64).split(2)}
    )
    given = given if isinstance(given, torch.Tensor) else {**given, 128: tokens.split(1)}
    read = read_windows(model, given, None, MaskedTokens(0))
    assert {len(unit.turns) for unit in read.units} == {4 if len(read.lengths) == 4 else 2}
    for head in read_reach(read, read.units, cache_shapes(model)).values():
        assert sum(head.octaves) == pytest.approx(1.0, abs=1e-4)
        assert head.first <= 1.0
        assert head.keys_95 <= 128


def test_a_rule_lets_the_nearest_heads_stream_and_rounds_the_rest() -> None:
    """By weight, the head that reads far stays; by the costs, the rest is rounded to 8 bits."""
    eight = HeadPlan(key_bits=8, value_bits=8)
    options = {
        ("layer", head): [
            Option(HeadPlan(), 100, 0.0),
            Option(SHORT, 10, 1.0),
            Option(eight, 60, 0.1),
        ]
        for head in range(4)
    }
    far = HeadReach((0.1,) * 5 + (0.5,), first=0.0, keys_95=20.0, n=64)
    near = HeadReach((0.9,) + (0.02,) * 5, first=0.0, keys_95=40.0, n=64)
    reach = dict(zip(options, (far, near, near, near), strict=True))
    plans = dict(propose(options, reach, [100]))
    assert set(plans) == {"gradient", "distant weight", "keys_95"}
    assert plans["distant weight"] == dict(zip(options, (eight, SHORT, SHORT, SHORT), strict=True))
    assert plans["keys_95"]["layer", 0] == SHORT
    assert sorted(one.kind for one in plans["keys_95"].values()) == ["full"] + 3 * ["streaming"]
    for plan in plans.values():
        sizes = {one.plan: one.bytes for one in options["layer", 0]}
        assert sum(sizes[one] for one in plan.values()) <= 100


def test_rules_propose_only_where_heads_may_stream() -> None:
    plans = (HeadPlan(), HeadPlan("dropped"), HeadPlan(key_bits=8, value_bits=8))
    choices = [Option(plan, size, 0.0) for plan, size in zip(plans, (100, 0, 60), strict=True)]
    reach = {("layer", 0): HeadReach((0.9,) + (0.02,) * 5, first=0.0, keys_95=4.0, n=64)}
    assert {rule for rule, _ in propose({("layer", 0): choices}, reach, [70])} == {"gradient"}


_KILLED = """
import os, signal, sys, torch
from acutance.caching import HeadPlan, budget
from acutance_lab.trained import decoder

torch.set_num_threads(1)
plans = [HeadPlan("streaming", first=2, recent=14), HeadPlan("streaming", first=2, recent=46)]
left = [int(sys.argv[2])]

def kill(*numbers):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

windows = torch.load(sys.argv[3])
given = {"keep": 0.6, "plans": plans, "shares": [0.75, 0.3]}
budget(decoder(), windows, save=sys.argv[1], advance=kill, **given)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system kills no process so")
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(3, marks=pytest.mark.slow, id="while reading derivatives"),
        pytest.param(9, id="while measuring losses"),
    ],
)
def test_a_killed_search_loses_nothing_that_was_written(
    found: Budget, tmp_path: Path, runs: int
) -> None:
    """A process ended by SIGKILL leaves whole files, and the search goes on to the same plan."""
    torch.save(windows(8), tmp_path / "windows")
    state = tmp_path / "state"
    command = [sys.executable, "-c", _KILLED, str(state), str(runs), str(tmp_path / "windows")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    with safe_open(state, framework="pt") as file:
        tables = {name for name in ("", ".costs", ".reach") if f"rows{name}" in file.metadata()}
    assert ".costs" in tables
    assert ("" in tables) == (runs > 4)  # four windows give derivatives
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "windows"]
    model, again = decoder(), []

    def note(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            again.append(1)

    handle = model.model.layers[0].register_forward_hook(note)
    given: dict[str, Any] = {"keep": 0.6, "plans": [SHORT, LONG], "shares": [0.75, 0.3]}
    resumed = budget(model, windows(8), save=state, resume=True, **given)
    handle.remove()
    assert resumed.plan == found.plan
    assert [one.delta for one in resumed.points] == pytest.approx(
        [one.delta for one in found.points], abs=1e-6
    )
    assert len(again) == max(0, 4 - runs)  # derivatives that are in the file are not read again


@pytest.mark.parametrize("of_keys", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_heads_are_rounded_as_the_cache_rounds_them(of_keys: bool, bits: Any) -> None:
    """Whole groups to the bit; the rest, fewer than 32 tokens, by half a step at most."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, 70, 64, generator=generator)
    call = AttentionCall("layer", "", torch.zeros_like(x), x, x, is_causal=False)
    rounded: dict[str, torch.Tensor] = {}

    class Call(AttentionCall):
        def rebuild(self, *_: Any) -> Any:
            rounded.update(key=self.key, value=self.value)
            return [self.value]

    Rounded(bits if of_keys else 16, 16 if of_keys else bits).output(Call(**vars(call)))
    result, plain = (rounded[name] for name in (("key", "value") if of_keys else ("value", "key")))
    assert plain is x
    groups = x[:, :, :64].unflatten(2, (2, 32))
    cached = dequantise(*quantise(groups, bits, None if of_keys else 32), bits, x.dtype)
    assert torch.equal(result[:, :, :64], cached)
    dim = 2 if of_keys else 3
    for rest, before in zip(
        result[:, :, 64:].split(32, dim), x[:, :, 64:].split(32, dim), strict=True
    ):
        spread = before.amax(dim, keepdim=True) - before.amin(dim, keepdim=True)
        step = (spread + before.abs().amax(dim, keepdim=True) * 2.0**-9) / (2**bits - 1)
        assert bool(((rest - before).abs() <= step / 2 * (1 + 2.0**-8) + 1e-6).all())


@pytest.mark.parametrize(("width", "fine"), [(48, False), (64, True)])
def test_rounded_values_have_the_groups_of_the_cache(width: int, fine: bool) -> None:
    """Where groups of 32 channels do not divide the width, a token's value has one scale."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 32, width, generator=generator).unbind(0)
    value[..., 32:] *= 1e-2
    call = AttentionCall("layer", "", query, key, value)
    error = (Rounded(value_bits=4).output(call) - call.rebuild(False)[0])[..., 32:].abs().max()
    assert (float(error) < 2e-3) == fine
    packed = quantise(value.unflatten(2, (1, 32)), 4, 32 if fine else width)
    cached = (dequantise(*packed, 4, torch.float32) - value)[..., 32:].abs().max()
    assert (float(cached) < 2e-3) == fine


def test_untrained_weights_are_said_as_a_probe_says_them(found: Budget) -> None:
    assert not found.untrained
    assert not any(line.startswith("Untrained") for line in sentences(found))
    tokens = torch.randint(1, 64, (4, 48), generator=torch.Generator().manual_seed(0))
    random = build(hidden_size=64, intermediate_size=64)
    for name, part in random.named_parameters():
        if "norm" in name:
            part.data.fill_(1.0)
    again = budget(random, tokens, keep=0.6, plans=[SHORT], shares=[0.6])
    assert again.to_dict()["untrained"] is True
    assert next(iter(sentences(again))).startswith("Untrained: ")


def test_recall_of_the_chosen_plan_is_measured_told_and_stored(found: Budget) -> None:
    """Against recall itself, on the deciding windows; windows of 128 tokens are too short."""
    assert (found.recall, found.plan.search["n"]) == ({}, 128)
    assert "Recall was not measured: the windows are too short for planted spans." in sentences(
        found
    )
    four = HeadPlan(key_bits=4, value_bits=4)
    tokens = windows(4, 456)
    again = budget(decoder(), tokens, keep=0.2, plans=[SHORT, four], shares=[0.2])
    for name, plan in {
        "plan": again.plan, "full": None, "4 bits": acutance.CachePlan.of(decoder(), four),
    }.items():  # fmt: skip
        alone = recall(decoder(), tokens[1::2], plan)
        assert again.recall[name] == (alone.mean, alone.error)
    (line,) = [line for line in sentences(again) if line.startswith("Recall of spans planted")]
    assert f"{again.recall['plan'][0]:.2f} ± " in line
    search = again.to_dict()["plan"]["search"]
    assert search["n"] == 456
    assert search["recall"] == {name: mean for name, (mean, _) in again.recall.items()}
    assert search["delta"] == again.chosen.delta
