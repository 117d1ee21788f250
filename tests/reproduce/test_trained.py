"""Training resumes to the bit, texts stay apart, and the decoder is what its record says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acutance
from acutance.reproduce import decoder
from acutance.scaling import LogN
from acutance_lab import texts, trained
from acutance_lab.encoder import Encoder
from acutance_lab.experiments import small_tasks
from acutance_lab.training import Plan, fit, seeded

Loss = Callable[[nn.Module, torch.Generator], Tensor]


class StoppedError(Exception):
    """What stands for an interrupt."""


def squares(stop_at: int | None = None) -> Loss:
    """A regression whose loss counts its calls, and may stop."""
    calls = [0]

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        if calls[0] == stop_at:
            raise StoppedError("stopped")
        calls[0] += 1
        x = torch.randn(8, 3, generator=generator)
        return F.mse_loss(model(x)[:, 0], x.sum(1))

    return loss


def linear() -> nn.Linear:
    return nn.Linear(3, 1)


def test_a_training_that_was_stopped_ends_at_the_same_weights(tmp_path: Path) -> None:
    plan, keep = Plan("squares", 60, 1e-2, warm=5, fall=0.5, decay=0.1, clip=1.0), tmp_path / "c"
    whole = fit(linear, squares(), plan)
    with pytest.raises(StoppedError, match="stopped"):
        fit(linear, squares(stop_at=37), plan, keep=keep, every=0.0)
    taken = 60 - 37
    rest = fit(linear, squares(stop_at=taken), plan, keep=keep)  # one step more would stop it
    for one, other in zip(whole.parameters(), rest.parameters(), strict=True):
        assert torch.equal(one, other)
    again = fit(linear, squares(stop_at=0), plan, keep=keep)  # finished: nothing is trained
    assert torch.equal(again.weight, whole.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("spoil", ["other plan", "broken file"])
def test_a_checkpoint_of_something_else_is_not_used(tmp_path: Path, spoil: str) -> None:
    plan, keep = Plan("squares", 20, 1e-2), tmp_path / "c"
    fit(linear, squares(), plan if spoil == "broken file" else Plan("squares", 20, 1e-3),
        keep=keep)  # fmt: skip
    if spoil == "broken file":
        keep.write_bytes(keep.read_bytes()[:100])
    found = fit(linear, squares(), plan, keep=keep)
    assert torch.equal(found.weight, fit(linear, squares(), plan).weight)  # type: ignore[arg-type]


def test_a_loss_that_is_not_a_number_ends_the_training() -> None:
    plan = Plan("nan", 1, 1e-2)
    with pytest.raises(FloatingPointError, match="nan: the loss is nan after 1 steps"):
        fit(linear, lambda model, _: model(torch.zeros(1, 3)).sum() * math.nan, plan)


def test_seeds_give_other_weights_and_leave_the_callers_numbers() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with seeded(1):
        one = nn.Linear(2, 2)
    assert torch.equal(torch.get_rng_state(), before)
    with seeded(2):
        assert not torch.equal(one.weight, nn.Linear(2, 2).weight)


def test_parts_of_the_standard_library_have_no_file_in_common() -> None:
    training, held_out = texts.files("training"), texts.files("held out")
    assert not set(training) & set(held_out)
    assert len(training) > 4 * len(held_out) > 40
    assert not any("test" in path.parts for path in training + held_out)
    assert texts.digest(training) != texts.digest(training[:-1])


def test_a_library_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no source files in"):
        texts.files("training", tmp_path)
    with pytest.raises(ValueError, match="part must be 'training' or 'held out', got 'test'"):
        texts.files("test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a window of 5 bytes is longer than the text, 4 bytes"):
        texts.sample_windows(torch.zeros(4, dtype=torch.uint8), 5, 1, torch.Generator())


def test_tokens_that_count_as_many_give_the_answer_of_the_whole_string() -> None:
    with seeded(0):
        model = Encoder(
            3, 1, width=16, heads=2, hidden=32, layers=2, law=LogN(base=math.e), kinds=3
        ).eval()
    whole = torch.tensor([[2, 1] + [0] * 7 + [1] * 23])
    few, counts = torch.tensor([[2, 1, 0, 1]]), torch.tensor([[1.0, 1.0, 7.0, 23.0]])
    assert torch.allclose(model(whole)[0, 0], model(few, counts)[0, 0], atol=1e-5)
    other = torch.tensor([[1.0, 1.0, 8.0, 22.0]])
    assert not torch.allclose(model(whole)[0, 0], model(few, other)[0, 0], atol=1e-5)


def test_a_model_that_no_longer_sees_the_first_symbol_is_at_chance_exactly() -> None:
    with seeded(0):
        model = Encoder(3, 1, width=16, heads=1, hidden=64, layers=2, kinds=3).eval()
    drawn = torch.randn(8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert small_tasks.accuracy_by_counts(model, small_tasks.FAR, drawn) == 0.5

    def majority(ids: Tensor, counts: Tensor) -> Tensor:  # of the other symbols
        return (counts[:, 3] - counts[:, 2])[:, None, None]

    def seeing(ids: Tensor, counts: Tensor) -> Tensor:
        return (2.0 * ids[:, 1] - 1)[:, None, None]

    for n in (10, 1000, small_tasks.FAR):
        assert small_tasks.accuracy_by_counts(majority, n, drawn) == 0.5  # type: ignore[arg-type]
        assert small_tasks.accuracy_by_counts(seeing, n, drawn) == 1.0  # type: ignore[arg-type]


def test_the_weights_fit_into_two_megabytes() -> None:
    files = [trained.directory(seed) / "model.safetensors" for seed in trained.SEEDS]
    assert sum(path.stat().st_size for path in files) <= 2_000_000


def held_out(length: int, count: int) -> Tensor:
    text = texts.read(texts.files("held out"))
    return texts.sample_windows(text, length, count, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("seed", trained.SEEDS)
def test_a_decoder_predicts_text_it_has_not_seen(seed: int) -> None:
    ids = held_out(trained.TRAIN_LENGTH + 1, 32)
    with torch.no_grad():
        losses = trained.next_byte_losses(decoder(seed), ids)
    loss, error = float(losses.mean()), float(losses.mean(1).std()) / math.sqrt(len(ids))
    assert loss < 2.0 < math.log(256)  # the frequencies of bytes alone give about 3.3
    record = json.loads((trained.directory(seed) / "training.json").read_text("utf-8"))
    assert record["seed"] == seed
    told = record["held_out_loss"]["128"]  # of the last 64 bytes, on more windows
    assert abs(float(losses[:, -64:].mean()) - told) < 5 * error + 0.15


def test_weights_are_what_transformers_reads_and_tokens_are_bytes() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    folder = trained.directory()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = held_out(64, 2)
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=ids).logits, decoder()(input_ids=ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n\treturn  'é 漢'\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_a_decoder_is_probed_scaled_and_generates() -> None:
    model, ids = decoder(), held_out(256, 1)
    with acutance.probe(model, metrics=["entropy"]) as plain, torch.no_grad():
        model(input_ids=ids)
    law = LogN(train_length=trained.TRAIN_LENGTH)
    with (
        acutance.apply(model, law),
        acutance.probe(model, metrics=["entropy"]) as scaled,
        torch.no_grad(),
    ):
        out = model.generate(ids[:, :150], max_new_tokens=4, do_sample=False)
    assert len(plain.summary().mean("entropy")) == 12
    assert scaled.summary().mean("entropy").isfinite().all()
    assert out.shape == (1, 154)


def test_a_seed_that_does_not_come_with_it_is_named() -> None:
    with pytest.raises(
        ValueError, match="bundled decoder has seed 0, got 7: train others with tools/train_decoder"
    ):
        decoder(7)


def test_training_is_deterministic() -> None:
    text = texts.read(texts.files("training")[:3])
    configuration = trained.configuration()
    one, other = (trained.train("d", configuration, 3, text, steps=1) for _ in range(2))
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    with seeded(3):
        fresh = type(one)(configuration)
    assert not torch.equal(one.lm_head.weight, fresh.lm_head.weight)


def test_records_name_the_text_and_versions() -> None:
    for seed in trained.SEEDS:
        record = json.loads((trained.directory(seed) / "training.json").read_text("utf-8"))
        assert record["text"]["python"].count(".") == 2
        assert record["text"]["training"]["files"] > 100
        assert record["train_length"] == trained.TRAIN_LENGTH
        assert record["held_out_loss"]["128"] < record["held_out_loss"]["1024"]
