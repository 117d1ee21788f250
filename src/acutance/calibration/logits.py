"""A model's logits, all at once or a few at a time: the head runs by itself on hidden states."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.capture.module_names import class_name


class LossError(ValueError):
    """A loss that this model does not have, or that is not a number."""


def has_separate_head(model: torch.nn.Module) -> bool:
    """Whether a model is a base model, which gives hidden states, with a head on top."""
    base = getattr(model, "base_model", None)
    return (
        isinstance(base, torch.nn.Module)
        and base is not model
        and callable(getattr(model, "get_output_embeddings", None))
        and isinstance(getattr(model, "get_output_embeddings")(), torch.nn.Module)  # noqa: B009
    )


def losses_in_pieces(
    model: Any,
    batch: Mapping[str, Any],
    ids: Tensor,
    places: Tensor,
    most: int,
    *,
    backward: bool = False,
) -> Tensor:
    """Losses at some places, (places,) float64, in their order, a few logits at a time.

    The model runs once and its head on a single place. Then the head, with all that the model does
    to its logits, runs on the hidden states of the places, piece by piece, while the base model
    hands out those of the piece instead of running.

    Args:
        model: a base model with a head, see :func:`has_separate_head`.
        batch: what the model is called with.
        ids: the token to be predicted at each place, (B, L).
        places: which places count, boolean (B, L).
        most: numbers of logits that are held at once.
        backward: also add the gradient of the sum of the losses to the leaves that need one.
    """
    base = model.base_model
    outputs: list[Any] = []

    def shorten(module: torch.nn.Module, given: Any, output: Any) -> Any:
        outputs.append(output)
        return _with_hidden(output, _hidden(output)[:, -1:])

    handle = base.register_forward_hook(shorten)
    try:
        vocabulary = logits_of(model, call_model(model, batch)).shape[-1]
    finally:
        handle.remove()
    (output,) = outputs
    hidden = _hidden(output)[places].unsqueeze(0)  # (1, places, E)
    states = hidden.detach().requires_grad_(backward)
    output = _with_hidden(output, states[:, :0])  # the rest of the states may go
    targets, found = ids[places], []
    step = max(1, most // vocabulary)
    for start in range(0, targets.numel(), step):
        stop = min(start + step, targets.numel())
        few = {"input_ids": targets[None, start:stop]}  # not read, but for their shape
        with _instead(base, _with_hidden(output, states[:, start:stop])):
            logits = logits_of(model, call_model(model, few))
        losses = cross_entropy(logits[0], targets[start:stop])
        if backward:
            losses.sum().backward()
        found.append(losses.detach())
    if backward and hidden.requires_grad:
        hidden.backward(states.grad)
    return torch.cat(found)


@contextmanager
def _instead(module: torch.nn.Module, output: Any) -> Iterator[None]:
    """Let a module return this without running."""
    own = vars(module).get("forward")
    vars(module)["forward"] = lambda *_, **__: output
    try:
        yield
    finally:
        if own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = own


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output.last_hidden_state if hasattr(output, "keys") else output[0]
    return hidden


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """The output of a base model with other hidden states."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    changed = copy.copy(output)
    changed["last_hidden_state"] = hidden
    return changed


def call_model(model: torch.nn.Module, batch: Mapping[str, Any]) -> Any:
    """Run a model, by keywords where it has them, and without a cache that nobody reads."""
    takes = inspect.signature(model.forward).parameters
    if "input_ids" not in takes and not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        return model(batch["input_ids"])
    return model(**batch, **({"use_cache": False} if "use_cache" in takes else {}))


def logits_of(model: torch.nn.Module, output: Any) -> Tensor:
    """The logits that a model returned, (B, L, V).

    Raises:
        LossError: if there are none.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.is_floating_point():
        raise LossError(
            f"{class_name(model)} has no language-model head: it returns no logits (B, L, "
            "vocabulary); load it with its head, or pass a loss of your own to acutance.judge"
        )
    return logits


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Losses in nats, float64 on the CPU, of logits (places, V)."""
    return F.cross_entropy(logits.float(), targets, reduction="none").cpu().double()
