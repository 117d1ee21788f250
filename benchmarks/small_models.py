"""What probes and laws cost small models: decoding, structure, a short text.

    python benchmarks/small_models.py                 # every case, one thread
    python benchmarks/small_models.py decode --rounds 11

Models are random. Before anything is timed, probed outputs are checked to be those of the plain
model. Rounds interleave the contenders, in turn forwards and backwards; the table gives medians of
each round's ratio to the plain run, in process CPU time. "probe" and "law" open anew for each run;
"probe later" and "law later" were opened, and have run once, before the clock starts; "multiply"
multiplies the queries of every layer by a constant, which is the least that a law can cost.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

import acutance
from acutance.comparison.timing import cpu_seconds
from acutance.scaling import LogN


class Contender(NamedTuple):
    """A run, and what is open around it while the clock runs: it runs there once before."""

    run: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] | None = None


Contenders = dict[str, Contender]


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


@contextmanager
def _multiplied() -> Iterator[None]:
    """Multiply every query by a constant."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend, factor = ALL_ATTENTION_FUNCTIONS["sdpa"], torch.full((1, 1, 1, 1), 1.5)

    def multiply(module: Any, query: Any, *rest: Any, **options: Any) -> Any:
        return attend(module, query * factor, *rest, **options)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = multiply
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attend


def _contenders(run: Callable[[], Any], **around: Callable[[], Any]) -> Contenders:
    """The plain run; opened anew and, but for structure, while it is open, each of the others."""

    def inside(opened: Callable[[], Any]) -> Callable[[], Any]:
        def runs() -> Any:
            with opened():
                return run()

        return runs

    all_of_them = {"plain": Contender(run)}
    for name, opened in around.items():
        if name != "multiply":
            all_of_them[name] = Contender(inside(opened))
        if name != "structure":
            later = name if name == "multiply" else f"{name} later"
            all_of_them[later] = Contender(run, opened)
    return all_of_them


def decode() -> Contenders:
    """48 tokens of a Llama of 4 layers, 256 wide, one at a time after 32."""
    model, ids = _llama(), torch.randint(0, 1000, (1, 32))
    options = {"max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False, "pad_token_id": 0}
    return _contenders(
        lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options),
        probe=lambda: acutance.probe(model),
        multiply=_multiplied,
        law=lambda: acutance.apply(model, LogN(train_length=16)),
    )


def structure() -> Contenders:
    """1024 tokens of the same model, without structure and with it."""
    model, ids = _llama(), torch.randint(0, 1000, (1, 1024))
    return _contenders(
        lambda: model(ids).logits,
        probe=lambda: acutance.probe(model),
        structure=lambda: acutance.probe(model, structure=True),
    )


def short() -> Contenders:
    """A GPT-2 of 12 layers, 96 wide, on 16 tokens, eight times."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_layer=12, n_embd=96, n_head=12)
    model = GPT2Model._from_config(config, attn_implementation="sdpa").eval()
    ids = torch.randint(0, 1000, (1, 16))
    return _contenders(
        lambda: [model(ids).last_hidden_state for _ in range(8)][-1],
        probe=lambda: acutance.probe(model),
        multiply=_multiplied,
        law=lambda: acutance.apply(model, LogN(train_length=16)),
    )


CASES = {"decode": decode, "structure": structure, "short": short}


def measure(contenders: Contenders, rounds: int) -> dict[str, float]:
    """Median ratios of CPU time to the plain run, and its seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            run, around = contenders[name]
            with nullcontext() if around is None else around():
                run()
                start = cpu_seconds()
                run()
                seconds[name].append(cpu_seconds() - start)
    plain = seconds["plain"]
    ratios = {
        name: statistics.median(one / other for one, other in zip(each, plain, strict=True))
        for name, each in seconds.items()
    }
    return ratios | {"seconds": statistics.median(plain)}


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
            plain = contenders["plain"].run()
            for name, (run, around) in contenders.items():
                if "law" not in name and around is None and not torch.equal(run(), plain):
                    raise SystemExit(f"{case}, {name}: the output is another")
            ratios = measure(contenders, given.rounds)
            print(case, {name: round(value, 3) for name, value in ratios.items()}, flush=True)


if __name__ == "__main__":
    main()
