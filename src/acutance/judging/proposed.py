"""Changes that a probe's statistics suggest, as remedies for the loss to decide on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from acutance.calibration.apply_law import Change, LawChange
from acutance.calibration.law import longest, names_in
from acutance.capture.find_layers import attention_layers, choose_layers, uses_interface
from acutance.diagnose.rules import HeadFacts, Kind, Summary
from acutance.judging.heads_off import HeadsOff
from acutance.scaling import ClipLogN, Window

__all__ = ["Proposals", "proposed_remedies"]

#: Kinds of heads that are switched off, and what they do.
_OFF: dict[Kind, str] = {
    "dead": "average all keys (dead)",
    "entropy_collapse": "put nearly all weight on one key (collapsed)",
    "diffuse": "spread their weight widely (diffuse)",
}
_MOST = 5  # changes
_STRONGEST = 3  # heads of a kind that are switched off together
_SHARE = 0.9  # of a local head's weight that its window and the first key hold


@dataclass(frozen=True)
class Proposals:
    """Changes to judge.

    Attributes:
        remedies: the changes, at most five.
        reasons: why each is proposed, in the same order.
        left_out: sentences on what cannot be judged.
    """

    remedies: tuple[Change, ...] = ()
    reasons: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def proposed_remedies(
    model: torch.nn.Module,
    summary: Summary,
    length: int,
    *,
    train_length: int | None = None,
    causal: bool = True,
) -> Proposals:
    """The changes that a summary suggests, to be judged by the loss.

    Heads that are dead, collapsed or diffuse are switched off: for each kind the three furthest
    beyond the threshold, and all of these together. If entropy grows with n, log n is clipped at
    the trained length. Local heads (known with ``structure=True``) read through a window that, with
    the first key, holds about 90 % of their weight.

    Args:
        model: the model to change, with its head.
        summary: what was measured on it, or on it without its head.
        length: tokens of the windows that will be judged.
        train_length: tokens of the windows that it was trained on; None takes the configuration's.
        causal: whether rows see only earlier keys, as windows need.

    Returns:
        The changes; none for an untrained model.

    Example:
        >>> import torch, acutance
        >>> from acutance.reproduce import decoder, texts
        >>> model, code = decoder(), texts.read(texts.files("held out")).long()
        >>> with acutance.probe(model) as probe, torch.no_grad():
        ...     _ = model(code[: 8 * 512].view(8, 512))
        >>> found = proposed_remedies(model, probe.summary(), 512, train_length=128)
        >>> found.remedies[-1].name
        'clip_log_n:train_length=128'
    """
    if summary.about.get("untrained") is True:
        return Proposals(left_out=("The model is untrained, so no change was judged.",))
    layers = _layers(model, summary)
    heads = [head for head in summary.facts if head.layer in layers]
    found: list[tuple[Change, str]] = []
    left_out = []
    together: list[HeadFacts] = []
    for kind, what in _OFF.items():
        beyond = [head for head in heads if kind in head.rules]
        if beyond:
            those = sorted(beyond, key=lambda head: -head.rules[kind].size)[:_STRONGEST]
            many = f"{len(those)} of {len(beyond)} heads that {what}"
            found.append((_off(layers, those), f"switches off {many}"))
            together += those
    kinds = len(found)
    if any("dilution" in head.rules for head in heads):
        trained = longest(model) if train_length is None else train_length
        if trained is None:
            left_out.append(
                "Entropy grows with n, but log n was not judged: the configuration does not say on "
                "how many tokens the model was trained; --train-length does."
            )
        elif length <= trained:
            left_out.append(
                "Entropy grows with n, but log n was not judged: clipped at the trained length "
                f"{trained} it changes nothing in windows of {length} tokens."
            )
        else:
            law = LawChange(f"clip_log_n:train_length={trained}", ClipLogN(trained))
            found.append((law, "sharpens attention beyond the trained length"))
    local = [head for head in heads if "local" in head.rules]
    if causal and (windows := _windows(summary, layers, local, length)):
        sizes = sorted({window.size for window in windows.values()})
        span = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
        name = f"window:size={span},sinks=1 on {len(windows)} of {len(local)} local heads"
        why = "drops all keys but the nearby ones and the first"
        found.append((LawChange(name, windows), why))
    if kinds > 1 and len(found) < _MOST:
        found.append((_off(layers, together), f"switches off the heads of {kinds} kinds together"))
    if not found and not left_out:
        left_out.append("The statistics suggest no change that the loss could judge.")
    return Proposals(
        tuple(remedy for remedy, _ in found), tuple(why for _, why in found), tuple(left_out)
    )


def _layers(model: torch.nn.Module, summary: Summary) -> dict[int, int | str]:
    """How a law names each layer of a summary: by the number of its block, else its module's name.

    By index of the layer in the summary. Layers that transformers' attention interface does not run
    are left out.
    """
    known = attention_layers(model)
    names = names_in(model, [layer.module for layer in summary.layers])
    found: dict[int, int | str] = {}
    for index, layer in enumerate(summary.layers):
        name = names[layer.module]
        if name in known and uses_interface(known[name]):
            numbers = map(int, re.findall(r"(?<=\.)\d+(?=\.)", f".{name}."))
            found[index] = next((one for one in numbers if _is_block(model, one, name)), name)
    return found


def _is_block(model: torch.nn.Module, number: int, name: str) -> bool:
    """Whether choosing layer ``number`` selects the attention module ``name`` and no other."""
    try:
        return list(choose_layers(model, number, "layer")) == [name]
    except ValueError:
        return False


def _off(layers: Mapping[int, int | str], heads: Sequence[HeadFacts]) -> HeadsOff:
    """The remedy that switches off these heads."""
    places: dict[int | str, list[int]] = {}
    for head in sorted(heads, key=lambda head: (head.layer, head.head)):
        places.setdefault(layers[head.layer], []).append(head.head)
    return HeadsOff(places)


def _windows(
    summary: Summary, layers: Mapping[int, int | str], local: Sequence[HeadFacts], length: int
) -> dict[tuple[int | str, int], Window]:
    """A window for each local head: the smallest power of 2 that contains most of its weight.

    The first key is always visible, so its weight counts as inside; in rows where the window
    reaches the first key it is counted twice. Heads that need a window of ``length`` or more keys
    are left out.

    Returns:
        Windows by layer and head.
    """
    found = {}
    for head in local:
        mass = summary.distances.mass[head.index, 0]  # octave k: distances below 2^k
        sink = head.mean.get("first_weight", 0.0)
        reached = mass.cumsum(0) + sink >= _SHARE * mass.sum()
        size = 1 << int(reached.int().argmax())
        if size < length:
            found[layers[head.layer], head.head] = Window(size, sinks=1)
    return found
