"""Which tensors of a saved model did not load, which of them matter, and the likely cause.

transformers initialises parameters that are missing from the files at random and continues;
measurements are then meaningless. Some differences are normal: files of a language model contain a
head that the base model lacks, and lack the pooler that some models add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

__all__ = ["missing_head", "not_loaded"]

#: Parts behind the last layer: no attention depends on them.
_BEHIND = "pooler"
#: Tensors that old files hold and models compute today.
_COMPUTED = {"position_ids", "token_type_ids", "inv_freq", "original_inv_freq", "masked_bias"} | {
    "causal_mask", "num_batches_tracked", "relative_position_index", "version", "_float_tensor",
}  # fmt: skip
#: What wrappers put before each name of a state dict.
_WRAPPERS = {
    "module": "DistributedDataParallel and DataParallel add it",
    "_orig_mod": "torch.compile adds it",
    "_fsdp_wrapped_module": "FullyShardedDataParallel adds it",
}
_LISTED = 3


def not_loaded(model: nn.Module, report: Mapping[str, Any]) -> str | None:
    """The tensors that a model and its files do not share, as a clause; None if irrelevant.

    Args:
        model: a transformers model.
        report: result of ``from_pretrained(..., output_loading_info=True)``.

    Returns:
        None if all that attention depends on has loaded.

    Example:
        >>> names = {"module.weight", "module.bias"}
        >>> report = {"missing_keys": {"weight", "bias"}, "unexpected_keys": names}
        >>> print(not_loaded(nn.Linear(2, 2), report))
        2 tensors missing from its files (bias, weight) and 2 that fit nowhere (module.bias,
        module.weight); the names in the files begin with 'module.' (DistributedDataParallel and
        DataParallel add it): save the wrapped model instead of its wrapper
    """
    every = set(map(str, report.get("missing_keys", ())))
    missing = {name for name in every if _BEHIND not in name.split(".") or "atten" in name}
    unexpected = {
        name for name in map(str, report.get("unexpected_keys", ())) if _fits(model, name)
    }
    cause = _cause(missing, set(map(str, report.get("unexpected_keys", ()))))
    if cause:
        unexpected |= set(map(str, report["unexpected_keys"]))
    shapes = [
        f"{name}: {tuple(saved_shape)} in the files, {tuple(model_shape)} in the model"
        for name, saved_shape, model_shape in sorted(
            report.get("mismatched_keys", ()), key=lambda part: part[0]
        )
    ]
    parts = [
        f"{_count(missing)} missing from its files ({_listed(missing)})" if missing else "",
        (
            f"{len(unexpected)} that fit{'s' * (len(unexpected) == 1)} nowhere "
            f"({_listed(unexpected)})"
            if missing
            else (
                f"{_count(unexpected)} in its files that the model does not have "
                f"({_listed(unexpected)})"
            )
        )
        if unexpected
        else "",
        f"{_count(shapes)} of the wrong shape ({_listed(shapes)})" if shapes else "",
    ]
    if not any(parts):
        return None
    return " and ".join(filter(None, parts)) + (f"; {cause}" if cause else "")


def missing_head(model: nn.Module, report: Mapping[str, Any]) -> str | None:
    """The tensors of the model's head that its files lack, as text; None if none are missing.

    Args:
        model: a model of transformers with a head on its base model.
        report: what ``from_pretrained`` returns with ``output_loading_info=True``.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    missing = {str(name) for name in report.get("missing_keys", ())}
    head = {name for name in missing if not name.startswith(prefix)}
    return f"{_count(head)} missing from its files: {_listed(head)}" if head else None


def _fits(model: nn.Module, name: str) -> bool:
    """Whether a missing tensor belongs to a loaded part of the model, not to an output head."""
    prefix = getattr(model, "base_model_prefix", "")
    inner = name.removeprefix(f"{prefix}.") if prefix else name
    parts = inner.split(".")
    if parts[-1] in _COMPUTED or inner in dict(model.named_buffers()):
        return False
    inside = inner != name and not hasattr(model, prefix)
    return inside or parts[0] in dict(model.named_children())


def _cause(missing: Collection[str], unexpected: Iterable[str]) -> str:
    """A prefix whose removal makes most names in the files match the model's; empty if none."""
    before: Counter[str] = Counter()
    for name in unexpected:
        start = name.find(".") + 1
        while start:
            if name[start:] in missing:
                before[name[:start]] += 1
                break
            start = name.find(".", start) + 1
    if not before or 2 * before.total() < len(missing):
        return ""
    prefix, _ = before.most_common(1)[0]
    cause = next((reason for part, reason in _WRAPPERS.items() if part in prefix.split(".")), "")
    if not cause:
        return f"the names in the files begin with {prefix!r}; without it they would match"
    return (
        f"the names in the files begin with {prefix!r} ({cause}): save the wrapped model instead "
        "of its wrapper"
    )


def _count(names: Collection[str]) -> str:
    """Number of tensors, as text."""
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"


def _listed(names: Iterable[str]) -> str:
    """The first names of a list, and how many more there are."""
    first = sorted(names)
    more = f", … {len(first) - _LISTED} more" if len(first) > _LISTED else ""
    return ", ".join(name[:120] for name in first[:_LISTED]) + more
