"""The factor reaches the logits, row by row and head by head, in the query's dtype."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from acutance import scaling
from acutance.scaling import SCALINGS, apply_scaling, from_dict, get


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_product_is_in_the_querys_dtype(dtype: torch.dtype) -> None:
    query = torch.randn(1, 1, 300, 4).to(dtype)
    n = torch.arange(1, 301).view(1, 1, -1)
    scaled = apply_scaling(query, scaling.SSMax(), n)
    assert scaled.dtype == dtype
    factor = (0.43 * n.double().log()).to(dtype)
    # one rounding of the factor (float32 log: one more), one of the product
    error = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(scaled, query * factor.unsqueeze(-1), rtol=error, atol=1e-12)


def test_n_is_not_rounded_to_the_querys_dtype_first() -> None:
    """float16 ends at 65504 and knows no 8191: a factor would be infinite, or a step too high."""
    query = torch.ones(1, 1, 1, 1, dtype=torch.float16)
    scaled = apply_scaling(query, scaling.ClipLogN(8192), torch.tensor([131072]))
    assert scaled.item() == pytest.approx(17 / 13, rel=2**-10)
    query = torch.ones(1, 1, 2, 1, dtype=torch.float16)
    n = torch.tensor([[[8191, 8192]]])
    assert torch.equal(
        apply_scaling(query, scaling.Llama4(coefficient=1.0), n).flatten(),
        torch.tensor([1.0, 1 + math.log(2)], dtype=torch.float16),
    )


def test_no_scaling_gives_the_query_itself() -> None:
    query, n = torch.randn(1, 2, 3, 4), torch.tensor([1, 2, 3])
    for law in (None, "none", scaling.NoScaling()):
        assert apply_scaling(query, law, n) is query


def test_before_normalisation_a_scaling_is_undone() -> None:
    query, n = torch.randn(1, 1, 5, 8), torch.arange(2, 7)
    law = scaling.LogN(base=math.e, n_min=1)
    late = apply_scaling(torch.nn.functional.normalize(query, dim=-1), law, n)
    early = torch.nn.functional.normalize(apply_scaling(query, law, n), dim=-1)
    torch.testing.assert_close(early, torch.nn.functional.normalize(query, dim=-1))
    torch.testing.assert_close(late.norm(dim=-1).flatten(), n.log(), rtol=1e-5, atol=1e-6)


def test_gradients_pass_through_the_factor() -> None:
    query = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    n = torch.tensor([0, 1, 9])
    assert torch.autograd.gradcheck(lambda q: apply_scaling(q, scaling.SSMax([0.2, 0.4]), n), query)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda q: apply_scaling(q, "ssmx", torch.tensor([3])),
            ValueError,
            "scaling='ssmx' is not one of none, log_n, .*; did you mean 'ssmax'?",
        ),
        (
            lambda q: apply_scaling(q, "log_n", torch.tensor([3])),
            ValueError,
            r"scaling='log_n' needs parameters: pass scaling.LogN\(...\) with train_length or base",
        ),
        (
            lambda q: get("head_table"),
            ValueError,
            r"scaling='head_table' needs parameters: pass scaling.HeadTable\(...\) with factors",
        ),
        (lambda q: get(3), TypeError, "scaling must be a name or a Scaling, got int"),
        (
            lambda q: apply_scaling(q, "ssmax", torch.tensor([3, 4])),
            ValueError,
            r"n must broadcast to \(B, Hq, L\) = \(1, 2, 3\), got \(2,\) \(query \(1, 2, 3, 4\)\)",
        ),
        (
            lambda q: apply_scaling(q, scaling.SSMax([1.0] * 3), torch.tensor([3, 4, 5])),
            ValueError,
            r"factors must broadcast to \(B, Hq, L\) = \(1, 2, 3\), got \(3, 3\): it has "
            "parameters for 3 heads",
        ),
        (
            lambda q: apply_scaling(q[0], "ssmax", torch.tensor([3])),
            ValueError,
            "must have shape .B, Hq",
        ),
        (lambda q: from_dict({}), ValueError, "a scaling's record must have a name, got nothing"),
        (lambda q: from_dict({"name": "yarm"}), ValueError, "did you mean 'yarn'"),
        (lambda q: from_dict({"name": 3}), TypeError, "a scaling's name must be text, got int"),
        (
            lambda q: from_dict({"name": "ssmax", "t": 1}),
            ValueError,
            "ssmax has no 't': its parameters are s, bias",
        ),
        (
            lambda q: from_dict({"name": "clip_log_n"}),
            ValueError,
            "clip_log_n needs train_length",
        ),
    ],
)
def test_bad_input_is_named(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call(torch.ones(1, 2, 3, 4))


def test_every_name_is_found_or_says_what_it_needs() -> None:
    made, needs = 0, 0
    for name, kind in SCALINGS.items():
        assert kind.name == name
        try:
            assert isinstance(get(name), kind)
            made += 1
        except ValueError as error:
            assert f"scaling.{kind.__name__}" in str(error)  # noqa: PT017 - either is right
            needs += 1
    assert (made, needs) == (7, 9)


def test_the_guide_has_every_name_and_record() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guide" / "scaling.md"
    lines = [
        line for line in guide.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    table = {line.split("`")[1]: line for line in lines}
    assert {name for name in SCALINGS if f"{SCALINGS[name].__name__}" in table[name]} == {*table}
