"""Laws as a command names them: a file, or a scaling with its parameters."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from acutance.calibration.apply_law import ApplyError, apply
from acutance.calibration.law import AnyLaw, Law
from acutance.scaling import SCALINGS, Scaling, from_dict, get

__all__ = ["applying", "named_law"]


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
        raise ValueError(f"law: {text} is a directory; pass the file that calibrate -o wrote")
    if not os.path.exists(text):
        try:
            return get(text)
        except ValueError as error:
            raise ValueError(f"law: there is no file {text}, and {error}") from error
    return Law.load(text)


def _scaling(name: str, parameters: str) -> Scaling:
    if not parameters:
        try:
            scaling = get(name)
        except ValueError as error:
            raise ValueError(
                f"law: {name} needs parameters, as in log_n:train_length=512"
            ) from error
        assert isinstance(scaling, Scaling)
        return scaling
    record: dict[str, Any] = {"name": name}
    for part in parameters.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"law: parameters must be name=number, got {part!r}")
        try:
            record[key.strip()] = json.loads(value)
        except ValueError as error:
            raise ValueError(f"law: {key.strip()} must be a number, got {value!r}") from error
    try:
        return from_dict(record)
    except TypeError as error:
        raise ValueError(f"law: {error}") from error


def applying(text: str) -> tuple[str, Callable[[torch.nn.Module], AbstractContextManager[Any]]]:
    """Words for a law of :func:`named_law`, different for different laws, and what applies it."""
    law = named_law(text)
    if isinstance(law, Law):
        record = json.dumps(law.record(), sort_keys=True)
        words = f"{Path(text).name} {hashlib.sha256(record.encode()).hexdigest()[:12]}"
    else:
        words = str(law)

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
            raise ApplyError(f"the law scaled no call: {name}: {why}")

    return words, scaled
