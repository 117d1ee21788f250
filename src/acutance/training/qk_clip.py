"""QKClip: bound the largest logit of each head by scaling its query and key weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acutance.capture.find_layers import named_modules
from acutance.capture.layer_choice import Chosen
from acutance.capture.listener import ProbeError
from acutance.shapes import check_count, check_flag, check_number
from acutance.training.across_ranks import ExactMaxima, multiply, reshard
from acutance.training.projections import (
    LAYOUTS,
    NAMES,
    HeadSlices,
    NoProjectionsError,
    Projections,
    agrees,
    all_heads,
    find_layouts,
    recorded_outputs,
    rotary_width,
)
from acutance.training.watch import AttentionWatch

_UNTOLD, _OTHERS = -1, len(LAYOUTS)  # beside the number of a layout: not known; none of them


@dataclass(frozen=True)
class LayerClip:
    """The effect of one step on one layer.

    Attributes:
        module: qualified name of the module.
        max_logit: largest logit of each head since the last step, over all ranks.
        factor: γ of each head; 1 for unchanged heads.
    """

    module: str
    max_logit: tuple[float, ...]
    factor: tuple[float, ...]


@dataclass(frozen=True)
class ClipReport:
    """The effect of one step of :class:`acutance.training.QKClip`.

    Attributes:
        layers: the layers that ran since the last step.
        not_finite: heads, as ``(module, head)``, whose largest logit was not finite. They were not
            changed.
    """

    layers: tuple[LayerClip, ...]
    not_finite: tuple[tuple[str, int], ...] = ()

    @property
    def max_logit(self) -> float:
        """The largest logit of all heads; −inf without rows."""
        return max((value for layer in self.layers for value in layer.max_logit), default=-math.inf)

    @property
    def clipped(self) -> tuple[tuple[str, int], ...]:
        """Heads that were scaled, as ``(module, head)``."""
        return tuple(
            (layer.module, head)
            for layer in self.layers
            for head, factor in enumerate(layer.factor)
            if factor != 1.0
        )


class QKClip:
    r"""After an optimiser step, scale down the heads whose largest logit exceeded a threshold.

    .. math:: \gamma_h = \min\bigl(1, \tau / S^h_{\max}\bigr), \qquad
              W_q^h \leftarrow \gamma_h^{\alpha} W_q^h, \quad
              W_k^h \leftarrow \gamma_h^{1 - \alpha} W_k^h

    :math:`S^h_{\max}` is the largest scaled product :math:`q \cdot k` of a head over rows, visible
    keys, batches and ranks since the last step, before softcap, bias and sinks. Projection biases
    are scaled too. A key that query heads share is not scaled; the head's queries get all of γ:
    with grouped queries, and for the rotary part of multi-head latent attention, whose other parts
    get √γ each. Other heads are unchanged bit for bit.

    It supports ``torch.nn.MultiheadAttention``, :class:`acutance.nn.MultiheadAttention`, and
    modules of any library that call ``F.scaled_dot_product_attention`` or transformers' attention
    interface, or use a softmax of one product of queries and keys, with projections under a usual
    name (``q_proj`` and ``k_proj``, ``query`` and ``key``, ``c_attn``, ``qkv_proj``, ...). A
    layer's first forward shows how a fused projection is laid out, and whether the scored vectors
    are the projections' outputs: a layer with something in between, such as a normalisation, is
    refused. Weights shared by modules get the smallest of their factors, once.

    Args:
        model: the model being trained.
        tau: threshold τ, above 0.
        alpha: exponent of γ for the queries, between 0 and 1.
        layers: as for :class:`AttentionWatch`.
        base_weights: under LoRA, also scale the frozen weights that the adapter is added to, as a
            bound on the logits needs. An adapter saved alone then lacks a part: save the merged
            model. DoRA needs it only for projections with a bias.
        group: process group for the maxima; None for all ranks, if ``torch.distributed`` is
            initialised.

    Attributes:
        steps: number of steps so far.
        clips: by module, how often each head was scaled, integers (Hq,).

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, or weights are not known or cannot be scaled (at the
            first :meth:`step` after it ran).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> attend = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> x = 9 * torch.randn(2, 10, 16)
        >>> clip = QKClip(attend, tau=5.0)
        >>> with clip:
        ...     _ = attend(x, x, x)
        >>> [f"{value:.1f}" for value in clip.step().layers[0].max_logit]
        ['224.9', '145.2', '279.8', '169.6']
        >>> with clip:
        ...     _ = attend(x, x, x)
        >>> clip.step().max_logit <= 5.0
        True

    Source:
        Kimi Team (2025), arXiv:2507.20534, algorithm 1 (MuonClip).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tau: float = 100.0,
        *,
        alpha: float = 0.5,
        layers: Chosen | None = None,
        base_weights: bool = False,
        group: Any = None,
    ) -> None:
        self._watch = AttentionWatch(
            model, layers=layers, gradients=False, products=True, noted=self._note
        )
        self._model = model
        self.tau = check_number("tau", tau, above=0.0)
        self.alpha = check_number("alpha", alpha, above=0.0, including=True)
        if alpha > 1:
            raise ValueError(f"alpha must be between 0 and 1, got {alpha!r}")
        self.base_weights = check_flag("base_weights", base_weights)
        self.steps = 0
        self.clips: dict[str, Tensor] = {}
        self._exact = ExactMaxima(group)
        self._maxima: dict[str, Tensor] = {}
        self._shapes: dict[str, tuple[int, float]] = {}
        self._layouts: dict[str, int] = {}
        self._recording = ExitStack()
        self._outputs: dict[torch.nn.Module, Any] | None = None  # of projections, while recorded
        self._makers: dict[str, tuple[torch.nn.Module, ...]] = {}  # of reported calls, in a context
        self._attending: set[torch.nn.Module] = set()  # projections of which attention was seen
        self._aside: set[torch.nn.Module] = set()  # what only has the name of a projection
        self._modules: dict[str, torch.nn.Module] = {}

    def __enter__(self) -> QKClip:
        self._watch.__enter__()
        if untold := self._with_unknown_layout():
            self._outputs = self._recording.enter_context(recorded_outputs(untold))
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        try:
            self._watch.__exit__(kind, *details)
        finally:
            rows, self._watch.rows, self._modules = self._watch.rows, [], {}
            self._recording.close()
            if kind is None:  # those that ran, and no attention with them
                self._aside |= set(self._outputs or ()) - self._attending
            self._outputs = None
            self._makers, self._attending = {}, set()
        if kind is not None:
            return
        if self._watch.unread:
            raise ValueError(
                "some layers could not be read; exclude them with layers=: "
                f"{'; '.join(self._watch.unread)}"
            )
        for seen in rows:
            name, stats = seen.module.partition("#")[0], seen.statistics
            # a kernel's maximum may pass over what is not a number; the logsumexp does not
            logits = torch.where(stats.lse.isnan(), torch.nan, stats.max_logit)
            largest = torch.where(seen.kept, logits, -torch.inf).amax((0, 2)).detach().double()
            before = self._maxima.get(name, largest)
            self._maxima[name] = torch.maximum(before, largest)
            eps = torch.finfo(seen.dtype).eps if seen.dtype is not None else 0.0
            self._shapes[name] = (seen.width, eps)  # for ranks that do not see the layer

    def _note(self, name: str, query: Tensor, key: Tensor) -> None:
        """Determine the layout of a module's projections from its first calls."""
        if self._outputs is None:
            return
        if name in self._layouts:
            for maker in self._makers.get(name, ()):
                self._outputs.pop(maker, None)
            return
        try:
            ways = self._weights(name, query.shape[1], query.shape[-1], local=True)
        except ValueError:
            return  # step() says so
        holder = self._holder(name)
        rotary = 0 if holder is None else rotary_width(holder, query.shape[-1])
        agreements = [agrees(way, query, key, self._outputs, rotary) for way in ways]
        right = [way.layout for way, verdict in zip(ways, agreements, strict=True) if verdict]
        if len(right) == 1:  # where several are, other tokens may tell them apart
            self._layouts[name] = LAYOUTS.index(right[0])
        elif not right and agreements[0] is False:
            self._layouts[name] = _OTHERS
        makers = tuple(maker for way in ways for maker in way.makers)
        for maker in makers:
            self._outputs.pop(maker, None)
        self._attending.update(makers)
        if name in self._layouts:
            self._makers[name] = makers

    def _with_unknown_layout(self) -> set[torch.nn.Module]:
        """Projections, in the chosen modules, whose weight layout is unknown."""
        known = {self._holder(name) for name in self._layouts}
        chosen = {
            self._holder(name)
            for name, _ in named_modules(self._model)
            if self._watch.captures_module(name)
        }
        return {
            part
            for module in chosen - known
            if module is not None
            for name, part in module.named_children()
            if name in NAMES
        } - self._aside

    def _enclosing(self, name: str) -> Iterator[torch.nn.Module]:
        """The named module and the two around it, the innermost first."""
        self._modules = self._modules or dict(named_modules(self._model))
        if name in self._modules:
            yield self._modules[name]
            for _ in range(2 if name else 0):
                name = name.rpartition(".")[0]
                yield self._modules.get(name, self._model)

    def _holder(self, name: str) -> torch.nn.Module | None:
        """The nearest enclosing module that has an attribute with a projection's name."""
        for module in self._enclosing(name):
            if any(child in NAMES for child, _ in module.named_children()):
                return module
        return None

    def step(self) -> ClipReport:
        """Scale the heads that exceeded τ since the last step, and reset the maxima.

        Call it after ``optimizer.step()``, on every rank.

        Raises:
            ProbeError: if no rank ran any attention inside ``with clip:`` since the last step.
            ValueError: if a layer's weights cannot be determined or scaled.
        """
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        reshard(self._model)
        mine = {}
        for name, values in self._maxima.items():
            about = [*self._shapes[name], self._layouts.get(name, _UNTOLD)]
            mine[name] = torch.cat([self._of_all_heads(name, values), values.new_tensor(about)])
        layers, not_finite = [], []
        smallest: dict[tuple[int, ...], tuple[HeadSlices, float]] = {}
        for name, values in self._exact(mine, device).items():
            *largest, width, eps, layout = values.tolist()
            if width < 0:
                continue  # in the layout of the ranks, but none saw it since the last step
            factors = [1.0] * len(largest)
            weights = self._split_projections(name, len(largest), int(width), int(layout))
            for head, logit in enumerate(largest):
                if math.isnan(logit) or logit == math.inf:
                    not_finite.append((name, head))
                elif logit > self.tau:
                    # by so much rounding of weights and products can increase a logit
                    rounding = max(eps, weights.eps)
                    margin = 4 * rounding if rounding > 1e-5 else 64 * rounding
                    factors[head] = self.tau / logit * (1 - margin)
                    for part, factor in weights.factors(head, factors[head], self.alpha):
                        place = (id(part.tensor), part.dim, part.offset(head), part.size)
                        before = smallest.get(place, (part, 1.0))[1]
                        smallest[place] = (part, min(before, factor))
            counts = self.clips.setdefault(name, torch.zeros(len(largest), dtype=torch.int64))
            counts += torch.tensor([factor != 1.0 for factor in factors])
            layers.append(LayerClip(name, tuple(largest), tuple(factors)))
        if not layers:
            raise ProbeError(
                f"QKClip captured no attention of {type(self._model).__name__} since its last "
                "step: run the model inside 'with clip:' before step()"
            )
        for (_, dim, start, size), (part, factor) in smallest.items():
            multiply(part.tensor, dim, start, size, factor)
        self.steps += 1
        self._maxima, self._modules = {}, {}
        return ClipReport(tuple(layers), tuple(not_finite))

    def _of_all_heads(self, name: str, values: Tensor) -> Tensor:
        """Maxima (heads,) of a layer's heads on all tensor-parallel ranks; −∞ on other ranks."""
        holder = self._holder(name)
        width, _ = self._shapes[name]
        total, first = (len(values), 0) if holder is None else all_heads(holder, len(values), width)
        whole = values.new_full((total,), -torch.inf)
        whole[first : first + len(values)] = values
        return whole

    def settle(self, run: Callable[[], object], *, rounds: int = 100) -> tuple[ClipReport, ...]:
        """Run and clip repeatedly until no head exceeds τ on what ``run`` computes.

        Scaling one layer changes the inputs of the next, so a single step guarantees τ only for
        unchanged inputs. With each round one more layer is final.

        Args:
            run: runs the model, such as ``lambda: model(**batch)``.
            rounds: largest number of rounds.

        Returns:
            The report of each round; the last clipped nothing.

        Raises:
            RuntimeError: if a head still exceeds τ after the last round.
        """
        reports: list[ClipReport] = []
        for _ in range(check_count("rounds", rounds, 1)):
            with self, torch.no_grad():
                run()
            reports.append(self.step())
            if not reports[-1].clipped:
                return tuple(reports)
        raise RuntimeError(f"after {rounds} rounds {len(reports[-1].clipped)} heads exceeded tau")

    def after(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call :meth:`step` after every step of an optimiser; the result's ``remove()`` ends it.

        Example:
            >>> layer = torch.nn.MultiheadAttention(8, 2)
            >>> clip = QKClip(layer)
            >>> handle = clip.after(torch.optim.SGD(layer.parameters(), lr=0.1))
            >>> handle.remove()
        """

        def after_step(*_: Any) -> None:
            self.step()

        return optimizer.register_step_post_hook(after_step)

    def _split_projections(self, name: str, heads: int, width: int, layout: int) -> Projections:
        """The query and key weights of a module, split in the layout seen in a forward pass."""
        ways = self._weights(name, heads, width)
        if layout == _OTHERS:
            raise ValueError(
                f"{name} cannot be clipped: its queries and keys are not just rotated or scaled "
                "outputs of its projections (there is a normalisation, a clamp, an added term or "
                "an unknown order of heads in between); exclude it with layers="
            )
        split = next((w for w in ways if LAYOUTS.index(w.layout) == layout), ways[0])
        if split.changes_base and not self.base_weights:
            raise ValueError(
                f"{name} cannot be clipped: its projections have LoRA adapters, and scaling a head "
                "must change the frozen weights too, which an adapter saved alone lacks; pass "
                "base_weights=True and save the merged model, or use DoRA"
            )
        return split

    def _weights(
        self, name: str, heads: int, width: int, local: bool = False
    ) -> tuple[Projections, ...]:
        """The weights of a module, or of the nearest enclosing module that has them."""
        reason: ValueError | None = None
        for module in self._enclosing(name):
            try:
                return find_layouts(module, heads, width, local)
            except NoProjectionsError as problem:
                reason = reason or problem
            except ValueError as problem:
                reason = problem
                break
        raise ValueError(f"{name} cannot be clipped: {reason}; exclude it with layers=")

    def state_dict(self) -> dict[str, Any]:
        """Steps, counts, the maxima since the last step, and how weights are laid out."""
        return {
            "tau": self.tau,
            "alpha": self.alpha,
            "steps": self.steps,
            "clips": {name: counts.clone() for name, counts in self.clips.items()},
            "maxima": {name: values.clone() for name, values in self._maxima.items()},
            "shapes": dict(self._shapes),
            "layouts": dict(self._layouts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, including τ and α.

        Raises:
            ValueError: if an entry is missing.
        """
        required = set(QKClip.state_dict(self))
        if set(state) != required:
            raise ValueError(
                f"the state of a QKClip must have {', '.join(sorted(required))}, got "
                f"{', '.join(sorted(state)) or 'nothing'}"
            )
        self.tau = check_number("tau", state["tau"], above=0.0)
        self.alpha = check_number("alpha", state["alpha"], above=0.0, including=True)
        self.steps = check_count("steps", state["steps"], 0)
        self.clips = {name: counts.clone() for name, counts in state["clips"].items()}
        self._maxima = {name: values.clone() for name, values in state["maxima"].items()}
        self._shapes = {name: (int(w), float(e)) for name, (w, e) in state["shapes"].items()}
        layouts = {name: int(layout) for name, layout in state["layouts"].items()}
        self._layouts = {name: layout for name, layout in layouts.items() if layout != _UNTOLD}
