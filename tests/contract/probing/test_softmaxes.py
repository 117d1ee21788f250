"""Attention written out by hand: which softmaxes are attention, and where their heads are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance

TOLERANCE = 1e-5
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 5, 7, 4


class Written(nn.Module):
    """Runs a function of query, key and value (B, H, L, E)."""

    def __init__(self, function: Callable[..., Tensor], heads: int | None = HEADS) -> None:
        super().__init__()
        self.function = function
        if heads is not None:
            self.num_heads = heads

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    query = 2.0 * torch.randn(BATCH, HEADS, QUERIES, WIDTH)
    return query, torch.randn(BATCH, HEADS, KEYS, WIDTH), torch.randn(BATCH, HEADS, KEYS, WIDTH)


def expected(query: Tensor, key: Tensor) -> Tensor:
    """Mean entropy of each head, in float64."""
    p = torch.softmax(query.double() @ key.double().mT, -1)
    return -torch.xlogy(p, p).sum(-1).mean((0, 2))


def folded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (part.flatten(0, 1) for part in (query, key, value))
    return torch.bmm(F.softmax(torch.bmm(query, key.mT), dim=-1), value)


def by_einsum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key)
    return torch.einsum("bhqk,bhkd->bqhd", scores.softmax(-1), value)


def heads_third(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bqhk", query, key)
    return torch.einsum("bqhk,bhkd->bqhd", torch.softmax(scores, -1), value)


def transposed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.mT, -1)
    return (value.mT @ weights.mT).mT


def passed_on(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax((query @ key.mT).float(), dim=-1, dtype=torch.float32)
    weights = F.dropout(weights.to(query.dtype), 0.5, training=False)
    return weights.contiguous().view(BATCH, HEADS, QUERIES, KEYS) @ value


def twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.mT, -1)
    return weights @ value + weights @ value.flip(-1)


def in_windows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (part.unsqueeze(1) for part in (query, key, value))  # (B, windows, H, …)
    return (torch.softmax(query @ key.mT, -1) @ value).squeeze(1)


def by_operators(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.ops.aten.clone(torch.softmax(query @ key.mT, -1))
    output: Tensor = torch.ops.aten.matmul.default(weights, value)
    return output


def exp_of_logs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.log_softmax(query @ key.mT, dim=-1).exp() @ value


def over_the_third(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bijh", query, key)
    return torch.einsum("bijh,bhjd->bihd", scores.softmax(2), value)


def heads_last_keys_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bjih", query, key).softmax(1)
    weights = F.dropout(weights, 0.5, training=False)
    return torch.einsum("bjih,bhjd->bhid", weights, value)


@pytest.mark.parametrize(
    "function",
    [
        *(folded, by_einsum, heads_third, transposed, passed_on, twice, in_windows),
        *(exp_of_logs, over_the_third, heads_last_keys_first, by_operators),
    ],
)
def test_heads_are_found_and_counted_once(function: Any) -> None:
    model, given = Written(function), inputs()
    plain = model(*given)
    with acutance.probe(model, verify=True) as probe:
        assert torch.equal(model(*given), plain)
    summary = probe.summary()
    (layer,) = summary.layers
    assert (layer.heads, layer.calls, layer.rows) == (HEADS, 1, BATCH * QUERIES)
    assert (layer.status, layer.source, probe.unread) == ("unverified", "softmax", [])
    entropy = expected(*given[:2])
    assert float((summary.mean("entropy") - entropy).abs().max()) < TOLERANCE


def test_without_a_number_of_heads_three_dimensions_are_one_head() -> None:
    model, given = Written(folded, heads=None), inputs()
    with acutance.probe(model) as probe:
        model(*given)
    assert probe.summary().layers[0].heads == 1
    mean = expected(*given[:2]).mean()
    assert float((probe.summary().mean("entropy") - mean).abs().max()) < TOLERANCE


def router(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    share = torch.softmax(query[:, 0] @ key[:, 0].mT, -1)  # three dimensions
    best = share.topk(2, -1).values.sum(-1)
    return F.scaled_dot_product_attention(query, key, value) * best[:, None, :, None]


def gate(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    share = torch.softmax(query, -1)  # four dimensions, over features
    return F.scaled_dot_product_attention(query, key, value) * share


def projected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    share = torch.softmax(query, -1)
    mixed = F.linear(share, torch.eye(WIDTH))  # what comes out are no weights
    return F.scaled_dot_product_attention(query, key, value) + mixed @ torch.eye(WIDTH)


def other_sum(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.mT, -1)
    torch.einsum("bhqk,bhqd->bhkd", weights, query)  # sums over queries
    return F.scaled_dot_product_attention(query, key, value)


def likelihoods(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    logs = torch.log_softmax(query @ key.mT, -1)
    logs @ value  # no weights
    return F.scaled_dot_product_attention(query, key, value)


def channels(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    torch.softmax(query, 1)  # as over the classes of a picture
    (torch.softmax(key, 2) * value).sum(2)  # pools each feature over positions
    (key.mT @ value).softmax(1)
    return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("function", "listed"),
    [
        *((router, False), (channels, False), (gate, True)),
        *((projected, True), (other_sum, True), (likelihoods, False)),
    ],
)
def test_a_softmax_that_no_product_sums_over_is_no_attention(function: Any, listed: bool) -> None:
    model = Written(function)
    with acutance.probe(model) as probe:
        model(*inputs())
    (layer,) = probe.summary().layers
    assert layer.source == "scaled_dot_product_attention"
    said = ["no matrix product uses a softmax" in line for line in probe.unread]
    assert said == [True] * listed


def rescaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.softmax(query @ key.mT, -1)
    return (weights * torch.linspace(0.5, 1.0, KEYS)) @ value


def squared_third(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhid,bhjd->bijh", query, key).softmax(2).square()
    return torch.einsum("bijh,bhjd->bihd", weights, value)


@pytest.mark.parametrize("function", [rescaled, squared_third])
def test_weights_that_are_not_the_softmax_are_a_mismatch(function: Any) -> None:
    model, given = Written(function), inputs()
    with acutance.probe(model, verify=True) as probe:
        model(*given)
    assert [layer.status for layer in probe.summary().layers] == ["mismatch"]
    (line,) = probe.unread
    assert "its weights changed by up to 0." in line


def overwritten(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    weights = torch.softmax(scores, -1)
    scores.mul_(2.0)
    return weights @ value


def in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    torch.softmax(scores, -1, out=scores)
    return scores @ value


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("function", [overwritten, in_place])
def test_scores_that_are_gone_are_not_read(function: Any, verify: bool) -> None:
    model, given = Written(function), inputs()
    plain = model(*given)
    with pytest.raises(acutance.ProbeError, match="scores were overwritten after the softmax"):  # noqa: SIM117
        with acutance.probe(model, verify=verify):
            assert torch.equal(model(*given), plain)


def test_a_softmax_in_float32_of_float64_scores_is_no_change() -> None:
    def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query.double() @ key.double().mT
        return torch.softmax(scores, -1, dtype=torch.float32).double() @ value.double()

    model, given = Written(mixed), inputs()
    with acutance.probe(model, verify=True) as probe:
        model(*given)
    assert ([layer.status for layer in probe.summary().layers], probe.unread) == (
        ["unverified"],
        [],
    )


def test_dropped_weights_are_no_mismatch() -> None:
    def dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.dropout(torch.softmax(query @ key.mT, -1), 0.5, training=True) @ value

    model, given = Written(dropped), inputs()
    with acutance.probe(model, verify=True) as probe:
        model(*given)
    assert [layer.status for layer in probe.summary().layers] == ["unverified"]
    entropy = expected(*given[:2])
    assert float((probe.summary().mean("entropy") - entropy).abs().max()) < TOLERANCE


def test_nothing_waits_when_the_probe_has_closed() -> None:
    kept: list[Tensor] = []

    def keeps(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kept.append(torch.softmax(query @ key.mT, -1))
        return F.scaled_dot_product_attention(query, key, value)

    model, given = Written(keeps), inputs()
    with acutance.probe(model) as probe:
        model(*given)
    kept[0] @ given[2]
    kept.clear()
    assert [layer.source for layer in probe.summary().layers] == ["scaled_dot_product_attention"]
    assert probe.unread == []


def test_a_softmax_in_place_is_listed_in_inference_mode_too() -> None:
    def in_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT
        return torch.softmax(scores, -1, out=scores) @ value

    model = Written(in_place)
    with (
        pytest.raises(acutance.ProbeError, match="its scores were overwritten after the softmax"),
        torch.inference_mode(),
        acutance.probe(model),
    ):
        model(*inputs())


def test_a_softmax_of_a_nested_tensor_goes_on_and_is_listed() -> None:
    def nested(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [query[0, 0], query[1, 0, :-1]]
        found = torch.softmax(torch.nested.nested_tensor(parts, layout=torch.jagged), -1)
        assert [float(part.sum()) for part in found.unbind()] == pytest.approx(
            [len(part) for part in parts]
        )
        return F.scaled_dot_product_attention(query, key, value)

    model = Written(nested)
    with acutance.probe(model) as probe:
        model(*inputs())
    assert [layer.calls for layer in probe.summary().layers] == [1]
    assert ["its softmax is of a nested tensor" in line for line in probe.unread] == [True]


def test_a_softmax_module_takes_the_heads_of_the_attention_around_it() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.softmax = HEADS, nn.Softmax(dim=2)

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scores = torch.einsum("bhid,bhjd->bijh", query, key)
            return torch.einsum("bijh,bhjd->bihd", self.softmax(scores), value)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, *given: Tensor) -> Tensor:
            output: Tensor = self.attention(*given)
            return output

    model = Block()
    with acutance.probe(model) as probe:
        model(*inputs())
    (layer,) = probe.summary().layers
    assert (layer.heads, layer.rows) == (HEADS, BATCH * QUERIES)


def heads_first(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->hbqk", query, key).softmax(-1)
    return torch.einsum("hbqk,bhkd->bhqd", weights, value)


def heads_first_of_columns(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query, key, value = (part.unsqueeze(2) for part in (query, key, value))
    weights = torch.einsum("bhcqd,bhckd->hcbqk", query, key).softmax(-1)  # as ESM's columns
    return torch.einsum("hcbqk,bhckd->bhqd", weights, value)


@pytest.mark.parametrize("function", [heads_first, heads_first_of_columns])
def test_heads_may_come_first(function: Any) -> None:
    model, given = Written(function), inputs()
    with acutance.probe(model, verify=True) as probe:
        model(*given)
    (layer,) = probe.summary().layers
    assert (layer.heads, layer.rows) == (HEADS, BATCH * QUERIES)
    entropy = expected(*given[:2])
    assert float((probe.summary().mean("entropy") - entropy).abs().max()) < TOLERANCE


def beside_sdpa(function: Any) -> Any:
    return lambda *qkv: (F.scaled_dot_product_attention(*qkv), function(*qkv))


def keys_before_queries(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(key @ query.mT, -2).mT @ value


def slots(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    shares = torch.softmax(torch.einsum("bnd,bmd->bnm", query[:, 0], key[:, 0]), dim=1) + 1e-8
    shares = shares / shares.sum(-1, keepdim=True)
    return torch.einsum("bnm,bmd->bnd", shares, value[:, 0])


def features_over_tokens(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query @ (torch.softmax(key, 2).mT @ value)


def sparsemax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT
    ordered = scores.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    count = (ordered * torch.arange(1, KEYS + 1) > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, count - 1) / count).clamp(min=0) @ value


def exponentials(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", query, key)
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return torch.einsum("bhij,bhjd->bhid", e / e.sum(-1, keepdim=True), value)


def normalised_by_columns(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    relative = (key @ query.mT).square()  # turned: it is summed over its rows
    return (relative / relative.sum(-2, keepdim=True)).mT @ value


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (keys_before_queries, "over dimension 2 of"),
        (slots, "over dimension 1 of"),
        (features_over_tokens, "over dimension 2 of"),
        (sparsemax, "computed without a softmax"),
        (exponentials, "computed without a softmax"),
        (normalised_by_columns, "computed without a softmax"),
    ],
)
def test_weights_that_are_not_read_beside_a_readable_layer_are_listed(
    function: Any, reason: str
) -> None:
    model, given = Written(beside_sdpa(function)), inputs()
    with acutance.probe(model, verify=True) as probe:
        model(*given)
        model(*given)
    (layer,) = probe.summary().layers
    assert layer.source == "scaled_dot_product_attention"
    (line,) = probe.unread
    assert line.startswith("Written: a matrix product uses")
    assert reason in line


def mixture_of_experts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    tokens = query[:, 0]
    top, chosen = F.linear(tokens, torch.randn(5, WIDTH)).softmax(-1).topk(2, -1)
    share = torch.zeros(BATCH, QUERIES, 5).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
    experts = torch.einsum("btd,edf->btef", tokens, torch.randn(5, WIDTH, WIDTH))
    return torch.einsum("bte,btef->btf", share, experts)


def classifier(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    classes = F.linear(query + query @ (key.mT @ value), torch.randn(9, WIDTH))[:, 0]
    F.cross_entropy(classes.flatten(0, -2), torch.zeros(classes[..., 0].numel(), dtype=torch.int64))
    return classes.transpose(1, -1).softmax(1)


def squeeze_and_select(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    both = torch.stack([query, key[:, :, : query.shape[2]]], 1)
    share = both.mean((-2, -1), keepdim=True).softmax(1)
    return F.linear((share * both).sum(1), torch.ones(3, WIDTH)) @ torch.ones(3, 2)


def taps_of_a_kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    taps = F.linear(key[:, 0], torch.randn(1, WIDTH)).softmax(1)  # (B, S, 1)
    return value[:, 0].mT @ taps


def averages(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    adjacency = torch.ones(1, 1, KEYS, KEYS).tril()  # a graph's, of no activations
    return (adjacency / adjacency.sum(-1, keepdim=True)) @ value


@pytest.mark.parametrize(
    "function", [mixture_of_experts, classifier, squeeze_and_select, taps_of_a_kernel, averages]
)
def test_heads_gates_and_fixed_averages_are_not_listed(function: Any) -> None:
    model, given = Written(beside_sdpa(function)), inputs()
    with acutance.probe(model, verify=True) as probe:
        model(*given)
    assert len(probe.summary().layers) == 1
    assert probe.unread == []


def top_keys(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores, chosen = (query @ key.mT).topk(4, -1)
    values = value.unsqueeze(2).expand(-1, -1, QUERIES, -1, -1)
    values = values.gather(3, chosen.unsqueeze(-1).expand(-1, -1, -1, -1, WIDTH))
    return (torch.softmax(scores, -1).unsqueeze(-2) @ values).squeeze(-2)


def test_the_first_of_sorted_keys_is_not_the_first_key() -> None:
    model, given = Written(top_keys), inputs()
    with acutance.probe(model, verify=True) as probe:
        model(*given)
    summary = probe.summary()
    assert summary.mean("first_weight").isnan().all()
    p = (given[0] @ given[1].mT).topk(4, -1).values.softmax(-1)
    entropy = torch.special.entr(p).sum(-1).mean((0, 2))
    assert torch.allclose(summary.mean("entropy"), entropy.double(), atol=TOLERANCE, rtol=0)
    assert summary.unread == (
        "Written: its keys are in the order of their scores, as after top-k: first_weight is not "
        "known",
    )


@pytest.mark.parametrize("first", [True, False])
def test_a_score_without_a_value_is_said_to_count_as_a_key(first: bool) -> None:
    def sink(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT
        none = torch.zeros_like(scores[..., :1])
        weights = torch.softmax(torch.cat([none, scores] if first else [scores, none], -1), -1)
        return (weights[..., 1:] if first else weights[..., :-1]) @ value

    model = Written(sink)
    with acutance.probe(model, verify=True) as probe:
        model(*inputs())
    summary = probe.summary()
    assert summary.mean("n_keys").tolist() == [KEYS + 1] * HEADS
    (line,) = summary.unread
    assert line.endswith(
        "one score more than its product has values, as a sink: it counts as a key"
    )


def test_rows_left_out_of_a_product_are_no_keys() -> None:
    """All rows but the first of a square: as many weights are gone as with a key left out."""
    model = Written(lambda query, key, value: torch.softmax(query @ key.mT, -1)[:, :, 1:] @ value)
    _, key, value = inputs()
    with acutance.probe(model) as probe:
        model(key, key, value)
    assert probe.summary().unread == ()


def test_a_batch_without_items_passes() -> None:
    model, given = Written(folded), inputs()
    with acutance.probe(model) as probe:
        assert model(*(part[:0] for part in given)).shape == (0, QUERIES, WIDTH)
        model(*given)
    assert probe.summary().layers[0].rows == BATCH * QUERIES


def test_weights_without_numbers_are_left_alone() -> None:
    over_items = torch.vmap(lambda *qkv: exponentials(*(part[None] for part in qkv))[0])
    model, given = Written(beside_sdpa(over_items)), inputs()
    plain = model(*given)
    with torch.inference_mode(), acutance.probe(model) as probe:
        assert torch.equal(model(*given)[1], plain[1])
    assert len(probe.summary().layers) == 1
    model = Written(beside_sdpa(exponentials))
    with acutance.probe(model):
        model(*given)
        assert model(*(part.to("meta") for part in given))[1].is_meta
