"""Structure through the probe: what calls are made of, positions, tokens, states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import acutance
from acutance.probing import Examples, HeadSummary, Moments
from acutance.structure import STRUCTURE, statistics
from tests.versions import CACHE, any_global_hook

transformers = pytest.importorskip("transformers")


class Tiny(nn.Module):
    """Two layers of causal attention over embedded tokens."""

    def __init__(self, heads: int = 4, width: int = 16, positions: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.place = nn.Embedding(12, width) if positions else None
        self.blocks = nn.ModuleList(
            nn.MultiheadAttention(width, heads, batch_first=True) for _ in range(2)
        )

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if self.place is not None:
            x = x + self.place(torch.arange(ids.shape[1]))
        hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
        for block in self.blocks:
            x = (
                x
                + block(x, x, x, attn_mask=hidden, key_padding_mask=padding, need_weights=False)[0]
            )
        return x


@pytest.fixture
def model() -> Tiny:
    torch.manual_seed(0)
    return Tiny().double().eval()


def ids(batch: int = 3, length: int = 40) -> Tensor:
    return torch.randint(0, 20, (batch, length), generator=torch.Generator().manual_seed(5))


def read(model: nn.Module, *inputs: Any, **options: Any) -> HeadSummary:
    with acutance.probe(model, structure=True, **options) as probe, torch.no_grad():
        for each in inputs:
            model(*each) if isinstance(each, tuple) else model(each)
    return probe.summary()


def same(left: HeadSummary, right: HeadSummary, *, exact: bool = True) -> None:
    """Equal in all that is kept; sums to 1e-9 where batches differ."""
    assert left.metrics == right.metrics
    (mine, theirs) = (
        side.moments.tensors() | side.optional_parts.tensors() for side in (left, right)
    )
    assert mine.keys() == theirs.keys()
    for name, part in mine.items():
        other = theirs[name]
        if exact or part.dtype == torch.int64:
            assert torch.equal(part.nan_to_num(-7.0), other.nan_to_num(-7.0)), name
        else:
            assert torch.allclose(part, other, rtol=1e-9, atol=1e-9, equal_nan=True), name


def test_the_probe_records_what_the_function_gives(model: Tiny) -> None:
    tokens = ids()
    seen: list[tuple[Tensor, Tensor]] = []
    kept = F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, *rest: Any, **more: Any) -> Tensor:
        seen.append((query, key))
        return kept(query, key, *rest, **more)

    F.scaled_dot_product_attention = watched
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        F.scaled_dot_product_attention = kept
    found = read(model, tokens, special=[3, 7], metrics=["entropy"])
    assert found.metrics == ("entropy", "first_weight", *STRUCTURE)
    for layer, (query, key) in enumerate(seen):
        direct = statistics(query, key, is_causal=True, tokens=tokens, special=[3, 7])
        for name in STRUCTURE:
            rows = direct[name].transpose(0, 1).flatten(1)
            if name == "critical_ratio":
                continue
            assert found.mean(name)[4 * layer : 4 * layer + 4].tolist() == pytest.approx(
                rows.nanmean(1).tolist(), rel=1e-9
            )
            column = found.metrics.index(name)
            counts = found.moments.count[4 * layer : 4 * layer + 4, column]
            assert counts.tolist() == rows.isfinite().sum(1).tolist()
        assert found.distances is not None
        mass = direct.octaves.mean((0, 2))
        assert torch.allclose(found.distances.mass[4 * layer : 4 * layer + 4], mass, atol=1e-9)
    column = found.metrics.index("critical_ratio")
    assert set(found.moments.count[:, column].tolist()) == {3 * 13}  # of 40 rows every third


def test_position_embeddings_are_no_tokens() -> None:
    torch.manual_seed(0)
    found = read(Tiny(positions=True), ids(2, 12), special=[3])
    tokens = ids(2, 12)
    rows = sum(3 in row[: i + 1].tolist() for row in tokens for i in range(12))
    assert set(found.moments.count[:, found.metrics.index("mass_special")].tolist()) == {rows}


def test_padded_rows_are_left_out(model: Tiny) -> None:
    tokens = ids(1, 30)
    padding = torch.zeros(1, 40).bool()
    padding[0, 30:] = True
    longer = torch.cat([tokens, torch.zeros(1, 10, dtype=torch.int64)], 1)
    whole, padded = read(model, tokens), read(model, (longer, padding))
    for name in (*STRUCTURE, "entropy"):
        if name != "critical_ratio":  # other rows are drawn
            assert torch.allclose(whole.mean(name), padded.mean(name), rtol=1e-6, equal_nan=True)
    left, right = whole.distances, padded.distances
    assert left is not None
    assert right is not None
    assert left.rows.tolist() == right.rows.tolist() == [30] * 8
    assert torch.allclose(left.mass, right.mass[..., : left.mass.shape[-1]], atol=1e-7)
    assert float(right.mass[..., left.mass.shape[-1] :].sum()) == 0


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=20, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_read_token_by_token_equals_the_whole(implementation: str, cache: str) -> None:
    model = llama(attn_implementation=implementation)
    tokens = ids(2, 17)
    whole = read(model, tokens, special=[3])
    with acutance.probe(model, structure=True, special=[3]) as probe, torch.no_grad():
        model(ids(2, 30))  # an earlier text is no part of the cache
        past = None
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=24)
        start = probe.summary()
        for first, last in ((0, 9), (9, 12), *((i, i + 1) for i in range(12, 17))):
            places = torch.arange(first, last)
            past = model(
                tokens[:, first:last], **{CACHE: past}, use_cache=True,
                cache_position=places, position_ids=places[None],
            ).past_key_values  # fmt: skip
    both = probe.summary()
    for name in STRUCTURE:
        if name == "critical_ratio":
            continue
        column = both.metrics.index(name)
        count = both.moments.count[:, column] - start.moments.count[:, column]
        assert count.tolist() == whole.moments.count[:, column].tolist(), name
        total = (
            both.moments.mean[:, column] * both.moments.count[:, column]
            - start.moments.mean[:, column] * start.moments.count[:, column]
        )
        assert (total / count).tolist() == pytest.approx(whole.mean(name).tolist(), rel=1e-6), name


@pytest.mark.skipif(
    not transformers.T5Model._supports_sdpa,
    reason="this release of transformers computes T5's attention by hand",
)
def test_an_encoder_and_its_decoder_have_their_own_tokens() -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=20, pad_token_id=0,
        eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    source, target = torch.full((1, 10), 7), torch.arange(8, 14)[None]
    with acutance.probe(model, structure=True, special=[7]) as probe, torch.no_grad():
        model(input_ids=source, decoder_input_ids=target)
    found = probe.summary()
    encoder, decoder, cross = 0, 2, 4
    assert [layer.module.split(".")[0] for layer in found.layers] == ["encoder"] + ["decoder"] * 2
    special, alike = found.mean("mass_special"), found.mean("mass_same")
    assert special[encoder] == pytest.approx(1.0)
    assert alike[encoder] == pytest.approx(1.0 - float(found.mean("mass_self")[encoder]))
    assert special[decoder].isnan()  # no such token among the target's
    assert alike[decoder].isnan()
    assert found.distances is not None
    assert found.distances.rows.tolist() == [10, 10, 6, 6, 0, 0]
    for name in STRUCTURE:
        assert found.mean(name)[cross].isnan() == (name != "critical_ratio")


def test_chosen_heads_and_drawn_rows(model: Tiny) -> None:
    whole = read(model, ids())
    some = read(model, ids(), heads=[1, 3])
    for name in STRUCTURE:
        chosen = whole.mean(name).view(2, 4)[:, [1, 3]].flatten()
        assert torch.allclose(some.mean(name), chosen, rtol=1e-12, equal_nan=True)
    drawn = read(model, ids(), max_rows=90)
    everything = read(model, ids(), max_rows=119)
    for name in ("attention_distance", "mass_self", "mass_same"):
        column = drawn.metrics.index(name)
        assert int(drawn.moments.count[0, column]) <= 90
        error = drawn.sampling_error(name)
        assert bool(((drawn.mean(name) - whole.mean(name)).abs() < 5 * error).all()), name
        off = (everything.mean(name) - whole.mean(name)).abs()
        assert bool((off < 0.05 * whole.mean(name)).all()), name


def test_provided_calls_are_read_alike(model: Tiny) -> None:
    same_names = ("entropy", *STRUCTURE)
    found, provided = read(model, ids()), read(model, ids(), provide=True)
    for name in same_names:
        assert torch.allclose(found.mean(name), provided.mean(name), rtol=1e-9, equal_nan=True)


def test_halves_merge_to_the_whole_in_any_order(model: Tiny) -> None:
    tokens = ids(4)
    options: dict[str, Any] = {"examples": 3, "special": [3]}
    whole = read(model, tokens, **options)
    one, two = read(model, tokens[:1], **options), read(model, tokens[1:], **options)
    same(one.merge(two), whole, exact=False)
    same(two.merge(one), whole, exact=False)
    same(read(model, tokens[:1], tokens[1:], **options), whole, exact=False)


def test_heads_of_a_layer_from_two_ranks_are_laid_side_by_side(model: Tiny) -> None:
    options: dict[str, Any] = {"examples": 2, "special": [3]}
    whole = read(model, ids(), **options)
    parts = [read(model, ids(), heads=heads, **options) for heads in ([0, 2], [1, 3])]
    same(parts[0].merge(parts[1]), whole, exact=False)


def test_a_state_keeps_everything(model: Tiny, tmp_path: Path) -> None:
    found = read(model, ids(), examples=2, special=[3])
    path = tmp_path / "state.safetensors"
    found.save(path)
    same(acutance.load(path), found)
    assert acutance.load(path).to_dict() == found.to_dict()
    found.to_parquet(tmp_path / "heads.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "heads.parquet")
    columns = set(table.column_names)
    assert {f"{name}_mean" for name in STRUCTURE} < columns
    assert {"mass_octave_0", "mass_octave_1", "mass_octave_ahead_1", "classes"} < columns


def test_a_state_without_them_still_loads(model: Tiny, tmp_path: Path) -> None:
    """States of earlier versions have the moments alone."""
    with acutance.probe(model) as probe:
        model(ids())
    found, path = probe.summary(), tmp_path / "state.safetensors"
    found.save(path)
    header, parts = found.parts()
    arrays = {name: part.clone() for name, part in parts.items() if "." not in name}
    save_file(arrays, path, metadata=header)
    old = acutance.load(path)
    assert old.profile is old.positions is old.distances is old.examples is None
    assert torch.equal(old.moments.mean, found.moments.mean)
    assert old.merge(found).profile is None  # it would be of some rows only
    assert "by_n" not in old.to_dict()["heads"][0]
    with pytest.raises(ValueError, match="merged only if they recorded the same metrics"):
        old.merge(read(model, ids()))


def rewritten(found: HeadSummary, path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    header, arrays = found.parts()
    arrays = {name: part.clone() for name, part in arrays.items()}
    change(arrays)
    save_file(arrays, path, metadata=header)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("profile.mean"), "the array 'profile.mean' is missing"),
        (lambda t: t.update({"profile.x": torch.zeros(1)}), "'profile.x' does not belong"),
        (lambda t: t.update({"wit.x": torch.zeros(1)}), "'wit.x' does not belong to a summary"),
        (lambda t: t["distances.mass"].fill_(2), "'mass' of distances has an invalid value"),
        (lambda t: t["distances.peaks"].fill_(-1), "'peaks' of distances has an invalid value"),
        (lambda t: t.update({"distances.rows": torch.zeros(3).long()}), "'rows' of distances must"),
        (lambda t: t["examples.weights"].fill_(-1), "of examples has an invalid value"),
        (lambda t: t["examples.tokens"].fill_(-2), "'tokens' of examples has an invalid value"),
        (lambda t: t.update({"examples.query": torch.zeros(8, 65).long()}), "0 and 64 rows"),
        (lambda t: t.update({"examples.query": torch.zeros(()).long()}), "0 and 64 rows"),
        (lambda t: t.update({"profile.rows": torch.zeros(()).long()}), "0 to 32 octaves"),
        (lambda t: t.update({"distances.mass": torch.zeros(())}), "0 to 64 octaves"),
        (lambda t: t["positions.between"].fill_(torch.nan), "'between' of a profile has"),
    ],
)  # fmt: skip
def test_hostile_arrays_are_refused(
    model: Tiny, tmp_path: Path, change: Callable[[dict[str, Any]], Any], match: str
) -> None:
    found = read(model, ids(), examples=1)
    path = tmp_path / "state.safetensors"
    rewritten(found, path, change)
    with pytest.raises(ValueError, match=match):
        acutance.load(path)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("[1]", "'words' must be a JSON object"),
        ('{"a": "b"}', "keys of 'words' must be token IDs"),
        ('{"-1": "b"}', "keys of 'words' must be token IDs"),
        ('{"1": 3}', "values of 'words' must be strings, got 3"),
    ],
)
def test_hostile_words_are_refused(model: Tiny, tmp_path: Path, words: str, match: str) -> None:
    found = read(model, ids(), examples=1)
    header, arrays = found.parts()
    save_file(arrays, tmp_path / "state.safetensors", metadata=header | {"words": words})
    with pytest.raises(ValueError, match=match):
        acutance.load(tmp_path / "state.safetensors")


class Words:
    """A tokenizer of letters, as far as a probe asks."""

    all_special_ids = (3,)

    def decode(self, tokens: list[int]) -> str:
        return "<b>" if tokens[0] == 3 else chr(ord("a") + tokens[0])


class Pieces(Words):
    """Sentence pieces, whose decoder drops the blank that a text begins with."""

    def convert_ids_to_tokens(self, token: int) -> str:
        return "\u2581" + self.decode([token]) if token % 2 else self.decode([token])


def test_sentence_pieces_keep_the_blank_they_begin_with(model: Tiny) -> None:
    tokens = ids(2, 60)
    found = read(model, tokens[:1], tokens[1:], examples=2, tokenizer=Pieces()).examples
    assert found is not None
    assert found.words
    for token, word in found.words.items():
        assert word.startswith(" ") == bool(token % 2)
        assert word.strip() == Words().decode([token])


def test_examples_are_the_sharpest_rows_with_what_they_attend_to(model: Tiny) -> None:
    tokens = ids(2, 60)
    found = read(model, tokens[:1], tokens[1:], examples=4, tokenizer=Words())
    assert found.examples is not None
    column = found.metrics.index("information")
    for head in range(8):
        rows = found.examples.rows(head)
        assert len(rows) == 4
        assert [row.information for row in rows] == sorted(
            (row.information for row in rows), reverse=True
        )
        assert rows[0].information == pytest.approx(float(found.moments.high[head, column]))
        for row in rows:
            text = [Words().decode([token]) for b in tokens for token in b.tolist()]
            assert row.query in text
            assert row.n_keys == row.position + 1
            assert len(row.attended) == min(8, row.n_keys)
            weights = [weight for _, _, weight in row.attended]
            assert weights == sorted(weights, reverse=True)
            assert sum(weights) <= 1 + 1e-9
            assert len(row.context) == min(48, row.n_keys)
            assert row.context[-1][0] == row.query  # causal: the query ends what it sees
            whole = [
                [Words().decode([token]) for token in b.tolist()][row.position] for b in tokens
            ]
            assert row.query in whole
            share = dict(
                zip(range(row.position + 1 - len(row.context), row.position + 1),
                    [weight for _, weight in row.context], strict=True)
            )  # fmt: skip
            for _, place, weight in row.attended:
                if place in share:
                    assert share[place] == weight


def test_examples_without_a_tokenizer_have_numbers_for_words(model: Tiny) -> None:
    found = read(model, ids(1, 10), examples=1)
    assert found.examples is not None
    (row,) = found.examples.rows(0)
    assert row.query.startswith("#")
    assert found.examples.text(-1) == ""


def test_equal_rows_tie_in_any_order() -> None:
    torch.manual_seed(0)
    parts = []
    for seed in range(3):
        part = Examples.none(2, 2)
        part.information[:] = 1.0
        part.position[:] = torch.tensor([seed, 5 - seed])
        part.keys[:, :, 0] = 1
        part.n_keys[:], part.query[:] = 9, 4
        parts.append(part)
    forwards = parts[0].merge(parts[1]).merge(parts[2])
    backwards = parts[2].merge(parts[1].merge(parts[0]))
    assert forwards.position.tolist() == backwards.position.tolist() == [[0, 1]] * 2
    for _ in range(2):  # nothing is kept of heads without rows
        assert Examples.none(2, 2).merge(parts[0]).position.tolist() == [[0, 5]] * 2


def test_other_embeddings_and_float_inputs_change_nothing(model: Tiny) -> None:
    found = read(nn.TransformerEncoderLayer(16, 4, batch_first=True), torch.randn(2, 9, 16))
    assert found.mean("mass_same").isnan().all()
    assert found.mean("mass_self").isfinite().all()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"examples": -1}, ValueError, "examples must be 0 to 64 rows of each head, got -1"),
        ({"examples": 65}, ValueError, "examples must be 0 to 64"),
        ({"examples": 1.5}, TypeError, "examples must be a whole number, got 1.5"),
        ({"structure": True, "special": ["[CLS]"]}, TypeError, "special must contain token ids"),
    ],
)
def test_bad_options(
    model: Tiny, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        acutance.probe(model, **options)


def test_hooks_are_gone_afterwards(model: Tiny) -> None:
    read(model, ids(), examples=1)
    assert not any_global_hook()
    before = model(ids())
    with acutance.probe(model, structure=True):
        assert torch.equal(model(ids()), before)


def test_moments_of_structure_have_bins() -> None:
    values = torch.rand(len(STRUCTURE), 1, 10)
    assert int(Moments.of(values, tuple(STRUCTURE)).histogram.sum()) == 10 * len(STRUCTURE)
