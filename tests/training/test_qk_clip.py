"""QKClip: factors, layouts of weights, ranks, and what it must leave alone."""

from __future__ import annotations

import pytest
import torch

from acutance import training
from acutance.training.qk_clip import find_layouts
from tests.contract.training.test_qk_clip import (
    LANGUAGE,
    MODULES,
    build,
    measure,
    tokens,
)


@pytest.mark.parametrize("name", [*LANGUAGE, *MODULES])
def test_heads_end_at_or_under_tau_and_the_others_are_bit_for_bit_the_same(name: str) -> None:
    model = build(name)
    first, largest = measure(model)[0]
    ordered = largest.sort().values
    tau = float((ordered[1] + ordered[2]) / 2)  # two of four heads exceed it
    clip = training.QKClip(model, tau, layers=[first])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with clip:
        model(tokens())
    report = clip.step()
    over = [head for head in range(4) if largest[head] > tau]
    assert report.clipped == tuple((first, head) for head in over)
    torch.testing.assert_close(torch.tensor(report.layers[0].max_logit).double(), largest)

    after = measure(model)[0][1]  # the first layer's inputs are what they were
    assert bool((after <= tau).all())
    for head in range(4):
        if head not in over:
            assert float(after[head]) == float(largest[head])
        elif name != "ours-alibi":  # its biases, none above 0, are not scaled: it ends lower
            assert float(after[head]) == pytest.approx(tau, rel=2e-5)
    changed = {
        name: (value != before[name])
        for name, value in model.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed
    # every entry that moved lies in a slice of a head that exceeded tau
    module = dict(model.named_modules())[first]
    while module is not model:
        try:
            width = 12 if "deepseek" in name else 8
            weights = find_layouts(module, 4, width)[0]
            break
        except ValueError:
            first = first.rpartition(".")[0]
            module = dict(model.named_modules())[first]
    allowed = 0
    for part in (*weights.query, *weights.query_alone):
        allowed += sum(part[head].numel() for head in over)
    if weights.group == 1:
        allowed += sum(part[head].numel() for part in weights.key for head in over)
    assert sum(int(mask.sum()) for mask in changed.values()) <= allowed
