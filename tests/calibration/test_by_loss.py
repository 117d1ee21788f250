"""Laws fitted to the loss: exact derivatives, steps that help, nothing changed by noise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import acutance
from acutance.calibration import gate_slopes, gradients, loss_slopes
from acutance.calibration.losses import NextToken
from acutance.calibration.result import Calibration, HeadCalibration, beyond_noise
from acutance.scaling import Window
from acutance_lab.trained import decoder


@pytest.mark.parametrize("target", ["entropy", "loss"])
def test_untrained_weights_are_said_as_a_probe_says_them(
    built: Callable[[str, str], torch.nn.Module], target: str, tmp_path: Path
) -> None:
    tokens = torch.randint(3, 97, (8, 32), generator=torch.Generator().manual_seed(1))
    model = built("llama", "sdpa")
    for part in model.modules():
        if "Norm" in type(part).__name__:
            part.weight.data.fill_(1.0)
    trained = decoder()
    for one, is_random in ((model, True), (trained, False)):
        with acutance.probe(one) as probe, torch.no_grad():
            one(tokens)
        assert probe.summary().about.get("untrained", False) is is_random
        found = acutance.calibrate(
            one, list(tokens.split(1)), target=target, lengths=[16, 32], passes=2
        )
        assert found.untrained is is_random
        *first, last = found.sentences()
        assert any(line.startswith("Untrained: ") for line in first) is is_random
        assert ("can raise the loss of another" in last) is not getattr(found, "empty", False)
        found.save(tmp_path / "law.json")
        again = acutance.Law.load(tmp_path / "law.json")
        assert again.untrained is is_random
        assert ("untrained" in again.record()) is is_random  # older releases read other laws


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("kind", ["factors", "gates"])
def test_a_model_is_prepared_once_for_all_windows_and_put_back(
    monkeypatch: pytest.MonkeyPatch, kind: str, stopped: bool
) -> None:
    made: list[torch.nn.Module] = []
    prepared = gradients.prepared

    def counted(model: torch.nn.Module) -> AbstractContextManager[None]:
        made.append(model)
        return prepared(model)

    def advance(*_: int) -> None:
        read.append(0)
        if stopped and len(read) == 2:
            raise KeyboardInterrupt

    monkeypatch.setitem(vars(gradients), "prepared", counted)
    model = decoder().train()
    read: list[int] = []
    tokens = torch.randint(3, 97, (4, 32), generator=torch.Generator().manual_seed(1))
    before = model(tokens).logits
    with suppress(KeyboardInterrupt):
        if kind == "factors":
            loss_slopes(model, tokens, lengths=[16, 32], advance=advance)
        else:
            gate_slopes(model, tokens, [Window(8)], advance=advance)
    assert len(made) == 1
    assert len(read) == (2 if stopped else 4)
    assert model.training
    assert all(one.requires_grad for one in model.parameters())
    assert torch.equal(before, model(tokens).logits)


@pytest.mark.parametrize("window", [5, "sliding", [], [5]])
def test_a_window_is_a_window(window: object) -> None:
    tokens = torch.zeros(8, 32, dtype=torch.int64)
    with pytest.raises(TypeError, match="window must be a Window or a list of them, got "):
        acutance.calibrate(decoder(), tokens, target="loss", window=window)  # type: ignore[arg-type]


def test_a_fit_that_finds_nothing_says_so(built: Callable[[str, str], torch.nn.Module]) -> None:
    tokens = torch.randint(3, 97, (8, 32), generator=torch.Generator().manual_seed(1))
    choices = (Window(size) for size in (8,))
    found = acutance.calibrate(
        built("llama", "sdpa"), tokens, target="loss", law="none", window=choices, passes=2
    )
    assert getattr(found, "empty", False)
    said = list(found.sentences())
    assert any(line.startswith("No law was found that lowers the loss of ") for line in said)


def test_a_model_may_name_no_head() -> None:
    tokens = torch.randint(3, 97, (2, 32), generator=torch.Generator().manual_seed(1))
    expected = NextToken().score(decoder(), {"input_ids": tokens}).loss
    model, loss = decoder(), NextToken()
    model.get_output_embeddings = None
    loss.check(model, {"input_ids": tokens})
    actual = loss.score(model, {"input_ids": tokens}).loss
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0, equal_nan=True)


def test_one_window_shows_nothing_beyond_noise() -> None:
    slope, error = torch.tensor([[0.5, -0.1]]), torch.tensor([[0.1, torch.nan]])
    assert beyond_noise(slope, error, 1).tolist() == [[False, False]]


def test_a_value_that_is_unknown_is_a_dash() -> None:
    nan = (torch.nan,)
    head = HeadCalibration(
        0, 0, "layer", (8,), (1.0,), nan, nan, (2.0,), nan, (1.5,), (0.1,), ("missed",)
    )
    tokens = torch.randint(3, 97, (2, 32), generator=torch.Generator().manual_seed(1))
    found = acutance.calibrate(decoder(), list(tokens.split(1)), lengths=[16, 32], passes=2)
    assert isinstance(found, Calibration)
    cells = [row[-1].value for row in replace(found, heads=(head,)).table().rows]
    assert cells == ["–", "2", "1.5±0.1"]
