"""``acutance judge``: what laws do to a model's loss on texts."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from acutance.cli import inputs
from acutance.cli import options as cli
from acutance.cli.shared import console, progress, refuse

if TYPE_CHECKING:
    from acutance.judging.paired import LossComparison


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class JudgeOptions(cli.RunOptions):
    """The options of ``acutance judge``.

    Attributes:
        text: Text for measuring the loss, other than what a law was fitted to; repeat for more.
            With 5 texts or more, standard errors come from the differences between texts, not
            windows. Default: the included text.
        law: What to judge (required); repeat for more. A file from 'calibrate -o' or 'budget -o', a
            cache plan of another tool such as duo_attention:DIR, a name such as ssmax or
            log_n:train_length=512, a window such as window:size=1024,sinks=4, RoPE settings such as
            rope:yarn,factor=2, or heads to switch off, such as off:3.1,4.0 (layer 3 head 1, layer 4
            head 0).
        train_length: Context length in training, in tokens, from which RoPE settings such as yarn
            are computed. Default: the configuration's.
        lengths: Window lengths to compare at, ascending. Default: the model's maximum length, at
            most 512.
        windows: Maximum number of windows of the longest length, spread over the text; 0: all.
            Shorter windows are cut from these.
        save_every: Save the state after this many new windows. Unsaved windows are run again after
            an interruption.
    """

    model: cli.LanguageModel
    law: cli.Changes = None
    train_length: cli.Tokens = None
    lengths: cli.Lengths = None
    windows: cli.Count = 16
    save_every: cli.SaveEvery = 1


@cli.command(JudgeOptions, {cli.READ: "train_length"}, interrupted="before all windows were read")
def judge(options: JudgeOptions) -> None:
    """Compare a model's loss with and without each law, on the same windows of text.

    A law is a factor on the attention logits as a function of n, the number of keys that a row
    sees. Laws by name are log_n, clip_log_n, sqrt_log_n, ssmax, yarn, llama4, mistral3, info_scale,
    cosine_log_n, cos_scale, critical, asentmax and adaptive_poly, with the parameters that
    acutance.scaling documents. Windows, RoPE settings and heads to switch off are compared in the
    same way.
    """
    if not options.law:
        refuse(
            "--law", "name at least one law to judge, such as ssmax or a file from 'calibrate -o'"
        )
    for law in options.law:
        if options.law.count(law) > 1:
            refuse("--law", f"{law} is given twice")
    comparison = _compare(options, options.law)
    options.write_and_show(comparison.table, comparison.to_dict)


def _compare(options: JudgeOptions, laws: list[str]) -> "LossComparison":
    """Load the model, read the texts, and compare; progress is shown on standard error."""
    from acutance.calibration.loss_table import COMPARISON, Saving
    from acutance.judging.changes import for_train_length
    from acutance.judging.judge_model import judge_windows, loss_of

    changes = inputs.read_laws(laws)
    texts = options.texts()
    loaded = options.load(head=True)
    changes = for_train_length(loaded.model, changes, options.train_length)
    lengths = options.lengths or (loaded.window(None),)
    inputs.note_lengths(loaded.model, lengths)
    inputs.note_searches(changes, lengths[-1])
    windows = inputs.read_windows(options, loaded, texts, lengths)
    tokens = windows.tokens * (1 + len(changes))
    saving = Saving.to(**cli.keywords(Saving.to, options, tables={"": COMPARISON}))
    with progress("judging", windows.count, tokens, console()) as advance, inputs.lengths_noted():
        comparison = judge_windows(
            loaded.model, windows, changes, loss_of(loaded), saving=saving, advance=advance
        )
    return replace(comparison, about=inputs.about_run(loaded, texts))
