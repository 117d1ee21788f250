"""Texts, laws and lengths that several commands read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from acutance.cli.shared import console, misuse

if TYPE_CHECKING:
    from acutance.corpus.load_model import TextModel
    from acutance.corpus.texts import Text
    from acutance.judging.remedies import Remedy


def read_texts(names: Sequence[str] | None) -> list[Text]:
    """The files of ``--text``; the included text if there are none."""
    from acutance.corpus import texts

    return texts.read(names) if names else [texts.bundled()]


@contextmanager
def reading(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Context with a progress bar on standard error while texts are tokenised.

    Yields:
        The texts, whose reading moves the bar.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    screen = console()
    columns = TextColumn("reading the text"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=screen, transient=True, disable=not (texts and screen.is_terminal)
    ) as bar:
        task = bar.add_task("", total=sum(text.size for text in texts))
        yield [replace(text, advance=partial(bar.advance, task)) for text in texts]


def about_run(loaded: TextModel, texts: Iterable[Text]) -> dict[str, Any]:
    """The model, the texts and the versions of a run, as a record of its result has them."""
    from importlib.metadata import version

    about = {"model": loaded.name, "text": [text.name for text in texts], **loaded.about}
    return about | {name: version(name) for name in ("acutance", "transformers")}


def read_laws(texts: Iterable[str]) -> list[Remedy]:
    """Parse each ``--law``; what is no law is misuse, a damaged file is not."""
    from acutance.judging.remedies import as_remedies, named_remedy
    from acutance.judging.rope import RopeRemedy

    remedies: list[Remedy] = []
    for text in texts:
        with nullcontext() if os.path.exists(text) else misuse():
            remedies.append(found := named_remedy(text))
            if isinstance(found, RopeRemedy):
                found.check_kind()
    with misuse():
        return as_remedies(remedies)


def note_lengths(model: Any, lengths: tuple[int, ...]) -> None:
    """Note lengths beyond a model's positions; raises ValueError if these are learned."""
    from acutance.calibration.fit.windows import check_positions
    from acutance.report.screen import note

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_positions(model, lengths)
    for warning in caught:
        console().print(note(("note", "yellow"), f": {warning.message}"))


def note_searches(remedies: Iterable[Remedy], longest: int) -> None:
    """Note plans that were searched on shorter windows."""
    from acutance.judging.remedies import PlanRemedy
    from acutance.report.screen import note

    for one in remedies:
        search = getattr(one.plan, "search", None) if isinstance(one, PlanRemedy) else None
        if search is not None and search["n"] < longest:
            text = f": {one.name} was searched on windows of {search['n']} tokens, not {longest}"
            console().print(note(("note", "yellow"), text), soft_wrap=True)


@contextmanager
def lengths_noted() -> Iterator[None]:
    """Context without the warnings of lengths beyond a model or a plan: they were noted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lengths reach", UserWarning)
        warnings.filterwarnings("ignore", "the plan was searched on", UserWarning)
        yield
