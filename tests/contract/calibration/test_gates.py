"""Gates between heads' outputs: exact derivatives, windows chosen by the loss of other text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import acutance
from acutance.calibration import LossCalibration, gate_slopes
from acutance.scaling import Window
from tests.contract import texts
from tests.contract.trained import decoder


def windows(part: str, count: int, length: int, seed: int = 5) -> Tensor:
    text = texts.read(texts.files(part))
    return texts.sample_windows(text, length, count, torch.Generator().manual_seed(seed)).long()


def tokens(count: int = 3, length: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 97, (count, length), generator=generator)


@contextmanager
def mixed(model: Any, module: str, heads: list[int], gate: float, window: Window) -> Iterator[None]:
    """Eager attention whose heads are (1 - gate) their own output and gate that of the window."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer = model.get_submodule(module)

    def attend(asking: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any):
        output, none = sdpa_attention_forward(asking, query, key, value, *rest, **more)
        if asking is layer:
            shape = query.shape[1], query.shape[2], key.shape[2]
            group = shape[0] // key.shape[1]
            apart = torch.arange(shape[1])[:, None] - torch.arange(shape[2])
            read = (apart >= 0) & ((apart < window.size) | (torch.arange(shape[2]) < window.sinks))
            scores = query @ key.repeat_interleave(group, 1).mT * more["scaling"]
            weights = scores.masked_fill(~read, -torch.inf).softmax(-1)
            other = (weights @ value.repeat_interleave(group, 1)).transpose(1, 2)
            output = output.clone()
            output[:, :, heads] += gate * (other - output)[:, :, heads]
        return output, none

    AttentionInterface.register("mixed", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("mixed")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def loss_of(model: Any, batch: Tensor) -> float:
    with torch.no_grad():
        return sum(float(model(one, labels=one).loss) for one in batch.split(1)) / len(batch)


@pytest.mark.parametrize("key_heads", [False, True])
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3",))]
)
def test_slopes_are_the_derivatives_by_a_gate(
    name: str, key_heads: bool, built: Callable[[str, str], torch.nn.Module]
) -> None:
    """By central differences of the loss of a model that has the gate."""
    model, window = built(name, "sdpa"), Window(6, sinks=2)
    slopes = gate_slopes(model, tokens(), [Window(4), window], key_heads=key_heads)
    config: Any = model.config
    group = config.num_attention_heads // config.num_key_value_heads if key_heads else 1
    assert len(slopes) == 2 * config.num_attention_heads // group
    step = 0.02
    for one in (slopes[0], slopes[-1]):
        heads = [one.head * group + i for i in range(group)]
        sides = []
        for gate in (step, -step):
            with mixed(model, one.module, heads, gate, window):
                sides.append(loss_of(model, tokens()))
        expected = (sides[0] - sides[1]) / (2 * step)
        assert abs(expected) > 1e-6
        assert one.slope[1] == pytest.approx(expected, rel=0.02, abs=2e-6)
        assert one.slope[0] != one.slope[1]
        assert one.curvature[1] > 0


@dataclass(frozen=True)
class Itself:
    """An alternative that changes nothing."""

    words = "itself"

    def output(self, call: Any) -> Tensor:
        return call.rebuild(False)[0]


def test_an_alternative_that_changes_nothing_costs_nothing() -> None:
    heads = gate_slopes(decoder(), windows("held out", 2, 64), [Itself(), Window(64), Window(16)])
    assert max(abs(number) for one in heads for number in one.slope[:2]) < 1e-6
    assert all(one.slope[2] != 0.0 for one in heads)


def test_errors_are_those_between_windows() -> None:
    batch = windows("held out", 3, 96)
    each = torch.tensor(
        [
            [one.slope for one in gate_slopes(decoder(), [part, part], [Window(32)])]
            for part in batch.split(1)
        ]
    )
    heads = gate_slopes(decoder(), batch, [Window(32)])
    slopes = torch.tensor([one.slope for one in heads])
    torch.testing.assert_close(slopes, each.mean(0), atol=1e-6, rtol=1e-4)
    errors = torch.tensor([one.error for one in heads])
    torch.testing.assert_close(errors, each.std(0) / 3**0.5, atol=1e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def chosen() -> tuple[LossCalibration, Tensor]:
    batch = windows("training", 9, 256, 0)
    sizes = [Window(4), Window(128)]
    law = acutance.calibrate(decoder(), batch, target="loss", law="none", window=sizes, passes=2)
    assert isinstance(law, LossCalibration)
    return law, batch


def test_windows_chosen_by_the_loss_help_on_other_text(
    chosen: tuple[LossCalibration, Tensor], tmp_path: Path
) -> None:
    """Beyond the 128 bytes of training a window of them helps; one of 4 keys does not."""
    law, _ = chosen
    assert len(law.gates) == len(law.reads) == 12
    assert law.delta < -3 * law.error
    assert sum(window == Window(128) for window in law.reads) >= 6
    assert law.factors == law.slopes == ()
    law.save(tmp_path / "law.json")
    loaded = acutance.Law.load(tmp_path / "law.json")
    result = acutance.judge(decoder(), windows("held out", 8, 256), {"law": law, "file": loaded})
    assert result["law"].verdict == "helps"
    assert result["law"].delta < -0.1
    assert result["file"].delta == pytest.approx(result["law"].delta, abs=1e-6)
    assert law.to_dict()["gates"][0]["slope"] == list(law.gates[0].slope)


def test_no_head_has_a_window_where_none_helps() -> None:
    """Inside the trained length a window of 4 keys only hides what the model reads."""
    batch = windows("training", 6, 64)
    law = acutance.calibrate(
        decoder(), batch, target="loss", law="none", window=Window(4), passes=2
    )
    assert isinstance(law, LossCalibration)
    assert set(law.reads) == {None}
    assert law.delta == 0.0
    assert law.layers == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"law": "none"}, ValueError, "law='none' fits no factors: give a window"),
        ({"target": "entropy", "window": Window(8)}, ValueError, "window is for target='loss'"),
        ({"window": [8]}, TypeError, r"window must be a Window or a list of them, got \[8\]"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    batch = list(windows("held out", 6, 64).split(1))
    with pytest.raises(error, match=message):
        acutance.calibrate(decoder(), batch, **{"target": "loss", **options})


def test_what_gates_refuse() -> None:
    with pytest.raises(ValueError, match="alternatives must contain at least one window"):
        gate_slopes(decoder(), windows("held out", 2, 64), [])
    with pytest.raises(ValueError, match="at least 2 windows, got 1"):
        gate_slopes(decoder(), windows("held out", 1, 64), [Window(8)])
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    plain = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()

    def own(model: torch.nn.Module, batch: Any) -> Tensor:
        return model(batch["input_ids"]).square().mean(-1)

    with pytest.raises(
        ValueError, match=r"can have gates: .* does not use transformers' attention"
    ):
        gate_slopes(plain, [torch.randn(1, 8, 16)] * 2, [Window(4)], loss=own)
