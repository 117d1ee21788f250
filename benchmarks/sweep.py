"""Sweep over every model type of transformers, or over another library; ``--help`` says how.

Each model type is built small in a process of its own, with limits of time and memory, run on input
of its kind with and without a probe, and judged against an independent witness and against its own
attention maps. The record is written after every model, so that an interrupted sweep goes on where
it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zoo.libraries import LIBRARIES

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "_static" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
SCHEMA = "acutance.sweep/1"
_HEAVY = {
    "transformers": "transformers.modeling_utils",
    "diffusers": "diffusers.models.transformers",
}
CPU_SECONDS, WALL_SECONDS, MEMORY = 120, 300, 6 << 30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; all of them where none is named")
    parser.add_argument(
        "--library", default="transformers", choices=["transformers", *LIBRARIES],
        help="what is swept (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="the record (default: that of the page)")
    parser.add_argument("--fresh", action="store_true", help="begin again, whatever the record has")
    parser.add_argument("--seconds", type=float, help="stop after so many seconds of process time")
    parser.add_argument("--page", action="store_true", help="only write the page from the record")
    parser.add_argument(
        "--laws", action="store_true", help="only put laws on what the record has as read"
    )
    parser.add_argument("--failed", action="store_true", help="again what did not build or run")
    chosen = parser.parse_args()
    path, types = chosen.json or record_of(chosen.library), chosen.types
    if chosen.failed:
        known = json.loads(path.read_text(encoding="utf-8"))["models"].values()
        types = [one["model_type"] for one in known if one["verdict"] in ("not built", "not run")]
    if chosen.laws:
        laws(types, path, fresh=chosen.fresh, seconds=chosen.seconds)
    elif not chosen.page:
        sweep(types, path, fresh=chosen.fresh, seconds=chosen.seconds, library=chosen.library)
    record = json.loads(path.read_text(encoding="utf-8"))
    from zoo import laws as under
    from zoo import page

    if chosen.json is None:
        PAGE.write_text(page.render(*records()), encoding="utf-8")
    counts = Counter(model["verdict"] for model in record["models"].values())
    print(", ".join(f"{verdict} {count}" for verdict, count in counts.most_common()))
    found = [
        under.Lawful(**model["law"]) for model in record["models"].values() if model.get("law")
    ]
    faults, refused = sum(bool(law.fault) for law in found), sum(bool(law.refused) for law in found)
    print(f"under a law: {len(found) - faults - refused}, refused {refused}, wrong {faults}")
    return 1 if counts["wrong"] or faults else 0


def record_of(library: str) -> Path:
    """Where the record of a library lies."""
    return RECORD if library == "transformers" else RECORD.with_stem(f"{RECORD.stem}-{library}")


def records() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The record of transformers, and those of other libraries that there are."""
    paths = {name: record_of(name) for name in LIBRARIES}
    others = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }
    return json.loads(RECORD.read_text(encoding="utf-8")), others


def sweep(
    types: list[str],
    path: Path,
    *,
    fresh: bool,
    seconds: float | None,
    library: str = "transformers",
    examined: Callable[[Any, str], dict[str, Any]] | None = None,
) -> None:
    """Examine model types that the record does not have yet, or all that are named."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    names, total = _names(library)
    record = _begun(path, fresh, library)
    record["registered"] = total
    wanted = types or [name for name in names if name not in record["models"]]
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise SystemExit(f"{library} has no model type {', '.join(unknown)}")
    spent, context = 0.0, _context(library)
    for name in wanted:
        found = (examined or partial(_examined, library=library))(context, name)
        spent += found["seconds"]
        record["models"][name] = found
        record["models"] = dict(sorted(record["models"].items()))
        _write(path, record)
        print(f"{name:34} {found['verdict']:14} {found['reason'][:110]}", flush=True)
        if seconds is not None and spent >= seconds:
            print(f"stopped after {spent:.0f} seconds of process time; run again to go on")
            return


def _names(library: str) -> tuple[list[str], int]:
    """What a sweep examines, and how many there are in all."""
    if library != "transformers":
        one = LIBRARIES[library]
        names = one.names()
        return names, one.total() if one.total is not None else len(names)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES), len(CONFIG_MAPPING_NAMES)


def laws(
    types: list[str],
    path: Path,
    *,
    fresh: bool,
    seconds: float | None,
    in_process: Callable[[Any, Any, str], dict[str, Any]] | None = None,
) -> None:
    """Put laws on model types whose attention was read: those without one, or all named."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from zoo.laws import Lawful

    record = _begun(path, False, "transformers")
    read = [name for name, model in record["models"].items() if model.get("read")]
    unread = sorted(set(types) - set(read))
    if unread:
        raise SystemExit(f"the record has no attention read of {', '.join(unread)}")
    spent, context = 0.0, _context()
    for name in types or read:
        model = record["models"][name]
        if "law" in model and not (types or fresh):
            continue
        found = (in_process or _in_process)(context, _under_laws, name)
        spent += found.pop("seconds")
        law = Lawful(**found)
        model["law"] = asdict(law)
        _write(path, record)
        print(f"{name:34} {(law.fault or law.refused or law.left)[:110]}", flush=True)
        if seconds is not None and spent >= seconds:
            print(f"stopped after {spent:.0f} seconds of process time; run again to go on")
            return


def _begun(path: Path, fresh: bool, library: str = "transformers") -> dict[str, Any]:
    """The record to go on with: what was found with other versions does not count."""
    import torch

    package = LIBRARIES[library].package if library in LIBRARIES else library
    versions = {
        "torch": torch.__version__.partition("+")[0],
        library: metadata.version(package),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    if path.exists() and not fresh:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("schema") == SCHEMA and record.get("versions") == versions:
            return dict(record)
    return {"schema": SCHEMA, "versions": versions, "models": {}}


def _context(library: str = "transformers") -> Any:
    context = multiprocessing.get_context("forkserver")
    heavy = _HEAVY.get(library, library.replace("-", "_"))
    context.set_forkserver_preload(["zoo.examine", heavy])
    return context


def _examined(
    context: Any, name: str, work: Any = None, library: str = "transformers"
) -> dict[str, Any]:
    found = _in_process(context, work or partial(_work, library=library), name)
    if "failed" in found:
        found = {"verdict": "not built", "reason": found["failed"], "seconds": found["seconds"]}
    found["model_type"] = name
    return found


def _in_process(context: Any, work: Any, name: str) -> dict[str, Any]:
    """What a piece of work sends; why nothing came, where it takes its process along."""
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=work, args=(name, theirs), daemon=True)
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
        found = {"failed": reason, "seconds": time.monotonic() - start}
    return found


def _work(name: str, pipe: Connection, library: str = "transformers") -> None:
    """Judge one model type."""
    from zoo.examine import Examined, examine

    try:
        with _quiet():
            found = examine(name, library)
    except BaseException as error:
        reason = f"the examination failed: {_line(error)}"
        found = Examined(name, "wrong", reason=reason)
    pipe.send(found.record())
    pipe.close()


def _under_laws(name: str, pipe: Connection) -> None:
    """Put laws on one model type."""
    from zoo.examine import under_laws

    with _quiet():
        found = under_laws(name)
    pipe.send(found)
    pipe.close()


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """One thread, limits of time and memory, and nothing printed: for a process of one model."""
    import logging
    import warnings

    import torch
    import transformers

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
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
