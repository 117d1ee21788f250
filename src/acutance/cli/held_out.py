"""The loss of held-out text, which ``probe --judge`` and ``calibrate`` measure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acutance.cli.inputs import lengths_noted
from acutance.cli.options import load_model
from acutance.cli.shared import console, progress, resumable

if TYPE_CHECKING:
    import torch

    from acutance.calibration.fit.result import Calibration
    from acutance.calibration.law import Law
    from acutance.calibration.losses import Loss
    from acutance.corpus.load_model import TextModel
    from acutance.corpus.texts import Text
    from acutance.judging.judge_model import Windows
    from acutance.judging.paired import LawComparison, LossComparison
    from acutance.judging.remedies import Remedy
    from acutance.judging.text_windows import HeldOut
    from acutance.summary.head_summary import HeadSummary
    from acutance.summary.state import State

JudgeChanges = Annotated[
    bool,
    typer.Option(
        "--judge",
        help=(
            "Also measure how each change that the statistics suggest affects the loss, on the "
            "ends of the texts (a quarter of the windows, 4 to 16), which are then not probed."
        ),
    ),
]
WriteLaw = Annotated[
    Path | None,
    typer.Option(
        "--write-law",
        metavar="FILE",
        help=(
            "With --judge: write the law that lowers the loss most to this file, for 'judge "
            "--law', 'probe --law' and acutance.apply. Nothing is written if none lowers it."
        ),
    ),
]

#: Held-out windows of ``probe --judge``, at least.
_HELD_OUT = 4


@dataclass(frozen=True)
class Judged:
    """What ``probe --judge`` measured of the changes that its statistics propose.

    Attributes:
        comparison: of the losses; None if nothing was to be judged.
        reasons: why each change was proposed.
        remedies: the changes.
    """

    comparison: "LossComparison | None" = None
    reasons: tuple[str, ...] = ()
    remedies: tuple["Remedy", ...] = ()

    @property
    def sentences(self) -> list[str]:
        """Sentences: the verdicts, how they were measured, and which changes to make."""
        from acutance.judging.paired import conclusion, sentences

        if self.comparison is None:
            return []
        return [*sentences(self.comparison), conclusion(self.comparison)]

    def to_dict(self) -> dict[str, Any]:
        """JSON record for files and the page: laws with verdicts, windows and loss, sentences."""
        if self.comparison is None:
            return {"laws": []}
        record = self.comparison.to_dict()
        for law, reason in zip(record["laws"], self.reasons, strict=True):
            law["reason"] = reason
        return record | {"sentences": self.sentences}

    def noted(self, state: "State", save: Path | None) -> "State":
        """The state with the verdicts in ``about``, written to the file if there is one."""
        about = {**state.summary.about, "judged": self.sentences}
        state = replace(state, summary=replace(state.summary, about=about))
        if save is not None:
            state.save(save)
        return state

    def best_law(self, model: "torch.nn.Module") -> "tuple[str, Law] | None":
        """The law that lowers the loss most, and its name; None if no law has the verdict *helps*.

        Heads that are switched off are no law.
        """
        from acutance.calibration.law import Law
        from acutance.judging.paired import HELPS
        from acutance.judging.remedies import LawRemedy

        if self.comparison is None:
            return None
        pairs = zip(self.comparison.laws, self.remedies, strict=True)
        helping = [
            (judged, one.law)
            for judged, one in pairs
            if isinstance(one, LawRemedy) and judged.verdict == HELPS
        ]
        if not helping:
            return None
        judged, law = min(helping, key=lambda pair: pair[0].delta)
        record = _record(judged, self.comparison)
        return judged.name, replace(Law.of(model, law), judged=record)

    def write_law(self, model: "torch.nn.Module", path: Path | None) -> None:
        """Write the best law to a file, or say why there is none; without a file, say how to.

        What was written is said on standard error.
        """
        from acutance.judging.paired import HELPS
        from acutance.judging.remedies import HeadsOff
        from acutance.report.screen import note

        found = self.best_law(model)
        lines = []
        if path is not None and found is None:
            lines.append(f"no law was written to {path}: none of the judged laws lowers the loss")
        elif path is not None and found is not None:
            found[1].save(path)
            lines.append(
                f"law written to {path}: {found[0]}. Use it with --law {path}, or in Python with "
                f'acutance.apply(model, "{path}")'
            )
        elif found is not None:
            lines.append(f"--write-law FILE writes this change to a law file: {found[0]}")
        laws = () if self.comparison is None else self.comparison.laws
        lines += [
            f'{judged.name} needs no file: use acutance.apply(model, "{judged.name}")'
            for judged, one in zip(laws, self.remedies, strict=True)
            if isinstance(one, HeadsOff) and judged.verdict == HELPS
        ]
        for line in lines:
            console().print(note(line), soft_wrap=True)


def _record(judged: "LawComparison", comparison: "LossComparison") -> dict[str, Any]:
    """What a law file keeps of a comparison of one law."""
    whole = comparison.to_dict()
    names = ("windows", "tokens", "loss", "mean_loss", "lengths", "groups", "unit")
    return judged.to_dict() | {name: whole[name] for name in names}


def check_judge(judge: bool, excluded: Mapping[str, object], needing: Mapping[str, object]) -> None:
    """Refuse options of ``probe`` that do not go with --judge, or need it.

    Args:
        judge: whether it is given.
        excluded: values of the options that cannot be combined with it; None where not given.
        needing: values of the options that have no effect without it.
    """
    for option, given in (excluded if judge else needing).items():
        if given is not None and judge:
            raise typer.BadParameter(f"cannot be combined with {option}", param_hint="--judge")
        if given is not None:
            raise typer.BadParameter("needs --judge", param_hint=option)


def hold_out_windows(headed: "TextModel", texts: "list[Text]", length: int) -> "HeldOut":
    """Split texts: the probe reads the beginnings, the losses are measured on the ends.

    Raises:
        ValueError: if the text is too short.
    """
    from acutance.judging.text_windows import hold_out

    return hold_out(headed, texts, length, _HELD_OUT)


def judge_proposals(
    headed: "TextModel",
    held: "HeldOut",
    summary: "HeadSummary",
    *,
    length: int,
    train_length: int | None,
    save: Path | None,
    save_every: int,
    resume: bool,
) -> Judged:
    """Judge what a summary proposes on held-out windows; progress is shown on standard error.

    Raises:
        typer.Exit: after Ctrl-C.
    """
    from acutance.judging.proposed import proposed_remedies
    from acutance.judging.text_windows import loss_of, text_windows
    from acutance.report.screen import note

    loss = loss_of(headed)
    proposed = proposed_remedies(
        headed.model, summary, length, train_length=train_length, causal=not loss.reads_all
    )
    for sentence in proposed.left_out:
        console().print(note(("note", "yellow"), f": {sentence}"), soft_wrap=True)
    if not proposed.remedies:
        return Judged()
    windows = text_windows(headed, held.judged, [length], 0, 0)
    with resumable("while judging by the loss", save):
        comparison = _compared(
            headed, windows, proposed.remedies, loss, save, save_every, resume,
            given={"train_length": train_length},
        )  # fmt: skip
    return Judged(comparison, proposed.reasons, proposed.remedies)


def _compared(
    headed: "TextModel",
    windows: "Windows",
    remedies: "Sequence[Remedy]",
    loss: "Loss",
    save: Path | None,
    save_every: int,
    resume: bool,
    given: Mapping[str, Any] | None = None,
) -> "LossComparison":
    """Compare losses on held-out windows, with progress on standard error.

    The state of that is in ``save`` with ``.judging`` added; ``given`` are options that decide
    about ``remedies``.
    """
    from acutance.judging.judge_model import judge_windows

    tokens = windows.tokens * (1 + len(remedies))
    with progress("judging", windows.count, tokens, console()) as advance:
        return judge_windows(
            headed.model, windows, remedies, loss, given=given, advance=advance,
            save=None if save is None else f"{save}.judging", save_every=save_every,
            resume=resume, overwrite=not resume,
        )  # fmt: skip


def judge_law(
    calibration: "Calibration",
    headed: "TextModel",
    held: "HeldOut",
    lengths: tuple[int, ...],
    *,
    windowed: bool,
    save: Path | None,
    save_every: int,
    resume: bool,
) -> "Calibration":
    """Measure a fitted law's effect on the held-out loss, print it, and add it to the result."""
    from acutance.judging.paired import verdict_sentence
    from acutance.judging.remedies import LawRemedy
    from acutance.judging.text_windows import loss_of, text_windows
    from acutance.report.screen import note

    loss = loss_of(headed)
    # a causal model's long windows have the short ones inside
    read = lengths if loss.reads_all else lengths[-1:]
    windows = text_windows(headed, held.judged, read, 0, 0)
    remedies = [LawRemedy("the law", calibration, windowed)]
    with lengths_noted():
        comparison = _compared(headed, windows, remedies, loss, save, save_every, resume)
    (law,) = comparison.laws
    where = f"judged on {comparison.windows} held-out windows ({comparison.loss})"
    console().print(note(f"{where}: {verdict_sentence(law)}"), soft_wrap=True)
    return replace(calibration, judged=_record(law, comparison))


def load_with_head(options: Any, by_loss: bool) -> "tuple[TextModel | None, TextModel]":
    """Load the model with its language-model head, and without.

    The first is None if the model has no such head and ``by_loss`` does not need one.
    """
    from acutance.corpus.load_model import HeadError

    try:
        headed = load_model(options, options.device, head=True)
    except HeadError:
        if by_loss:
            raise
        return None, load_model(options, options.device)
    return headed, headed.base


def held_out_ends(
    headed: "TextModel", texts: "list[Text]", longest: int, *, unjudged: bool
) -> "HeldOut | None":
    """Split texts: the law is fitted to the beginnings and judged on the ends.

    None, for no judging, if the text is too short and ``unjudged`` allows it.
    """
    from acutance.judging.text_windows import hold_out

    try:
        return hold_out(headed, texts, longest)
    except ValueError as error:
        if unjudged:
            return None
        raise type(error)(f"{error}, or --even-if-worse for a law that nothing judged") from error


def hurts(calibration: "Calibration") -> bool:
    """Whether the law raises the loss, at least at some positions."""
    from acutance.judging.paired import HURTS, MIXED

    return calibration.judged is not None and calibration.judged["verdict"] in (HURTS, MIXED)


def nothing_found(calibration: "Calibration") -> bool:
    """Whether a fit to the loss found no law, so that there is nothing to judge or write."""
    from acutance.calibration.by_loss.result import LossCalibration

    return isinstance(calibration, LossCalibration) and calibration.empty
