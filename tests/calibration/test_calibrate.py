"""acutance.calibrate: laws that hold a target, what is said about them, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acutance
from acutance import scaling
from acutance.calibration import Law, Measured, measure
from acutance.calibration.fit import Fit
from acutance.calibration.measured import TARGETS

Built = Callable[..., nn.Module]
LENGTHS = (16, 32, 64)


def encoder(scale: float = 2.0, layers: int = 1) -> tuple[nn.Module, Callable[[int], list[Tensor]]]:
    """A bidirectional model of random weights, and text of normal tokens for a seed."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()

    def text(seed: int, length: int = 64, windows: int = 12) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [scale * torch.randn(windows, length, 32, generator=generator)]

    return model, text


@pytest.fixture(scope="module")
def fitted() -> acutance.Calibration:
    model, text = encoder(layers=2)
    return acutance.calibrate(model, text(1, length=128), lengths=[16, 32, 64, 128])


# -- what a law does ------------------------------------------------------------------------------


def test_entropy_is_held_on_other_text_and_at_a_length_that_was_not_fitted() -> None:
    model, text = encoder(layers=2)
    law = acutance.calibrate(model, text(1), lengths=LENGTHS)
    assert law.worst() < 0.02 < 0.3 < law.worst(law=False)
    lengths, other = [16, 32, 64, 128], text(2, length=128)
    plain = measure(model, other, lengths=lengths).flat()
    under = measure(model, other, lengths=lengths, law=law).flat()
    wanted = plain[:, :1]
    assert ((under - wanted).abs() / wanted)[:, :3].max() < 0.05
    # twice the longest fitted length: what is left of the growth, which was above 30 %
    assert ((plain - wanted) / wanted)[:, 3].min() > 0.3
    assert ((under - wanted).abs() / wanted)[:, 3].max() < 0.1


def test_each_number_agrees_with_a_probe(fitted: acutance.Calibration) -> None:
    """At one length all rows have as many keys, so a head's mean is the probe's."""
    model, text = encoder(layers=2)
    (x,) = text(1, length=128)
    for law, part in ((None, "before"), (fitted, "after")):
        probe = acutance.probe(model, metrics=["entropy"])
        if law is None:
            with probe, torch.no_grad():
                model(x)
        else:
            with acutance.apply(model, law), probe, torch.no_grad():
                model(x)
        got = [getattr(head, part)[-1] for head in fitted.heads]
        assert got == pytest.approx(probe.summary().columns()["entropy_mean"], abs=1e-5)


def test_factors_rise_from_one(fitted: acutance.Calibration) -> None:
    for head in fitted.heads:
        assert head.target == pytest.approx((head.before[0],) * 4)
        assert head.factors[0] == 1.0
        assert list(head.factors) == sorted(head.factors)
        assert set(head.status) == {"held"}


@pytest.mark.parametrize(
    ("target", "value"),
    [
        ("entropy", 2.0),
        ("normalized_entropy", 0.7),
        ("effective_keys", 6.0),
        ("top_weight", 0.4),
        ("normalized_entropy", None),
        ("effective_keys", None),
        ("top_weight", None),
    ],
)
def test_every_target_is_held(target: str, value: float | None) -> None:
    model, text = encoder()
    law = acutance.calibrate(model, text(1), target=target, value=value, lengths=LENGTHS)
    assert law.metric == target
    assert law.worst() < 0.03 < law.worst(law=False)
    under = measure(model, text(1), target=target, lengths=LENGTHS, law=law)
    for head in law.heads:
        assert head.after == pytest.approx(under.values(head.module)[:, head.head].tolist())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_causal_rows_count_by_the_keys_they_see(built: Built, name: str) -> None:
    """One window length gives rows of every n; grouped queries and query-key norms included."""
    model = built(name)
    ids = torch.randint(3, 97, (24, 64), generator=torch.Generator().manual_seed(1))
    law = acutance.calibrate(model, [ids], lengths=[16, 32, 64])
    heads = model.config.num_attention_heads
    assert [(one.layer, one.head) for one in law.heads] == [
        (layer, head) for layer in range(2) for head in range(heads)
    ]
    assert law.worst() < 0.05 < law.worst(law=False)
    other = torch.randint(3, 97, (24, 64), generator=torch.Generator().manual_seed(2))
    with acutance.apply(model, law), acutance.probe(model, metrics=["entropy"]) as probe:
        model(other)
    assert probe.summary().mean("entropy").isfinite().all()
    with acutance.apply(model, law), torch.no_grad():
        made = model.generate(
            ids[:2, :20], attention_mask=torch.ones(2, 20), max_new_tokens=30, do_sample=False,
            output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        want = model(made.sequences).logits[:, 19:-1]
    torch.testing.assert_close(torch.stack(made.logits, 1), want, atol=1e-4, rtol=0)


def test_a_windowed_layer_is_skipped_unless_asked_for(built: Built) -> None:
    model = built("gpt-oss", "eager")
    ids = torch.randint(3, 97, (4, 32), generator=torch.Generator().manual_seed(1))
    law = acutance.calibrate(model, [ids], lengths=[16, 32], passes=2)
    assert {one.module for one in law.heads} == {"model.layers.1.self_attn"}
    assert list(law.skipped) == ["model.layers.0.self_attn"]
    with pytest.raises(ValueError, match=r"no layer to calibrate: .*0\.self_attn: no row sees"):
        acutance.calibrate(built("mistral"), [ids], lengths=[16, 32])


def test_cached_and_padded_windows(built: Built) -> None:
    """Padding on the left is not seen: a window's rows are as many as its tokens."""
    model = built("llama")
    ids = torch.randint(3, 97, (8, 32), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    whole = measure(model, [{"input_ids": ids, "attention_mask": mask}], lengths=[16, 32])
    padded = torch.cat([torch.zeros_like(ids), ids], 1)
    shown = torch.cat([torch.zeros_like(mask), mask], 1)
    batch = {"input_ids": padded, "attention_mask": shown}
    both = measure(model, {64: [batch]}, lengths=[64])
    assert both.lengths == ()  # no row sees 33 to 64 keys
    cut = measure(model, [batch], lengths=[16, 32])  # windows of padding alone are left out
    for name in whole.modules:
        torch.testing.assert_close(cut.values(name), whole.values(name), atol=1e-5, rtol=0)


# -- forms of the law -----------------------------------------------------------------------------


def test_one_factor_for_all_lengths() -> None:
    model, text = encoder()
    given: dict[str, Any] = {"lengths": [8, 16, 32, 64], "value": 1.8}
    found = acutance.calibrate(model, text(1), law="constant", passes=4, **given)
    (laws,) = [laws for _, laws in found.layers]
    assert isinstance(laws.whole, scaling.HeadTable)
    assert laws.whole.lengths is None
    assert [set(head.factors) for head in found.heads] == [{one} for one in laws.whole.factors]
    under = measure(model, text(1), lengths=[8, 16, 32, 64], law=found)
    for head in found.heads:
        assert head.after == pytest.approx(under.values(head.module)[:, head.head].tolist())
        assert head.after[0] < 1.8 < head.after[-1]


def test_beyond_the_last_length_the_line_goes_on(fitted: acutance.Calibration) -> None:
    table = fitted.layers[0][1].whole
    assert isinstance(table, scaling.HeadTable)
    head = fitted.heads[0]
    n = torch.tensor([16, 32, 64, 128, 256])
    factors = table.factor(n, dtype=torch.float64)[0]
    assert factors[:4].tolist() == pytest.approx(head.factors)
    slope = head.factors[-1] - head.factors[-2]
    assert 0.3 * slope < factors[4] - factors[3] < 1.5 * slope
    assert (table.factor(torch.tensor([2])) == 1).all()


# -- what is said ---------------------------------------------------------------------------------


def test_a_target_above_log_n_is_impossible_there() -> None:
    model, text = encoder()
    law = acutance.calibrate(model, text(1), value=3.0, lengths=LENGTHS)
    for head in law.heads:
        assert head.status[0] == "impossible"  # log 16 = 2.77
        assert head.factors[0] == 1.0
        assert set(head.status[1:]) == {"held"}
    assert law.counts()["impossible"] == 4


@pytest.mark.parametrize(
    ("metric", "flat", "sharp"), [("effective_keys", 32.0, 1.0), ("top_weight", 1 / 32, 1.0)]
)
def test_what_only_rows_of_equal_scores_have_is_impossible(
    metric: str, flat: float, sharp: float
) -> None:
    n = torch.tensor([[32, 32], [64, 64]])
    ones = torch.ones(2, 2, dtype=torch.float64)
    values = Measured(metric, (32, 64), {"layer": 2}, n, ones, -ones, ones.expand(3, 2, 2))
    possible = [Fit(values, value, 32, 16.0).possible.all(1).tolist() for value in (flat, sharp)]
    assert possible == [[False, True], [True, True]]


def test_a_factor_at_its_limit_is_reported() -> None:
    model, text = encoder()
    law = acutance.calibrate(model, text(1), value=0.05, lengths=LENGTHS, limit=2.0)
    assert {status for head in law.heads for status in head.status} == {"limited"}
    assert max(max(head.factors) for head in law.heads) == 2.0
    beyond = law.layers[0][1].whole
    assert isinstance(beyond, scaling.HeadTable)
    assert (beyond.factor(torch.tensor([64, 4096])) == 2.0).all()


def test_a_gain_within_noise_leaves_a_head_alone() -> None:
    """Rows that ignore their length: all keys but 16 are hidden by the first dimension."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = model

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.zeros(x.shape[:2])
            hidden[:, 16:] = -40.0  # additive, so that the row still counts every key
            out: Tensor = self.attend(x, x, x, key_padding_mask=hidden)[0]
            return out

    x = torch.randn(16, 64, 8, generator=torch.Generator().manual_seed(1))
    law = acutance.calibrate(Fixed(), [x], lengths=LENGTHS)
    assert {status for head in law.heads for status in head.status} == {"kept"}
    assert {head.factors for head in law.heads} == {(1.0, 1.0, 1.0)}
    assert law.passes == 2


def test_noise_is_told_by_a_test_at_five_per_cent() -> None:
    """Five parts of a text, one head 3.5 standard errors from its target and one 2.5."""
    parts = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    parts = parts / (parts.var() / 5).sqrt()  # a mean of these has standard error 1
    value = torch.tensor([[100.0, 100.0], [103.5, 102.5]], dtype=torch.float64)
    noise = torch.stack([torch.zeros(5, 2, dtype=torch.float64), parts[:, None].expand(5, 2)], 1)
    left = value - noise / 4  # without a part, a mean moves by a quarter of its distance
    n = torch.tensor([[16, 16], [32, 32]])
    slope = -torch.ones_like(value)
    values = Measured("effective_keys", (16, 32), {"layer": 2}, n, value, slope, left)
    fit = Fit(values, None, 16, 16.0)
    fit.possible[:] = True
    assert values.error(torch.tensor([0, 0]))[1].tolist() == pytest.approx([1.0, 1.0])
    assert fit.matters(values).tolist() == [[False, False], [True, False]]  # t(4) is 2.78


@pytest.mark.parametrize(("lengths", "knots"), [([8, 16, 32], (8, 11, 16, 32)), ([8, 9], (8, 9))])
def test_rows_just_beyond_the_reference_are_fitted_too(
    built: Built, lengths: list[int], knots: tuple[int, ...]
) -> None:
    """Where there are such rows: a causal model has them, the encoders above have not."""
    ids = torch.randint(3, 97, (8, 32), generator=torch.Generator().manual_seed(1))
    law = acutance.calibrate(built("llama"), [ids], lengths=lengths, passes=2)
    assert law.lengths == knots
    assert {head.lengths for head in law.heads} == {knots}


def test_rows_are_measured_in_the_parts_of_the_fit(built: Built) -> None:
    """Under one text and law the two give the same numbers, half an octave and all."""
    model = built("llama")
    ids = torch.randint(3, 97, (8, 32), generator=torch.Generator().manual_seed(1))
    law = acutance.calibrate(model, [ids], lengths=[8, 16, 32], reference=16, passes=2)
    found = measure(model, [ids], lengths=[8, 16, 32], reference=16, law=law)
    assert found.lengths == law.lengths == (8, 16, 23, 32)
    after = torch.tensor([head.after for head in law.heads])
    torch.testing.assert_close(found.flat().float(), after, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"reference must be one of the lengths \[8, 16\], got 32"):
        measure(model, [ids], lengths=[8, 16], reference=32)


def test_errors_are_those_of_repeated_texts() -> None:
    """The spread of fitted factors over twelve texts is what each of them reports."""
    model, text = encoder()
    given: dict[str, Any] = {"lengths": [16, 64], "passes": 3}
    runs = [acutance.calibrate(model, text(seed), **given) for seed in range(12)]
    factors = torch.tensor([[head.factors[1] for head in run.heads] for run in runs])
    told = torch.tensor([[head.factor_errors[1] for head in run.heads] for run in runs])
    # a deviation of 12 has a relative error of 1/√22 = 0.21, and there are four heads
    ratio = (factors.std(0).square().mean() / told.square().mean()).sqrt()
    assert 0.6 < ratio < 1.6


# -- files ----------------------------------------------------------------------------------------


def test_law_and_record_are_written(fitted: acutance.Calibration, tmp_path: Path) -> None:
    model, text = encoder(layers=2)
    fitted.save(tmp_path / "law.json")
    law = Law.load(tmp_path / "law.json")
    assert law.lengths == (16, 32, 64, 128)
    assert law.target == "entropy"
    (x,) = text(3)
    with torch.no_grad():
        with acutance.apply(model, fitted):
            want = model(x)
        with acutance.apply(model, law):
            assert torch.equal(model(x), want)
    fitted.to_json(tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["heads"]) == 8
    assert record["heads"][0]["factors"] == list(fitted.heads[0].factors)
    assert record["law"].items() < json.loads((tmp_path / "law.json").read_text()).items()


def test_a_law_of_a_bare_model_serves_one_with_a_head(built: Built, ids: Tensor) -> None:
    whole = built("llama")
    bare = whole.model
    law = acutance.calibrate(bare, [ids.repeat(4, 3)], lengths=[8, 16], passes=2)
    with torch.no_grad():
        with acutance.apply(bare, law):
            want = whole.lm_head(bare(ids)[0])
        with acutance.apply(whole, law) as applied:
            got = whole(ids)[0]
    assert sorted(applied.calls) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="another model: it has"):
        acutance.apply(built("qwen3"), law)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"target": "entropi"}, ValueError, "did you mean 'entropy'"),
        ({"target": 3}, TypeError, "target must be the name of a metric"),
        (
            {"value": 9.0},
            ValueError,
            r"rows with 64 keys must be between 0 and 4\.159 \(log 64\), got",
        ),
        ({"value": -1.0}, ValueError, "value: entropy"),
        ({"value": math.nan}, ValueError, "value"),
        ({"target": "top_weight", "value": 1.5}, ValueError, r"must be between 0\.01562 \(1/64\)"),
        ({"target": "max_logit"}, ValueError, "is not one of entropy, normalized_entropy, "),
        ({"law": "constants"}, ValueError, "did you mean 'constant'"),
        ({"law": "ssmax"}, ValueError, "law='ssmax' is not one of table, constant"),
        ({"lengths": [64, 16]}, ValueError, r"lengths must be ascending.*\[64, 16\]"),
        ({"lengths": []}, ValueError, "lengths must be ascending"),
        (
            {"lengths": [16, 4096]},
            ValueError,
            "lengths must be at most 64, the tokens of the longest batch",
        ),
        ({"lengths": 64}, TypeError, "lengths must be a list of whole numbers"),
        ({"lengths": [1, 64]}, ValueError, "lengths"),
        (
            {"reference": 24},
            ValueError,
            r"reference must be one of the lengths \[16, 32, 64\], got 24",
        ),
        ({"passes": 1}, ValueError, "passes"),
        ({"limit": 1.0}, ValueError, "limit"),
        ({"resume": True}, ValueError, "resume is for target='loss', got target='entropy'"),
        ({"save": "state"}, ValueError, "save is for target='loss', got target='entropy'"),
        ({"window": scaling.Window(8)}, ValueError, "window is for target='loss', got target="),
    ],
)
def test_bad_arguments(given: dict[str, Any], error: type[Exception], match: str) -> None:
    model, text = encoder()
    with pytest.raises(error, match=match):
        acutance.calibrate(model, text(1), **({"lengths": LENGTHS} | given))


def test_bad_batches(built: Built) -> None:
    model, text = encoder()
    (x,) = text(1, length=128)
    for batches, error, match in (
        ([], ValueError, "at least one batch, got none"),
        (x, TypeError, "put a single batch into a list"),
        (["text"], TypeError, "a batch must be a tensor"),
        (
            [torch.zeros(4)],
            ValueError,
            r"shape \(B, L, ...\) with at least one window and 2 tokens",
        ),
        ([x[:1]], ValueError, "at least 2 windows of 128 tokens, got 1"),
        (
            {64: [x]},
            ValueError,
            r"batches\[64\] must have windows of 64 tokens, got a batch with 128",
        ),
    ):
        with pytest.raises(error, match=match):
            acutance.calibrate(model, batches)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        acutance.calibrate("gpt2", [x])  # type: ignore[arg-type]
    ids = torch.zeros(2, 128, dtype=torch.int64)
    with pytest.raises(ValueError, match="lengths reach 128, but the model has 64 positions"):
        acutance.calibrate(built("gpt2"), [ids])
    with pytest.warns(UserWarning, match="lengths reach 128, but the model has 64 positions"):
        measure(built("llama"), [ids], lengths=[128])
    with pytest.raises(acutance.ProbeError, match="captured no attention call"):
        acutance.calibrate(nn.Linear(32, 32), [x])


def test_heads_that_change_between_batches_are_refused_after_the_pass() -> None:
    class Attention(nn.Module):
        heads = 8

        def forward(self, x: Tensor) -> Tensor:
            self.heads //= 2
            x = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(Attention())
    with pytest.raises(ValueError, match="0 has 2 heads in this batch, but had 4 in earlier ones"):
        measure(model, [torch.randn(2, 32, 16)] * 3, lengths=[32])
    assert model[0].heads == 1


def test_training_mode_is_put_back() -> None:
    model, text = encoder()
    model.train()
    model.layers[0].norm1.eval()
    acutance.calibrate(model, text(1), lengths=[16, 64], passes=2)
    assert model.training
    assert not model.layers[0].norm1.training


def test_every_target_is_a_metric_and_has_limits() -> None:
    assert set(TARGETS) <= set(acutance.METRICS)
    for target in TARGETS.values():
        low, high = target.limits(64)
        assert low < high


def test_a_law_that_is_taken_by_name_says_so() -> None:
    with pytest.raises(ValueError, match=r"table, constant; acutance\.apply takes ssmax"):
        acutance.calibrate(torch.nn.Linear(2, 2), [torch.zeros(4, 16, 2)], law="ssmax")
