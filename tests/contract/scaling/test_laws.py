"""Every law is its formula, for each n and each head."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import acutance
from acutance import scaling, scores, theory
from acutance.scaling import SCALINGS, Scaling, from_dict

N = [1, 2, 15, 16, 17, 100, 511, 512, 513, 8192, 16384, 16385, 131072, 10**7]

#: Each record beside its formula, in plain Python floats.
LAWS: list[tuple[Scaling, Callable[[int], float]]] = [
    (scaling.NoScaling(), lambda n: 1.0),
    (scaling.LogN(train_length=512), lambda n: math.log(max(n, 16), 512)),
    (scaling.LogN(base=math.e, n_min=1), math.log),
    (scaling.LogN(base=2.0, n_min=40), lambda n: math.log2(max(n, 40))),
    (scaling.ClipLogN(8192), lambda n: max(1.0, math.log(n, 8192))),
    (scaling.SSMax(), lambda n: 0.43 * math.log(n)),
    (scaling.SSMax(0.2, -0.1), lambda n: 0.2 * math.log(n) - 0.1),
    (scaling.Yarn(s=4.0), lambda n: (0.1 * math.log(4) + 1) ** 2),
    (scaling.Yarn(s=0.5), lambda n: 1.0),
    (scaling.Yarn(train_length=512), lambda n: (0.1 * math.log(max(1, n / 512)) + 1) ** 2),
    (scaling.Llama4(), lambda n: 1 + 0.1 * math.log(n // 8192 + 1)),
    (scaling.Mistral3(), lambda n: 1 + 0.1 * math.log(1 + (n - 1) // 16384)),
    (scaling.SqrtLogN(512), lambda n: max(1.0, math.sqrt(max(0, 1 + 2 * math.log(n / 512))))),
    (
        scaling.SqrtLogN(512, gamma=2.0, minimum=0.0),
        lambda n: math.sqrt(max(0.0, 4 + 2 * math.log(n / 512))) / 2,
    ),
    (scaling.CosineLogN(), lambda n: 4 * math.log(max(n, 16))),
    (scaling.CosineLogN(3.5, n_min=1), lambda n: 3.5 * math.log(n)),
    (scaling.CosScale(32.0), lambda n: 32.0),
    (
        scaling.InfoScale(512, width=64),
        lambda n: math.sqrt((1 - n ** (-2 / 64)) / (1 - 512 ** (-2 / 64))),
    ),
    (
        scaling.InfoScale(8192, width=128, minimum=1.0),
        lambda n: max(1.0, math.sqrt((1 - n ** (-2 / 128)) / (1 - 8192 ** (-2 / 128)))),
    ),
    (scaling.Critical(2.0, gap=0.5), lambda n: 4 * math.log(n)),
    (scaling.Critical(1.5, critical_scale=3.0), lambda n: 4.5),
    (
        scaling.Critical(critical_scale=3.0, length=64),
        lambda n: 3 * math.log(n) / math.log(64),
    ),
    (scaling.ASEntmax(1.0, 0.5, 0.5), lambda n: 1 + 0.5 * math.sqrt(math.log(n))),
    (scaling.ASEntmax(0.5, 0.1, -1.0), lambda n: 0.5 + 0.1 / math.log(max(n, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("law", "formula"), LAWS, ids=[repr(law) for law, _ in LAWS])
def test_a_law_is_its_formula(law: Scaling, formula: Callable[[int], float]) -> None:
    want = torch.tensor([formula(n) for n in N], dtype=torch.float64)
    n = torch.tensor(N)
    exact = law.factor(n, dtype=torch.float64)
    # log, power and a few products, each within an ulp
    torch.testing.assert_close(exact, want, rtol=1e-14, atol=1e-14)
    single = law.factor(n)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), want, rtol=2e-6, atol=1e-6)
    assert torch.equal(law.factor(n[None, None], dtype=torch.float64)[0, 0], exact)
    assert law.factor(512).shape == ()


def test_every_named_law_but_those_that_measure_is_above() -> None:
    assert {law.name for law, _ in LAWS} | {"entropy_target", "adaptive_poly", "head_table"} == set(
        SCALINGS
    )
    assert len(SCALINGS) == 16


@pytest.mark.parametrize(
    ("law", "factor"),
    [
        (scaling.ClipLogN(8192), 1.308),
        (scaling.Llama4(), 1.283),
        (scaling.Yarn(train_length=8192), 1.631),
        (scaling.Yarn(s=16.0), 1.631),
    ],
)
def test_factors_at_131072_keys(law: Scaling, factor: float) -> None:
    assert law.factor(131072).item() == pytest.approx(factor, abs=5e-4)


def test_mistral_steps_one_token_after_llama() -> None:
    """floor(p / L) against floor((p + 1) / L): 131072 keys are position 131071."""
    law = scaling.Mistral3()
    assert law.factor(131072).item() == pytest.approx(1 + 0.1 * math.log(8))
    at = law.factor(131072, torch.tensor(131072)).item()
    assert at == pytest.approx(1.220, abs=5e-4)


def test_positions_decide_where_a_law_goes_by_position() -> None:
    """A packed row of few visible keys, far into the text."""
    n, positions = torch.tensor([3, 3]), torch.tensor([0, 8191])
    assert scaling.Llama4().factor(n, positions).tolist() == pytest.approx(
        [1, 1 + 0.1 * math.log(2)]
    )
    assert torch.equal(scaling.SSMax().factor(n, positions), scaling.SSMax().factor(n))


def test_positions_count_beyond_what_float32_holds() -> None:
    """2^24 + 1 is no float32: the floor is taken before the conversion."""
    law, edge = scaling.Llama4(length=2**24 + 1), 2**24 + 1
    got = law.factor(torch.tensor([edge - 1, edge])).tolist()
    assert got == pytest.approx([1.0, 1 + 0.1 * math.log(2)])


def test_released_laws_are_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.ministral3.modeling_ministral3")
    if not hasattr(theirs, "get_llama_4_attn_scale"):
        pytest.skip("this release of transformers has another name for it")
    positions = torch.tensor([[0, 1, 16383, 16384, 16385, 131071, 131072, 10**6]])
    theirs = theirs.get_llama_4_attn_scale(positions, 0.1, 16384)[0, 0, :, 0]
    torch.testing.assert_close(scaling.Mistral3().factor(positions[0] + 1), theirs)


def test_yarn_is_the_square_of_what_transformers_multiplies_both_sides_by() -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192,
            "rope_theta": 10000.0}  # fmt: skip
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=rope
    )
    _, both = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert scaling.Yarn(s=16.0).factor(1).item() == pytest.approx(both**2)


def test_sqrt_log_n_is_the_scale_theory_gives() -> None:
    n = [512, 2048, 65536, 2**20]
    law = scaling.SqrtLogN(512, gamma=1.5, minimum=0.0)
    want = theory.gauss_invariant_scale(n, 512, 1.5) / 1.5
    got = law.factor(torch.tensor(n), dtype=torch.float64).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-13)


def test_info_scale_is_roughly_the_growth_of_the_nearest_cosine() -> None:
    """Largest cosine of n random directions of width 8 with a fixed one, by sampling."""
    width, rows = 8, 2000
    generator = torch.Generator().manual_seed(0)

    def largest(n: int) -> float:
        directions = torch.randn(rows, n, width, generator=generator)
        return float((directions[..., 0] / directions.norm(dim=-1)).max(-1).values.mean())

    more = largest(1024) / largest(64) / scaling.InfoScale(64, width).factor(1024).item()
    assert more == pytest.approx(1.07, abs=0.01)  # as the docstring says


def test_info_scale_of_wide_heads_is_a_root_of_log_n() -> None:
    n = torch.tensor([16, 512, 2**20])
    want = (n.double().log() / math.log(512)).sqrt()
    got = scaling.InfoScale(512, width=10**6).factor(n, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_cos_scale_is_the_temperature_of_a_cosine() -> None:
    query, key = torch.randn(2, 1, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    law = acutance.row_statistics(query, key, score="cosine", scaling=scaling.CosScale(16.0))
    cosine = scores.Cosine(temperature=1 / 16)
    torch.testing.assert_close(
        law.entropy, acutance.row_statistics(query, key, score=cosine).entropy
    )


def test_ssmax_as_a_shift_would_change_nothing() -> None:
    scores = torch.randn(5, 100, dtype=torch.float64)
    factor = scaling.SSMax().factor(100, dtype=torch.float64)
    plain = torch.softmax(scores, -1)
    torch.testing.assert_close(torch.softmax(scores - factor, -1), plain, rtol=1e-13, atol=0)
    assert (torch.softmax(scores * factor, -1) - plain).abs().max() > 0.05


def test_ssmax_keeps_one_key_in_front() -> None:
    """Figure 1 of the article: all logits −2 but one of 3, s = 0.43."""
    for n in (10, 1000, 10**6):
        factor = scaling.SSMax(0.43).factor(n, dtype=torch.float64).item()
        share = 1 / (1 + (n - 1) * math.exp(-5 * factor))
        assert share == pytest.approx(1 / (1 + (n - 1) * n**-2.15), rel=1e-9)
        assert share > 0.9


@pytest.mark.parametrize(
    "law",
    [
        scaling.SSMax([0.2, 0.4, 0.8], bias=torch.tensor([0.0, 1.0, -1.0])),
        scaling.SSMax([0.2, 0.4, 0.8], bias=0.5),
        scaling.SqrtLogN(64, gamma=(0.5, 1.0, 2.0)),
        scaling.Critical(gap=torch.tensor([0.5, 1.0, 2.0])),
        scaling.Critical(critical_scale=[2.0, 3.0, 4.0], length=32),
        scaling.ASEntmax(delta=[1.0, 0.5, 0.0], beta=0.2, gamma=[0.5, 1.0, -0.5]),
    ],
    ids=repr,
)
def test_each_head_has_the_factor_of_its_own_parameters(law: Scaling) -> None:
    n = torch.tensor([[[1, 7, 300]], [[2, 64, 5000]]])  # (B, 1, L)
    got = law.factor(n, dtype=torch.float64)
    assert got.shape == (2, 3, 3)
    for head in range(3):
        own = {name: value[head] if isinstance(value, list) else value
               for name, value in law.to_dict().items()}  # fmt: skip
        assert torch.equal(got[:, head], from_dict(own).factor(n[:, 0], dtype=torch.float64))
    assert law.factor(torch.tensor([5, 6])).shape == (3, 2)
    by_head = torch.tensor([[[4], [5], [6]]])  # n that differs from head to head, (1, Hq, L)
    assert law.factor(by_head).shape == (1, 3, 1)


MEASURED = [
    scaling.HeadTable([1.0, 1.5]),
    scaling.HeadTable(torch.tensor([[1.0, 1.25], [1.5, 2.0]]), lengths=[512, 2048]),
    scaling.EntropyTarget(lengths=[64, 256, 1024], factors=[1.0, 1.3, 1.7], target=3.0),
    scaling.EntropyTarget([64, 256], [[1.0, 1.3], [2.0, 2.5]], target=[3.0, 2.0]),
    scaling.AdaptivePoly(),
    scaling.SSMax(torch.tensor([0.1, 0.2]), bias=0.3),
    scaling.ASEntmax(delta=[1.0, 2.0]),
    scaling.Critical(gap=[1.0, 0.5]),
]


@pytest.mark.parametrize("law", [law for law, _ in LAWS] + MEASURED, ids=repr)
def test_a_record_survives_json(law: Scaling) -> None:
    again = from_dict(json.loads(json.dumps(law.to_dict())))
    assert again == law
    assert type(again) is type(law)
    assert hash(again) == hash(law)
    entropy = torch.tensor([2.0]) if law.needs_entropy else None
    n = torch.tensor([700])
    assert torch.equal(again.factor(n, entropy=entropy), law.factor(n, entropy=entropy))


@pytest.mark.parametrize("law", [law for law, _ in LAWS] + MEASURED, ids=repr)
def test_a_row_that_sees_nothing_has_a_finite_factor(law: Scaling) -> None:
    entropy = torch.tensor([math.nan, 2.0]) if law.needs_entropy else None
    factor = law.factor(torch.tensor([0, 1]), entropy=entropy)
    assert factor.isfinite().all()
    if not law.needs_entropy:
        assert torch.equal(factor[..., 0], factor[..., 1])


@pytest.mark.parametrize("law", [law for law, _ in LAWS if law.name != "asentmax"], ids=repr)
def test_no_law_falls_as_n_grows(law: Scaling) -> None:
    n = torch.arange(1, 20000)
    assert (law.factor(n, dtype=torch.float64).diff() >= 0).all()


BAD = [
    (lambda: scaling.LogN(), ValueError, "log_n needs either train_length or base, got"),
    (lambda: scaling.LogN(512, 2.0), ValueError, "log_n needs either train_length or base"),
    (lambda: scaling.LogN(base=1.0), ValueError, "base must be a finite number above 1, got 1.0"),
    (lambda: scaling.LogN(1), ValueError, "train_length must be at least 2, got 1"),
    (lambda: scaling.LogN(512, n_min=0), ValueError, "n_min must be at least 1, got 0"),
    (lambda: scaling.ClipLogN(8.0), TypeError, "train_length must be an integer, got 8.0"),
    (lambda: scaling.SSMax(math.nan), ValueError, "s must be finite, got nan"),
    (lambda: scaling.SSMax([]), ValueError, "s must have one number for each head, got none"),
    (lambda: scaling.SSMax("0.43"), TypeError, "s must be a number or one for each head, got '0'"),
    (
        lambda: scaling.SSMax(torch.ones(2, 2)),
        ValueError,
        r"s must be a number or \(Hq,\), got \(2, 2",
    ),
    (
        lambda: scaling.SSMax(torch.ones(2, requires_grad=True)),
        TypeError,
        "s must be constant, got a tensor that requires a gradient: detach it, or train it with",
    ),
    (lambda: scaling.SqrtLogN(512, gamma=0.0), ValueError, "gamma must be finite above 0, got 0.0"),
    (lambda: scaling.Yarn(), ValueError, "yarn needs either s or train_length, got s=None"),
    (lambda: scaling.Yarn(s=-1.0), ValueError, "s must be a finite number above 0, got -1.0"),
    (lambda: scaling.Llama4(length=0), ValueError, "length must be at least 1, got 0"),
    (lambda: scaling.CosineLogN(0.0), ValueError, "coefficient must be a finite number above 0"),
    (lambda: scaling.Critical(), ValueError, "critical needs either gap or critical_scale"),
    (lambda: scaling.Critical(gap=[1.0, -1.0]), ValueError, "gap must be finite above 0, got -1.0"),
    (
        lambda: scaling.Critical(gap=1.0, length=9),
        ValueError,
        "length can be used only with critical_scale",
    ),
    (lambda: scaling.SSMax().factor(1.5), TypeError, "n must be a Tensor or an integer, got float"),
    (lambda: scaling.SSMax().factor(-1), ValueError, "n must be at least 0, got -1"),
    (
        lambda: scaling.SSMax().factor(torch.tensor([True])),
        TypeError,
        "n must contain whole numbers of visible keys, got a Tensor of torch.bool",
    ),
    (
        lambda: scaling.SSMax().factor(torch.tensor([3]), [2]),
        TypeError,
        "positions must be a Tensor, got list",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_parameters_are_named(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call()
