"""One token of each sequence, read from a planned layer by one call of the native kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from acutance import HeadPlan
from acutance.caching.run_plan import PlannedLayer
from acutance.caching.stores import Attend, restore
from acutance.kernels import library, ragged
from acutance.testing import score_error

FOUND = library.load()
CPUS = () if isinstance(FOUND, str) else FOUND.cpus
native = pytest.mark.skipif(isinstance(FOUND, str), reason=str(FOUND))

FULL, DROPPED = HeadPlan(), HeadPlan("dropped")
STREAMING = HeadPlan("streaming", first=3, recent=9)
NEWEST = HeadPlan("streaming", recent=16)
QUANTISED = [
    HeadPlan(key_bits=keys, value_bits=values)
    for keys, values in ((8, 8), (4, 4), (2, 2), (8, 16), (16, 2))
]
HEADS = (FULL, STREAMING, DROPPED, QUANTISED[0], STREAMING, *QUANTISED[1:], NEWEST, FULL)
RESIDUAL = 8


@pytest.fixture(params=CPUS or ("none",))
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with each instruction set of this machine and build."""
    assert not isinstance(FOUND, str)
    before = FOUND.named
    FOUND.use_cpu(request.param)
    yield request.param
    FOUND.use_cpu(before)


@pytest.fixture(params=[1, 3], ids=["whole", "split"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Tokens:
    """Queries, keys and values of new tokens for a layer with these heads."""

    def __init__(
        self, heads: tuple[HeadPlan, ...], share: int, widths: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self._chance = torch.Generator().manual_seed(0)
        self._heads, self._share, self._widths, self._dtype = len(heads), share, widths, dtype

    def next(self, batch: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        width, value_width = self._widths
        shapes = (
            (self._heads * self._share, width),
            (self._heads, width),
            (self._heads, value_width),
        )
        query, key, value = (
            torch.randn(batch, count, *shape, generator=self._chance)
            .to(self._dtype)
            .transpose(1, 2)
            for shape in shapes
        )
        return 2.0 * query, key + 1.0, value


def expected(
    layer: PlannedLayer, heads: tuple[HeadPlan, ...], query: Tensor, width: int
) -> tuple[Tensor, float]:
    """Attention in float64 to what heads hold, and the error that rounding allows."""
    share = query.shape[1] // len(heads)
    output = torch.zeros(*query.shape[:3], width, dtype=torch.float64)
    held, limit = layer.held(), 0.0
    for place in range(len(query)):
        row = place if len(held) > 1 else 0
        for group in held[row]:
            key, value = (restore(part._replace(buffer=part.buffer.double())) for part in group[1:])
            one = slice(place, place + 1) if len(held) == 1 else slice(None)
            for i, head in enumerate(group.heads):
                k, v = key[one, i : i + 1], value[one, i : i + 1]
                at = slice(head * share, (head + 1) * share)
                q = query[place : place + 1, at].double()
                scores = q @ k.mT * q.shape[3] ** -0.5
                output[place, at] = (scores.softmax(-1) @ v)[0]
                # codes are as large as the keys' range, their zero points too
                delta = 8.0 * score_error(q.float(), k.float())
                unit = torch.finfo(query.dtype).eps + 1.2e-7 * k.shape[2] ** 0.5
                limit = max(limit, (2.0 * delta + unit) * v.abs().max().item())
    return output, limit


def check_decoding(
    layer: PlannedLayer,
    tokens: Tokens,
    heads: tuple[HeadPlan, ...],
    batch: int,
    steps: int,
    group: int,
) -> None:
    """Decode some tokens, each checked."""
    for _ in range(steps):
        query, key, value = tokens.next(batch, 1)
        channels = group if value.shape[3] % group == 0 else value.shape[3]
        assert ragged.supports(query, value.shape[3], group, channels)
        output = layer.attend(heads, query, key, value, None, Attend())
        assert output.dtype == query.dtype
        right, limit = expected(layer, heads, query, value.shape[3])
        assert (output.double() - right).abs().max() <= limit


# -- against float64 on what the heads hold -------------------------------------------------------


@native
@pytest.mark.parametrize(
    ("dtype", "share", "widths", "group"),
    [
        (torch.float32, 1, (64, 64), 32),
        (torch.float32, 3, (20, 70), 24),
        (torch.bfloat16, 6, (8, 80), 16),
        (torch.float16, 4, (96, 36), 8),
        (torch.bfloat16, 2, (33, 5), 256),
        (torch.float16, 3, (64, 64), 32),
    ],
)
def test_heads_read_what_they_hold(
    cpu: str, dtype: torch.dtype, share: int, widths: tuple[int, int], group: int
) -> None:
    tokens, layer = Tokens(HEADS, share, widths, dtype), PlannedLayer(group, RESIDUAL)
    check_decoding(
        layer, tokens, HEADS, 2, 20, group
    )  # from the first token on: rings fill and wrap
    layer.attend(HEADS, *tokens.next(2, 290), None, Attend())  # tiles have 256 keys
    check_decoding(layer, tokens, HEADS, 2, 3, group)


@native
def test_padded_sequences_read_their_own(cpu: str) -> None:
    tokens, layer = Tokens(HEADS, 3, (64, 64), torch.float32), PlannedLayer(32, RESIDUAL)
    real = torch.ones(3, 60, dtype=torch.bool)
    real[1, :27], real[2] = False, False  # the last one has only padding so far
    layer.attend(HEADS, *tokens.next(3, 60), real, Attend())
    check_decoding(layer, tokens, HEADS, 3, 14, 32)
    assert layer.real_counts(3) == [74, 47, 14]


def test_padding_may_begin_after_the_first_pass() -> None:
    heads = (FULL, STREAMING, QUANTISED[1])
    tokens, layer = Tokens(heads, 3, (16, 16), torch.float32), PlannedLayer(32, RESIDUAL)
    real = torch.tensor([[True], [False]])
    with torch.inference_mode():
        layer.attend(heads, *tokens.next(2, 70), None, Attend())
        output = layer.attend(heads, *tokens.next(2, 1), real, Attend())
        assert output[0].abs().min() > 0
        assert output[1].abs().max() == 0
    query, key, value = tokens.next(2, 1)
    output = layer.attend(heads, query, key, value, None, Attend())
    right, limit = expected(layer, heads, query, 16)
    assert (output.double() - right).abs().max() <= limit
    assert layer.real_counts(2) == [72, 71]


@native
def test_long_heads_are_shared_out(threads: int) -> None:
    heads = (FULL, STREAMING, QUANTISED[0], QUANTISED[1])
    tokens, layer = Tokens(heads, 3, (64, 64), torch.float32), PlannedLayer(32, 32)
    layer.add(heads, *tokens.next(2, 5000)[1:])
    assert layer.get_seq_length() == 5000
    check_decoding(layer, tokens, heads, 2, 3, 32)


@native
def test_packed_heads_take_a_token_in_place_where_there_is_room() -> None:
    """More than 64 tokens that are not packed have room for one more."""
    heads = QUANTISED[1], QUANTISED[4], FULL
    tokens, layer = Tokens(heads, 2, (32, 64), torch.bfloat16), PlannedLayer(32, 100)
    layer.attend(heads, *tokens.next(2, 220), None, Attend())
    stores = layer._stores[0].values()
    channels = [channel for store in stores for channel in (store._key, store._value)]
    places = [channel._newest.buffer.data_ptr() for channel in channels]
    check_decoding(layer, tokens, heads, 2, 1, 32)
    assert [channel._newest.buffer.data_ptr() for channel in channels] == places
    check_decoding(layer, tokens, heads, 2, 39, 32)


@native
def test_a_layer_that_holds_nothing_gives_zeros() -> None:
    heads = (DROPPED, DROPPED)
    layer = PlannedLayer(32, 32)
    output = layer.attend(
        heads, *Tokens(heads, 2, (16, 16), torch.float32).next(2, 1), None, Attend()
    )
    assert torch.equal(output, torch.zeros(2, 4, 1, 16))


# -- beside PyTorch's operations ------------------------------------------------------------------


@native
def test_the_fallback_gives_the_same() -> None:
    tokens = Tokens(HEADS, 3, (64, 64), torch.float32)
    layers = [PlannedLayer(32, RESIDUAL) for _ in range(2)]
    for count in (50, 1, 1, 40, *[1] * 12):
        query, key, value = tokens.next(2, count)
        mine = layers[0].attend(HEADS, query, key, value, None, Attend())
        # a gradient is wanted: PyTorch's operations
        other = layers[1].attend(HEADS, query.requires_grad_(), key, value, None, Attend())
        torch.testing.assert_close(mine, other.detach(), atol=2e-5, rtol=1e-5)
    assert other.requires_grad
    assert [one.nbytes for one in layers[0].tensors()] == [
        one.nbytes for one in layers[1].tensors()
    ]


@pytest.mark.parametrize(
    ("attend", "dtype"),
    [
        (Attend(softcap=2.0), torch.float32),
        (Attend(), torch.float64),
        (Attend(scale=0.3), torch.float32),
    ],
)
def test_settings_of_the_call_are_kept(attend: Attend, dtype: torch.dtype) -> None:
    heads = (FULL, STREAMING)
    tokens, layer = Tokens(heads, 2, (16, 16), dtype), PlannedLayer(32, 32)
    layer.add(heads, *tokens.next(1, 40)[1:])
    query, key, value = tokens.next(1, 1)
    output = layer.attend(heads, query, key, value, None, attend)
    for group in layer.held()[0]:
        q = query.unflatten(1, (2, 2))[:, group.heads].flatten(1, 2)
        right = attend(q, restore(group.key), restore(group.value), None, None)
        got = output.unflatten(1, (2, 2))[:, group.heads].flatten(1, 2)
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


def test_a_gradient_through_a_ring_that_was_written_since_is_refused() -> None:
    heads = (NEWEST,)
    tokens, layer = Tokens(heads, 1, (16, 16), torch.float32), PlannedLayer(32, 32)
    layer.add(heads, *tokens.next(1, 20)[1:])
    query, key, value = tokens.next(1, 1)
    output = layer.attend(heads, query.requires_grad_(), key, value, None, Attend())
    layer.attend(heads, *tokens.next(1, 1), None, Attend())
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        output.sum().backward()


def test_another_batch_is_refused() -> None:
    heads = (FULL, STREAMING)
    tokens, layer = Tokens(heads, 1, (16, 16), torch.float32), PlannedLayer(32, 32)
    layer.add(heads, *tokens.next(2, 20)[1:])
    with pytest.raises(ValueError, match=r"holds 2 sequences, but new keys are \(3, 2, 1, 16\)"):
        layer.attend(heads, *tokens.next(3, 1), None, Attend())


def test_tensors_as_they_come() -> None:
    heads = (FULL, STREAMING)
    tokens, layer = Tokens(heads, 1, (16, 16), torch.float32), PlannedLayer(32, 32)
    layer.add(heads, *tokens.next(2, 20)[1:])
    for _ in range(2):  # the first makes room
        strided = [torch.cat([part, part], -1)[..., ::2] for part in tokens.next(2, 1)]
        negated = [torch._neg_view(part) for part in strided]
        output = layer.attend(heads, *negated, None, Attend())
        right, limit = expected(layer, heads, negated[0], 16)
        assert (output.double() - right).abs().max() <= limit
        key, value = (restore(part)[:, :, -1:] for part in layer.held()[0][0][1:])
        assert torch.equal(key, negated[1][:, :1])
        assert torch.equal(value, negated[2][:, :1])
