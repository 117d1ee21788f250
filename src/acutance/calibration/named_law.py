"""Laws as a command names them: a file, or a scaling or window with its parameters."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from acutance.calibration.apply_law import ApplyError, apply
from acutance.calibration.law import AnyLaw, Law
from acutance.scaling import SCALINGS, Scaling, Window, from_dict, get

__all__ = ["applying", "named_law"]


def named_law(text: str) -> AnyLaw:
    """A law from a file, or by name, as ``log_n:train_length=512`` or ``window:size=4096,sinks=4``.

    A scaling and a window are joined by a plus sign.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if there is neither a file nor a law of that name, or a parameter is wrong.

    Example:
        >>> named_law("log_n:train_length=512")
        LogN(train_length=512, base=None, n_min=16)
    >>> named_law("ssmax+window:size=64,far=clamp")[1].far
    'clamp'
    """
    parts = re.split(r"\+(?=[a-z])", text)
    if len(parts) > 1 and not os.path.exists(text):
        return _pair(text, [_named(part) for part in parts])
    return _named(text)


def _pair(text: str, parts: list[AnyLaw]) -> tuple[Scaling, Window]:
    """The scaling and the window of a text with a plus sign; raises ValueError for other parts."""
    scalings = [part for part in parts if isinstance(part, Scaling)]
    windows = [part for part in parts if isinstance(part, Window)]
    if len(parts) != 2 or len(scalings) != 1 or len(windows) != 1:
        raise ValueError(f"law: a plus sign joins one scaling and one window, got {text!r}")
    return scalings[0], windows[0]


def _named(text: str) -> AnyLaw:
    """The law of a text without a plus sign."""
    name, colon, parameters = text.partition(":")
    if not os.path.exists(text) and (name in SCALINGS or name == Window.name or colon):
        return _from_parameters(name, parameters)
    if os.path.isdir(text):
        raise ValueError(f"law: {text} is a directory; pass the file that calibrate -o wrote")
    if not os.path.exists(text):
        try:
            return get(text)
        except ValueError as error:
            raise ValueError(
                f"law: {text!r} is neither a file nor the name of a law: {error}"
            ) from error
    return Law.load(text)


def _from_parameters(name: str, parameters: str) -> Scaling | Window:
    """A scaling or window from its name and ``name=value,...``."""
    if not parameters and name != Window.name:
        try:
            scaling = get(name)
        except ValueError as error:
            raise ValueError(
                f"law: {name} needs parameters, for example log_n:train_length=512"
            ) from error
        assert isinstance(scaling, Scaling)
        return scaling
    record: dict[str, Any] = {"name": name}
    for part in parameters.split(",") if parameters else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"law: parameters must be name=number, got {part!r}")
        try:
            record[key.strip()] = json.loads(value)
        except ValueError as error:
            if name == Window.name and value.strip().isalpha():
                record[key.strip()] = value.strip()
                continue
            raise ValueError(f"law: {key.strip()} must be a number, got {value!r}") from error
    try:
        return Window.from_dict(record) if name == Window.name else from_dict(record)
    except TypeError as error:
        raise ValueError(f"law: {error}") from error


def applying(text: str) -> tuple[str, Callable[[torch.nn.Module], AbstractContextManager[Any]]]:
    """The law of a text as :func:`named_law` reads it, ready to be applied to a model.

    Returns:
        A description, different for different laws, and a function that applies the law to a model
        and returns a context manager.
    """
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
