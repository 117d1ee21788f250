"""Attention of a model's own making that tells the probe what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance

TOLERANCE = 1e-5


def by_exponentials(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention without a softmax, in place of a kernel that a probe cannot see."""
    weights = torch.exp(scale * query @ key.mT).tril()
    return (weights / weights.sum(-1, keepdim=True)) @ value


class Kernel(nn.Module):
    """One layer; ``says`` is what it tells of itself."""

    def __init__(self, **says: Any) -> None:
        super().__init__()
        self.says = says

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with acutance.tap(query, key, value, **self.says) as told:
            told.output = by_exponentials(query, key, value, 0.5)
        return told.output


def inputs() -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 3, 6, 4) for _ in range(3))


def entropy(query: Tensor, key: Tensor) -> Tensor:
    scores = 0.5 * query.double() @ key.double().mT
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return -torch.xlogy(p, p).sum(-1).mean((0, 2))


def test_a_tapped_kernel_is_read_and_verified() -> None:
    model, given = Kernel(scale=0.5, is_causal=True), inputs()
    plain = model(*given)
    with acutance.probe(model, verify=True, noise=True) as probe:
        assert torch.equal(model(*given), plain)
    summary = probe.summary()
    (layer,) = summary.layers
    assert (layer.module, layer.status, layer.source) == ("Kernel", "verified", "tap")
    assert layer.rows == 12
    assert summary.mean("noise_gain").isfinite().all()
    assert float((summary.mean("entropy") - entropy(*given[:2])).abs().max()) < TOLERANCE


def test_a_tap_that_says_something_else_is_a_mismatch() -> None:
    model, given = Kernel(scale=0.25, is_causal=True), inputs()
    with acutance.probe(model, verify=True) as probe:
        model(*given)
    assert [layer.status for layer in probe.summary().layers] == ["mismatch"]
    assert "the output recomputed from the captured arguments differs by" in probe.unread[0]


@pytest.mark.parametrize(("off", "status"), [(1.0, "verified"), (1.004, "mismatch")])
def test_rows_of_large_scores_excuse_no_other_row(off: float, status: str) -> None:
    """A row hidden by −10⁴ has scores of that size, whose rounding is 0.005 of a weight."""
    mask = torch.zeros(6, 6)
    mask[0] = -1e4

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with acutance.tap(query, key, value, attn_mask=mask) as told:
            weights = torch.exp(0.5 * query @ key.mT)
            told.output = off * (weights / weights.sum(-1, keepdim=True)) @ value
        return told.output

    class Layer(nn.Module):
        forward = staticmethod(model)

    layer = Layer()
    with acutance.probe(layer, verify=True) as probe:
        layer(*inputs())
    assert [one.status for one in probe.summary().layers] == [status]


def test_what_does_not_fit_is_listed_and_the_model_goes_on() -> None:
    model, given = Kernel(attn_mask=torch.ones(3, 3, dtype=torch.bool)), inputs()
    plain = model(*given)
    probe = acutance.probe(model)
    with pytest.raises(acutance.ProbeError, match="Kernel: attn_mask"), probe:
        assert torch.equal(model(*given), plain)


def test_nothing_inside_is_read_again_and_values_are_no_must() -> None:
    class Softmaxed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with acutance.tap(x, x):
                inner = torch.softmax(x @ x.mT / 2.0, -1) @ x
            return torch.softmax(inner @ inner.mT, -1) @ inner

    model = Softmaxed()
    with acutance.probe(model, verify=True) as probe:
        model(torch.randn(1, 2, 5, 4))
    layers = probe.summary().layers
    assert [(layer.module, layer.source) for layer in layers] == [
        ("Softmaxed", "tap"),
        ("Softmaxed#1", "softmax"),
    ]
    assert layers[0].status == "captured"


def test_without_a_probe_a_tap_does_nothing_and_errors_pass() -> None:
    model, given = Kernel(attn_mask="nonsense"), inputs()
    assert torch.equal(model(*given), by_exponentials(*given, 0.5))

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with acutance.tap(x, x, x):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), acutance.probe(Fails()) as probe:
        probe._model(torch.randn(1, 2, 5, 4))
    with pytest.raises(acutance.ProbeError, match="captured no attention call"):
        probe.summary()


def test_two_probes_are_both_told() -> None:
    model, given = Kernel(scale=0.5, is_causal=True), inputs()
    with acutance.probe(model) as outer, acutance.probe(model) as inner:
        model(*given)
    assert outer.summary().layers == inner.summary().layers
    with (
        pytest.raises(acutance.ProbeError, match="Linear did not run"),
        acutance.probe(nn.Linear(1, 1)),
    ):
        model(*given)  # of which a probe of another model hears nothing


def test_a_probe_can_be_told_alone() -> None:
    class Mine(nn.Module):
        probe: acutance.Probe | None = None

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            assert self.probe is not None
            with self.probe.tap(query, key, value, scale=0.5, is_causal=True) as told:
                told.output = by_exponentials(query, key, value, 0.5)
            return told.output

    model, given = Mine(), inputs()
    with (
        pytest.raises(acutance.ProbeError, match="could not read any attention"),
        acutance.probe(model) as other,
        acutance.probe(model, verify=True) as model.probe,
    ):
        model(*given)
    (layer,) = model.probe.summary().layers
    assert (layer.status, layer.source) == ("verified", "tap")
    (line,) = other.unread
    assert line.startswith(
        "Mine: a matrix product uses weights that were computed without a softmax"
    )
    before = model.probe.summary().layers
    model(*given)  # closed: told to nobody
    assert model.probe.summary().layers == before
    with pytest.raises(TypeError, match="casual"):
        model.probe.tap(*given, casual=True)


class Own(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = acutance.attention(query, key, value, **self.options)
        return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "return_stats": True, "scale": 0.7},
        {"score": "cosine"},
        {"alibi_slopes": torch.tensor([0.1, 0.2, 0.4]), "window": 3},
        {"softcap": 2.0, "sinks": torch.tensor([0.5, 0.0, -1.0])},
        {"weights": "softmax_one", "query_offset": 2, "is_causal": True},
        {"key_mask": torch.tensor([[True] * 6, [True] * 3 + [False] * 3])},
    ],
)
def test_acutance_attention_is_read(options: dict[str, Any]) -> None:
    model, given = Own(**options), inputs()
    plain = model(*given)
    with acutance.probe(model, verify=True) as probe:
        assert torch.equal(model(*given), plain)
    summary = probe.summary()
    (layer,) = summary.layers
    assert (layer.status, layer.source) == ("verified", "acutance.attention")
    options = {name: value for name, value in options.items() if name != "return_stats"}
    rows = acutance.row_statistics(*given[:2], **options).entropy.double()
    if "key_mask" in options:  # its padding is left out
        kept = options["key_mask"][:, None, :].expand_as(rows)
        rows = torch.where(kept, rows, 0.0).sum((0, 2)) / kept.sum((0, 2))
    else:
        rows = rows.mean((0, 2))
    assert float((summary.mean("entropy") - rows).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "relu2"}, "weights='relu2': return_stats=True reads it"),
        ({"scaling": acutance.scaling.LogN(train_length=4)}, "a scaling: return_stats=True"),
    ],
)
def test_what_is_no_softmax_of_products_is_listed(options: Any, reason: str) -> None:
    model, given = Own(**options), inputs()
    plain = model(*given)
    probe = acutance.probe(model)
    with pytest.raises(acutance.ProbeError, match=reason), probe:
        assert torch.equal(model(*given), plain)


def test_modules_of_acutance_are_read() -> None:
    model = acutance.nn.MultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(2, 6, 12)
    with acutance.probe(model, verify=True) as probe:
        model(x, x, x)
    (layer,) = probe.summary().layers
    assert (layer.status, layer.heads, layer.rows) == ("verified", 3, 12)
