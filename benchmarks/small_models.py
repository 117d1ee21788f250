"""What probes and laws cost small models: decoding, structure, a law on a short text.

    python benchmarks/small_models.py                 # every case, one thread
    python benchmarks/small_models.py decode --rounds 11

Models are random. Before anything is timed, probed outputs are checked to be those of the plain
model. Rounds interleave the contenders, in turn forwards and backwards; the table gives medians of
each round's ratio to the plain run, in process CPU time. Each run opens its probe or law anew.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import acutance
from acutance.scaling import LogN

Contenders = dict[str, Callable[[], Any]]


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=688,
        vocab_size=1000,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def _probed(run: Callable[[], Any], model: Any, **options: Any) -> Callable[[], Any]:
    def probed() -> Any:
        with acutance.probe(model, **options):
            return run()

    return probed


def decode() -> Contenders:
    """48 tokens of a Llama of 4 layers, 256 wide, one at a time after 32."""
    model, ids = _llama(), torch.randint(0, 1000, (1, 32))
    options = {"max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False, "pad_token_id": 0}

    def run() -> Any:
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    return {"plain": run, "probe": _probed(run, model)}


def structure() -> Contenders:
    """1024 tokens of the same model, without structure and with it."""
    model, ids = _llama(), torch.randint(0, 1000, (1, 1024))

    def run() -> Any:
        return model(ids).logits

    return {
        "plain": run,
        "probe": _probed(run, model),
        "structure": _probed(run, model, structure=True),
    }


def law() -> Contenders:
    """A GPT-2 of 12 layers, 96 wide, on 16 tokens, eight times."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_layer=12, n_embd=96, n_head=12)
    model = GPT2Model._from_config(config, attn_implementation="sdpa").eval()
    ids = torch.randint(0, 1000, (1, 16))

    def run() -> Any:
        return [model(ids).last_hidden_state for _ in range(8)][-1]

    def scaled() -> Any:
        with acutance.apply(model, LogN(train_length=16)):
            return run()

    return {"plain": run, "law": scaled}


CASES = {"decode": decode, "structure": structure, "law": law}


def measure(contenders: Contenders, rounds: int) -> dict[str, float]:
    """Median ratios of CPU time to the plain run, and its seconds."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for turn in range(rounds):
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            start = time.process_time()
            contenders[name]()
            taken[name].append(time.process_time() - start)
    plain = taken["plain"]
    found = {
        name: statistics.median(one / other for one, other in zip(each, plain, strict=True))
        for name, each in taken.items()
    }
    return found | {"seconds": statistics.median(plain)}


def main() -> None:
    """Check and time the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for case in given.case or list(CASES):
            contenders = CASES[case]()
            plain = contenders["plain"]()
            for name, run in contenders.items():
                if name != "law" and not torch.equal(run(), plain):
                    raise SystemExit(f"{case}, {name}: the output is another")
            found = measure(contenders, given.rounds)
            print(case, {name: round(value, 3) for name, value in found.items()}, flush=True)


if __name__ == "__main__":
    main()
