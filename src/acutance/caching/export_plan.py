"""Write a cache plan for other tools, and say what they cannot express."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from acutance.caching.head_plan import HeadPlan, Plan
from acutance.caching.layer_shapes import PlanError
from acutance.calibration.law import Identity
from acutance.escapes import ranges
from acutance.files import as_json, write_text

#: Files of a folder that DuoAttention loads.
TABLE, SETTINGS = "full_attention_heads.tsv", "config.json"


class _Whole(Plan, Protocol):
    """A :class:`~acutance.CachePlan`."""

    @property
    def model(self) -> Identity:
        """The model's identity."""


#: Picks key heads of a plan, by the module name of their layer and what they keep.
_Pick = Callable[[str, HeadPlan], bool]
#: Text by file name ("" for the path itself), and sentences.
_Export = tuple[dict[str, str], list[str]]


def export_plan(plan: _Whole, name: str, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write a plan in another tool's format.

    Args:
        plan: to write.
        name: of the format, one of :data:`EXPORTS`.
        path: the file to write; for ``duo_attention`` a directory, which is made if it is missing.

    Returns:
        What the format cannot express, one sentence for each kind of loss, with the heads as
        LAYER.HEAD; empty if it expresses the whole plan.

    Raises:
        OSError: if the file cannot be written.
        PlanError: if the format has no place for a plan of this shape.
        ValueError: if there is no such format.
    """
    check_export(name)
    files, lost = EXPORTS[name](plan)
    target = Path(path)
    if "" not in files:
        target.mkdir(exist_ok=True)
    for part, text in files.items():
        write_text(target / part if part else target, text)
    return tuple(lost)


def check_export(name: str) -> None:
    """Raise ValueError unless there is an export format of this name."""
    if name not in EXPORTS:
        known = ", ".join(EXPORTS)
        raise ValueError(f"export: there is no format {name!r:.60}; the formats are {known}")


# -- heads as text ---------------------------------------------------------------------------------


def places(plan: _Whole, pick: _Pick) -> str:
    """The key heads for which ``pick`` is true, in words, as LAYER.HEAD; "" if it is for none.

    Example:
        >>> from acutance import CachePlan
        >>> from acutance.reproduce import decoder
        >>> plan = CachePlan.of(decoder(), {0: HeadPlan("dropped"), (1, 1): HeadPlan("dropped")})
        >>> places(plan, lambda layer, head: head.kind == "dropped")
        'Key heads 1.1 and all of layer 0'
    """
    whole: list[int] = []
    single: list[str] = []
    for layer, (name, heads) in enumerate(plan.layers.items()):
        picked = [index for index, head in enumerate(heads) if pick(name, head)]
        if len(picked) == len(heads):
            whole.append(layer)
        else:
            single += [f"{layer}.{index}" for index in picked]
    layers = f"of {ranges(whole, 'layer')}" if whole else ""
    heads_of = f"Key heads {', '.join(single)}"
    if not whole or not single:
        return heads_of if single else f"All key heads {layers}" if whole else ""
    return f"{heads_of} and all {layers}"


def _lost(plan: _Whole, rest: str, pick: _Pick) -> list[str]:
    """The sentence that the heads which ``pick`` returns true for ``rest``; [] without heads."""
    heads = places(plan, pick)
    return [f"{heads} {rest}."] if heads else []


def _quantised(_: str, head: HeadPlan) -> bool:
    return head.quantised


def _dropped(_: str, head: HeadPlan) -> bool:
    return head.kind == "dropped"


def _most(heads: Sequence[HeadPlan]) -> tuple[int, int]:
    """The most first keys and the most recent keys of any of these heads; (0, 1) without heads."""
    return max((one.first for one in heads), default=0), max(
        (one.recent for one in heads), default=1
    )


# -- formats ---------------------------------------------------------------------------------------


def _kvpress(plan: _Whole) -> _Export:
    """A Python file with a press for kvpress."""

    def kept(head: HeadPlan) -> str:
        return "None" if head.kind == "full" else f"({head.first}, {head.recent})"

    rows = [f"    [{', '.join(map(kept, heads))}]," for heads in plan.layers.values()]
    lost = _lost(plan, "keep 16 bits, as kvpress does not round single heads", _quantised)
    lost += _lost(plan, "read the row's own key and value instead of nothing", _dropped)
    lost.append(
        "kvpress reads the prompt with full attention, and masks the keys that heads drop instead "
        "of removing them, so the cache keeps its size."
    )
    return {"": _PRESS.replace("    # heads", "\n".join(rows))}, lost


def _duo_attention(plan: _Whole) -> _Export:
    """DuoAttention's table of full-attention heads, with the sizes of streaming heads."""
    counts = sorted({len(heads) for heads in plan.layers.values()})
    if len(counts) > 1:
        raise PlanError(
            "DuoAttention's table needs the same number of key heads in all layers, and this "
            f"plan's layers have {' or '.join(map(str, counts))}"
        )
    streaming = [one for heads in plan.layers.values() for one in heads if one.kind == "streaming"]
    first, recent = _most(streaming)
    table = "".join(
        "\t".join("1.0" if one.kind == "full" else "0.0" for one in heads) + "\n"
        for heads in plan.layers.values()
    )
    lost = _lost(plan, "keep 16 bits, as the table has no precisions", _quantised)
    lost += _lost(plan, f"keep {first} first and {recent} recent keys instead of nothing", _dropped)
    lost += _lost(
        plan,
        f"keep {first} first and {recent} recent keys, more than planned, as the table has one "
        "size for all streaming heads",
        lambda _, one: one.kind == "streaming" and (one.first, one.recent) != (first, recent),
    )
    return {
        TABLE: table,
        SETTINGS: as_json({"sink_size": first, "recent_size": recent}) + "\n",
    }, lost


def _layer_types(plan: _Whole) -> _Export:
    """``layer_types`` and ``sliding_window`` of a transformers configuration, as JSON."""
    sliding = {
        name: heads
        for name, heads in plan.layers.items()
        if all(one.kind == "streaming" for one in heads)
    }
    _, recent = _most([one for heads in sliding.values() for one in heads])
    types = ["sliding_attention" if one in sliding else "full_attention" for one in plan.layers]
    record = {
        "layer_types": types,
        "sliding_window": recent if sliding else None,
        "use_sliding_window": bool(sliding),
    }
    lost = _lost(plan, "keep 16 bits, as layer_types has no precisions", _quantised)
    lost += _lost(plan, "keep all keys, as layer_types drops no heads", _dropped)
    lost += _lost(
        plan,
        "keep all keys, as layer_types lets only whole layers stream",
        lambda name, one: one.kind == "streaming" and name not in sliding,
    )
    lost += _lost(
        plan,
        "lose their first keys, as a sliding window keeps only recent ones",
        lambda name, one: name in sliding and one.first > 0,
    )
    lost += _lost(
        plan,
        f"keep {recent} recent keys, more than planned, as there is one sliding_window",
        lambda name, one: name in sliding and one.recent != recent,
    )
    return {"": as_json(record, indent=1) + "\n"}, lost + _ignored(plan.model.architecture)


def _ignored(architecture: str) -> list[str]:
    """A sentence if the installed transformers does not read layer_types for this class."""
    import transformers

    kind = getattr(transformers, architecture, None)
    source = None if kind is None else inspect.getsourcefile(kind)
    if source is None or "layer_types" in Path(source).read_text(encoding="utf-8"):
        return []
    return [
        f"{architecture} of transformers {transformers.__version__} ignores layer_types: the file "
        "is of use only for a class that reads it, such as Qwen2ForCausalLM."
    ]


#: Formats by name: what makes the texts of their files, and the sentences about what is lost.
EXPORTS: dict[str, Callable[[_Whole], _Export]] = {
    "kvpress": _kvpress,
    "duo_attention": _duo_attention,
    "layer_types": _layer_types,
}

_PRESS = '''"""A cache plan as a press for kvpress (written for 0.5.5).

Enter the press around the whole generation, for one sequence without padding:

    with press(model):
        model.generate(...)

kvpress's pipeline enters it for the prompt alone; then heads also keep every key generated later.
"""

import torch
from kvpress import BasePress

#: First and recent keys that each key head of each layer keeps; None is all of them.
HEADS = [
    # heads
]


class CachePlanPress(BasePress):
    """Masks the keys that heads drop, for every token after the prompt."""

    def post_init_from_model(self, model):
        """Refuse a model with other layers or key heads."""
        config = model.config
        layers = config.num_hidden_layers
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if layers != len(HEADS) or any(heads != len(layer) for layer in HEADS):
            raise ValueError(
                f"the plan has {len(HEADS)} layers of {len(HEADS[0])} key heads, but "
                f"{type(model).__name__} has {layers} of {heads}"
            )
        if config._attn_implementation == "eager":
            raise ValueError("kvpress masks no keys of single heads in eager attention")

    def forward_hook(self, module, input, kwargs, output):
        """After a layer has run, mask what its next token does not read."""
        cache = kwargs["cache" if "cache" in kwargs else "past_key_values"]
        keys = cache.layers[module.layer_idx].keys
        stored = keys.shape[2]
        masked = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        for head, kept in enumerate(HEADS[module.layer_idx]):
            if kept is not None:
                first, recent = kept  # the next token's own key is one of the recent ones
                masked[:, head, first : max(first, stored - max(recent - 1, 0))] = True
        module.masked_key_indices = torch.nonzero(masked, as_tuple=True)
        return output


press = CachePlanPress()
'''
