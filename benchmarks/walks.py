"""How many functions and files of acutance a call passes through.

    python -m benchmarks.walks           a table
    python -m benchmarks.walks --json    the same as JSON

Each walk is run once before it is counted, so that imports, caches and compiled tables are there.
A call is a Python function of the package that is entered, a comprehension of Python 3.11 or older
included; a file counts once for each walk.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import acutance

PACKAGE = str(Path(acutance.__file__).parent)
DECODER = Path(PACKAGE) / "data" / "decoder" / "seed0"


@dataclass(frozen=True)
class Walk:
    """What one walk passes through.

    Attributes:
        name: the walk.
        calls: functions of the package that are entered.
        files: files of the package that they are in.
    """

    name: str
    calls: int
    files: int


def count(name: str, run: Callable[[], object]) -> Walk:
    """Run something twice, and count in the second run."""
    run()
    calls, files = 0, set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls += 1
            files.add(frame.f_code.co_filename)

    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(name, calls, len(files))


def attention_walks() -> list[Walk]:
    """From a query to the entropy of its row."""
    query, key, value = torch.randn(3, 1, 2, 16, 16)
    learned = query.clone().requires_grad_()

    def entropy(query: Tensor) -> Tensor:
        return acutance.attention(query, key, value, return_stats=True)[1].entropy

    return [
        count("query -> attention -> entropy", lambda: entropy(query)),
        count("the same with its gradient", lambda: entropy(learned).sum().backward()),
    ]


def llama(layers: int) -> Any:
    """A tiny Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def probe_walks(folder: Path) -> list[Walk]:
    """A probe of one layer, and what is shown of its heads."""
    from rich.console import Console

    from acutance.report import console_table, write_html

    model, ids = llama(1), torch.arange(32)[None]

    def enter_pass_leave() -> acutance.Probe:
        with torch.no_grad(), acutance.probe(model) as opened:
            model(input_ids=ids)
        return opened

    closed = enter_pass_leave()
    console = Console(file=io.StringIO(), width=100)
    return [
        count("probe of one layer: enter, pass, leave", enter_pass_leave),
        count("head -> terminal table", lambda: console.print(console_table(closed.summary()))),
        count("head -> page", lambda: write_html(closed.summary(), folder / "page.html")),
    ]


def law_walks() -> list[Walk]:
    """A law by its name, around one pass."""

    def apply(layers: int) -> Callable[[], None]:
        model, ids = llama(layers), torch.arange(32)[None]

        def run() -> None:
            with torch.no_grad(), acutance.apply(model, "log_n:train_length=16"):
                model(input_ids=ids)

        return run

    return [
        count("law by name, one layer", apply(1)),
        count("law by name, 12 layers", apply(12)),
    ]


def loss_walks() -> list[Walk]:
    """A search for a cache plan, and the comparison of what it found."""
    model = acutance.load_model(str(DECODER), head=True).model
    text = (Path(sysconfig.get_path("stdlib")) / "copy.py").read_bytes()[: 4 * 96]
    windows = torch.tensor(list(text)).view(4, 96)
    found = acutance.budget(model, windows, keep=0.6)
    return [
        count("budget -> plan", lambda: acutance.budget(model, windows, keep=0.6).plan),
        count("plan -> judge", lambda: acutance.judge(model, windows, {"plan": found.plan})),
    ]


def verify_walks() -> list[Walk]:
    """Verification of one layer."""
    model, ids = llama(1), torch.arange(32)[None]
    return [count("verify of one layer", lambda: acutance.verify(model, ids))]


def measure() -> list[Walk]:
    """Count every walk."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            *attention_walks(),
            *probe_walks(Path(folder)),
            *law_walks(),
            *loss_walks(),
            *verify_walks(),
        ]


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    walks = measure()
    if given.json:
        json.dump([asdict(walk) for walk in walks], sys.stdout, indent=1)
        print()
        return
    print(f"{'calls':>8} {'files':>6}  walk")
    for walk in walks:
        print(f"{walk.calls:8,} {walk.files:6}  {walk.name}")


if __name__ == "__main__":
    main()
