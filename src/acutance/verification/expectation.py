"""What the configuration says of each attention call, and how the call's arguments differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
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


class Expectation:
    """What the configuration and the parameters say of one attention module.

    Args:
        module: the attention module.
        config: its configuration; None if there is none.
        heads: number of query heads, Hq.
        width: components of a query, E.
        layer: the module's index among the layers; None if unknown.

    Attributes:
        scale: factor of the scores; None if nothing states it.
        scale_from: what states it.
        causal: whether later keys are hidden; None if nothing states it.
        window: sliding window, in keys, including the token itself; None for none. In both
            directions, architectures differ in whether it includes the token itself.
        window_from: what states the window, or that there is none.
        window_of_both_sides: whether a window in both directions is the keys of both sides
            together, as in T5Gemma 2, not those of each side.
        softcap: bound of the scores; None for none.
        sinks: the module's sinks, (Hq,); None if it has none.
        key_heads: number of key heads; None if nothing states it.
        rope: rotary positions; None for none.
        rope_problem: why the rotary positions are not known; empty if they are.
        other_ropes: rotary positions of other types of layers.
        masks_problem: why the keys that a row sees are not known; empty if they are.
        interleaved: whether rotated pairs are neighbours, not of two halves; None if unknown.
        folded: a scale that queries, or queries and keys, are multiplied by before; None for none.
    """

    def __init__(self, module: Any, config: Any, heads: int, width: int, layer: int | None) -> None:
        self.scale, self.scale_from = _scale(module, config)
        self.folded: float | None = None
        types, index = entry_of(config, "layer_types"), getattr(module, "layer_idx", None)
        index = index if isinstance(index, int) else layer
        layer_type = None
        if isinstance(types, Sequence) and index is not None and 0 <= index < len(types):
            layer_type = str(types[index])
        self.window, self.window_from, self.masks_problem = _window(config, layer_type)
        causal = getattr(module, "is_causal", None)
        self.causal = causal if isinstance(causal, bool) else None
        if self.causal is None:
            self.masks_problem = self.masks_problem or "nothing states whether it is causal"
        elif self.window is not None and not causal:
            self.window_from = f"{self.window_from} in both directions"
        capped = type(module).__name__ not in _UNCAPPED
        softcap: Any = entry_of(config, "attn_logit_softcapping") if capped else None
        self.softcap = float(softcap) if _is_positive(softcap) else None
        sinks = getattr(module, "sinks", None)
        self.sinks: Tensor | None = None
        if isinstance(sinks, Tensor) and sinks.numel() == heads:
            self.sinks = sinks.detach().reshape(-1)
        self.rope, self.rope_problem, self.other_ropes = _ropes(config, layer_type, width)
        keys = entry_of(config, "num_key_value_heads")
        group = getattr(module, "num_key_value_groups", None)
        grouped = isinstance(keys, int) and isinstance(group, int) and keys * group == heads
        self.key_heads = keys if grouped else None
        kind = entry_of(config, "model_type")
        self.interleaved = False if kind in _HALVES else True if kind in _NEIGHBOURS else None
        self.window_of_both_sides = kind in _BOTH_SIDES


def windows_of(config: Any) -> set[int]:
    """Sizes of the sliding windows of a configuration's text layers."""
    if hasattr(config, "get_text_config"):
        try:
            config = config.get_text_config()
        except ValueError:  # it has more than one
            return set()
    types = entry_of(config, "layer_types")
    sizes = {
        _window(config, kind)[0] for kind in (types if isinstance(types, Sequence) else [None])
    }
    return {size for size in sizes if size is not None}


def _is_positive(value: Any) -> bool:
    """Whether a value is a number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _scale(module: Any, config: Any) -> tuple[float | None, str]:
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
        with suppress(KeyError, ValueError):
            others.append(configured_rope(config, other, width))
    return rope, "", tuple(other for other in others if other is not None and other != rope)


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


class ExpectedCall:
    """A captured call beside what configuration, parameters and input say that it should be.

    Masks stay those of the call where the configuration does not determine them.

    Args:
        call: the captured call.
        expected: what the configuration says of its module.
        facts: what is known of the forward pass.

    Attributes:
        ours: the same call with the expected arguments.
        seen: the keys that each of its rows sees, (B, 1 or Hq, L, S).
        wanted: those that it is to see, likewise.
        counted: rows to compare, boolean (B, Hq, L): real tokens that are to see a key.
    """

    def __init__(self, call: AttentionCall, expected: Expectation, facts: Pass) -> None:
        self.call, self.expected, self.facts = call, expected, facts
        self.seen = visible_keys(call)
        self.ours = self._expected()
        self.wanted = visible_keys(self.ours)
        counted = self.wanted.any(-1).expand(-1, call.query.shape[1], -1)
        real = call.real
        if facts.real is not None and facts.knows_masks(call):
            real = facts.real[:, facts.past :]
        self.counted = counted if real is None else counted & real[:, None, :].to(counted.device)

    def _expected(self) -> AttentionCall:
        """The call with the expected arguments."""
        call, expected, facts = self.call, self.expected, self.facts
        changes: dict[str, Any] = {"dropout_p": 0.0, "unknown": ()}
        for name in ("scale", "softcap", "sinks"):
            if (value := getattr(expected, name)) is not None:
                changes[name] = value
        if not expected.masks_problem and facts.knows_masks(call):
            keys = call.key.shape[2]
            real = None if facts.real is None else facts.real[:, -keys:]
            changes |= {
                "attn_mask": None,
                "is_causal": bool(expected.causal),
                "query_offset": keys - call.query.shape[2],
                "window": expected.window,
                "key_mask": None if real is None or bool(real.all()) else real,
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
                if torch.equal(*torch.broadcast_tensors(self.seen, visible_keys(other))):
                    return other
        return ours

    def differences(self) -> list[Difference]:
        """Differences of the call's arguments from those expected."""
        seen, wanted, rows = self.seen, self.wanted, self.counted
        found = [*self._of_scores(), *self._of_heads()]
        if max(seen.shape[1], wanted.shape[1]) == 1:
            rows = rows[:, :1]
        if bool(((seen != wanted) & rows.unsqueeze(-1)).any()):
            found += self._of_masks(rows.unsqueeze(-1))
        return found

    def _of_scores(self) -> Iterator[Difference]:
        """Differences in what scores are computed from."""
        call, scale, cap = self.call, self.expected.scale, self.expected.softcap
        if scale is not None and abs(call.factor - scale) > _SCALE_TOLERANCE * scale:
            text = f"scores are scaled by {call.factor:.4g}, but {self.expected.scale_from} means "
            yield Difference("wrong scale", f"{text}{scale:.4g}")
        if cap is not None and call.softcap is None:
            text = f"scores are not capped, but attn_logit_softcapping={cap:g}"
            yield Difference("softcap missing", text)
        elif cap is not None and call.softcap is not None and abs(cap - call.softcap) > 1e-6 * cap:
            text = f"scores are capped at {call.softcap:g}, but attn_logit_softcapping={cap:g}"
            yield Difference("wrong softcap", text)
        sinks, given = self.expected.sinks, call.sinks
        if sinks is None:
            return
        if given is None:
            text = "the sinks do not reach the attention function: rows sum to 1 without them"
            yield Difference("sinks dropped", text)
        elif not torch.allclose(given.double(), sinks.double(), 1e-2, 1e-2):
            text = "the attention function gets other sinks than the module's parameter"
            yield Difference("wrong sinks", text)

    def _of_heads(self) -> Iterator[Difference]:
        """Key heads that were repeated in another order than query heads are grouped."""
        key, heads, wanted = self.call.key, self.call.query.shape[1], self.expected.key_heads
        given = key.shape[1]
        if wanted is None or not 1 < wanted < given or given != heads or heads % wanted:
            return
        group = heads // wanted
        if torch.equal(key, key[:, ::group].repeat_interleave(group, 1)):
            return
        if torch.equal(key, key[:, :wanted].repeat(1, group, 1, 1)):
            text = (
                f"the {wanted} key heads are repeated in turn (0, 1, …, 0, 1, …), but query heads "
                f"0–{group - 1} share key head 0"
            )
            yield Difference("heads grouped differently", text)

    def _of_masks(self, rows: Tensor) -> Iterator[Difference]:
        """Name what distinguishes the keys that rows (B, 1 or Hq, L, 1) see and are to see."""
        ours, seen, wanted = self.ours, self.seen, self.wanted
        queries, keys = ours.query.shape[2], ours.key.shape[2]
        places = torch.arange(queries, device=seen.device)[:, None] + keys - queries
        distance = (places - torch.arange(keys, device=seen.device)).expand(seen.shape)
        extra, missing = seen & ~wanted & rows, wanted & ~seen & rows
        if not bool((seen == wanted)[(rows & (distance != 0)).expand_as(seen)].any()):
            yield Difference("mask inverted", "rows see exactly the keys that should be hidden")
            return
        if ours.key_mask is not None:
            padding = ~ours.key_mask[:, None, None, :] & extra
            extra = extra & ~padding
            if bool(padding.any()) and bool(missing.any()):
                missing = torch.zeros_like(missing)
                text = "padding is visible and real tokens are hidden: the mask marks the wrong "
                yield Difference("padding mask wrong", f"{text}tokens")
            elif bool(padding.any()):
                seen_keys, hidden = int(padding.any(2).any(1).sum()), int((~ours.key_mask).sum())
                text = f"{seen_keys} of {hidden} padding keys are visible to real tokens"
                yield Difference("padding ignored", text)
        if ours.cu_seqlens is not None:
            ends = ours.cu_seqlens[1:].contiguous()
            document = torch.bucketize(torch.arange(keys, device=ends.device), ends, right=True)
            mixed = extra & (document[keys - queries :, None] != document)
            extra = extra & ~mixed
            if bool(mixed.any()):
                text = "tokens of packed documents see tokens of other documents"
                yield Difference("documents mixed", text)
        later = extra & (distance < 0)
        extra = extra & ~later
        if bool(later.any()):
            ahead = int(-distance[later].min())
            kind = "causal mask shifted" if ahead == 1 and keys > 2 else "not causal"
            text = f"rows see keys up to {ahead} {'token' if ahead == 1 else 'tokens'} ahead"
            yield Difference(kind, text)
        seen = seen & rows
        if bool(extra.any()):
            yield self._wider(extra, seen, distance)
        behind = missing & (distance < 0)
        if bool(behind.any()) and not bool((seen & (distance < 0)).any()):
            missing = missing & ~behind
            text = "later keys are hidden, but the module is not causal"
            yield Difference("causal by mistake", text)
        if bool(missing.any()):
            yield self._narrower(missing, seen, distance)

    def _wider(self, extra: Tensor, seen: Tensor, distance: Tensor) -> Difference:
        """Name earlier keys that are visible beyond the window."""
        size, stated = self.expected.window, self.expected.window_from
        if size is None:
            pairs = f"{int(extra.sum())} pairs of query and key are visible that should be hidden"
            return Difference("mask wrong", pairs)
        reach = int(distance[seen].max()) + 1
        if reach == size + 1:
            text = f"rows see {reach} keys, but {stated} means {size}"
            return Difference("window off by one", text)
        return Difference("window ignored", f"rows see up to {reach} keys, but {stated}")

    def _narrower(self, missing: Tensor, seen: Tensor, distance: Tensor) -> Difference:
        """Name keys that are hidden and should be visible."""
        size, stated = self.expected.window, self.expected.window_from
        if self.expected.causal is False:
            distance = distance.abs()
        nearest = int(distance[missing].min())
        reach = int(distance[seen].max()) + 1 if bool(seen.any()) else 0
        if nearest == 0 and not bool((seen & (distance == 0)).any()):
            return Difference("causal mask shifted", "no row sees its own token")
        if reach and nearest >= reach:
            if size is not None and reach == size - 1:
                text = f"rows see {reach} keys, but {stated} means {size}"
                return Difference("window off by one", text)
            text = f"rows see {reach} keys at most, but the configuration says {stated}"
            cause = "window on the wrong layer" if size is None else "wrong window"
            return Difference(cause, text)
        queries, keys = distance.shape[-2:]
        if keys > queries and bool(seen[..., 0, :].any()) and not bool(seen[..., 0, 1:].any()):
            text = f"row 0 of {queries} sees only the first of {keys} keys: rows are aligned with "
            return Difference("causal mask shifted", f"{text}it")
        text = f"{int(missing.sum())} pairs of query and key are hidden that should be visible"
        return Difference("mask wrong", text)
