"""Laws fitted to the loss: exact derivatives, steps that help, nothing changed by noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import acutance
from acutance.calibration import LossCalibration, loss_slopes
from acutance.judging import LossError, MaskedTokens
from acutance.scaling import HeadTable
from tests.contract import texts
from tests.contract.trained import decoder


def windows(part: str, count: int, length: int, seed: int = 5) -> Tensor:
    text = texts.read(texts.files(part))
    return texts.sample_windows(text, length, count, torch.Generator().manual_seed(seed)).long()


def changed_loss(model: torch.nn.Module, batches: Any, law: Any, loss: Any) -> float:
    found = acutance.judge(model, batches, {"law": law}, loss=loss)
    return found.mean_loss + found.laws[0].delta


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen3"))]
)
def test_slopes_are_the_derivatives_of_the_loss(
    name: str, built: Callable[[str, str], torch.nn.Module]
) -> None:
    """By central differences of the judged loss, head by head and length by length."""
    model = built(name, "sdpa")
    tokens = torch.randint(3, 97, (3, 32), generator=torch.Generator().manual_seed(1))
    heads = loss_slopes(model, tokens, lengths=[8, 32])
    assert [(one.layer, one.head) for one in heads] == [(i, h) for i in range(2) for h in range(4)]
    step = 0.01
    for one, at in ((heads[1], 0), (heads[3], 1), (heads[6], 2)):
        assert one.lengths == (8, 16, 32)
        sides = []
        for sign in (1, -1):
            factors = [1.0, 1.0, 1.0, 1.0]
            factors[at] = math.exp(sign * step)
            factors[3] = factors[2]  # constant beyond
            law = {(one.module, one.head): HeadTable([factors], lengths=(8, 16, 32, 64))}
            sides.append(changed_loss(model, tokens, law, None))
        slope = (sides[0] - sides[1]) / (2 * step)
        assert one.slope[at] == pytest.approx(slope, rel=0.02, abs=2e-5)


def test_slopes_of_masked_tokens_and_of_a_loss_of_ones_own(
    built: Callable[[str, str], torch.nn.Module],
) -> None:
    import transformers as hf

    from .conftest import SIZES

    torch.manual_seed(3)
    masked = hf.BertForMaskedLM(hf.BertConfig(**SIZES)).eval()
    tokens = torch.randint(3, 97, (4, 24), generator=torch.Generator().manual_seed(1))
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    plain = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()

    def own(model: torch.nn.Module, batch: Any) -> Tensor:
        return model(batch["input_ids"]).square().mean(-1)

    vectors = [2 * torch.randn(2, 24, 16) for _ in range(3)]
    cases: list[tuple[Any, Any, Any]] = [
        (masked, tokens, MaskedTokens(2)),
        (plain, vectors, own),
    ]
    for model, batches, loss in cases:
        heads = loss_slopes(model, batches, loss=loss, law="constant")
        for one in (heads[0], heads[-1]):
            sides = [
                changed_loss(
                    model, batches, {(one.module, one.head): HeadTable([math.exp(step)])}, loss
                )
                for step in (0.02, -0.02)
            ]
            slope = (sides[0] - sides[1]) / 0.04
            assert one.slope[0] == pytest.approx(slope, rel=0.03, abs=2e-5)


def test_errors_are_those_between_windows() -> None:
    tokens = windows("held out", 3, 64)
    each = torch.tensor(
        [
            [one.slope for one in loss_slopes(decoder(), [part, part], lengths=[32, 64])]
            for part in tokens.split(1)
        ]
    )
    heads = loss_slopes(decoder(), tokens, lengths=[32, 64])
    slopes = torch.tensor([one.slope for one in heads])
    torch.testing.assert_close(slopes, each.mean(0), atol=1e-6, rtol=1e-4)
    errors = torch.tensor([one.error for one in heads])
    torch.testing.assert_close(errors, each.std(0) / 3**0.5, atol=1e-6, rtol=1e-4)


def test_activations_of_one_block_at_a_time() -> None:
    """Every block runs again in the backward pass, and the model is left as it was."""
    model = decoder()
    calls = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append(1))
    loss_slopes(model, windows("held out", 2, 64), lengths=[64])
    handle.remove()
    # the layers are found, the loss is checked by two runs, and each window runs twice
    assert len(calls) == 3 + 2 * 2
    assert all("forward" not in vars(block) for block in model.model.layers)
    assert all(part.requires_grad and part.grad is None for part in model.parameters())


@pytest.fixture(scope="module")
def fitted() -> tuple[LossCalibration, Tensor]:
    tokens = windows("training", 9, 512, 0)
    law = acutance.calibrate(decoder(), tokens, target="loss", lengths=[128, 512], passes=2)
    assert isinstance(law, LossCalibration)
    return law, tokens


def test_a_law_fitted_to_the_loss_helps_on_other_text(
    fitted: tuple[LossCalibration, Tensor], tmp_path: Path
) -> None:
    """Beyond the 128 bytes of training, where sharper heads help."""
    law, _ = fitted
    assert (law.fitted, law.stopped, law.metric, law.target) == (6, 3, "loss", "loss")
    assert law.delta < -2 * law.error
    assert law.changed > 1
    law.save(tmp_path / "law.json")
    loaded = acutance.Law.load(tmp_path / "law.json")
    other = windows("held out", 8, 512)
    result = acutance.judge(decoder(), other, {"loss": law, "file": loaded})
    assert result["loss"].verdict == "helps"
    assert result["loss"].delta < -0.01
    assert result["file"].delta == pytest.approx(result["loss"].delta, abs=1e-6)
    record = law.to_dict()
    assert record["changed"] == law.changed
    assert len(record["heads"]) == 12
    assert len(record["heads"][0]["factors"]) == len(record["heads"][0]["slope"]) == 3


def test_factors_without_a_slope_beyond_noise_stay_1() -> None:
    """A loss whose sign is random for each window has slopes that are noise alone."""

    def own(model: torch.nn.Module, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        sign = 1 - 2 * (ids.sum() % 2)
        logits = model(input_ids=ids, use_cache=False).logits
        return sign * F.cross_entropy(logits.transpose(1, 2), ids.roll(-1, 1), reduction="none")

    tokens = windows("held out", 12, 32)
    law = acutance.calibrate(decoder(), tokens, target="loss", loss=own, lengths=[32], passes=2)
    assert isinstance(law, LossCalibration)
    assert max(abs(one.slope[0] / one.error[0]) for one in law.slopes) > 1
    assert law.changed == 0
    assert set(law.factors) == {(1.0,)}
    result = acutance.judge(decoder(), tokens[:3], law)
    assert result.laws[0].verdict == "no difference found"


def test_one_factor_for_all_lengths() -> None:
    tokens = windows("training", 6, 128)
    law = acutance.calibrate(decoder(), tokens, target="loss", law="constant", passes=2)
    assert isinstance(law, LossCalibration)
    assert {len(row) for row in law.factors} == {1}
    assert law.family == "constant"


def test_a_fit_resumes_where_it_was_interrupted(
    fitted: tuple[LossCalibration, Tensor], tmp_path: Path
) -> None:
    law, tokens = fitted
    state = tmp_path / "state"
    given: dict[str, Any] = {"target": "loss", "lengths": [128, 512], "passes": 2, "save": state}
    seen: list[tuple[int, int, int]] = []

    def stop(tokens: int, number: int, most: int) -> None:
        seen.append((tokens, number, most))
        if len(seen) == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        acutance.calibrate(decoder(), tokens, advance=stop, save_every=4, **given)
    assert seen[0] == (512, 1, 2)
    assert seen[-1] == (512, 2, 2)
    model, ran = decoder(), []
    handle = model.model.layers[0].self_attn.register_forward_hook(lambda *_: ran.append(1))
    resumed = acutance.calibrate(model, tokens, resume=True, **given)
    handle.remove()
    assert len(ran) == 1 + 2 * (18 - 12) + 2  # found once; the loss is checked once, by two runs
    assert resumed == law
    assert acutance.calibrate(decoder(), tokens, resume=True, **given) == law  # nothing is left
    with pytest.raises(ValueError, match=r"--lengths was 128, 512 and is now 512$"):
        acutance.calibrate(decoder(), tokens, resume=True, **given | {"lengths": [512]})
    with pytest.raises(ValueError, match="it was written for another text"):
        acutance.calibrate(decoder(), tokens.flip(0), resume=True, **given)
    with pytest.raises(FileExistsError, match="state"):
        acutance.calibrate(decoder(), tokens, **given)
    state.write_bytes(state.read_bytes()[:-9])
    with pytest.raises(ValueError, match="contains no fit to the loss that can be resumed"):
        acutance.calibrate(decoder(), tokens, resume=True, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": 2.0}, "target='loss' holds nothing constant"),
        ({"reference": 64}, "target='loss' holds nothing constant"),
        ({"law": "ssmax"}, "target='loss' fits law='table', 'constant' or 'none', got law='ssmax'"),
        (
            {"lengths": [128]},
            "lengths must be at most 64, the tokens of the longest batch, got 128",
        ),
        ({"resume": True}, "resume needs save"),
        ({"target": "entropy", "loss": "next_token"}, "loss is for target='loss', got target="),
        ({"target": "los"}, "'los' is not one of .*, loss; did you mean 'loss'"),
        ({}, "at least 6 windows of 64 tokens, 4 to fit to and 2 to decide when to stop, got 5"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    tokens = windows("held out", 5, 64)
    batches = tokens if options.get("target", "loss") == "loss" else list(tokens.split(1))
    with pytest.raises(ValueError, match=message):
        acutance.calibrate(decoder(), batches, **{"target": "loss", **options})


def test_a_model_without_a_head_has_no_loss() -> None:
    tokens = windows("held out", 6, 64)
    with pytest.raises(LossError, match="has no language-model head"):
        acutance.calibrate(decoder().model, tokens, target="loss")
    with pytest.raises(ValueError, match="at least 2 windows, got 1"):
        loss_slopes(decoder(), tokens[:1])
