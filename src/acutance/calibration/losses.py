"""The loss of every prediction of a model, without the logits of a whole window at once."""

from __future__ import annotations

import copy
import inspect
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from acutance.calibration.windows import first_tokens
from acutance.capture.find_layers import class_name
from acutance.shapes import check_count

__all__ = ["Loss", "LossError", "MaskedTokens", "NextToken", "Scored"]

#: Numbers in the logits that are held at once: 32 MB of float32.
_LOGITS = 1 << 23
#: Tokens on which the loss in pieces is compared with the model's own.
_COMPARED = 64

#: The name of a loss, an object of this module, or a function of model and batch that returns the
#: loss of each token, (B, L), NaN where nothing is predicted.
AnyLoss: TypeAlias = "str | Loss | Callable[[torch.nn.Module, Mapping[str, Any]], Tensor]"


class LossError(ValueError):
    """A loss that this model does not have, or that is not a number."""


@dataclass(frozen=True)
class Scored:
    """The predictions of one call of a model.

    Attributes:
        loss: in nats, float64, (B, L); NaN where nothing is predicted.
        n: tokens that each prediction could read, int64, (B, L).
    """

    loss: Tensor
    n: Tensor


class Loss(ABC):
    """A loss that models are judged by.

    Attributes:
        words: what it is, with every setting that changes its numbers.
        reads_all: whether every prediction reads its whole window.
    """

    words: str
    reads_all = False

    @abstractmethod
    def check(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> None:
        """Refuse a model that does not have this loss, by a call with a few tokens.

        Raises:
            LossError: if it does not.
        """

    @torch.no_grad()
    def score(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Scored:
        """Run the model on one batch and return the loss of every prediction."""
        return self._run(model, batch, backward=False)

    @torch.enable_grad()
    def backward(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> Scored:
        """Like :meth:`score`, and backpropagate the sum of the losses."""
        return self._run(model, batch, backward=True)

    def _run(self, model: torch.nn.Module, batch: Mapping[str, Any], *, backward: bool) -> Scored:
        """Run the model, with or without a backward pass: what the two methods above call."""
        raise NotImplementedError


class _Logits(Loss):
    """Cross-entropy of a model's logits, in pieces where the head can be run by itself."""

    #: How many positions after the one that predicts it a token stands.
    _ahead = 0

    def __init__(self, logits: int = _LOGITS) -> None:
        self.logits = check_count("logits", logits, 1)
        #: by model, whether it needs all its logits at once
        self._whole: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()

    @torch.no_grad()
    def check(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> None:
        """Compare the loss in pieces with that of the model's whole logits, on a few tokens."""
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise LossError(
                f"{class_name(model)} is an encoder-decoder, whose loss needs pairs of texts: pass "
                "a loss of your own to acutance.judge"
            )
        few = first_tokens(batch, _COMPARED)
        logits = logits_of(model, call_model(model, few))
        ids, places = self._targets(few)
        whole = cross_entropy(logits[places], ids[places])
        if not bool(whole.isfinite().all()):
            raise LossError(
                f"the loss of {class_name(model)} is not finite, without any law: "
                f"{int((~whole.isfinite()).sum())} of {whole.numel()} predictions"
            )
        self._whole[model] = True
        base = getattr(model, "base_model", model)
        head = getattr(model, "get_output_embeddings", None)
        if base is not model and callable(head) and isinstance(head(), torch.nn.Module):
            scale = float(logits.abs().amax()) * torch.finfo(logits.dtype).eps
            try:
                pieces = losses_in_pieces(model, few, ids, places, self.logits, False)
                equal = bool(((pieces - whole).abs() <= max(1e-4, 8 * scale)).all())
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError):
                equal = False  # a head that reads more of the model than its hidden states
            self._whole[model] = not equal

    def _run(self, model: torch.nn.Module, batch: Mapping[str, Any], *, backward: bool) -> Scored:
        if model not in self._whole:
            self.check(model, batch)
        inputs, n = self._shown(batch)
        ids, places = self._targets(batch)
        loss = torch.full(ids.shape, torch.nan, dtype=torch.float64)
        if self._whole[model]:
            found = cross_entropy(logits_of(model, call_model(model, inputs))[places], ids[places])
            if backward and found.requires_grad:
                found.sum().backward()
        else:
            found = losses_in_pieces(model, inputs, ids, places, self.logits, backward)
        loss[places.cpu()] = found.detach()
        return Scored(loss.roll(self._ahead, 1), n.cpu())

    @abstractmethod
    def _targets(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Targets of the predictions at each position of the output.

        Returns:
            Token ids to predict, (B, L); and boolean (B, L), True at positions that count.
        """

    @abstractmethod
    def _shown(self, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor]:
        """The model's inputs for a batch, and how many tokens each prediction can see, (B, L)."""


class NextToken(_Logits):
    """Cross-entropy of every token after the first, predicted from those before it.

    Args:
        logits: how many numbers of logits are held at once, a position at least.

    Example:
        >>> NextToken().words
        'next token'
    """

    words = "next token"
    _ahead = 1

    def _targets(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        ids, mask = batch["input_ids"], _mask(batch)
        places = torch.zeros_like(mask)
        places[:, :-1] = mask[:, :-1] & mask[:, 1:]
        return ids.roll(-1, 1), places

    def _shown(self, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor]:
        return batch, _mask(batch).long().cumsum(1) - 1


class MaskedTokens(_Logits):
    """Cross-entropy of masked tokens, the same ones for every law.

    Which tokens of a window are masked depends on its tokens and the seed alone. Every prediction
    reads the whole window.

    Args:
        mask_token: id of the token that stands in their place.
        share: part of the tokens that is masked, at least one of each window.
        seed: of the choice.
        special: ids that are never masked.
        logits: how many numbers of logits are held at once, a position at least.

    Raises:
        ValueError: if ``share`` is not between 0 and 1.

    Example:
        >>> MaskedTokens(103).words
        '15 % of the tokens masked, seed 0'
    """

    reads_all = True

    def __init__(
        self,
        mask_token: int,
        share: float = 0.15,
        seed: int = 0,
        special: Iterable[int] = (),
        logits: int = _LOGITS,
    ) -> None:
        super().__init__(logits)
        if not 0 < share < 1:
            raise ValueError(f"share must be between 0 and 1, got {share!r}")
        self.mask_token, self.share, self.seed = mask_token, share, seed
        self.special = frozenset(special)
        self.words = f"{100 * share:g} % of the tokens masked, seed {seed}"

    def _targets(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        ids: Tensor = batch["input_ids"]
        places = _mask(batch)
        for token in self.special:
            places &= ids != token
        chosen = torch.zeros_like(places)
        for row, (tokens, free) in enumerate(zip(ids.cpu(), places.cpu(), strict=True)):
            where = free.nonzero().squeeze(1)
            key = zlib.crc32(tokens.numpy().tobytes(), self.seed)
            order = torch.randperm(len(where), generator=torch.Generator().manual_seed(key))
            count = max(1, round(self.share * len(where)))
            chosen[row, where[order[:count]].to(chosen.device)] = True
        return ids, chosen

    def _shown(self, batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], Tensor]:
        ids, chosen = self._targets(batch)
        shown = torch.where(chosen, self.mask_token, ids)
        n = _mask(batch).long().sum(1, keepdim=True).expand_as(ids)
        return {**batch, "input_ids": shown}, n


class _Given(Loss):
    """A function of the user's: place i of a window counts as predicted from i tokens."""

    def __init__(self, function: Callable[[torch.nn.Module, Mapping[str, Any]], Tensor]) -> None:
        self.function = function
        self.words = str(getattr(function, "__qualname__", type(function).__name__))

    def check(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> None:
        """Nothing can be known before the first call."""

    def _run(self, model: torch.nn.Module, batch: Mapping[str, Any], *, backward: bool) -> Scored:
        loss: object = self.function(model, batch)
        rows = next((part.shape[0] for part in batch.values() if isinstance(part, Tensor)), None)
        if not isinstance(loss, Tensor) or loss.dim() != 2 or loss.shape[0] != rows:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise LossError(
                f"loss must return one number for each token, (B, L) with B = {rows}, and NaN "
                f"where nothing is predicted; got {found}"
            )
        if backward and loss.requires_grad:
            loss[~loss.isnan()].sum().backward()
        n = torch.arange(loss.shape[1]).expand(loss.shape)
        return Scored(loss.detach().double().cpu(), n)


def choose_loss(model: torch.nn.Module, loss: AnyLoss | None) -> Loss:
    """The loss of a name, a function, or by default of the kind of model.

    Raises:
        LossError: if a masked language model is given without its mask token, or the name is not
            known.

    Example:
        >>> choose_loss(torch.nn.Linear(2, 2), "next_token").words
        'next token'
    """
    if isinstance(loss, Loss):
        return loss
    if loss is None and class_name(model).endswith("MaskedLM"):
        raise LossError(
            f"{class_name(model)} predicts masked tokens: pass "
            "loss=acutance.judging.MaskedTokens(mask_token=...)"
        )
    if loss is None or loss == "next_token":
        return NextToken()
    if callable(loss):
        return _Given(loss)
    raise LossError(
        "loss must be 'next_token', a MaskedTokens or a function of model and "
        f"batch, got {loss!r:.60}"
    )


def _mask(batch: Mapping[str, Any]) -> Tensor:
    """Which tokens are no padding, boolean (B, L)."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.bool()
    return torch.ones_like(batch["input_ids"], dtype=torch.bool)


# -- logits, all at once or a few at a time: the head runs by itself on hidden states --------------


def losses_in_pieces(
    model: Any, batch: Mapping[str, Any], ids: Tensor, places: Tensor, most: int, backward: bool
) -> Tensor:
    """Losses at some places, (places,) float64, in their order, a few logits at a time.

    The model runs once and its head on a single place. Then the head, with all that the model does
    to its logits, runs on the hidden states of the places, piece by piece, while the base model
    hands out those of the piece instead of running.

    Args:
        model: a base model, which gives hidden states, with a head on top.
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
        part = _with_hidden(output, states[:, start:stop])
        with with_forward(base, lambda *_, part=part, **__: part):
            logits = logits_of(model, call_model(model, few))
        losses = cross_entropy(logits[0], targets[start:stop])
        if backward:
            losses.sum().backward()
        found.append(losses.detach())
    if backward and hidden.requires_grad:
        hidden.backward(states.grad)
    return torch.cat(found)


@contextmanager
def with_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Context in which a module runs this function in place of its ``forward``."""
    before = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before


def _hidden(output: Any) -> Any:
    """The hidden states in the output of a base model."""
    return output.last_hidden_state if hasattr(output, "keys") else output[0]


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
