"""all_reduce_keys: two and three processes that share the keys, against one that has them all."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from acutance.rowstats import (
    RowState,
    RowStatistics,
    WeightStatistics,
    WeightSums,
    all_reduce_keys,
    empty,
    merge,
    merge_weights,
    observe,
    observe_weights,
)

KEYS, ROWS, WIDTH = 13, (2, 5), 3
CUTS = {2: (0, 6, KEYS), 3: (0, 4, 9, KEYS)}
#: Positions of each rank's keys where they lie in stripes, as rings that balance causal work do.
STRIPES = {size: [list(range(rank, KEYS, size)) for rank in range(size)] for size in (2, 3)}
REFUSALS = ("shapes", "dtypes", "same_keys", "order", "one_rank", "too_few")


def problem(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Rows of very different sizes; the last sees no key at all, the one before few."""
    torch.manual_seed(5)
    scores = torch.randn(*ROWS, KEYS, dtype=torch.float64) * 4.0
    scores[0, 0] += 700.0
    scores[0, 1] -= 700.0
    scores[1, 0, 3] = 900.0
    mask = torch.rand(*ROWS, KEYS) < 0.7
    mask[1, 4] = False
    mask[1, 3] = torch.arange(KEYS) >= KEYS - 2  # none on the ranks before the last
    mask[0, 4] = torch.arange(KEYS) < 1  # one key, on the first rank
    value = torch.randn(*ROWS, KEYS, WIDTH, dtype=torch.float64) + 50.0
    sink = torch.randn(*ROWS, dtype=torch.float64)
    return {
        "scores": scores.to(dtype),
        "mask": mask,
        "value": value.to(dtype),
        "sink": sink.to(dtype),
    }


def observed(x: dict[str, torch.Tensor], keys: Any, **given: Any) -> RowState:
    return observe(
        x["scores"][..., keys], x["mask"][..., keys], x["value"][..., keys, :], sink=x["sink"],
        **given,
    )  # fmt: skip


def weighed(x: dict[str, torch.Tensor], keys: Any, **given: Any) -> WeightSums:
    return observe_weights(x["scores"][..., keys], x["mask"][..., keys], **given)


def refusals(rank: int, group: dist.ProcessGroup) -> dict[str, str]:
    """What ranks say when their arguments do not fit; each is raised on every one of them."""
    x = problem()
    half = slice(0, 4) if rank == 0 else slice(4, 9)
    part = observe(x["scores"][..., half], x["mask"][..., half])
    calls: dict[str, Any] = {
        "shapes": lambda: all_reduce_keys(
            part if rank else RowState(*(t[:1] for t in part)), group
        ),
        "dtypes": lambda: all_reduce_keys(
            part if rank else observe(x["scores"][..., half].float()), group
        ),
        "same_keys": lambda: all_reduce_keys(observe(torch.zeros(2, 3).double()), group),
        "order": lambda: all_reduce_keys(part, group, first_key=torch.tensor([3, 2, 1, 0, 9])),
        "one_rank": lambda: all_reduce_keys(part, group, first_key=-rank),
        "too_few": lambda: all_reduce_keys(part, group, first_key=torch.tensor([rank])),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


def work(rank: int, store: str, out: str) -> None:
    """One process of three; the first two also form a group of their own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    results: dict[str, Any] = {}
    for size, group in ((3, None), (2, pair)):
        if rank >= size:
            with pytest.raises(ValueError, match="that this rank belongs to"):
                all_reduce_keys(empty((1,)), group)
            continue
        own = slice(CUTS[size][rank], CUTS[size][rank + 1])
        stripe = STRIPES[size][rank]
        for dtype in (torch.float64, torch.float32):
            x = problem(dtype)
            results[f"{size}/{dtype}"] = tuple(
                all_reduce_keys(observed(x, own), group, first_key=own.start)
            )
        x = problem()
        x["value"].requires_grad_()
        given = all_reduce_keys(RowStatistics(observed(x, own, first_key=own.start)), group)
        results[f"{size}/statistics"] = tuple(given.state)
        results[f"{size}/grad"] = any(t.requires_grad for t in given.state)
        results[f"{size}/stripes"] = tuple(
            all_reduce_keys(observed(x, stripe), group, first_key=torch.tensor(stripe))
        )
        bare = observe(x["scores"][..., own], x["mask"][..., own], first_key=own.start)
        results[f"{size}/bare"] = tuple(all_reduce_keys(bare, group))
        mixed = bare if rank else observed(x, own, first_key=own.start)  # values, sink: rank 0 only
        results[f"{size}/mixed"] = tuple(all_reduce_keys(mixed, group))
        none = empty(ROWS, WIDTH, dtype=torch.float64)
        results[f"{size}/empty_rank"] = tuple(
            all_reduce_keys(none if rank == 1 else observed(x, slice(0, 8)), group)
            if size == 2
            else none
        )
        results[f"{size}/nothing"] = tuple(all_reduce_keys(none, group))
        results[f"{size}/weights"] = tuple(
            all_reduce_keys(weighed(x, own, distribution=rank != 0), group, first_key=own.start)
        )
        positive = observe_weights(
            x["scores"][..., own].abs(), x["mask"][..., own], distribution=True, first_key=own.start
        )
        both = all_reduce_keys(WeightStatistics(positive, bare), group)
        results[f"{size}/distribution"] = tuple(both.sums)
        results[f"{size}/scores"] = tuple(both.scores or ())
        lost = all_reduce_keys(WeightStatistics(positive, bare if rank else None), group)
        results[f"{size}/lost"] = lost.scores is None
    if rank < 2:
        results["refusals"] = refusals(rank, pair)
    torch.save(results, f"{out}/{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # an object that holds gloo's threads past shutdown would abort it


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of three processes found; they start once for all tests of this file."""
    folder = tmp_path_factory.mktemp("ranks")
    running = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder / "store"), str(folder)])
        for rank in range(3)
    ]
    try:
        assert [process.wait(timeout=180) for process in running] == [0, 0, 0]
    finally:
        for process in running:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


def assert_close(found: tuple[Any, ...], want: tuple[Any, ...], tolerance: float) -> None:
    for name, a, b in zip(type(want)._fields, found, want, strict=True):  # type: ignore[attr-defined]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if not a.is_floating_point():
            assert torch.equal(a, b), name
            continue
        # relative to the row's own size: R2 and M2 are sums of squares of what is taken off
        size = b.abs().masked_fill(~b.isfinite(), 0.0).clamp(min=1.0)
        off = torch.where(a == b, 0.0, (a - b).abs() / size)
        assert float(off.max() if off.numel() else 0.0) <= tolerance, name


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranks_equal_one_process(ranks: Any, size: int, dtype: torch.dtype) -> None:
    whole = observed(problem(dtype), slice(None), first_key=0)
    assert whole.n[1, 4] == 0  # a row without a key, and a row with keys on one rank only
    cut = CUTS[size][-2]
    assert not problem()["mask"][1, 3, :cut].any()
    # float32: a dozen roundings of sums whose terms are as large as the sum
    tolerance = 1e-12 if dtype == torch.float64 else 3e-6
    for found in ranks[:size]:
        assert_close(found[f"{size}/{dtype}"], whole, tolerance)


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_same_bits(ranks: Any, size: int) -> None:
    first, *others = (found[f"{size}/{torch.float64}"] for found in ranks[:size])
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_it_is_the_exact_merge(ranks: Any, size: int) -> None:
    x = problem()
    joint = empty(ROWS, WIDTH, dtype=torch.float64)
    sums = []
    for start, stop in zip(CUTS[size], CUTS[size][1:], strict=False):
        joint = merge(joint, observed(x, slice(start, stop), first_key=start))
        sums.append(weighed(x, slice(start, stop), first_key=start))
    weights = sums[0]
    for part in sums[1:]:
        weights = merge_weights(weights, part)
    assert weights.X.shape[-1] == 0  # no distribution: not known
    for found in ranks[:size]:
        assert_close(found[f"{size}/statistics"], joint, 1e-12)
        assert_close(found[f"{size}/weights"], weights, 1e-12)
        assert found[f"{size}/grad"] is False


@pytest.mark.parametrize("size", [2, 3])
def test_first_keys_are_those_of_the_whole_row(ranks: Any, size: int) -> None:
    whole = observed(problem(), slice(None), first_key=0)
    for found in ranks[:size]:
        striped = RowState(*found[f"{size}/stripes"])
        assert torch.equal(striped.first_index, whole.first_index)
        assert torch.equal(striped.first, whole.first)
        assert_close(tuple(striped), whole, 1e-12)
        a, b = RowStatistics(striped).first_weight, RowStatistics(whole).first_weight
        assert torch.allclose(a, b, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("size", [2, 3])
def test_what_only_some_ranks_know(ranks: Any, size: int) -> None:
    x = problem()
    bare = observe(x["scores"], x["mask"], first_key=0)
    sunk = observe(x["scores"], x["mask"], sink=x["sink"], first_key=0)
    positive = observe_weights(x["scores"].abs(), x["mask"], distribution=True, first_key=0)
    for found in ranks[:size]:
        assert_close(found[f"{size}/bare"], bare, 1e-12)
        assert_close(found[f"{size}/mixed"], sunk, 1e-12)  # the sink is one; values are missing
        assert_close(found[f"{size}/distribution"], positive, 1e-12)
        assert_close(found[f"{size}/scores"], bare, 1e-12)
        assert found[f"{size}/lost"] is True


def test_ranks_without_keys(ranks: Any) -> None:
    part = observed(problem(), slice(0, 8), first_key=0)
    none = empty(ROWS, WIDTH, dtype=torch.float64)
    for found in ranks[:2]:
        assert_close(found["2/empty_rank"], part, 1e-12)
        assert_close(found["2/nothing"], none, 0.0)


def test_what_does_not_fit_is_refused_on_every_rank(ranks: Any) -> None:
    said = [found["refusals"] for found in ranks[:2]]
    assert [tuple(words) for words in said] == [REFUSALS, REFUSALS]
    for words in said:
        assert "all ranks must hold the same rows: rank" in words["shapes"]
        assert "float32" in said[0]["dtypes"]
        assert "2 of them hold key 0: give the position" in words["same_keys"]
        assert "in ascending order" in words["order"]
    assert said[0]["one_rank"] == "first_key of another rank does not fit its state"
    assert said[1]["one_rank"] == "first_key must be a position, 0 or more, got -1"
    assert any("has 1, but a row's first key is number" in words["too_few"] for words in said)


def test_it_needs_a_process_group_and_a_record() -> None:
    with pytest.raises(RuntimeError, match="which is not initialised"):
        all_reduce_keys(empty((2,)))
    with pytest.raises(TypeError, match=r"state must be a RowState, .* got Tensor"):
        all_reduce_keys(torch.zeros(2))  # type: ignore[type-var]


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2], sys.argv[3])
