"""Models that call kernels as functions: statistics and laws as with SDPA, nothing left over."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen

import acutance
from acutance.calibration import ApplyError
from tests.contract.caching.conftest import build
from tests.contract.kernel_functions.checks import (
    GROUPS,
    HEADS,
    WIDTH,
    Calls,
    assert_listed,
    assert_read,
    cumulative,
    packed,
    tensor,
    tensors,
)
from tests.contract.kernel_functions.reference import attend, sequences, window
from tests.contract.kernel_functions.stand_ins import flash_attn_2, flash_attn_3
from tests.contract.kernel_functions.stand_ins.flash_attn_3 import flash_attn_func

ALL = (-1, -1)


@pytest.fixture(scope="module", autouse=True)
def varlen_on_cpu() -> None:
    """PyTorch's own ``varlen_attn``, whose operator computes on a CPU what its page documents."""

    def kernel(
        query: Any,
        key: Any,
        value: Any,
        cu_seq_q: Any,
        cu_seq_k: Any,
        max_q: Any,
        max_k: Any,
        is_causal: Any = False,
        scale: Any = None,
        window_size: Any = None,
        enable_gqa: Any = False,
        seqused_k: Any = None,
        block_table: Any = None,
        num_splits: Any = None,
    ) -> Any:
        output = torch.zeros_like(query)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        asks = sequences(cu_seq_q)
        for index, ask in enumerate(asks):
            if block_table is not None:
                keys, values = (
                    torch.cat([part[page] for page in block_table[index].tolist()])
                    for part in (key, value)
                )
            else:
                start, end = int(cu_seq_k[index]), int(cu_seq_k[index + 1])
                keys, values = key[start:end], value[start:end]
            if seqused_k is not None:
                keys, values = (part[: int(seqused_k[index])] for part in (keys, values))
            sees = window(ask.stop - ask.start, len(keys), is_causal, window_size or ALL)
            output[ask] = attend(query[ask], keys, values, factor, sees)
        lse = torch.zeros(query.shape[1], len(query))
        return output, lse, torch.zeros(2, dtype=torch.uint64)

    varlen._varlen_attn.register_kernel("cpu")(kernel)  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [ALL, (-1, 0), (2, 0), (1, 1), (2, 1)])
@pytest.mark.parametrize(("queries", "keys"), [([3, 1, 4], [3, 1, 4]), ([2, 3], [5, 4])])
def test_varlen_attn(queries: list[int], keys: list[int], size: tuple[int, int]) -> None:
    given = packed(queries, keys)
    run = functools.partial(varlen.varlen_attn, *given, max(queries), max(keys), enable_gqa=True)
    assert_read(lambda: run(window_size=size, scale=0.5), "varlen_attn")
    operator = torch.ops.torch_attn._varlen_attn
    places = (*given, max(queries), max(keys), size == (-1, 0), 0.5, list(size), True)
    assert_read(lambda: operator(*places), "torch_attn._varlen_attn")
    used = torch.tensor([2, 1, 2][: len(keys)], dtype=torch.int32)
    assert_read(lambda: run(window_size=size, seqused_k=used))


def test_pages_of_varlen_attn() -> None:
    query, key, value, asks, _ = packed([2, 3], [8, 16])
    pages = [part.reshape(6, 4, GROUPS, WIDTH) for part in (key, value)]
    table, used = torch.tensor([[4, 0], [5, 2]], dtype=torch.int32), torch.tensor([5, 8])
    options: dict[str, Any] = {"block_table": table, "seqused_k": used, "enable_gqa": True}
    run = varlen.varlen_attn
    assert_read(lambda: run(query, *pages, asks, None, 3, 8, window_size=(-1, 0), **options))


# -- models ----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of a small decoder; subclasses compute it in two ways."""

    def __init__(self, width: int = HEADS * WIDTH) -> None:
        super().__init__()
        self.c_q = nn.Linear(width, width, bias=False)
        self.c_kv = nn.Linear(width, 2 * GROUPS * WIDTH, bias=False)
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, places: Any) -> Tensor:
        query = self.c_q(x).unflatten(-1, (HEADS, WIDTH)) * 2.0
        key, value = self.c_kv(x).unflatten(-1, (2, GROUPS, WIDTH)).unbind(-3)
        y: Tensor = self.c_proj(self.attend(query, key, value, places).flatten(-2))
        return y

    def attend(self, query: Tensor, key: Tensor, value: Tensor, places: Any) -> Tensor:
        raise NotImplementedError


class Nanochat(Attention):
    """As nanochat: (B, L, H, E), a window in some layers, the library in a namespace."""

    library = SimpleNamespace(flash_attn_func=flash_attn_func)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, places: Any) -> Tensor:
        kernel = self.library.flash_attn_func
        output: Tensor = kernel(query, key, value, causal=True, window_size=places)
        return output


class NanochatSdpa(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, places: Any) -> Tensor:
        row = torch.arange(query.shape[1]).unsqueeze(1)
        far = row - torch.arange(query.shape[1])
        mask = (far >= 0) & ((far <= places[0]) if places[0] >= 0 else True)
        parts = [part.transpose(1, 2) for part in (query, key, value)]
        return F.scaled_dot_product_attention(*parts, mask, enable_gqa=True).transpose(1, 2)


class Torchtitan(Attention):
    """As torchtitan: packed (T, H, E) with cumulative lengths of the documents."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, places: Any) -> Tensor:
        most = int(places.diff().max())
        parts = [part[0] for part in (query, key, value)]
        sizes: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}
        output: Any = varlen.varlen_attn(*parts, places, places, most, most, **sizes)
        return output.unsqueeze(0)  # type: ignore[no-any-return]


class TorchtitanSdpa(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, places: Any) -> Tensor:
        document = torch.bucketize(torch.arange(query.shape[1]), places[1:], right=True)
        mask = (document.unsqueeze(1) == document).tril()
        parts = [part.transpose(1, 2) for part in (query, key, value)]
        return F.scaled_dot_product_attention(*parts, mask, enable_gqa=True).transpose(1, 2)


class Decoder(nn.Module):
    def __init__(self, kind: type[Attention], layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, HEADS * WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(layers))
        self.head = nn.Linear(HEADS * WIDTH, 32)

    def forward(self, tokens: Tensor, places: list[Any]) -> Tensor:
        x = self.embedding(tokens)
        for layer, place in zip(self.layers, places, strict=True):
            x = x + layer(x, place)
        logits: Tensor = self.head(x)
        return logits


TOKENS = torch.randint(0, 32, (1, 12), generator=torch.Generator().manual_seed(4))
DOCUMENTS = cumulative([5, 1, 6])
PAIRS = [
    (Nanochat, NanochatSdpa, [(3, 0), ALL]),
    (Torchtitan, TorchtitanSdpa, [DOCUMENTS, DOCUMENTS]),
]
LAWS = [acutance.scaling.LogN(train_length=4), acutance.scaling.SSMax(s=0.7)]


@pytest.mark.parametrize(("kind", "sdpa", "places"), PAIRS, ids=["nanochat", "torchtitan"])
def test_a_model_has_the_statistics_of_its_sdpa_version(kind: Any, sdpa: Any, places: Any) -> None:
    summaries = []
    for each in (kind, sdpa):
        model = Decoder(each)
        with acutance.probe(model, verify=True) as probe, torch.no_grad():
            logits = model(TOKENS, places)
        assert probe.unread == []
        summaries.append((logits, probe.summary()))
    (plain, left), (other, right) = summaries
    torch.testing.assert_close(plain, other)
    assert [layer.module for layer in left.layers] == [layer.module for layer in right.layers]
    assert {layer.status for layer in left.layers} == {"verified"}
    assert [layer.rows for layer in left.layers] == [layer.rows for layer in right.layers]
    for metric in ("entropy", "n_keys", "max_logit", "lse", "top_weight", "logit_std"):
        torch.testing.assert_close(left.mean(metric), right.mean(metric), equal_nan=True)


@pytest.mark.parametrize("law", LAWS, ids=["log n", "ssmax"])
@pytest.mark.parametrize(("kind", "sdpa", "places"), PAIRS, ids=["nanochat", "torchtitan"])
def test_a_law_changes_logits_as_on_sdpa(kind: Any, sdpa: Any, places: Any, law: Any) -> None:
    results = []
    for each in (kind, sdpa):
        model = Decoder(each)
        plain = model(TOKENS, places)
        with acutance.apply(model, law) as applied, acutance.probe(model, verify=True) as probe:
            results.append(model(TOKENS, places))
        assert applied.calls == {"layers.0": 1, "layers.1": 1}
        assert {layer.status for layer in probe.summary().layers} == {"verified"}
        assert (results[-1] - plain).abs().max() > 1e-3
        assert torch.equal(model(TOKENS, places), plain)
    torch.testing.assert_close(*results)


def test_laws_change_packed_queries_padded_rows_and_caches() -> None:
    law, qkv = acutance.scaling.LogN(train_length=4), tensor(2, 5, 3, HEADS, WIDTH)
    query, key, value, asks, answers = packed([2, 3], [4, 6])
    slopes = torch.zeros(HEADS)  # read as padded sequences
    cache = tensors(2, 1, 9)

    def expected(part: Tensor, n: list[int]) -> Tensor:
        return part * law.factor(torch.tensor(n)).reshape(-1, 1, 1).float()

    varlen_func = flash_attn_2.flash_attn_varlen_func
    places: Any = (key, value, asks, answers, 3, 6)
    seen = [1, 2, 3, 4, 5]
    changed = torch.cat(
        [torch.stack([expected(q[:, 0], seen) for q in qkv])[:, :, None], qkv[:, :, 1:]], 2
    )
    for run, argument, scaled in (
        (functools.partial(flash_attn_2.flash_attn_qkvpacked_func, causal=True), qkv, changed),
        (
            lambda q: varlen_func(q, *places, causal=True, alibi_slopes=slopes),
            query,
            expected(query, [3, 4, 4, 5, 6]),
        ),
        (
            lambda q: flash_attn_2.flash_attn_with_kvcache(
                q, *cache[1:], cache_seqlens=torch.tensor([5, 8])
            ),
            cache[0],
            expected(cache[0].flatten(0, 1), [5, 8]).unsqueeze(1),
        ),
    ):
        model = Calls(functools.partial(run, argument))
        with acutance.apply(model, law):
            result = model()
        torch.testing.assert_close(result, run(scaled))


def test_a_law_that_a_kernel_cannot_have_is_refused_with_its_name() -> None:
    given = tensors(1, 5, 5)
    unknown = Calls(lambda: flash_attn_3.flash_attn_func(*given, causal=True, attention_chunk=2))
    eight = [part.to(torch.float8_e4m3fn) for part in given]
    narrow = Calls(lambda: flash_attn_3.flash_attn_func(*eight, causal=True))
    known = Calls(lambda: flash_attn_3.flash_attn_func(*given, causal=True))
    law, sliding = acutance.scaling.LogN(train_length=2), acutance.scaling.Window(3)
    for model, change, reason in (
        (unknown, law, "flash_attn_func with attention_chunk cannot be read"),
        (narrow, law, "it calls flash_attn_func: its queries are torch.float8_e4m3fn"),
        (known, sliding, "it calls flash_attn_func: a law's windows cannot be passed to it"),
    ):
        with (
            pytest.raises(ApplyError, match=reason),
            acutance.apply(model, change),
        ):
            model()
        assert known() is not None


def test_a_law_changes_operators() -> None:
    query, key, value, cuts, _ = packed([2, 3], [2, 3])
    sizes = (cuts, cuts, 3, 3, True, 0.5, [-1, 0], True)
    run = functools.partial(torch.ops.torch_attn._varlen_attn, key=key, value=value)
    names = [
        "cu_seq_q",
        "cu_seq_k",
        "max_q",
        "max_k",
        "is_causal",
        "scale",
        "window_size",
        "enable_gqa",
    ]
    options = dict(zip(names, sizes, strict=True))
    model = Calls(lambda: run(query, **options)[0])
    with acutance.apply(model, acutance.scaling.LogN(train_length=2)) as applied:
        changed = model()
    factor = acutance.scaling.LogN(train_length=2).factor(torch.tensor([1, 2, 1, 2, 3]))
    scaled = query * factor.reshape(-1, 1, 1).float()
    torch.testing.assert_close(changed, run(scaled, **options)[0])
    assert applied.calls == {"Calls": 1}


def test_a_cache_plan_is_refused() -> None:
    model, given = build(), tensors(1, 3, 3)
    plan = acutance.CachePlan.of(model, {})
    attention = model.get_submodule("model.layers.1.self_attn")
    attention.forward = lambda *_, **__: flash_attn_func(*given)  # type: ignore[method-assign]
    with (
        pytest.raises(
            ApplyError, match=r"layers\.1.*: it calls flash_attn_func: it has no cache of"
        ),
        acutance.apply(model, plan),
    ):
        model(torch.ones(1, 4, dtype=torch.long))


def test_functions_are_replaced_inside_contexts_only(libraries: dict[str, Any]) -> None:
    functions = [
        member
        for module in libraries.values()
        for member in vars(module).values()
        if hasattr(member, "__code__")
    ]
    before = [(each.__code__, dict(vars(each))) for each in functions]
    model = Decoder(Nanochat)
    places = [ALL, ALL]
    with acutance.probe(model) as outer:
        replaced = flash_attn_3.flash_attn_func.__code__
        assert replaced is not before[functions.index(flash_attn_3.flash_attn_func)][0]
        assert "softcap" in inspect.signature(flash_attn_3.flash_attn_func).parameters
        with pytest.raises(TypeError, match="argument"), acutance.probe(model):
            model(TOKENS)
        assert flash_attn_3.flash_attn_func.__code__ is replaced
        with acutance.probe(model) as inner:
            model(TOKENS, places)
    assert len(functions) > 15
    assert [(each.__code__, dict(vars(each))) for each in functions] == before
    assert inner.summary().layers[0].rows == 12
    assert outer.summary().layers[0].rows == 12


def test_threads_and_other_models_are_apart() -> None:
    models = [Decoder(Nanochat) for _ in range(3)]
    probes = [acutance.probe(model, verify=True) for model in models]
    errors: list[BaseException] = []

    def run(model: nn.Module, probe: Any) -> None:
        try:
            with probe:
                for _ in range(3):
                    model(TOKENS, [ALL, (2, 0)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(models, probes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for probe in probes:
        assert [layer.rows for layer in probe.summary().layers] == [36, 36]
        assert {layer.status for layer in probe.summary().layers} == {"verified"}


def test_kernels_of_the_hub_are_known_by_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "build" / "torch29-cxx11-cu128-x86_64-linux" / "flash_attn3"
    folder.mkdir(parents=True)
    source = Path(flash_attn_3.__file__).read_text(encoding="utf-8")
    (folder / "flash_attn_interface.py").write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("hub_1a2b", folder / "flash_attn_interface.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    given = tensors(1, 4, 4)

    def load_and_run() -> Any:  # as a kernel that is fetched by the first pass
        if "hub_1a2b" not in sys.modules:
            monkeypatch.setitem(sys.modules, "hub_1a2b", module)
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        return module.flash_attn_func(*given, causal=True)

    load_and_run()
    assert_read(load_and_run, "flash_attn_func")
    monkeypatch.delitem(sys.modules, "hub_1a2b")
    model = Calls(load_and_run)
    with acutance.probe(model, verify=True) as probe:
        model()  # the kernel is loaded inside this pass, and known from the next on
        model()
    assert probe.summary().layers[0].rows == 4


def test_libraries_imported_by_the_model_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    source = Path(flash_attn_3.__file__).read_text(encoding="utf-8")
    (tmp_path / "flash_attn_interface.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    given = tensors(1, 4, 4)

    def call() -> Any:
        import flash_attn_interface  # type: ignore[import-not-found]

        return flash_attn_interface.flash_attn_func(*given, causal=True)

    assert_read(call, "flash_attn_func")


def test_keywords_that_nobody_knows_are_listed() -> None:
    def sageattn(q: Any, k: Any, v: Any, tensor_layout: str = "NHD", tilt: float = 0.0) -> Any:
        return q + tilt

    sys.modules["sageattention.core"].sageattn, original = (
        sageattn,
        sys.modules["sageattention.core"].sageattn,
    )  # type: ignore[attr-defined]
    try:
        given = tensors(1, 3, 3)
        assert_listed(lambda: sageattn(*given, tilt=0.5), "sageattn", "tilt=0.5")
    finally:
        sys.modules["sageattention.core"].sageattn = original  # type: ignore[attr-defined]
