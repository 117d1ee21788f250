"""Texts, laws and lengths that several commands read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from acutance.cli.shared import bar, console, misuse, tell

if TYPE_CHECKING:
    from acutance.calibration.apply_law import Change
    from acutance.corpus.load_model import TextModel
    from acutance.corpus.texts import Text
    from acutance.judging.judge_model import Windows


@contextmanager
def reading(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Context with a progress bar on standard error while texts are tokenised.

    Yields:
        The texts, whose reading moves the bar.
    """
    from rich.progress import DownloadColumn, TimeRemainingColumn

    columns = ("reading the text", DownloadColumn(), TimeRemainingColumn())
    with bar(console(), *columns, shown=bool(texts)) as shown:
        task = shown.add_task("", total=sum(text.size for text in texts))
        yield [replace(text, advance=partial(shown.advance, task)) for text in texts]


def read_windows(
    options: Any, loaded: TextModel, texts: Sequence[Text], lengths: Sequence[int]
) -> Windows:
    """Windows of some lengths, spread over the texts as ``--windows`` and ``--seed`` say."""
    from acutance.judging.judge_model import text_windows

    with reading(texts) as texts:
        return text_windows(loaded, texts, lengths, options.windows, options.seed)


def about_run(loaded: TextModel, texts: Iterable[Text]) -> dict[str, Any]:
    """The model, the texts and the versions of a run, as a record of its result has them."""
    from importlib.metadata import version

    about = {"model": loaded.name, "text": [text.name for text in texts], **loaded.about}
    return about | {name: version(name) for name in ("acutance", "transformers")}


def read_laws(texts: Iterable[str]) -> list[Change]:
    """Parse each ``--law``; what is no law is misuse, a damaged file is not."""
    from acutance.judging.changes import as_changes, named_change

    changes: list[Change] = []
    for text in texts:
        with nullcontext() if os.path.exists(text) else misuse():
            changes.append(named_change(text))
    with misuse():
        return as_changes(changes)


def noted(text: str, *, sign: str = "note") -> None:
    """Print a sentence on standard error, behind a yellow word."""
    tell((sign, "yellow"), f": {text}")


def note_lengths(model: Any, lengths: tuple[int, ...]) -> None:
    """Note lengths beyond a model's positions; raises ValueError if these are learned."""
    from acutance.calibration.law import check_positions

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_positions(model, lengths)
    for warning in caught:
        noted(str(warning.message))


def note_searches(changes: Iterable[Change], longest: int) -> None:
    """Note plans that were searched on shorter windows."""
    from acutance.caching.plan import CachePlan

    for change in changes:
        search = change.search if isinstance(change, CachePlan) else None
        if search is not None and search["n"] < longest:
            noted(f"{change.name} was searched on windows of {search['n']} tokens, not {longest}")


@contextmanager
def lengths_noted() -> Iterator[None]:
    """Context without the warnings of lengths beyond a model or a plan: they were noted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lengths reach", UserWarning)
        warnings.filterwarnings("ignore", "the plan was searched on", UserWarning)
        yield
