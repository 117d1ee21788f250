"""Attention sinks of a trained language model: in which layers, and what the opening token does."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from acutance import key_mass
from acutance.probing import THRESHOLDS
from acutance_lab import language
from acutance_lab.experiment import Experiment, Run, mean
from acutance_lab.figure import Axis, Curve, Lines, Page, Panel, measured
from acutance_lab.record import Claim, Record, Row, Value, untested_row, values

XIAO = "Xiao et al. (2023), arXiv:2309.17453"
GU = "Gu et al. (2024), arXiv:2410.10781"
OWN, RANDOM, REPEATED = "its own", "random tokens", "one token repeated"
BOTTOM = 2  # layers
FIRST, SECOND_KEY = "share of heads, first key", "share of heads, second key"

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
    layers: list[Tensor] = []

    def see(layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
        mass = key_mass(query, key, is_causal=True, scale=scale, enable_gqa=True)
        layers.append(mass[0] / rows)

    with language.attending(reader.model, see):
        reader.model(input_ids=ids[None])
    return torch.cat(layers)


def variants(reader: language.Reader, run: Run, ids: Tensor) -> dict[str, Tensor]:
    """Variants of a window of tokens (n,), by name of what it opens with.

    The window itself; with another token put before it and the last dropped; n random tokens; and
    its first token repeated n times.
    """
    size = int(reader.model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    texts = {OWN: ids}
    for name, token in reader.openings.items():
        texts[name] = torch.cat((torch.tensor([token]), ids[:-1]))
    texts[RANDOM] = torch.randint(size, ids.shape, generator=run.generator)
    texts[REPEATED] = ids[:1].expand(len(ids)).contiguous()
    return texts


def measure(run: Run) -> Iterator[Row]:
    """Share of heads whose first or second key is an attention sink, for each opening token."""
    reader = language.reader(run, windows=run.size(4, 8), length=run.size(64, 512))
    least = THRESHOLDS["sink"].value
    # by opening: whether each head sinks in the first key, and in the second, one row a window
    first: dict[str, list[Tensor]] = {}
    second: dict[str, list[Tensor]] = {}
    elsewhere: list[Tensor] = []
    strongest: list[int] = []  # the token of each window's strongest other key
    for ids in reader.windows:
        for name, text in variants(reader, run, ids).items():
            received = weights(reader, text)
            first.setdefault(name, []).append(received[:, 0] > least)
            second.setdefault(name, []).append(received[:, 1] > least)
            if name == OWN:
                half = received[:, 1 : len(ids) // 2]  # keys that many rows see
                elsewhere.append(half.max(-1).values > least)
                strongest.append(int(ids[1 + int(half.amax(0).argmax())]))
        if run.note is not None:
            run.note(f"real_sinks: {len(elsewhere)} of {len(reader.windows)} windows")

    own = _share(first[OWN])
    where: dict[str, Value] = {"opening": OWN}
    yield untested_row(FIRST, mean(own), where)
    for name, sinks in first.items():
        at: dict[str, Value] = {"opening": name}
        here = _share(sinks)
        if name == REPEATED:
            yield REPEAT.row(FIRST, 0.01, mean(here), at)
        elif name != OWN:
            # paired by window
            estimate = mean(here - 0.8 * own)._replace(value=float(here.mean()))
            claim = NONSENSE if name == RANDOM else MOVES
            yield claim.row(FIRST, 0.8 * float(own.mean()), estimate, at)
        if name in reader.openings:
            yield SECOND.row(SECOND_KEY, 0.02, mean(_share(second[name])), at)
    yield untested_row("share of heads, another key", mean(_share(elsewhere)), where)
    token, times = Counter(strongest).most_common(1)[0]
    quantity = "share of windows, the other key is of one token"
    yield untested_row(quantity, times / len(strongest), {"token": token})
    layers, heads = reader.heads
    by_layer = torch.stack(first[OWN]).view(-1, layers, heads)
    bottom = mean(by_layer[:, :BOTTOM].double().mean((1, 2)))
    above = mean(by_layer[:, BOTTOM:].any(-1).double().mean(1))
    yield BOTTOM_LAYERS.row("share of heads in bottom layers", 0.01, bottom, where)
    yield ABOVE.row("share of layers above", 0.99, above, where)
    for layer in range(layers):
        for name, sinks in first.items():
            share = _share([window.view(layers, heads)[layer] for window in sinks])
            yield untested_row("share of heads", mean(share), {"layer": layer, "opening": name})


def _share(windows: Sequence[Tensor]) -> Tensor:
    """Share of True in each window."""
    return torch.stack([window.double().mean() for window in windows])


def _by_opening(record: Record) -> Iterator[Curve]:
    names = values(record.untested("share of heads"), "opening")
    for name, quantity in (("first key", FIRST), ("second key", SECOND_KEY)):
        rows = measured([r for r in record.rows if r.quantity == quantity], "opening", bars=True)
        yield Curve(name, marks=rows._replace(x=[names.index(opening) for opening in rows.x]))


def _name_openings(axes: Any, record: Record, theme: Any) -> None:
    names = values(record.untested("share of heads"), "opening")
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")


EXPERIMENT = Experiment(
    "real_sinks", "attention sinks of a trained language model",
    "the sink is the first position, not a token: whatever opens a text takes the "
    "weight, and what stood there before loses it; random tokens have sinks too, one token "
    "repeated has none",
    (MOVES, SECOND, NONSENSE, REPEAT, BOTTOM_LAYERS, ABOVE), measure,
    Page(
        "Heads that put more than 0.3 of their weight on the first token",
        "Means over windows; bars are standard errors. Left: by layer, for each opening. Right: "
        "of all heads, on the first key and on the second, where another token opens the text.",
        Panel(
            Axis("layer"), Axis("share of heads", limits=(-0.05, 1.55)),
            [Lines("", "layer", "{}", by="opening", quantity="share of heads", marks=False)],
            "by layer",
            legend="upper left", columns=2,
        ),
        Panel(
            Axis("opening"), Axis("share of heads"), [_by_opening], "all layers",
            also=_name_openings,
        ),
    ),
    needs="transformers", full_needs=language.PACKAGE,
    full_only=("moves", "second", "nonsense", "bottom", "above"),
)  # fmt: skip
