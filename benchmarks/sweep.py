"""Sweep over every model type of the installed transformers; ``--help`` says how.

Each model type is built small in a process of its own, with limits of time and memory, run on input
of its kind with and without a probe, and judged against an independent witness and against its own
attention maps. The record is written after every model, so that an interrupted sweep goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "_static" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
SCHEMA = "acutance.sweep/1"
CPU_SECONDS, WALL_SECONDS, MEMORY = 40, 300, 6 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all of them where none is named")
    parser.add_argument(
        "--json", type=Path, default=RECORD, help="the record (default: %(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="begin again, whatever the record has")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds of process time")
    parser.add_argument("--page", action="store_true", help="only write the page from the record")
    chosen = parser.parse_args()
    if not chosen.page:
        sweep(chosen.types, chosen.json, fresh=chosen.fresh, seconds=chosen.seconds)
    record = json.loads(chosen.json.read_text(encoding="utf-8"))
    from zoo import page

    if chosen.json == RECORD:
        PAGE.write_text(page.render(record), encoding="utf-8")
    counts = Counter(model["verdict"] for model in record["models"].values())
    print(", ".join(f"{verdict} {count}" for verdict, count in counts.most_common()))
    return 1 if counts["wrong"] else 0


def sweep(types: list[str], path: Path, *, fresh: bool, seconds: float | None) -> None:
    """Examine model types that the record does not have yet, or all that are named."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    record = _begun(path, fresh)
    record["registered"] = len(CONFIG_MAPPING_NAMES)
    wanted = types or [
        name for name in sorted(CONFIG_MAPPING_NAMES) if name not in record["models"]
    ]
    unknown = sorted(set(wanted) - set(CONFIG_MAPPING_NAMES))
    if unknown:
        raise SystemExit(f"transformers has no model type {', '.join(unknown)}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zoo.examine", "transformers.modeling_utils"])
    spent = 0.0
    for name in wanted:
        found = _examined(context, name)
        spent += found["seconds"]
        record["models"][name] = found
        record["models"] = dict(sorted(record["models"].items()))
        _write(path, record)
        print(f"{name:34} {found['verdict']:14} {found['reason'][:110]}", flush=True)
        if seconds is not None and spent >= seconds:
            print(f"stopped after {spent:.0f} seconds of process time; run again to go on")
            return


def _begun(path: Path, fresh: bool) -> dict[str, Any]:
    """The record to go on with: what was found with other versions does not count."""
    import torch
    import transformers

    versions = {
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    if path.exists() and not fresh:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("schema") == SCHEMA and record.get("versions") == versions:
            return dict(record)
    return {"schema": SCHEMA, "versions": versions, "models": {}}


def _examined(context: Any, name: str) -> dict[str, Any]:
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(name, theirs), daemon=True)
    start = time.monotonic()
    worker.start()
    theirs.close()
    found: dict[str, Any] | None = None
    try:
        if ours.poll(WALL_SECONDS):
            found = ours.recv()
    except EOFError:
        pass
    worker.join(5)
    if worker.exitcode is None:
        worker.kill()
        worker.join()
    if found is None:
        reason = f"its process ended with exit code {worker.exitcode}"
        if worker.exitcode in (-9, -24):  # killed, or out of processor time
            reason = f"more than {CPU_SECONDS} seconds or {MEMORY >> 30} GiB"
        found = {"verdict": "not built", "reason": reason, "seconds": time.monotonic() - start}
    found["model_type"] = name
    return found


def _work(name: str, pipe: Connection) -> None:
    """One model type, in a process of its own."""
    import contextlib
    import logging
    import warnings

    import torch
    import transformers
    from zoo.examine import Examined, examine

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    except ImportError:  # not on Windows
        pass
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    try:
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            found = examine(name)
    except BaseException as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        found = Examined(name, "wrong", reason=f"the examination failed: {reason}")
    pipe.send(found.record())
    pipe.close()


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
