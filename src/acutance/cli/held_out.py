"""The loss of held-out text, which ``probe --judge`` and ``calibrate`` measure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from acutance.cli import options as cli
from acutance.cli.inputs import noted
from acutance.cli.shared import console, plain_errors, progress, tell

if TYPE_CHECKING:
    import torch

    from acutance.calibration.apply_law import Change
    from acutance.corpus.load_model import TextModel
    from acutance.judging.judge_model import HeldOut, Windows
    from acutance.judging.paired import LawComparison, LossComparison
    from acutance.judging.proposed import Proposals
    from acutance.summary.head_summary import HeadSummary


@dataclass(frozen=True)
class Judged:
    """What ``probe --judge`` measured of the changes that its statistics propose.

    Attributes:
        proposed: the changes, and why.
        comparison: of the losses; None if nothing was to be judged.
    """

    proposed: "Proposals"
    comparison: "LossComparison | None" = None

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
        for law, reason in zip(record["laws"], self.proposed.reasons, strict=True):
            law["reason"] = reason
        return record | {"sentences": self.sentences}

    def helping(self, kind: "type[Change]") -> "list[tuple[LawComparison, Any]]":
        """The changes of a kind that lower the loss, each behind what was measured of it."""
        from acutance.judging.paired import HELPS

        laws = () if self.comparison is None else self.comparison.laws
        pairs = zip(laws, self.proposed.remedies[: len(laws)], strict=True)
        return [
            (law, change)
            for law, change in pairs
            if law.verdict == HELPS and isinstance(change, kind)
        ]

    def write_law(self, model: "torch.nn.Module", path: Any) -> None:
        """Write the law that lowers the loss most, and say on standard error how to use it.

        Heads that are switched off are no law. Without a path, or a law that helps, say so.
        """
        from acutance.calibration.apply_law import LawChange
        from acutance.calibration.law import Law
        from acutance.judging.heads_off import HeadsOff

        lines = []
        best, change = min(
            self.helping(LawChange), key=lambda pair: pair[0].delta, default=(None, None)
        )
        if best is None and path is not None:
            lines.append(f"no law was written to {path}: none of the judged laws lowers the loss")
        elif best is not None and path is None:
            lines.append(f"--write-law FILE writes this change to a law file: {best.name}")
        elif best is not None and change is not None and self.comparison is not None:
            law = replace(Law.of(model, change.law), judged=record_of(best, self.comparison))
            law.save(path)
            lines.append(
                f"law written to {path}: {best.name}. Use it with --law {path}, or in Python with "
                f'acutance.apply(model, "{path}")'
            )
        lines += [
            f'{law.name} needs no file: use acutance.apply(model, "{law.name}")'
            for law, _ in self.helping(HeadsOff)
        ]
        for line in lines:
            tell(line)


def record_of(law: "LawComparison", comparison: "LossComparison") -> dict[str, Any]:
    """What a law file keeps of a comparison of one law."""
    record = comparison.to_dict()
    names = ("windows", "tokens", "loss", "mean_loss", "lengths", "groups", "unit")
    return law.to_dict() | {name: record[name] for name in names}


def compare_held_out(
    options: cli.RunOptions, headed: "TextModel", windows: "Windows", changes: "Sequence[Change]",
    **given: Any,
) -> "LossComparison":  # fmt: skip
    """Compare losses on held-out windows, with progress on standard error.

    The state of that is in the file of ``--save`` with ``.judging`` added; ``given`` are options
    that decide about ``changes``.
    """
    from acutance.calibration.loss_table import COMPARISON, Saving
    from acutance.judging.judge_model import judge_windows, loss_of

    tokens = windows.tokens * (1 + len(changes))
    save = None if options.save is None else f"{options.save}.judging"
    where = {"save": save, "overwrite": not options.resume, "tables": {"": COMPARISON}}
    saving = Saving.to(**cli.keywords(Saving.to, options, **where))
    with progress("judging", windows.count, tokens, console()) as advance:
        return judge_windows(
            headed.model, windows, changes, loss_of(headed),
            saving=saving, given=given or None, advance=advance,
        )  # fmt: skip


def judge_proposals(
    options: Any, headed: "TextModel", held: "HeldOut", summary: "HeadSummary"
) -> Judged:
    """Judge what a summary proposes on held-out windows; progress is shown on standard error.

    Raises:
        typer.Exit: after Ctrl-C.
    """
    from acutance.judging.judge_model import loss_of, text_windows
    from acutance.judging.proposed import proposed_remedies

    length, trained = headed.window(options.length), options.train_length
    causal = not loss_of(headed).reads_all
    proposed = proposed_remedies(headed.model, summary, length, train_length=trained, causal=causal)
    for sentence in proposed.left_out:
        noted(sentence)
    if not proposed.remedies:
        return Judged(proposed)
    windows = text_windows(headed, held.judged, [length], 0, 0)
    with plain_errors(when="while judging by the loss", save=options.save):
        comparison = compare_held_out(
            options, headed, windows, proposed.remedies, train_length=trained
        )
    return Judged(proposed, comparison)
