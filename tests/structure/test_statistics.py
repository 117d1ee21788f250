"""Structure statistics against the whole map in float64, under every mask a call can have."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from acutance.structure import STRUCTURE, StructureStatistics, statistics
from acutance.structure.statistics import NO_PEAK
from acutance.theory import critical_scale
from tests.contract.structure.test_statistics import B, E, G, H, L, S, random_call

module = importlib.import_module("acutance.structure.statistics")


def weights(
    query: Tensor, key: Tensor, seen: Tensor, bias: Tensor, scale: float, **rule: Any
) -> tuple[Tensor, Tensor]:
    """The map (B, Hq, L, S), and the scores with -inf where a key is hidden."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    s = query.double() @ key.double().mT * scale
    if rule.get("softcap"):
        s = torch.tanh(s / rule["softcap"]) * rule["softcap"]
    s = (s + bias).masked_fill(~seen, -torch.inf)
    whole = s
    if rule.get("sinks") is not None:
        sink = rule["sinks"].double().view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        whole = torch.cat([s, sink], -1)
    return torch.softmax(whole, -1)[..., : s.shape[-1]], s


def oracle(
    p: Tensor, s: Tensor, at: Tensor, tokens: Tensor, special: set[int], octaves: int
) -> dict[str, Tensor]:
    """Every number row by row and key by key; ``at`` (B, L), ``tokens`` (B, S)."""
    batch, heads, queries, keys = p.shape
    rows = (batch, heads, queries)
    found = {name: torch.full(rows, math.nan, dtype=torch.float64) for name in STRUCTURE}
    found["octaves"] = torch.zeros(*rows, 2, octaves, dtype=torch.float64)
    found["even"] = torch.zeros(*rows, 2, octaves, dtype=torch.float64)
    found["peak"] = torch.full(rows, NO_PEAK, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                row, scores, here = p[b, h, i].tolist(), s[b, h, i].tolist(), int(at[b, i])
                seen = [j for j in range(keys) if scores[j] > -math.inf]
                if not seen:
                    continue
                mine = int(tokens[b, here]) if 0 <= here < keys else -1
                kinds = {
                    "mass_self": [j for j in seen if j == here],
                    "mass_previous": [j for j in seen if j == here - 1],
                    "mass_same": [
                        j for j in seen if j != here and mine >= 0 and int(tokens[b, j]) == mine
                    ],
                    "mass_special": [j for j in seen if int(tokens[b, j]) in special],
                }
                for name, there in kinds.items():
                    if there:
                        found[name][b, h, i] = sum(row[j] for j in there)
                found["attention_distance"][b, h, i] = sum(row[j] * abs(here - j) for j in seen)
                if len(seen) > 1:
                    found["critical_ratio"][b, h, i] = 1 / float(critical_scale(scores))
                best = [j for j in seen if scores[j] == max(scores[j] for j in seen)]
                near = [j - here for j in best if abs(j - here) <= 8]
                if len(near) == 1:
                    found["peak"][b, h, i] = near[0]
                for j in seen:
                    side, octave = int(j > here), abs(here - j).bit_length()
                    found["octaves"][b, h, i, side, octave] += row[j]
                    found["even"][b, h, i, side, octave] += 1 / len(seen)
    return found


def check(got: StructureStatistics, want: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name in (*STRUCTURE, "octaves", "even", "peak"):
        value = getattr(got, name).double()
        expected = want[name]
        value = value.expand(expected.shape)
        size = 1 + torch.nan_to_num(expected).abs()
        assert torch.equal(value.isnan(), expected.isnan()), name
        off = float(((value - expected) / size).nan_to_num().abs().max())
        assert off <= tolerance, (name, off)


def everywhere() -> Tensor:
    return torch.ones(B, H * G, L, S, dtype=torch.bool)


def cases() -> dict[str, dict[str, Any]]:
    """Options of the call, and what they mean as one mask and one bias."""
    torch.manual_seed(3)
    i, j = torch.arange(L)[:, None], torch.arange(S)
    boolean = (torch.rand(B, 1, L, S) < 0.6) | (j == 2)
    by_head = torch.rand(B, H * G, L, S) < 0.5  # some rows may see nothing
    by_head[0, 1, 3] = False
    padded = torch.ones(B, S, dtype=torch.bool)
    padded[1, :4] = False
    additive = torch.randn(1, H * G, L, S, dtype=torch.float64)
    additive[..., 5] = -torch.inf
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    own = documents[None, :] == documents[4 : 4 + L, None]
    slopes = torch.tensor([0.5, 0.25, 0.1, 1.0])
    bias = torch.randn(B, 1, L, S, dtype=torch.float64)
    away = (i + 4 - j).abs()
    return {
        "plain": {"options": {}},
        "causal": {"options": {"is_causal": True}, "seen": j <= i},
        "offset": {"options": {"is_causal": True, "query_offset": 4}, "seen": j <= i + 4},
        "negative": {"options": {"is_causal": True, "query_offset": -2}, "seen": j <= i - 2},
        "beyond": {"options": {"query_offset": 30}},
        "window": {
            "options": {"is_causal": True, "query_offset": 4, "window": 3},
            "seen": (j <= i + 4) & (j > i + 1),
        },
        "both ways": {
            "options": {"query_offset": 4, "window": 3},
            "seen": (i + 4 - j).abs() < 3,
        },
        "boolean": {"options": {"attn_mask": boolean, "query_offset": 4}, "seen": boolean},
        "heads": {"options": {"attn_mask": by_head, "query_offset": 2}, "seen": by_head},
        "padding": {
            "options": {"key_mask": padded, "is_causal": True, "query_offset": 4},
            "seen": padded[:, None, None] & (j <= i + 4),
        },
        "additive": {
            "options": {"attn_mask": additive, "query_offset": 4},
            "seen": additive > -torch.inf,
            "bias": torch.where(additive > -torch.inf, additive, 0.0),
        },
        "documents": {
            "options": {
                "document_ids": (documents[4 : 4 + L], documents),
                "is_causal": True,
                "query_offset": 4,
            },
            "seen": own & (j <= i + 4),
        },
        "alibi": {
            "options": {"alibi_slopes": slopes, "query_offset": 4},
            "bias": -slopes.double().view(1, -1, 1, 1) * away,
        },
        "bias": {"options": {"bias": bias, "scale": 0.7}, "bias": bias},
        "softcap": {"options": {"softcap": 0.8}},
        "sinks": {"options": {"sinks": torch.tensor([2.0, -1.0, 0.0, 9.0])}},
    }


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("elements", [1, 60, 1 << 19], ids=["rows", "some", "whole"])
def test_statistics_equal_the_map(name: str, elements: int, limits: Callable[..., None]) -> None:
    limits(module, BLOCK_ELEMENTS=elements, _FEW_ROWS=3)
    case = cases()[name]
    options = case["options"]
    query, key, tokens = random_call()
    seen = case.get("seen", everywhere()).expand(B, H * G, L, S)
    scale = options.get("scale", E**-0.5)
    p, s = weights(
        query, key, seen, case.get("bias", torch.zeros(())), scale,
        softcap=options.get("softcap"), sinks=options.get("sinks"),
    )  # fmt: skip
    at = torch.arange(L).expand(B, -1) + options.get("query_offset", 0)
    got = statistics(query, key, enable_gqa=True, tokens=tokens, special={0, 3}, **options)
    check(got, oracle(p, s, at, tokens, {0, 3}, got.octaves.shape[-1]))


def test_given_positions_and_unknown_tokens() -> None:
    query, key, tokens = random_call()
    at = torch.randint(0, S, (B, L))
    tokens[0] = -1
    p, s = weights(query, key, everywhere(), torch.zeros(()), 0.5)
    got = statistics(
        query, key, enable_gqa=True, tokens=tokens, special=[1], positions=at, scale=0.5
    )
    want = oracle(p, s, at, tokens, {1}, got.octaves.shape[-1])
    check(got, want)
    assert got.mass_same[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    query, key, tokens = random_call(dtype)
    p, s = weights(query, key, everywhere(), torch.zeros(()), 0.5)
    at = torch.arange(L).expand(B, -1)
    got = statistics(query, key, enable_gqa=True, tokens=tokens, special=[1], scale=0.5)
    want = oracle(p, s, at, tokens, {1}, got.octaves.shape[-1])
    del want["critical_ratio"], want["peak"]
    for name, expected in want.items():
        value = getattr(got, name)
        assert value.dtype == torch.float32
        # S weights of some roundings each, distances up to S
        size = S if name == "attention_distance" else 1.0
        close = value.double().expand(expected.shape)
        assert torch.allclose(close, expected, rtol=0, atol=size * 1e-6, equal_nan=True), name


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operator returns."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else [result]:
            if isinstance(part, torch.Tensor):
                self.found = max(self.found, part.numel())
        return result


@pytest.mark.usefixtures("blocked_only")
def test_memory_is_that_of_a_block() -> None:
    query = torch.randn(1, 4, 900, 2)
    with Largest() as mode:
        statistics(query, query, is_causal=True, critical_every=0)
    assert 900 * 900 // 8 < mode.found <= module.BLOCK_ELEMENTS < 4 * 900 * 900 // 4


def test_a_metric_of_the_weights_is_named_as_one() -> None:
    query = torch.randn(1, 1, 4, 2)
    with pytest.raises(ValueError, match="'entropy' is one of METRICS, not of STRUCTURE: att"):
        statistics(query, query)["entropy"]
