"""``F.scaled_dot_product_attention`` in forms that few models use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import acutance

TOLERANCE = 1e-5
sdpa = F.scaled_dot_product_attention


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.attend(*tensors)


def inputs(queries: int = 5, keys: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    query = 2.0 * torch.randn(2, 3, queries, 4)
    return query, torch.randn(2, 3, keys, 4), torch.randn(2, 3, keys, 4)


def entropies(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Of each row (B, H, L), in float64."""
    scores = query.double() @ key.double().mT / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    p = scores.softmax(-1)
    return -torch.xlogy(p, p).sum(-1)


@pytest.mark.parametrize("provide", [False, True])
@pytest.mark.parametrize(("make", "diagonal"), [(causal_upper_left, 0), (causal_lower_right, 4)])
def test_causal_bias_is_no_mask_of_numbers(make: Any, diagonal: int, provide: bool) -> None:
    query, key, value = inputs()
    model = Layer(lambda *given: sdpa(*given, attn_mask=make(5, 9)))
    plain = model(query, key, value)
    with acutance.probe(model, verify=True, provide=provide) as probe:
        output = model(query, key, value)
    assert torch.equal(output, plain) if not provide else torch.allclose(output, plain, atol=1e-5)
    summary = probe.summary()
    assert [layer.status for layer in summary.layers] == ["verified"]
    mask = torch.ones(5, 9, dtype=torch.bool).tril(diagonal)
    expected = entropies(query, key, mask).mean((0, 2))
    assert float((summary.mean("entropy") - expected).abs().max()) < TOLERANCE


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("provide", [False, True])
def test_jagged_sequences_are_read_each_for_itself(provide: bool) -> None:
    lengths = [5, 9, 1]
    parts = [[torch.randn(n, 3, 8) for n in lengths] for _ in range(3)]
    packed = [
        torch.nested.nested_tensor(part, layout=torch.jagged).transpose(1, 2) for part in parts
    ]
    model = Layer(lambda *given: sdpa(*given).values())
    plain = model(*packed)
    with acutance.probe(model, verify=True, provide=provide) as probe:
        assert torch.equal(model(*packed), plain)  # never provided: its output stays nested
    summary = probe.summary()
    (layer,) = summary.layers
    assert (layer.status, layer.rows, layer.heads) == ("verified", 15, 3)
    assert probe.unread == []
    assert probe.not_provided == ["Layer: its tensors are nested"] * provide
    rows = []
    for query, key in zip(parts[0], parts[1], strict=True):
        rows.append(entropies(query.transpose(0, 1), key.transpose(0, 1), None))
    expected = torch.cat(rows, -1).mean(-1)
    assert float((summary.mean("entropy") - expected).abs().max()) < TOLERANCE


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_nested_tensors_are_listed() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 5, 4), torch.randn(3, 7, 4)])
    model = Layer(lambda *given: sdpa(*given))
    with (
        pytest.raises(acutance.ProbeError, match=r"must have layout torch\.jagged and shape"),
        acutance.probe(model),
    ):
        model(nested, nested, nested)


def test_the_operator_by_its_own_name_is_read() -> None:
    query, key, value = inputs()
    model = Layer(torch.ops.aten.scaled_dot_product_attention)
    with acutance.probe(model, verify=True) as probe:
        model(query, key, value)
    summary = probe.summary()
    assert [layer.status for layer in summary.layers] == ["verified"]
    expected = entropies(query, key, None).mean((0, 2))
    assert float((summary.mean("entropy") - expected).abs().max()) < TOLERANCE


def test_kernels_that_are_called_directly_are_listed() -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
        return sdpa(query, key, flash[0])

    given = inputs(9)
    model = Layer(kernel)
    with acutance.probe(model) as probe:
        model(*given)
    assert [layer.calls for layer in probe.summary().layers] == [1]
    (line,) = probe.unread
    assert line.startswith("Layer: aten._scaled_dot_product_flash_attention_for_cpu is called")
    assert line.endswith("report what it computes with acutance.tap")

    def told(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with acutance.tap(query, key, value) as tap:
            tap.output = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value
            )[0]
        return tap.output

    model = Layer(told)
    with acutance.probe(model, verify=True) as probe:
        model(*given)
    assert ([layer.status for layer in probe.summary().layers], probe.unread) == (
        ["verified"],
        [],
    )


def test_a_transform_over_sequences_is_listed() -> None:
    model = Layer(torch.vmap(lambda *given: sdpa(*given)))
    given = inputs()
    plain = model(*given)
    with pytest.raises(acutance.ProbeError, match=r"calls inside torch\.vmap cannot"):  # noqa: SIM117
        with acutance.probe(model):
            assert torch.equal(model(*given), plain)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_a_float64_model_is_verified(llama_models: Any, random_tokens: Any, kind: str) -> None:
    """transformers forms eager weights in float32, whatever the model is in."""
    model, ids = llama_models[kind].double(), random_tokens(2, 9)
    with torch.no_grad(), acutance.probe(model, verify=True) as probe:
        model(ids)
    layers = probe.summary().layers
    assert {layer.status for layer in layers} == {"verified"}
    assert probe.unread == []
    worst = max(layer.error for layer in layers)
    assert worst < 1e-12 if kind == "sdpa" else 1e-9 < worst < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_scores_of_a_narrow_type_are_no_mismatch(
    llama_models: Any, random_tokens: Any, dtype: torch.dtype
) -> None:
    """Eager scores of some hundreds are rounded to whole numbers in bfloat16."""
    model, ids = llama_models["eager"], random_tokens(2, 24)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.normal_(0.0, 3.0)
        with acutance.probe(model.to(dtype), metrics=["max_logit"], verify=True) as probe:
            model(ids)
        summary = probe.summary()
        assert float(summary.moments.high.max()) > 200.0
        assert {layer.status for layer in summary.layers} == {"verified"}


def test_what_is_missed_is_still_a_mismatch_where_scores_are_large() -> None:
    query, key, value = (40.0 * part.bfloat16() for part in inputs(9))
    model = Layer(lambda *given: sdpa(*given) * 1.3)

    def told(*given: Tensor) -> Tensor:
        with acutance.tap(*given) as tap:
            tap.output = model(*given)
        return tap.output

    teller = Layer(told)
    with acutance.probe(teller, verify=True) as probe:
        teller(query, key, value)
    assert [layer.status for layer in probe.summary().layers] == ["mismatch"]
