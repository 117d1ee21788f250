"""What makes a model's queries, or its keys, larger: the reference of a law, without the law."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from acutance.capture.find_layers import module_name as label
from acutance.training.qk_clip import NAMES, Projections, find_layouts

_NORMS = (
    *("{0}_norm", "{0}_layernorm", "{0}_layer_norm", "{0}_ln", "norm_{0}", "ln_{0}"),
    *("{0}_b_norm", "pool_{0}"),
)
_PROJECTIONS: dict[str, tuple[str, ...]] = {
    "query": (
        *("q_b_proj", "q_proj", "query", "q", "to_q", "q_lin", "query_proj", "wq_b", "wq", "Wq"),
        *("w_q", "W_q", "linear_q", "q_linear", "query_projection", "proj_q", "projection_query"),
        *("q_head", "project_q", "query_layer"),
    ),
    "key": (
        *("k_proj", "key", "k", "to_k", "k_lin", "key_proj", "wk", "Wk", "w_k", "W_k", "linear_k"),
        *("k_linear", "key_projection", "proj_k", "projection_key", "k_head", "project_k"),
    ),
}
#: What is added to the query before its products, and a second query whose products are added.
_BESIDE = (
    *("q_bias", "r_w_bias", "r_r_bias", "r_s_bias", "bias_u", "bias_v", "pos_bias_u", "pos_bias_v"),
    *("layout_query", "add_q_proj"),
)

#: The output of a module, or a tensor, and which power of the factor multiplies it.
Part: TypeAlias = "tuple[nn.Module | Tensor, float]"


def ways(model: Any, heads: dict[str, int]) -> Iterator[tuple[str, list[Part]]]:
    """What to make larger in all of some modules: each way that can be gone, once.

    Args:
        model: any model.
        heads: names of modules, and how many heads each has.
    """
    modules = {label(model, name): module for name, module in model.named_modules()}
    before: list[list[int]] = []
    for by, chosen in _WAYS:
        parts: list[Part] = []
        for name, count in heads.items():
            found = chosen(modules[name], count)
            if not found:
                break
            parts += found
        else:
            places = [id(one) if isinstance(one, nn.Module) else one.data_ptr() for one, _ in parts]
            if places not in before:
                before.append(places)
                yield by, parts


def normalises(model: Any, names: Iterable[str]) -> bool:
    """Whether code of one of some modules divides by a norm, which undoes any factor before."""
    modules = {label(model, name): module for name, module in model.named_modules()}
    for kind in {type(modules[name]) for name in names}:
        forward = kind.forward
        used = [forward.__globals__.get(name) for name in forward.__code__.co_names]
        for code in (kind, *filter(inspect.isfunction, used)):
            if "normalize(" in inspect.getsource(code):
                return True
    return False


@contextmanager
def larger(parts: list[Part], factor: float) -> Iterator[None]:
    """Multiply outputs of modules and entries of tensors, each once; then take it back."""
    with torch.no_grad(), ExitStack() as stack:
        seen: set[tuple[object, ...]] = set()
        for part, power in parts:
            if isinstance(part, nn.Module):
                key: tuple[object, ...] = (part,)
            else:
                key = (part.data_ptr(), part.shape, part.stride())
            if key in seen:
                continue
            seen.add(key)
            times = factor**power
            if isinstance(part, nn.Module):
                hook = part.register_forward_hook(lambda _, __, out, by=times: _times(out, by))
                stack.callback(hook.remove)
            else:
                stack.callback(part.copy_, part.clone())
                part.mul_(times)
        yield


def _times(output: Any, factor: float) -> Any:
    if isinstance(output, tuple):  # of queries and keys, from a normalisation of both
        return tuple(one * factor for one in output)
    return output * factor


def _normed(module: nn.Module, heads: int, *, of: str = "query") -> list[Part]:
    """Normalisations after the projection: of the query, or one that queries and keys share."""
    names = {"query": (("q", 1.0), ("query", 1.0), ("qk", 0.5)), "key": (("k", 1.0),)}
    for part, power in names[of]:
        for form in _NORMS:
            norm = getattr(module, form.format(part), None)
            norm = getattr(norm, "norm_act", norm)  # the last step of a pooling
            if isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity):
                return [(norm, power), *_alone(module, (form.format(f"added_{part}"),))]
    return _made(module, heads, of=of)


def _made(module: nn.Module, heads: int, *, of: str = "query", layout: int = 0) -> list[Part]:
    """What makes a module's queries or keys: a projection, or its part of one."""
    found = _alone(module, _PROJECTIONS[of])
    both = getattr(module, "to_kv", None)
    if not found and of == "key" and isinstance(both, nn.Linear):
        found = [(half.chunk(2)[0], 1.0) for half in both.parameters()]
    if not found and (slices := _packed(module, heads, layout)) is not None:
        found = [(one[head], 1.0) for one in getattr(slices, of) for head in range(heads)]
    if found and of == "query":
        for name in _BESIDE:
            found += _alone(module, (name,))
    return found


def _with_positions(module: nn.Module, heads: int) -> list[Part]:
    """Keys, and the tables of relative positions whose products with the queries are added."""
    found = _normed(module, heads, of="key")
    for name in ("rel_pos_h", "rel_pos_w", "rel_pos_t"):
        found += _alone(module, (name,)) if found else []
    return found


def _alone(module: nn.Module, names: tuple[str, ...]) -> list[Part]:
    """The first of some parts of a module that it has: parameters of one matrix, or outputs."""
    for name in names:
        part = getattr(module, name, None)
        if isinstance(part, nn.Parameter):
            return [(part, 1.0)]
        if isinstance(part, nn.Module):
            own = [one for one in part.parameters(recurse=False) if one is not None]
            matrix = getattr(part, "weight", None)
            if isinstance(matrix, Tensor) and matrix.dim() > 1:
                return [(one, 1.0) for one in own]
            return [(part, 1.0)]
    return []


def _packed(module: nn.Module, heads: int, layout: int) -> Projections | None:
    if not heads:
        return None
    widths = [getattr(module, name, None) for name in ("head_dim", "attention_head_size")]
    for name, part in module.named_children():
        weight = getattr(part, "weight", None)
        if name in NAMES and isinstance(weight, Tensor) and weight.dim() == 2:
            rows = weight.shape[1 if type(part).__name__ == "Conv1D" else 0]
            widths.append(rows // 3 // heads)
    for width in widths:
        if isinstance(width, int):
            with suppress(ValueError):
                found = find_layouts(module, heads, width)
                return found[min(layout, len(found) - 1)]
    return None


_WAYS: tuple[tuple[str, Callable[[nn.Module, int], list[Part]]], ...] = (
    ("queries", _normed),
    ("queries", _made),
    ("queries", partial(_made, layout=1)),
    ("keys", partial(_made, of="key")),
    ("keys", partial(_normed, of="key")),
    ("keys", _with_positions),
    ("keys", partial(_made, of="key", layout=1)),
)

__all__ = ["Part", "larger", "normalises", "ways"]
