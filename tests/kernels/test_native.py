"""The native kernel: every instruction set against the oracle, its layouts, threads and edges."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from acutance import attend, kernels, row_statistics
from acutance.kernels import blocked, library, native
from acutance.kernels.call import KernelCall
from acutance.kernels.library import CALL, GRADIENTS, SUMS, Layout
from acutance.masks import Masking
from acutance.rowstats import dense_statistics
from acutance.testing import (
    MASKS,
    assert_close_to_oracle,
    attention_case,
    exact_scores,
    score_error,
)

FOUND = library.load()
pytestmark = pytest.mark.skipif(isinstance(FOUND, str), reason=str(FOUND))
CPUS = () if isinstance(FOUND, str) else FOUND.cpus
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def the_library() -> library.Library:
    found = library.load()
    assert not isinstance(found, str)
    return found


def processor() -> tuple[str, int]:
    """The vendor and family of this processor, as Linux says."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    said = {name.strip(): text.strip() for name, _, text in (x.partition(":") for x in lines)}
    return said.get("vendor_id", ""), int(said.get("cpu family", 0))


@pytest.fixture(params=CPUS or ("none",))
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with each instruction set of this machine and build."""
    before = the_library().cpu
    the_library().use_cpu(request.param)
    assert the_library().cpu == request.param
    yield request.param
    the_library().use_cpu(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def attention(*tensors: Any, **options: Any) -> Any:
    return attend.attention(*tensors, **options, return_stats=True, backend="native")


# -- against the oracle ------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_the_oracle(mask: str, dtype: torch.dtype) -> None:
    """Lengths beyond one vector and one tile of keys, and few of each."""
    for seed, longest in ((0, 16), (1, 100)):
        case = attention_case(seed, mask=mask, dtype=dtype, longest=longest)
        noise = longest < 20  # the oracle takes its time over it
        out, stats = attention(*case.tensors, **case.options, noise=noise)
        assert stats.backend == "native"
        oracle = dense_statistics(*case.tensors[: 2 + noise], **case.options)
        size = sum(
            float(part[part > -1e4].abs().amax())
            for name in ("attn_mask", "bias")
            if (part := case.options.get(name)) is not None
            and part.is_floating_point()
            and bool((part > -1e4).any())
        ) + 400.0 * ("alibi_slopes" in case.options)
        delta = score_error(case.query, case.key, case.options.get("scale"), added=size)
        norm = float(torch.linalg.vector_norm(case.value.double(), dim=-1).amax())
        assert_close_to_oracle(stats, oracle, score_error=delta, value_norm=norm, name=case.name)
        bound = 1e-9 if dtype == torch.float64 else 2e-5
        half = torch.finfo(dtype).eps if dtype in (torch.bfloat16, torch.float16) else 0.0
        if noise:
            torch.testing.assert_close(
                out.double(), oracle["output"], rtol=bound + half, atol=bound + half
            )


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("keys", [1, 2, 1000])
@pytest.mark.parametrize("queries", [1, 4, 33])
def test_hard_rows_are_exact(queries: int, keys: int) -> None:
    """Logits of ±1e4 known exactly, equal or one-hot, for few and many queries."""
    rows = {
        "uniform": (torch.rand(keys, generator=torch.Generator().manual_seed(2)) * 2 - 1) * 1e4,
        "one-hot": torch.zeros(keys).index_fill(0, torch.tensor(keys - 1), 1e4),
        "offset": 1e4 + normal(keys, seed=1),
        "equal": torch.full((keys,), 1e4 / 3),
        "low": torch.full((keys,), -1e4),
    }
    for name, row in rows.items():
        query, key = exact_scores(row)
        query = query.expand(1, 1, queries, 1)
        stats = attend.row_statistics(query, key, scale=1.0, backend="native")
        oracle = dense_statistics(query, key, scale=1.0)
        assert_close_to_oracle(stats, oracle, name=name)
        # the entropy of a nearly one-hot row is a difference of two numbers near 1
        error = (stats.entropy.double() - oracle["entropy"]).abs()
        assert (error <= 2e-5 * oracle["entropy"].clamp(min=0.05)).all(), name


def test_a_hundred_thousand_keys() -> None:
    query, key = normal(1, 1, 3, 4), normal(1, 1, 100_000, 4, seed=1)
    for options in ({}, {"is_causal": True, "query_offset": 99_990}):
        stats = attend.row_statistics(query, key, **options, backend="native")
        want = dense_statistics(query, key, **options)
        assert torch.equal(stats.n_keys, want["n_keys"])
        error = (stats.entropy.double() - want["entropy"]).abs()
        assert (error <= 2e-5 * want["entropy"]).all()


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("queries", [2, 40])
def test_what_is_no_number_stays_in_its_row(bad: float, queries: int) -> None:
    query, key, value = normal(1, 2, queries, 8), normal(1, 2, 70, 8, seed=1), normal(1, 2, 70, 5)
    clean, stats = attention(query, key, value, noise=True)
    spoilt = query.clone()
    spoilt[0, 1, 1, 3] = bad
    out, found = attention(spoilt, key, value, noise=True)
    keep = torch.ones(1, 2, queries, dtype=torch.bool)
    keep[0, 1, 1] = False
    assert torch.equal(out[keep], clean[keep])
    for name in stats.available:
        assert torch.equal(found[name][keep], stats[name][keep]), name
    assert not found.entropy[0, 1, 1].isfinite()
    assert not out[0, 1, 1].isfinite().any()


@pytest.mark.usefixtures("cpu")
def test_a_hidden_key_may_hold_anything() -> None:
    query, key, value = normal(1, 1, 5, 8), normal(1, 1, 70, 8, seed=1), normal(1, 1, 70, 5)
    for bad in (torch.nan, torch.inf, 1e30):
        dirty, mask = key.clone(), torch.ones(1, 70, dtype=torch.bool)
        dirty[..., 3, :] = bad
        mask[0, 3] = False
        out, stats = attention(query, dirty, value, key_mask=mask)
        clean, want = attention(query, key, value, key_mask=mask)
        assert torch.equal(out, clean)
        assert torch.equal(stats.entropy, want.entropy)
        assert torch.equal(stats.logit_std, want.logit_std)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exponential(dtype: torch.dtype) -> None:
    """Two units in the last place and what rounding log 2 to a float does; far down 0 or nearly."""
    smallest = torch.finfo(dtype).tiny
    low = -87.0 if dtype == torch.float32 else -708.0
    x = torch.linspace(low, 0.0, 50_001, dtype=torch.float64).to(dtype)
    exact = x.double().exp()
    error = ((the_library().exp(x).double() - exact) / exact).abs()
    constant = 2.75e-9 if dtype == torch.float32 else 0.0  # |float(log 2) / log 2 - 1|
    assert (error <= 2 * torch.finfo(dtype).eps + constant * x.double().abs()).all()
    far = torch.tensor([-1e3, -1e4, -1e30, -torch.inf], dtype=dtype)
    assert (the_library().exp(far) <= smallest).all()
    assert the_library().exp(torch.zeros(1, dtype=dtype)).item() == 1.0
    assert the_library().exp(torch.full((1,), torch.nan, dtype=dtype)).isnan().all()


# -- layouts -----------------------------------------------------------------------------------


def layouts(tensor: Tensor) -> Iterator[Tensor]:
    """The same numbers in other places of memory."""
    yield tensor.contiguous()
    yield tensor.transpose(1, 2).contiguous().transpose(1, 2)
    yield tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    wide = torch.full((*tensor.shape[:3], tensor.shape[3] + 5), torch.nan, dtype=tensor.dtype)
    wide[..., 2:-3] = tensor
    yield wide[..., 2:-3]
    spaced = torch.full((tensor.shape[0], tensor.shape[1], 2 * tensor.shape[2], tensor.shape[3]), 9)
    spaced = spaced.to(tensor.dtype)
    spaced[:, :, 1::2] = tensor
    yield spaced[:, :, 1::2]


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_strides_do_not_matter(queries: int) -> None:
    query, key, value = (
        normal(2, 2, queries, 12), normal(2, 2, 50, 12, seed=1), normal(2, 2, 50, 7, seed=2)
    )  # fmt: skip
    mask = normal(2, 1, queries, 50, seed=3) > -1.0
    want, stats = attention(query, key, value, attn_mask=mask)
    count = 0
    for q, k, v in zip(layouts(query), layouts(key), layouts(value), strict=True):
        for m in (mask, mask.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)):
            out, found = attention(q, k, v, attn_mask=m)
            assert torch.equal(out, want)
            assert torch.equal(found.entropy, stats.entropy)
            count += 1
    assert count == 10


def test_expanded_heads_are_repeated_heads() -> None:
    query, key = normal(1, 4, 9, 8), normal(1, 1, 20, 8, seed=1)
    left = attention(query, key.expand(1, 4, 20, 8), key.expand(1, 4, 20, 8))
    right = attention(query, key, key, enable_gqa=True)
    assert torch.equal(left[0], right[0])
    assert torch.equal(left[1].entropy, right[1].entropy)


def test_inputs_are_left_as_they_were() -> None:
    case = attention_case(3, mask="everything", dtype=torch.float32)
    given = [part for part in (*case.tensors, *case.options.values()) if isinstance(part, Tensor)]
    copies = [part.clone() for part in given]
    attention(*case.tensors, **case.options)
    assert all(torch.equal(part, copy) for part, copy in zip(given, copies, strict=True))


def test_nothing_to_do() -> None:
    for batch, queries, keys in ((0, 3, 4), (1, 0, 4), (2, 3, 0)):
        query, key = torch.zeros(batch, 2, queries, 8), torch.zeros(batch, 2, keys, 8)
        out, stats = attention(query, key, key)
        assert out.shape == query.shape
        assert stats.n_keys.eq(keys).all()
        assert stats.n_keys.shape == (batch, 2, queries)


# -- threads and order -------------------------------------------------------------------------


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("queries", [1, 300])
def test_runs_agree_to_the_bit(queries: int) -> None:
    query, key = normal(1, 4, queries, 32), normal(1, 4, 3000, 32, seed=1)
    options = {"is_causal": True, "query_offset": 3000 - queries}
    first, stats = attention(query, key, key, **options)
    for _ in range(3):
        out, again = attention(query, key, key, **options)
        assert torch.equal(out, first)
        assert all(torch.equal(a, b) for a, b in zip(again.state, stats.state, strict=True))


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_may_change() -> None:
    query, key = normal(1, 3, 200, 16), normal(1, 3, 700, 16, seed=1)
    want = dense_statistics(query, key)["entropy"]
    for count in (1, 2, 3, 7, 1, 4):
        torch.set_num_threads(count)
        out, stats = attention(query, key, key)
        assert (stats.entropy.double() - want).abs().max() <= 2e-5
        assert out.isfinite().all()


def test_several_python_threads_at_once() -> None:
    query, key = normal(1, 2, 130, 16), normal(1, 2, 400, 16, seed=1)
    want, stats = attention(query, key, key, is_causal=True, query_offset=270)

    def work(_: int) -> bool:
        out, found = attention(query, key, key, is_causal=True, query_offset=270)
        return torch.equal(out, want) and torch.equal(found.entropy, stats.entropy)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_the_caller_keeps_its_denormals() -> None:
    small = torch.tensor([1e-40])
    query = normal(1, 2, 64, 16)
    attention(query, query * 100, query)
    assert (small * 0.5).item() > 0.0


# -- choice and absence ------------------------------------------------------------------------


@pytest.fixture
def use_cpu() -> Iterator[Callable[[str], None]]:
    """Set ACUTANCE_CPU, which is read when the library is loaded, for the rest of a test."""

    def use(name: str) -> None:
        patch.setenv(library.CPU_VARIABLE, name)
        library.load.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        yield use
    library.load.cache_clear()
    the_library()


def test_the_environment_chooses_an_instruction_set(use_cpu: Callable[[str], None]) -> None:
    use_cpu(CPUS[-1])
    assert kernels.info().cpu == CPUS[-1]


@pytest.mark.parametrize("name", [None, *CPUS])
def test_the_number_of_queries_never_decides_the_backend(
    name: str | None, use_cpu: Callable[[str], None]
) -> None:
    use_cpu(name or "")
    for length in (1, 64, 3000):
        q = torch.ones(1, 1, length, 3)
        key = q[:, :, :4]
        for noise in (False, True):  # with noise a call takes the long way
            assert row_statistics(q, key, key, noise=noise).backend == "native"
        assert attend.attention(q, key, key, return_stats=True)[1].backend == "native"


def test_a_fixed_table_says_where_pairs_of_bfloat16_are_multiplied() -> None:
    found = the_library()
    widest = found.cpus[0]
    for vendor, family in (("AuthenticAMD", 25), ("AuthenticAMD", 26)):
        assert found.usual_cpu(vendor, family) == widest
    without = found.cpus[widest == "avx512_bf16"]
    for vendor, family in (("GenuineIntel", 6), ("AuthenticAMD", 6), ("GenuineIntel", 25), ("", 0)):
        assert found.usual_cpu(vendor, family) == without


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="Linux says what processor it is")
def test_the_table_is_asked_for_this_processor(use_cpu: Callable[[str], None]) -> None:
    use_cpu("")
    used = the_library().usual_cpu(*processor())
    assert kernels.info().cpu == used


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="Linux says what processor it is")
@pytest.mark.parametrize(("heads", "width"), [(2, 64), (4, 64), (2, 65)])
def test_zen_4_decodes_a_lone_float32_query_with_avx2(
    heads: int, width: int, use_cpu: Callable[[str], None]
) -> None:
    q, k, v = (torch.randn(1, count, length, width, generator=torch.manual_seed(0))
               for count, length in ((heads, 1), (2, 3000), (2, 3000)))  # fmt: skip
    outputs = {}
    for name in ("", *CPUS):
        use_cpu(name)
        outputs[name] = attend.attention(q, k, v, enable_gqa=heads > 2)
    use_cpu("")
    lone_on_zen_4 = processor() == ("AuthenticAMD", 25) and heads == 2 and width <= 64
    used = (
        "avx2" if lone_on_zen_4 and kernels.info().cpu.startswith("avx512") else kernels.info().cpu
    )
    for name in CPUS:
        same_kernel = name == used or {name, used} == {"avx512", "avx512_bf16"}
        assert torch.equal(outputs[""], outputs[name]) == same_kernel


@pytest.mark.parametrize("name", [None, *CPUS])
def test_info_says_for_each_dtype_what_is_used_and_why(
    name: str | None, use_cpu: Callable[[str], None]
) -> None:
    use_cpu(name or "")
    found = kernels.info()
    assert list(found.dtypes) == ["float32", "float64", "bfloat16", "float16"]
    for dtype, text in found.dtypes.items():
        used, _, why = text.partition(": ")
        assert used == f"native, {name or found.cpu}"
        if name:
            assert why == "set by ACUTANCE_CPU"
        else:
            assert why.startswith(("the widest", "multiplies pairs", "avx512_bf16 is not known"))
        assert f"{dtype:16} {text}" in str(found)


def test_nothing_is_timed_or_written(tmp_path: Path) -> None:
    """What runs is the same in every process, whatever its home directory holds."""
    code = (
        "import torch, acutance; q = torch.ones(1, 8, 1024, 64); "
        "acutance.attention(q, q, q); print(acutance.kernels.info().dtypes)"
    )
    said = []
    for home in (tmp_path / "a", tmp_path / "b"):
        home.mkdir()
        command, environment = [sys.executable, "-c", code], os.environ | {"HOME": str(home)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        said.append(done.stdout)
    assert said[0] == said[1] == f"{kernels.info().dtypes}\n"
    assert not [*tmp_path.glob("*/**/*acutance*")]


def test_an_instruction_set_that_is_not_there_is_refused(use_cpu: Callable[[str], None]) -> None:
    with pytest.raises(
        ValueError, match="ACUTANCE_CPU must name an instruction set of this machine"
    ):
        the_library().use_cpu("mmx")
    use_cpu("mmx")
    q = torch.ones(1, 1, 2, 3)
    with pytest.raises(ValueError, match=rf"one of {', '.join(CPUS)}, got 'mmx'$"):
        row_statistics(q, q)


def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", 99)
    with pytest.raises(OSError, match=r"has interface 6, expected 99: reinstall acutance"):
        library.Library(the_library().path)


def test_the_threads_are_those_of_torch() -> None:
    """GOMP_parallel is found through torch's own library wherever that one has it."""
    if "openmp" not in torch.__config__.parallel_info().lower() or sys.platform != "linux":
        pytest.skip("this torch does not run on OpenMP")
    assert the_library().openmp is not None


def test_structures_have_the_size_of_c_s() -> None:
    """The three structures of cpu/api.h, counted in words of eight bytes."""
    assert (CALL.words, SUMS.words, GRADIENTS.words) == (57, 20, 18)
    with pytest.raises(TypeError, match="no member of the structure: colour"):
        Layout("size q").pack(size=1, colour=2)


def test_both_backends_have_the_same_fields() -> None:
    """Shapes, dtypes and strides of the sums, with and without values and noise."""
    masking = Masking(batch=2, heads=2, group=2, queries=5, keys=7)
    for dtype, wide, noise in itertools.product(FLOATS, (False, True), (False, True)):
        query, key = normal(2, 4, 5, 8, dtype=dtype), normal(2, 2, 7, 8, dtype=dtype)
        value = key[..., :3].contiguous() if wide else None
        ours = native.forward(KernelCall(query, key, value, masking, 0.3, noise=noise))
        theirs = blocked.forward(KernelCall(query, key, value, masking, 0.3, noise=noise))
        for name, left, right in zip(ours._fields, ours, theirs, strict=True):
            assert (left.shape, left.dtype) == (right.shape, right.dtype), name
            assert left.is_contiguous(), name
