"""AttentionMonitor as a callback of TRL's trainers, with and without LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.training import AttentionMonitor

trl = pytest.importorskip("trl", reason="trl is in the extra integrations: make integrations")
datasets = pytest.importorskip("datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what the libraries warn of is theirs
    pytest.mark.filterwarnings("error::acutance.training.AttentionWarning"),
]
LAYER = "attention/model.layers.0.self_attn"
STEPS = pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
WORDS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(WORDS)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **sizes, **heads, **ids))


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "v_proj"])


def usual(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "seed": 3,
    }


def supervised(folder: Path, steps: int, monitor: Any, **given: Any) -> Any:
    """An SFTTrainer after its training."""
    rows = datasets.Dataset.from_dict({"text": ["abcabc", "bcdabcde", "cdexyz", "defghijkl"] * 4})
    trainer = trl.SFTTrainer(
        model=model(),
        args=trl.SFTConfig(
            per_device_train_batch_size=2, gradient_accumulation_steps=2, **usual(folder, steps)
        ),
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=[] if monitor is None else [monitor],
        **given,
    )
    trainer.train()
    return trainer


def reinforced(folder: Path, steps: int, monitor: Any, **given: Any) -> Any:
    """A GRPOTrainer after its training: a text of two uses, four answers each."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(text.count("a")) + 0.1 * len(set(text)) for text in completions]

    rows = datasets.Dataset.from_dict({"prompt": ["ab", "cde", "xyz", "q"] * 4})
    model().save_pretrained(folder / "start")  # the reference model is read from there
    trainer = trl.GRPOTrainer(
        model=str(folder / "start"),
        reward_funcs=reward,
        args=trl.GRPOConfig(
            per_device_train_batch_size=4,
            num_generations=4,
            num_iterations=2,
            max_completion_length=6,
            beta=0.1,
            model_init_kwargs={"dtype": "float32"},
            **usual(folder, steps),
        ),
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=[] if monitor is None else [monitor],
        **given,
    )
    trainer.train()
    return trainer


def logged(trained: Any, name: str) -> dict[int, float]:
    """Values of one name in the history, by step."""
    return {entry["step"]: entry[name] for entry in trained.state.log_history if name in entry}


@STEPS
@pytest.mark.parametrize("train", [supervised, reinforced])
@pytest.mark.parametrize("adapter", [False, True], ids=["all weights", "LoRA"])
def test_losses_and_weights_are_equal_and_only_training_passes_count(
    train: Any, adapter: bool, steps: int, tmp_path: Path
) -> None:
    def options() -> dict[str, Any]:
        return {"peft_config": lora()} if adapter else {}

    monitor = AttentionMonitor(every=2, false_alarms=None, rollouts=True)
    plain = train(tmp_path, steps, None, **options())
    watched = train(tmp_path, steps, monitor, **options())
    losses = logged(plain, "loss")
    assert sorted(losses) == list(range(1, steps + 1))
    assert losses == logged(watched, "loss")
    assert logged(plain, "grad_norm") == logged(watched, "grad_norm")
    weights, others = plain.model.state_dict(), watched.model.state_dict()
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())
    entropy = logged(watched, f"{LAYER}/entropy")
    assert sorted(entropy) == [1, *range(2, steps + 1, 2)]
    record = monitor.last
    assert record is not None
    layer = record.summary.layers[0]
    assert layer.module == "model.layers.0.self_attn", "the name is the same with an adapter"
    rollouts = logged(watched, f"rollout/{LAYER}/entropy")
    if train is supervised:
        assert layer.calls == 2, "one pass for each of the accumulated batches"
        assert record.rollout is None
        assert not rollouts
    else:
        assert layer.calls == 1, "one training pass; its text was generated without gradients"
        generating = logged(watched, "completions/mean_length")
        assert rollouts
        assert set(rollouts) < set(entropy), "each text is used in two steps"
        assert generating


def test_a_measured_step_sees_as_many_rows_as_tokens_are_trained_on(tmp_path: Path) -> None:
    rows: list[int] = []

    class Recorder(AttentionMonitor):
        def step(self) -> Any:
            record = super().step()
            if record is not None:
                rows.append(record.summary.layers[0].rows)
            return record

    lengths: list[int] = []
    monitor = Recorder(every=1, false_alarms=None)
    original = trl.GRPOTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        masks = [inputs["prompt_mask"], inputs["completion_mask"]]
        lengths.append(int(sum(mask.sum() for mask in masks)))
        return original(self, model, inputs, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl.GRPOTrainer, "compute_loss", compute_loss)
        reinforced(tmp_path, 4, monitor)
    assert len(rows) == 4
    assert rows == lengths
