"""``probe``: a context in which a model's attention is measured while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from acutance.capture.layer_choice import Chosen
from acutance.capture.listener import ProbeError
from acutance.probing.head_maps import MapRows
from acutance.probing.probe import Probe
from acutance.probing.settings import ProbeSettings
from acutance.probing.spans import Span

__all__ = ["Probe", "ProbeError", "probe"]


def probe(
    model: torch.nn.Module,
    *,
    metrics: Sequence[str] | None = None,
    verify: bool | Literal["first"] = "first",
    noise: bool = False,
    gaps: bool = False,
    keep: bool = False,
    every: int = 1,
    layers: Chosen | None = None,
    heads: Chosen | None = None,
    max_rows: int | None = None,
    seed: int = 0,
    provide: bool = False,
    structure: bool = False,
    tokenizer: Any = None,
    special: Iterable[int] | None = None,
    examples: int = 0,
    profile: bool = True,
    spans: Mapping[str, Span] | None = None,
    maps: Mapping[Any, MapRows] | None = None,
    attention_mask: Tensor | None = None,
    rows: Tensor | str = "real",
) -> Probe:
    """Measure a model's attention while it runs, without changing its output.

    Args:
        model: any module; calls inside it are read, whatever else runs.
        metrics: names from :data:`acutance.METRICS`; None is all of them (``noise_gain`` only with
            ``noise``, ``keys_50`` and its like only with ``gaps``).
        verify: recompute outputs from the captured arguments and compare them with the model's. A
            capture that misses something then shows, but outputs are computed twice. ``"first"``
            checks the first call of each kind in each layer, True every call, False none.
        noise: also record ``noise_gain``, which needs a third matrix product.
        gaps: also record how many keys hold 50, 90, 95 and 99 % of a row's weight (``keys_90``),
            from counts of keys by the distance of their logit below the row's maximum. With
            ``structure``, ``critical_ratio`` is then computed on every row, from these counts, and
            not only on about sixteen rows of a sequence.
        keep: also keep a bounded sample of queries and keys: :meth:`Probe.queries_keys`.
        every: read the first of every ``every`` forward passes.
        layers: read these only: numbers of blocks (3 is ``encoder.layer.3``, −1 the last), ranges,
            patterns of module names, or text of several (``"0-3,-1,decoder.*"``).
        heads: read these heads of each layer only: numbers and ranges.
        max_rows: read at most this many rows of a call, drawn at random; the summary has the
            standard error of each mean that results from it.
        seed: random seed for the choice of rows.
        provide: let acutance's kernel compute attention and its statistics in one pass, in place of
            the model's function. Outputs are then equal up to rounding, not bit for bit;
            :attr:`Probe.not_provided` lists calls that the model computed itself, with the reason.
        structure: also record where each row's weight lies: the metrics of
            :data:`acutance.structure.STRUCTURE`, and the weight by octave of distance. Costs a
            second pass over the scores.
        tokenizer: gives ``structure`` the ids of special tokens, and examples and maps their words.
        special: ids of special tokens instead of the tokenizer's; without both, those of the
            model's configuration.
        examples: keep this many of each head's sharpest rows, with the tokens they attend to
            (implies ``structure``).
        profile: also record each metric by octave of n (:attr:`HeadSummary.profile`), which
            standard errors and slopes against n need. False saves time and memory.
        spans: named parts of the input, as ``{"system": (0, 31), "document": (31, 800)}``: also
            record how much weight the rows of each part, and all rows, put on each part
            (:attr:`HeadSummary.spans`). A part is a pair of the first token and one past the last
            (None: to the end), a list of such pairs, one for each sequence of the batch, or a
            boolean (B, S). Tokens are counted from the first column of the input, padding included,
            also while a cache is decoded. Set :attr:`Probe.spans` for each batch. Costs a second
            pass over the scores.
        maps: rows of attention weights to keep, as ``{"layer 5 head 3": [0, 10, 511]}``: for each
            head the positions of its rows in the input, a number, several or a slice, at most 64
            (:attr:`Probe.maps`). A head is named ``"layer 5 head 3"``, ``"5.3"`` or ``(5, 3)``;
            layers are named as for ``layers``.
        attention_mask: which tokens are real, (B, T), 1 or True; their rows count, those of padding
            do not. Needed only where the model is called without such a mask: one that a module
            gets as ``attention_mask``, ``mask``, ``key_padding_mask`` or ``padding_mask`` is read
            from the call. Set :attr:`Probe.attention_mask` for each batch. Calls of other sizes are
            read as if there were none.
        rows: which rows count: ``"real"``, all but padding; ``"all"``; or a boolean tensor, (L,) or
            (B, L), for some of the real ones. Calls of other sizes are then listed as not read.

    Returns:
        A context manager. Leaving it raises :class:`ProbeError` if the model ran no attention the
        probe can see; results are in :meth:`Probe.summary`.

    Raises:
        TypeError: if ``model`` is not a module, or an option has a wrong type.
        ValueError: if a metric does not exist (naming the nearest), layers choose nothing, heads
            are more than the model has, a number is too small, ``attention_mask`` or ``rows`` has
            another shape or other values, or ``spans`` are empty, negative or overlap. Leaving the
            context raises it if a span ends beyond the longest sequence that the model got.

    Example:
        >>> import torch, acutance
        >>> model = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
        >>> with acutance.probe(model) as probe:
        ...     _ = model(torch.randn(2, 10, 16))
        >>> frame = probe.summary().columns()
        >>> frame["head"], frame["rows"]
        ([0, 1, 2, 3], [20, 20, 20, 20])
    """
    settings = ProbeSettings(
        metrics=metrics,
        verify=verify,
        noise=noise,
        gaps=gaps,
        keep=keep,
        every=every,
        layers=layers,
        heads=heads,
        max_rows=max_rows,
        seed=seed,
        provide=provide,
        structure=structure,
        tokenizer=tokenizer,
        special=special,
        examples=examples,
        profile=profile,
        spans=spans,
        maps=maps,
        attention_mask=attention_mask,
        rows=rows,
    )
    return Probe(model, settings)
