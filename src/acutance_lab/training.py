"""Training of the small models that experiments are made with: seeded, and resumable.

The batch of a step depends on the seed and the step alone, so a run that was stopped continues from
its last checkpoint to the very weights it would have had.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from acutance.plugins import write_whole

Model = TypeVar("Model", bound=torch.nn.Module)


@dataclass(frozen=True)
class Plan:
    """How a model is trained: AdamW, a warm-up, and a fall to zero at the end.

    Attributes:
        name: of the model; its random numbers depend on it.
        steps: how many.
        rate: highest learning rate.
        seed: of initial weights and batches.
        warm: steps over which the rate rises.
        fall: share of the steps, at the end, over which the rate falls linearly to 0.
        decay: weight decay.
        clip: largest norm of the gradient; infinite is no limit.
    """

    name: str
    steps: int
    rate: float
    seed: int = 0
    warm: int = 0
    fall: float = 0.0
    decay: float = 0.0
    clip: float = 1.0

    def rate_at(self, step: int) -> float:
        """Learning rate of a step, counted from 0.

        Example:
            >>> plan = Plan("p", steps=100, rate=1.0, warm=10, fall=0.5)
            >>> [plan.rate_at(step) for step in (0, 9, 50, 75, 99)]
            [0.1, 1.0, 1.0, 0.5, 0.02]
        """
        rising = min(1.0, (step + 1) / self.warm) if self.warm else 1.0
        falling = min(1.0, (self.steps - step) / (self.fall * self.steps)) if self.fall else 1.0
        return self.rate * rising * falling

    def generator(self, step: int) -> torch.Generator:
        """The generator of a step's random numbers; it depends on name, seed and step."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.name} {self.seed} {step}".encode()))


@torch.enable_grad()
def fit(
    make: Callable[[], Model],
    loss: Callable[[torch.nn.Module, torch.Generator], Tensor],
    plan: Plan,
    *,
    keep: Path | None = None,
    every: float = 30.0,
    note: Callable[[str], None] | None = None,
) -> Model:
    """Train a model, continuing from a checkpoint of the same plan if there is one.

    Args:
        make: makes the model; its random weights are those of the plan's seed.
        loss: function of the model and a generator: the loss on a batch drawn with it.
        plan: steps, rates and seeds.
        keep: path of the checkpoint, written atomically; None stores none. The checkpoint of a
            finished training stays, and calling this again only reads it.
        every: seconds between checkpoints.
        note: takes a line of progress now and then.

    Returns:
        The model, in evaluation mode.

    Raises:
        FloatingPointError: if the loss is no longer finite.
    """
    with seeded(plan.seed):
        model = make()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=plan.decay
    )
    shapes = [(name, tuple(value.shape)) for name, value in model.state_dict().items()]
    identity = repr((plan, shapes, source_hash(loss), torch.__version__))
    state: dict[str, Any] = {}
    if keep is not None:
        with suppress(Exception):  # no file, or whatever a damaged one makes of the reader
            state |= torch.load(keep, weights_only=True)
    first = 0
    if state.get("identity") == identity:
        first = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    began = saved = time.perf_counter()
    model.train()
    for step in range(first, plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate_at(step)
        value = loss(model, plan.generator(step))
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        done, now = step + 1, time.perf_counter()
        if done % 50 == 0 or done == plan.steps:
            latest = float(value.detach())
            if not math.isfinite(latest):
                raise FloatingPointError(f"{plan.name}: the loss is {latest} after {done} steps")
            if note is not None:
                left = (now - began) / (done - first) * (plan.steps - done)
                note(f"{plan.name}: step {done}/{plan.steps}, loss {latest:.3f}, {left:.0f} s left")
        if keep is not None and (now - saved > every or done == plan.steps):
            state = {"identity": identity, "step": done}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            keep.parent.mkdir(parents=True, exist_ok=True)
            write_whole(keep, partial(torch.save, state))
            saved = time.perf_counter()
    return model.eval()


def source_hash(function: Callable[..., Any]) -> str:
    """A hash of the source file that defines a function; that of nothing if there is no file."""
    source = b""
    with suppress(OSError, TypeError):
        source = Path(inspect.getsourcefile(function) or "").read_bytes()
    return hashlib.sha256(source).hexdigest()[:16]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context with PyTorch's CPU random numbers seeded; their state outside does not change.

    Example:
        >>> with seeded(3):
        ...     one = torch.nn.Linear(2, 2).weight
        >>> with seeded(3):
        ...     two = torch.nn.Linear(2, 2).weight
        >>> torch.equal(one, two)
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
