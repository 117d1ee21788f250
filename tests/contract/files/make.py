"""Write files of every command into this folder: ``python -m tests.contract.files.make NAME ...``.

They are the contract of the file formats, so they are written anew only when a format gets a new
version, and then beside the old ones.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

from acutance.testing import run
from tests.contract.trained import directory

FOLDER = Path(__file__).parent
MODEL = ["decoder", "--text", "code.txt"]

#: What each command gets, in a folder that holds the model and the text. A second run of a command
#: has a word more in its name.
COMMANDS = {
    "probe": [
        *MODEL, "--layers", "0", "--heads", "0", "--length", "64", "--every", "16",
        "--noise", "--gaps", "--structure", "--examples", "2", "--span", "start=0:4",
        "--map", "0.1:0", "--save", "state.safetensors",
        "--json", "probe.json", "--csv", "probe.csv", "--parquet", "probe.parquet",
        "--keep-qk", "queries_keys.safetensors",
    ],
    "diff": [
        "state.safetensors", "state.safetensors", "--metric", "entropy",
        "--json", "diff.json", "--csv", "diff.csv",
    ],
    "calibrate": [
        *MODEL, "--target", "loss", "--lengths", "128,384", "--windows", "12", "--passes", "2",
        "--save", "calibration.safetensors", "-o", "law.json", "--json", "calibration.json",
    ],
    "calibrate law": [
        *MODEL, "--lengths", "128,1024", "--windows", "12", "-o", "law.json",
    ],
    "judge": [
        *MODEL, "--law", "log_n:train_length=64", "--law", "off:1.2", "--lengths", "128",
        "--windows", "4", "--save", "judge.safetensors", "--json", "judge.json",
    ],
    "budget": [
        *MODEL, "--lengths", "96", "--windows", "4", "--keep", "0.5", "--streaming", "2,14",
        "--save", "budget.safetensors", "-o", "plan.json", "--json", "budget.json",
    ],
    "plan": [
        "budget.json", "-o", "plan_again.json", "--export", "kvpress:press.py",
        "--export", "duo_attention:duo",
        "--export", "layer_types:layer_types.json",
    ],
    "extend": [
        *MODEL, "--train-length", "128", "--to", "256", "--windows", "4", "--final", "2",
        "--no-entropy", "--one-for-all",
        "--law", "window:size=128", "--save", "extend.safetensors", "--json", "extend.json",
        "-o", "extended",
    ],
    "verify": ["decoder", "--length", "16", "--implementations", "sdpa", "--json", "verify.json"],
    "compare": [
        "--n", "16", "--d", "8", "--heads", "2", "--samples", "2", "--mechanism", "softmax",
        "--mechanism", "relu2", "--no-costs", "--json", "compare.json",
    ],
    "reproduce": [
        "sparsity_identity", "--quick", "--no-figures", "--out", "records",
        "--json", "records.json",
    ],
    "alarms": ["log.jsonl", "--json", "alarms.json"],
    "predict": ["--n", "64", "--logit-std", "2", "--json", "predict.json"],
    "temperature": ["--n", "64", "--fraction", "0.5", "--json", "temperature.json"],
}  # fmt: skip


def log() -> str:
    """A monitor's log of 1,500 steps in which a layer's logits begin to grow after 1,000."""
    lines = []
    for step in range(10, 1501, 10):
        deviation = 2.0 + 0.05 * math.sin(step) + max(0, step - 1000) * 0.02
        record = {"step": step, "attention/layers.0.attn/logit_std": round(deviation, 4)}
        lines.append(json.dumps(record) + "\n")
    return "".join(lines)


def prepare(folder: Path) -> None:
    """Put what the commands read into a folder."""
    shutil.copytree(directory(), folder / "decoder")
    shutil.copy(FOLDER.parents[1] / "data" / "code.txt", folder)
    (folder / "log.jsonl").write_text(log(), encoding="utf-8")


def main() -> None:
    """Run every command, or those that are named, in a folder of its own and keep what it wrote."""
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        prepare(Path(name))
        for command in sys.argv[1:] or COMMANDS:
            result = run([command.split()[0], *COMMANDS[command]])
            print(command, result.exit_code, result.err)
        for part in (
            "decoder",
            "code.txt",
            "log.jsonl",
            "press.py",
            "extended/page.html",
            "plan_again.json",
        ):
            if Path(part).is_dir():
                shutil.rmtree(part)
            else:
                Path(part).unlink(missing_ok=True)
        shutil.copytree(name, FOLDER, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
