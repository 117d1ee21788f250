"""What the configuration says of each attention call, and how the call's arguments differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acutance.capture.attention_call import AttentionCall
from acutance.capture.readers.huggingface import packed_lengths
from acutance.masks import hides
from acutance.probing.causes import visible_keys

_FULL = ("full_attention", "attention", "global_attention")
_SLIDING = ("sliding_attention", "local_attention", "sliding_window_attention")
_CHUNKED = ("chunked_attention",)
#: Types of RoPE. Frequencies follow the published formulas, not transformers' code, which is among
#: what is verified.
_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
#: Architectures whose checkpoints rotate components of two halves, and neighbouring ones.
_HALVES = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma"),
    *("gemma2", "gemma3_text", "phi", "phi3", "gpt_neox", "gpt_oss", "olmo", "olmo2", "smollm3"),
    *("granite", "stablelm", "starcoder2"),
}
_NEIGHBOURS = {"cohere", "cohere2", "glm", "glm4"}
#: Architectures whose window in both directions is the number of keys on both sides together.
_BOTH_SIDES = {"t5gemma2_encoder", "t5gemma2_text"}
#: Modules that leave out the softcap of their configuration: they pool all tokens with one query.
_UNCAPPED = {"VideoPrismMultiheadAttentionPoolingHead"}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer.

    Attributes:
        kind: ``rope_type`` of transformers.
        theta: the base.
        width: number of components of a head that are rotated.
        parameters: other entries of ``rope_parameters``.
        longest: ``max_position_embeddings``.

    Example:
        >>> Rope("linear", 100.0, 4, {"factor": 2.0}).frequencies(8)
        tensor([0.5000, 0.0500], dtype=torch.float64)
    """

    kind: str
    theta: float
    width: int
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    longest: int | None = None

    @property
    def scaled(self) -> bool:
        """Whether it is another than the default."""
        return self.kind != "default"

    def plain(self) -> Rope:
        """The same base and width without scaling."""
        return replace(self, kind="default", parameters={})

    def frequencies(self, length: int) -> Tensor:
        """Radians per position of each pair of components, float64 (width / 2,).

        Args:
            length: number of positions that are read, on which some kinds depend.
        """
        exponents = torch.arange(0, self.width, 2, dtype=torch.float64) / self.width
        plain: Tensor = self.theta**-exponents
        factor, trained = self._factor, self._trained
        if self.kind == "linear":
            return plain / factor
        if self.kind == "dynamic":  # NTK scaling of the base beyond the trained length
            stretched = max(length, trained) * factor / trained - (factor - 1)
            base = self.theta * stretched ** (self.width / (self.width - 2))
            return torch.pow(base, -exponents)
        if self.kind == "yarn":
            return self._yarn(plain)
        if self.kind == "llama3":  # slow frequencies divided by the factor, fast ones as they are
            low, high = (float(self.parameters[f"{name}_freq_factor"]) for name in ("low", "high"))
            turns = trained * plain / (2 * math.pi)
            fast = ((turns - low) / (high - low)).clamp(0, 1)
            return plain * fast + plain / factor * (1 - fast)
        if self.kind == "longrope":  # each frequency has its factor, for short and for long texts
            name = "long_factor" if length > trained else "short_factor"
            return plain / torch.tensor(self.parameters[name], dtype=torch.float64)
        return plain

    @property
    def attention_factor(self) -> float:
        """Factor of rotated queries and keys, as YaRN and LongRoPE have it."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        given = self.parameters.get("attention_factor")
        if given is not None:
            return float(given)
        factor = self._factor
        if self.kind == "longrope":
            return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(self._trained))
        over, under = (self.parameters.get(name) for name in ("mscale", "mscale_all_dim"))
        if over and under:
            return _mscale(factor, over) / _mscale(factor, under)
        return _mscale(factor, 1.0)

    @property
    def _trained(self) -> float:
        """Number of positions that the model was trained on."""
        return float(self.parameters.get("original_max_position_embeddings") or self.longest or 1)

    @property
    def _factor(self) -> float:
        """By how much the context is stretched."""
        factor = self.parameters.get("factor")
        return float(factor) if factor is not None else float(self.longest or 1) / self._trained

    def _yarn(self, plain: Tensor) -> Tensor:
        """Interpolate slow frequencies, keep fast ones, and blend between."""
        given, width = self.parameters, self.width

        def turns(count: float) -> float:
            """Index of the frequency that turns ``count`` times within the trained length."""
            ratio = self._trained / (count * 2 * math.pi)
            return width * math.log(ratio) / (2 * math.log(self.theta))

        low = turns(given.get("beta_fast") or 32)
        high = turns(given.get("beta_slow") or 1)
        if given.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high += 0.001 if low == high else 0
        index = torch.arange(width // 2, dtype=torch.float64)
        interpolated = ((index - low) / (high - low)).clamp(0, 1)
        return plain / self._factor * interpolated + plain * (1 - interpolated)


def _mscale(factor: float, weight: float) -> float:
    """YaRN's growth of the attention logits with the context."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def entry_of(config: Any, name: str) -> Any:
    """An entry of a configuration; None if it has none."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # layers have values of their own, says the configuration
        return None


def configured_rope(config: Any, layer_type: str | None, width: int) -> Rope | None:
    """Rotary positions that a configuration states for a layer; None if it states none.

    Args:
        config: a configuration of transformers.
        layer_type: the layer's entry in ``layer_types``; None if it has none.
        width: components of a head.

    Raises:
        ValueError: for a type of RoPE that is not known.
    """
    entries = getattr(config, "rope_parameters", None)
    if not isinstance(entries, Mapping) or not entries:
        return None
    if any(isinstance(value, Mapping) for value in entries.values()):
        entries = entries.get(layer_type)
        if not isinstance(entries, Mapping):
            return None
    kind = entries.get("rope_type", "default")
    if kind not in _KINDS or "rope_theta" not in entries:
        raise ValueError(f"RoPE of type {kind!r} is not known to verify")
    size = entry_of(config, "head_dim") or width
    rotated_width = int(size * float(entries.get("partial_rotary_factor") or 1.0))
    longest = entry_of(config, "max_position_embeddings")
    rest = {name: value for name, value in entries.items() if name != "rope_theta"}
    return Rope(kind, float(entries["rope_theta"]), rotated_width, rest, longest)


@dataclass(frozen=True)
class Expectation:
    """What an attention module is to compute.

    Attributes:
        scale: factor of the scores; None if nothing states it.
        scale_from: what states it.
        causal: whether later keys are hidden; None if nothing states it.
        window: sliding window, in keys, including the token itself; None for none. In both
            directions, architectures differ in whether it includes the token itself.
        window_from: what states the window, or that there is none.
        softcap: bound of the scores; None for none.
        sinks: the module's sinks, (Hq,); None if it has none.
        key_heads: number of key heads; None if nothing states it.
        rope: rotary positions; None for none.
        rope_problem: why the rotary positions are not known; empty if they are.
        other_ropes: rotary positions of other types of layers.
        masks_problem: why the keys that a row sees are not known; empty if they are.
        interleaved: whether rotated pairs are neighbours, not of two halves; None if unknown.
        folded: a scale that queries, or queries and keys, are multiplied by before; None for none.
        window_of_both_sides: whether a window in both directions is the keys of both sides
            together, as in T5Gemma 2, not those of each side.
    """

    scale: float | None
    scale_from: str
    causal: bool | None
    window: int | None
    window_from: str
    softcap: float | None
    sinks: Tensor | None
    key_heads: int | None
    rope: Rope | None
    rope_problem: str
    other_ropes: tuple[Rope, ...]
    masks_problem: str
    interleaved: bool | None = None
    folded: float | None = None
    window_of_both_sides: bool = False

    @property
    def masks(self) -> bool:
        """Whether the keys that a row sees are known."""
        return not self.masks_problem


def expectation_of(
    module: Any, config: Any, heads: int, width: int, layer: int | None
) -> Expectation:
    """What the configuration and the parameters say of one attention module.

    Args:
        module: the attention module.
        config: its configuration; None if there is none.
        heads: number of query heads, Hq.
        width: components of a query, E.
        layer: the module's index among the layers; None if unknown.
    """
    scale, scale_from = _scale(module, config, width)
    types, index = entry_of(config, "layer_types"), getattr(module, "layer_idx", None)
    index = index if isinstance(index, int) else layer
    layer_type = None
    if isinstance(types, Sequence) and index is not None and 0 <= index < len(types):
        layer_type = str(types[index])
    window, window_from, problem = _window(config, layer_type)
    causal = getattr(module, "is_causal", None)
    if not isinstance(causal, bool):
        problem = problem or "nothing states whether it is causal"
    elif window is not None and not causal:
        window_from = f"{window_from} in both directions"
    capped = type(module).__name__ not in _UNCAPPED
    softcap: Any = entry_of(config, "attn_logit_softcapping") if capped else None
    sinks = getattr(module, "sinks", None)
    fits = isinstance(sinks, Tensor) and sinks.numel() == heads
    rope, rope_problem, others = _ropes(config, layer_type, width)
    kind, key_heads = entry_of(config, "model_type"), entry_of(config, "num_key_value_heads")
    group = getattr(module, "num_key_value_groups", None)
    grouped = isinstance(key_heads, int) and isinstance(group, int) and key_heads * group == heads
    return Expectation(
        scale=scale,
        scale_from=scale_from,
        causal=causal if isinstance(causal, bool) else None,
        window=window,
        window_from=window_from,
        softcap=float(softcap) if _is_positive(softcap) else None,
        sinks=sinks.detach().reshape(-1) if fits and isinstance(sinks, Tensor) else None,
        key_heads=key_heads if grouped else None,
        rope=rope,
        rope_problem=rope_problem,
        other_ropes=others,
        masks_problem=problem,
        interleaved=False if kind in _HALVES else True if kind in _NEIGHBOURS else None,
        window_of_both_sides=kind in _BOTH_SIDES,
    )


def windows_of(config: Any) -> set[int]:
    """Sizes of the sliding windows of a configuration's text layers."""
    if hasattr(config, "get_text_config"):
        try:
            config = config.get_text_config()
        except ValueError:  # it has more than one
            return set()
    types = entry_of(config, "layer_types")
    if isinstance(types, Sequence):
        found = {_window(config, each)[0] for each in types}
    else:
        found = {_window(config, None)[0]}
    return {size for size in found if size is not None}


def _is_positive(value: Any) -> bool:
    """Whether a value is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _scale(module: Any, config: Any, width: int) -> tuple[float | None, str]:
    """Factor of the scores, and what states it."""
    if _is_positive(base := entry_of(config, "query_pre_attn_scalar")):
        return float(base) ** -0.5, f"query_pre_attn_scalar={base:g}"
    if _is_positive(factor := entry_of(config, "attention_multiplier")):
        return float(factor), f"attention_multiplier={factor:g}"
    for name in ("scaling", "scale"):
        value: Any = getattr(module, name, None)
        if _is_positive(value):
            return float(value), f"the module's {name}={float(value):.4g}"
    return None, ""


def _window(config: Any, layer_type: str | None) -> tuple[int | None, str, str]:
    """A layer's window, what states it, and why masks are not known; empty if they are."""
    size = entry_of(config, "sliding_window")
    named = f" (layer_types: {layer_type})" if layer_type else ""
    if layer_type in _CHUNKED:
        return None, "", "it attends within chunks"
    if layer_type in _SLIDING:
        if not _is_positive(size):
            return None, "", f"its layer is {layer_type}, but sliding_window is {size}"
        return int(size), f"sliding_window={size}{named}", ""
    if layer_type in _FULL:
        return None, f"no window{named}", ""
    if layer_type is not None:
        return None, "", f"its layer is of type {layer_type}"
    if _is_positive(size) and entry_of(config, "use_sliding_window") is not False:
        return int(size), f"sliding_window={size}", ""
    return None, "no window", ""


def _ropes(
    config: Any, layer_type: str | None, width: int
) -> tuple[Rope | None, str, tuple[Rope, ...]]:
    """Rotary positions of a layer, why they are not known, and those of other types of layers."""
    try:
        rope = configured_rope(config, layer_type, width)
    except (KeyError, ValueError) as error:
        return None, str(error), ()
    others = []
    for other in set(entry_of(config, "layer_types") or ()) - {layer_type}:
        try:
            found = configured_rope(config, other, width)
        except (KeyError, ValueError):
            continue
        if found is not None and found != rope:
            others.append(found)
    return rope, "", tuple(others)


def layer_index(name: str) -> int | None:
    """The last number in a module's name; None if it has none.

    Example:
        >>> layer_index("model.layers.11.self_attn"), layer_index("attention")
        (11, None)
    """
    numbers = [int(part) for part in name.partition("#")[0].split(".") if part.isdigit()]
    return numbers[-1] if numbers else None


_SCALE_TOLERANCE = 1e-5


class Difference(NamedTuple):
    """One difference of a call from its expectation.

    Attributes:
        cause: a short name, such as ``"window off by one"``.
        sentence: what differs.
    """

    cause: str
    sentence: str


class Comparison(NamedTuple):
    """A comparison of a call's gradients, or of its rotated queries and keys, with those expected.

    Attributes:
        error: largest relative difference.
        tolerance: largest difference that rounding explains.
        difference: what they differ by; None if they agree.
    """

    error: float
    tolerance: float
    difference: Difference | None = None


@dataclass(frozen=True)
class Pass:
    """What is known of one forward pass.

    Attributes:
        inputs: kind of input, such as ``"left padding"``.
        tokens: tokens of the pass, L.
        past: tokens in the cache before them.
        real: boolean (B, past + L), False on padding; None if unknown.
        positions: of the tokens of the pass, (B, L); None if the model was not given any.
        documents: cumulative lengths of packed documents; None for one document in each row.
        is_text: whether every attention of the model reads these tokens, so that masks are known.
        separates: whether the model's code makes its masks from the positions. Otherwise only a
            call that is given them is to tell documents apart, as flash attention does.
    """

    inputs: str
    tokens: int = 0
    past: int = 0
    real: Tensor | None = None
    positions: Tensor | None = None
    documents: Tensor | None = None
    is_text: bool = False
    separates: bool = False

    def knows_masks(self, call: AttentionCall) -> bool:
        """Whether the keys that a call's rows see follow from this."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        return (
            self.is_text
            and not call.cross
            and queries == self.tokens
            and queries <= keys <= self.past + self.tokens
            and (self.real is None or len(self.real) == len(call.query))
        )

    def promises(self, call: AttentionCall) -> bool:
        """Whether a call's masks are to tell the documents apart, or there are none."""
        if self.documents is None or self.separates:
            return True
        return packed_lengths(call.positions, call.query, call.key.shape[2]) is not None

    def real_rows(self, call: AttentionCall) -> Tensor | None:
        """Boolean (B, L), False on padding queries; None if all are real."""
        if self.real is None or not self.knows_masks(call):
            return call.real
        return self.real[:, self.past :]

    def real_keys(self, keys: int) -> Tensor | None:
        """Boolean (B, S), False on padding keys; None if all are real."""
        if self.real is None or bool(self.real[:, -keys:].all()):
            return None
        return self.real[:, -keys:]


def expected_call(call: AttentionCall, expected: Expectation, facts: Pass) -> AttentionCall:
    """The call as configuration and parameters say that it should be.

    Masks stay those of the call where the configuration does not determine them.

    Args:
        call: the captured call.
        expected: what the configuration says of its module.
        facts: what is known of the forward pass.
    """
    changes: dict[str, Any] = {"dropout_p": 0.0, "unknown": ()}
    if expected.scale is not None:
        changes["scale"] = expected.scale
    if expected.softcap is not None:
        changes["softcap"] = expected.softcap
    if expected.sinks is not None:
        changes["sinks"] = expected.sinks
    if expected.masks and facts.knows_masks(call):
        keys = call.key.shape[2]
        changes |= {
            "attn_mask": None,
            "is_causal": bool(expected.causal),
            "query_offset": keys - call.query.shape[2],
            "window": expected.window,
            "key_mask": facts.real_keys(keys),
            "cu_seqlens": facts.documents,
        }
        mask = call.attn_mask
        if mask is not None and mask.is_floating_point():
            added = torch.where(hides(mask), 0.0, mask)
            if bool((added != 0).any()):  # ALiBi or another bias, with the mask in one tensor
                changes["bias"] = added if call.bias is None else added + call.bias
    ours = replace(call, **changes)
    if expected.window is not None and expected.causal is False and ours.window is not None:
        halved = (ours.window // 2 + 1,) if expected.window_of_both_sides else ()
        for size in (ours.window + 1, *halved):
            other = replace(ours, window=size)
            if torch.equal(*torch.broadcast_tensors(visible_keys(call), visible_keys(other))):
                return other
    return ours


def counted_rows(wanted: Tensor, call: AttentionCall, facts: Pass) -> Tensor:
    """Rows to compare, boolean (B, Hq, L): real tokens that see a key.

    Args:
        wanted: the keys that each row is to see, (B, 1 or Hq, L, S).
        call: the captured call.
        facts: what is known of the forward pass.
    """
    counted = wanted.any(-1).expand(-1, call.query.shape[1], -1)
    real = facts.real_rows(call)
    return counted if real is None else counted & real[:, None, :].to(counted.device)


def argument_differences(
    call: AttentionCall,
    ours: AttentionCall,
    expected: Expectation,
    seen: Tensor,
    wanted: Tensor,
    counted: Tensor,
) -> list[Difference]:
    """Differences of a captured call's arguments from those expected.

    Args:
        call: the captured call.
        ours: the same call with the expected arguments.
        expected: what the configuration says of its module.
        seen: the keys that each of its rows sees, (B, 1 or Hq, L, S).
        wanted: those that it is to see, likewise.
        counted: the rows to compare, from :func:`counted_rows`.
    """
    found = [*_scores(call, expected), *_heads(call, expected)]
    rows = counted[:, :1] if max(seen.shape[1], wanted.shape[1]) == 1 else counted
    if bool(((seen != wanted) & rows.unsqueeze(-1)).any()):
        found += _masks(seen, wanted, rows, ours, expected)
    return found


def _scores(call: AttentionCall, expected: Expectation) -> Iterator[Difference]:
    """Differences in what scores are computed from."""
    if expected.scale is not None:
        difference = abs(call.factor - expected.scale)
        if difference > _SCALE_TOLERANCE * expected.scale:
            yield Difference(
                "wrong scale",
                f"scores are scaled by {call.factor:.4g}, but {expected.scale_from} means "
                f"{expected.scale:.4g}",
            )
    cap = expected.softcap
    if cap is not None and call.softcap is None:
        text = f"scores are not capped, but attn_logit_softcapping={cap:g}"
        yield Difference("softcap missing", text)
    elif cap is not None and call.softcap is not None and abs(cap - call.softcap) > 1e-6 * cap:
        text = f"scores are capped at {call.softcap:g}, but attn_logit_softcapping={cap:g}"
        yield Difference("wrong softcap", text)
    if expected.sinks is None:
        return
    if call.sinks is None:
        text = "the sinks do not reach the attention function: rows sum to 1 without them"
        yield Difference("sinks dropped", text)
    elif not torch.allclose(call.sinks.double(), expected.sinks.double(), 1e-2, 1e-2):
        text = "the attention function gets other sinks than the module's parameter"
        yield Difference("wrong sinks", text)


def _heads(call: AttentionCall, expected: Expectation) -> Iterator[Difference]:
    """Key heads that were repeated in another order than query heads are grouped."""
    heads, given = call.query.shape[1], call.key.shape[1]
    wanted = expected.key_heads
    if not isinstance(wanted, int) or not 1 < wanted < given or given != heads or heads % wanted:
        return
    group, key = heads // wanted, call.key
    if torch.equal(key, key[:, ::group].repeat_interleave(group, 1)):
        return
    if torch.equal(key, key[:, :wanted].repeat(1, group, 1, 1)):
        text = (
            f"the {wanted} key heads are repeated in turn (0, 1, …, 0, 1, …), but query heads "
            f"0–{group - 1} share key head 0"
        )
        yield Difference("heads grouped differently", text)


def _masks(
    seen: Tensor, wanted: Tensor, rows: Tensor, ours: AttentionCall, expected: Expectation
) -> list[Difference]:
    """Name what distinguishes the keys that rows see from those that they are to see.

    Args:
        seen: keys that are visible in the captured call, (B, 1 or Hq, L, S).
        wanted: keys that should be, same shape or broadcastable.
        rows: rows to compare, (B, 1 or Hq, L).
        ours: the expected call.
        expected: what the configuration says of the module.
    """
    queries, keys = ours.query.shape[2], ours.key.shape[2]
    device = seen.device
    places = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = (places - torch.arange(keys, device=device)).expand(seen.shape)
    extra = seen & ~wanted & rows.unsqueeze(-1)
    missing = wanted & ~seen & rows.unsqueeze(-1)
    found: list[Difference] = []
    if not bool((seen == wanted)[(rows.unsqueeze(-1) & (distance != 0)).expand_as(seen)].any()):
        return [Difference("mask inverted", "rows see exactly the keys that should be hidden")]
    if ours.key_mask is not None:
        padding = ~ours.key_mask[:, None, None, :] & extra
        if bool(padding.any()):
            extra = extra & ~padding
            found.append(_padding(padding, missing, ours.key_mask))
            missing = missing & False if found[-1].cause == "padding mask wrong" else missing
    if ours.cu_seqlens is not None:
        ends = ours.cu_seqlens[1:].contiguous()
        document = torch.bucketize(torch.arange(keys, device=ends.device), ends, right=True)
        mixed = extra & (document[keys - queries :, None] != document)
        if bool(mixed.any()):
            extra = extra & ~mixed
            text = "tokens of packed documents see tokens of other documents"
            found.append(Difference("documents mixed", text))
    later = extra & (distance < 0)
    if bool(later.any()):
        extra = extra & ~later
        ahead = int(-distance[later].min())
        kind = "causal mask shifted" if ahead == 1 and keys > 2 else "not causal"
        text = f"rows see keys up to {ahead} {'token' if ahead == 1 else 'tokens'} ahead"
        found.append(Difference(kind, text))
    if bool(extra.any()):
        found.append(_wider(extra, seen & rows.unsqueeze(-1), distance, expected))
    behind = missing & (distance < 0)
    if bool(behind.any()) and not bool((seen & (distance < 0) & rows.unsqueeze(-1)).any()):
        missing = missing & ~behind
        text = "later keys are hidden, but the module is not causal"
        found.append(Difference("causal by mistake", text))
    if bool(missing.any()):
        found.append(_narrower(missing, seen & rows.unsqueeze(-1), distance, expected, queries))
    return found


def _padding(padding: Tensor, missing: Tensor, real: Tensor) -> Difference:
    """Name visible padding: a mask that is not applied, or one made for other tokens.

    Args:
        padding: visible padding keys, (B, 1 or Hq, L, S).
        missing: hidden keys that should be visible, same shape.
        real: real keys, (B, S).
    """
    if bool(missing.any()):
        text = "padding is visible and real tokens are hidden: the mask marks the wrong tokens"
        return Difference("padding mask wrong", text)
    seen = int(padding.any(2).any(1).sum())
    text = f"{seen} of {int((~real).sum())} padding keys are visible to real tokens"
    return Difference("padding ignored", text)


def _wider(extra: Tensor, seen: Tensor, distance: Tensor, expected: Expectation) -> Difference:
    """Name earlier keys that are visible beyond the window."""
    size = expected.window
    if size is None:
        pairs = f"{int(extra.sum())} pairs of query and key are visible that should be hidden"
        return Difference("mask wrong", pairs)
    reach = int(distance[seen].max()) + 1
    if reach == size + 1:
        text = f"rows see {reach} keys, but {expected.window_from} means {size}"
        return Difference("window off by one", text)
    text = f"rows see up to {reach} keys, but {expected.window_from}"
    return Difference("window ignored", text)


def _narrower(
    missing: Tensor, seen: Tensor, distance: Tensor, expected: Expectation, queries: int
) -> Difference:
    """Name keys that are hidden and should be visible."""
    if expected.causal is False:
        distance = distance.abs()
    nearest = int(distance[missing].min())
    reach = int(distance[seen].max()) + 1 if bool(seen.any()) else 0
    if nearest == 0 and not bool((seen & (distance == 0)).any()):
        return Difference("causal mask shifted", "no row sees its own token")
    if reach and nearest >= reach:
        size = expected.window
        if size is not None and reach == size - 1:
            text = f"rows see {reach} keys, but {expected.window_from} means {size}"
            return Difference("window off by one", text)
        text = f"rows see {reach} keys at most, but the configuration says {expected.window_from}"
        return Difference("window on the wrong layer" if size is None else "wrong window", text)
    keys = distance.shape[-1]
    if keys > queries and bool(seen[..., 0, :].any()) and not bool(seen[..., 0, 1:].any()):
        text = f"row 0 of {queries} sees only the first of {keys} keys: rows are aligned with it"
        return Difference("causal mask shifted", text)
    text = f"{int(missing.sum())} pairs of query and key are hidden that should be visible"
    return Difference("mask wrong", text)
