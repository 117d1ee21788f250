"""Verify every model type of the installed transformers, built small: where does it raise an alarm?

``python benchmarks/verification.py --json FILE [TYPE ...]`` goes on where the record stops.
Findings are differences between a model type and its configuration, or false alarms: read them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import sweep

IMPLEMENTATIONS = ("eager", "sdpa")


def verified(name: str, pipe: Connection) -> None:
    """Verify one model type, in a process of its own."""
    found: dict[str, Any] = {"status": "not built", "findings": [], "notes": [], "checks": 0}
    with sweep._quiet():
        try:
            found |= _verified(name)
        except BaseException as error:
            found |= {"status": "not verified", "notes": [sweep._line(error)]}
    pipe.send(found)
    pipe.close()


def _verified(name: str) -> dict[str, Any]:
    """What verify finds in one model type, on token ids if it reads them."""
    import torch

    import acutance
    from zoo.examine import Examined, runnable

    built = runnable(name, Examined(name))
    if built is None:
        return {}
    model, _, _, given = built
    tried: list[Any] = [given]
    ids = given.get("input_ids")
    if ids is not None and ids.dim() == 2:
        chance = torch.Generator().manual_seed(5)
        tried.insert(0, torch.randint(3, max(int(ids.max()) + 1, 5), (2, 20), generator=chance))
    for inputs in tried:
        try:
            found = acutance.verify(model, inputs, implementations=IMPLEMENTATIONS, backward=True)
        except ValueError:
            if inputs is given:
                raise
            continue
        return {
            "status": "clean" if found.ok else "finding",
            "findings": [str(finding) for finding in found.findings],
            "notes": list(found.notes),
            "checks": len(found.checks),
        }
    return {}


def main() -> int:
    """Verify the model types that the record does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all that the sweep ran, if none")
    parser.add_argument("--json", type=Path, required=True, help="the record")
    chosen = parser.parse_args()
    record = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    ran = json.loads(sweep.RECORD.read_text(encoding="utf-8"))["models"]
    left_out = ("not built", "not run")
    names = chosen.types or [
        name
        for name, model in ran.items()
        if model["verdict"] not in left_out and name not in record
    ]
    context = sweep._context()
    for name in names:
        record[name] = sweep._in_process(context, verified, name)
        sweep._write(chosen.json, record)
        print(name, record[name].get("status"), *record[name].get("findings", ()), flush=True)
    counts = Counter(found.get("status", "failed") for found in record.values())
    print(", ".join(f"{status} {count}" for status, count in counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
