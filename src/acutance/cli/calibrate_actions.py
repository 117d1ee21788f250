"""What ``acutance calibrate`` does once its options are read: run, show, write."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from acutance.calibration.apply_law import ApplyError, apply
from acutance.calibration.fit import Advance, calibrate
from acutance.calibration.law import AnyLaw, Law
from acutance.calibration.render import show
from acutance.calibration.request import check_asked, check_positions
from acutance.calibration.result import Calibration
from acutance.calibration.sample import Sample, draw, told
from acutance.corpus import load_model
from acutance.corpus import texts as corpus
from acutance.corpus.load_model import TextModel
from acutance.files import as_json, write_each
from acutance.report.screen import note
from acutance.scaling import SCALINGS, Scaling, get

__all__ = ["applying", "named_law", "run"]


def run(
    model: str | None,
    text: Sequence[str],
    *,
    lengths: Sequence[int] | None,
    given: dict[str, Any],
    windows: int,
    batch_size: int,
    tokenizer: str | None,
    attention: str | None,
    device: str,
    trust_remote_code: bool,
    allow_pickle: bool,
    allow_missing: bool,
    out: Path | None,
    to_json: Path | None,
    console: Callable[..., Any],
) -> Calibration:
    """Fit a law to a model on texts, show what it does and write what was asked for.

    Args:
        model: a directory or a name; None is the embedded default.
        text: files; none is the bundled page.
        lengths: of windows; None is an eighth of the model's longest to the whole of it.
        given: further arguments of :func:`acutance.calibrate`.
        windows: of each length at most, spread over the text; 0 is all.
        batch_size: windows of the longest length that are run at once.
        tokenizer: directory or name of a tokenizer; None is the model's own.
        attention: implementation.
        device: where to run.
        trust_remote_code: run code that comes with the model.
        allow_pickle: load weights that are not safetensors.
        allow_missing: go on where weights did not load.
        out: where the law goes.
        to_json: where the whole record goes.
        console: makes consoles.

    Raises:
        KeyboardInterrupt: if ^C came before the law was found.
        OSError: if a file cannot be read or written.
        RuntimeError: if the model cannot be loaded, or shows no attention.
        ValueError: if something does not fit.
    """
    texts = corpus.read(text) if text else [corpus.bundled()]
    with console().status("loading the model"):
        loaded = load_model.load(
            model,
            tokenizer=tokenizer,
            attention=attention,
            device=device,
            trust_remote_code=trust_remote_code,
            allow_pickle=allow_pickle,
            allow_missing=allow_missing,
        )
    places = tuple(lengths) if lengths is not None else _default_lengths(loaded)
    asked = ("target", "value", "reference", "law", "passes", "limit", "windowed")
    check_asked(lengths=places, **{name: given[name] for name in asked})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_positions(loaded.model, places)
    for warning in caught:
        console().print(note(("note", "yellow"), f": {warning.message}"))
    samples = draw(texts, loaded.tokenizer, places, windows, given["seed"])
    loaded.check_tokens(piece for sample in samples.values() for piece in sample.pieces)
    console().print(note((told(samples), "dim")), soft_wrap=True)
    batches = _batches(loaded, samples, batch_size)
    tokens = sum(part["input_ids"].numel() for parts in batches.values() for part in parts)
    with _progress(tokens, console()) as advance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lengths reach", UserWarning)  # said above
        found = calibrate(loaded.model, batches, lengths=places, advance=advance, **given)
    found = replace(found, weights_not_loaded=loaded.not_loaded)
    _write(found, out, to_json, console)
    return found


def _write(
    found: Calibration, out: Path | None, to_json: Path | None, console: Callable[..., Any]
) -> None:
    """Write what was asked for, and print the table unless the record takes its place."""
    steps: dict[str, Callable[[], object]] = {}
    if out is not None:
        steps["law"] = lambda: found.save(out)
    if str(to_json) == "-":
        steps[""] = lambda: sys.stdout.write(as_json(found.to_dict()) + "\n")
    else:
        if to_json is not None:
            steps["json"] = lambda: found.to_json(to_json)
        steps[""] = lambda: console(stderr=False).print(show(found))

    def written(what: str) -> None:
        if what:
            path = {"law": out, "json": to_json}[what]
            console().print(note((f"{what} written to", "dim"), f" {path}"))

    write_each(steps, written)


def _default_lengths(loaded: TextModel) -> tuple[int, ...]:
    """An eighth of the model's longest window, and its doubles."""
    longest = loaded.window(None)
    return tuple(sorted({max(2, longest >> step) for step in (3, 2, 1, 0)}))


def _batches(
    loaded: TextModel, samples: Mapping[int, Sample], size: int
) -> dict[int, list[dict[str, Any]]]:
    """The windows of every length, as many tokens at once as ``size`` of the longest have."""
    found, longest = {}, max(samples)
    for length, sample in samples.items():
        together = max(1, size * longest // length)
        found[length] = [
            _batch(loaded, sample.pieces[start : start + together])
            for start in range(0, len(sample.pieces), together)
        ]
    return found


def _batch(loaded: TextModel, pieces: Sequence[Sequence[int]]) -> dict[str, Any]:
    ids = torch.tensor(pieces, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(getattr(loaded.model, "config", None), "is_encoder_decoder", False):
        batch |= {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
    return batch


def named_law(text: str) -> AnyLaw:
    """A law from a file, or a scaling by name, as ``ssmax`` or ``log_n:train_length=512``.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there is neither a file nor a scaling of that name, or a parameter is wrong.

    Example:
        >>> named_law("log_n:train_length=512")
        LogN(train_length=512, base=None, n_min=16)
    """
    name, colon, parameters = text.partition(":")
    if not os.path.exists(text) and (name in SCALINGS or colon):
        return _scaling(name, parameters)
    if os.path.isdir(text):
        raise ValueError(f"law: {text} is a directory; give the file that calibrate -o wrote")
    if not os.path.exists(text):
        try:
            return get(text)
        except ValueError as error:
            raise ValueError(f"law: there is no file {text}, and {error}") from error
    return Law.load(text)


def _scaling(name: str, parameters: str) -> Scaling:
    from acutance.scaling import from_dict

    if not parameters:
        try:
            found = get(name)
        except ValueError as error:
            raise ValueError(f"law: {name} has parameters, as in log_n:train_length=512") from error
        assert isinstance(found, Scaling)
        return found
    record: dict[str, Any] = {"name": name}
    for part in parameters.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"law: parameters are name=number, got {part!r}")
        try:
            record[key.strip()] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"law: {key.strip()} is a number, got {value!r}") from error
    try:
        return from_dict(record)
    except TypeError as error:
        raise ValueError(f"law: {error}") from error


def applying(text: str) -> tuple[str, Callable[[torch.nn.Module], AbstractContextManager[Any]]]:
    """A law of :func:`named_law` in words that differ with it, and what puts it on a model."""
    law = named_law(text)
    if isinstance(law, Law):
        kept = json.dumps(law.record(), sort_keys=True)
        told = f"{Path(text).name} {hashlib.sha256(kept.encode()).hexdigest()[:12]}"
    else:
        told = str(law)

    @contextmanager
    def scaled(model: torch.nn.Module) -> Iterator[None]:
        applied = apply(model, law)
        try:
            yield
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a finished run that is resumed runs nothing
                applied.restore()
        if not applied.calls and applied.skipped:
            name, why = next(iter(applied.skipped.items()))
            raise ApplyError(f"the law changed no call: {name}: {why}")

    return told, scaled


@contextmanager
def _progress(tokens: int, console: Any) -> Iterator[Advance]:
    """A bar on standard error; silent where that is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("measuring without a law", total=tokens)

        def advance(count: int, number: int, most: int) -> None:
            bar.update(
                task,
                total=tokens * most,
                description="without a law" if number == 1 else f"pass {number} of {most}",
            )
            bar.advance(task, count)

        yield advance
