"""acutance.calibrate: fit the scale of every head that keeps a target constant in n."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from acutance.calibration.by_loss.fit import calibrate_by_loss
from acutance.calibration.fit.estimates import LayerValues
from acutance.calibration.fit.law_families import family_scalings, plain_table
from acutance.calibration.fit.next_factors import Aim, LayerState, aim_of, decide
from acutance.calibration.fit.passes import PassSums, run_pass
from acutance.calibration.fit.progress import PassState, Progress
from acutance.calibration.fit.request import Request, check_positions, check_request, check_windows
from acutance.calibration.fit.result import Calibration
from acutance.calibration.fit.summarise import FittedLayer, summarise
from acutance.calibration.fit.windows import (
    AnyBatches,
    Turn,
    batches_by_length,
    check_lengths,
    cut,
    digest,
)
from acutance.calibration.losses import AnyLoss
from acutance.corpus.texts import model_digest
from acutance.files import refuse_replacing
from acutance.probing.causes import is_untrained
from acutance.scaling import Scaling, Window
from acutance.shapes import check_count

__all__ = ["Advance", "calibrate"]

#: Told after each run of the model: tokens just read, the pass from 1, and passes at most.
Advance = Callable[[int, int, int], None]
#: Factors that change by less than this between passes are found.
_SETTLED = 0.002


def calibrate(
    model: torch.nn.Module,
    batches: AnyBatches | Tensor,
    *,
    target: str = "entropy",
    value: float | None = None,
    loss: AnyLoss | None = None,
    lengths: Sequence[int] | None = None,
    reference: int | None = None,
    law: str = "table",
    window: Window | Sequence[Window] | None = None,
    passes: int = 6,
    limit: float = 16.0,
    windowed: bool = False,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    save_every: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    advance: Advance | None = None,
) -> Calibration:
    r"""Fit, for every head, a factor that depends on the number of keys n.

    The factor keeps a target constant in n, or with ``target="loss"`` lowers the model's loss.

    The model runs over all windows without a law, then a few times under a law that Newton's steps
    improve with the slope of the same run, :math:`dH/d\log\lambda = -\mathrm{Var}_p(\lambda s)`.
    The last run measures the law that is returned.

    For the loss, the model runs with a backward pass over every window, which gives the derivative
    of the loss by all factors at once. Two windows of three are fitted to, by Adam's steps in log
    λ; the third ones decide when to stop, and return to the best so far. Heads and lengths whose
    derivative is not beyond noise (at most one in ten of those changed by chance, Benjamini and
    Hochberg) have the factor 1, as all have if the loss of the deciding windows does not fall
    beyond noise (Student's one-sided test at 5 %).

    Rows count by the keys that they see: a causal
    model has rows of every n up to its window's length, which are read at the lengths by a line in
    log n over the octave below.

    Args:
        model: any module whose attention :func:`acutance.apply` can scale; it is put into
            evaluation mode meanwhile.
        batches: tensors (B, L) of tokens or (B, L, E), which the model is called with, or mappings
            of its keywords; windows first, tokens second. They are cut into windows of every
            length. Or a mapping from each length to such batches that have it, as where every
            window has special tokens of its own. At least 2 windows of each length; errors are
            rough below some 10.
        target: ``"entropy"`` in nats, ``"normalized_entropy"`` H / log n, ``"effective_keys"``,
            ``"top_weight"``, means over rows; ``"max_logit"``, an upper bound of the largest; or
            ``"loss"``.
        value: what is wanted of every head; None is each head's own at the reference length,
            without a law.
        loss: which to lower with ``target="loss"``, as for :func:`acutance.judge`.
        lengths: of windows, rising; None is that of the longest batch and its halves down to an
            eighth.
        reference: the training length, one of the lengths; None is the shortest.
        law: ``"table"``, a factor at every length; or a family fitted to it: ``"constant"``,
            ``"ssmax"`` (s log n + b), ``"log_n"``, ``"sqrt_log_n"``, ``"clip_log_n"``. For the
            loss ``"table"``, ``"constant"``, or with a window ``"none"`` for windows alone.
        window: with ``target="loss"``, let those heads read through it for which that lowers the
            loss, before factors are fitted; of several, each head chooses its own.
        passes: runs over all windows at most, the first without a law.
        limit: factors stay between 1/limit and limit.
        windowed: also fit layers with a sliding window.
        seed: of the rows whose critical scale is sampled.
        save: file that keeps the state as it grows, to continue from.
        save_every: windows between two writes, at least.
        resume: continue from what ``save`` holds.
        overwrite: replace what ``save`` holds.
        advance: told after each run of the model how many tokens it read, which pass this is, and
            how many there are at most.

    Returns:
        The law with what was measured for each head: values before and after with standard errors,
        predicted effect, factors, the family that they resemble, Λ and β/Λ. Rows shorter than the
        first length have its factor; beyond the last each head continues by its family. For the
        loss a :class:`LossCalibration` with the derivatives, constant beyond the last length.

    Raises:
        ApplyError: if attention that was seen cannot be scaled.
        FileExistsError: if the file of ``save`` is there, and is neither resumed nor overwritten.
        LossError: if the model has no such loss.
        ProbeError: if no attention was seen.
        TypeError: if an argument is of the wrong kind.
        ValueError: if one is out of range, the text too short, lengths are beyond the model's
            learned positions, or the state to resume is of another run.

    Warns:
        UserWarning: if lengths are beyond positions that are not learned.

    Example:
        >>> import acutance
        >>> _ = torch.manual_seed(0)
        >>> layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
        >>> text = [2 * torch.randn(8, 256, 32)]
        >>> law = acutance.calibrate(model, text, lengths=[64, 128, 256])
        >>> for numbers in (law.heads[0].before, law.heads[0].factors, law.heads[0].after):
        ...     [f"{number:.1f}" for number in numbers]
        ['2.7', '3.2', '3.8']
        ['1.0', '1.3', '1.5']
        ['2.7', '2.7', '2.7']
        >>> with acutance.apply(model, law):
        ...     _ = model(text[0])

    Source:
        Su (2021), https://kexue.fm/archives/8823 (keep the entropy as n grows).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if target == "loss":
        if value is not None or reference is not None:
            raise ValueError(
                "target='loss' holds nothing constant: value and reference cannot be given"
            )
        by_loss = calibrate_by_loss(
            model, batches, lengths=lengths, loss=loss, law=law, window=window, passes=passes,
            limit=limit, windowed=windowed, save=save, save_every=save_every, resume=resume,
            overwrite=overwrite, advance=advance,
        )  # fmt: skip
        return replace(by_loss, untrained=is_untrained(model))
    if loss is not None:
        raise ValueError(f"loss is for target='loss', got target={target!r:.40}")
    if window is not None:
        raise ValueError(f"window is for target='loss', got target={target!r:.40}")
    refuse_replacing(save, resume=resume, overwrite=overwrite)
    found = batches_by_length(batches)
    places = check_lengths(lengths, found)
    request = check_request(target, value, places, reference, law, passes, limit, windowed)
    check_positions(model, places)
    turns = cut(found, places)
    windows = check_windows(turns, places)
    settings = {
        "model": model_digest(model),
        "text": digest(turns),
        "windows": list(windows.values()),
        "target": request.target.name,
        "value": request.value,
        "lengths": list(places),
        "reference": request.reference,
        "law": law,
        "limit": request.limit,
        "windowed": windowed,
        "seed": seed,
        "weights": str(next((part.dtype for part in model.parameters()), None)),
    }
    progress = Progress(settings)
    if resume and save is not None:
        progress = Progress.resume(save, settings)
    job = _Job(
        model, turns, request, progress, seed, save, check_count("save_every", save_every, 1)
    )
    job.run(advance)
    result = summarise(model, request, job.fitted(), windows, len(progress.passes), job.skipped)
    return replace(result, untrained=is_untrained(model))


class _Job:
    """The passes of one calibration; the sums of earlier passes decide each one."""

    def __init__(
        self,
        model: torch.nn.Module,
        turns: Sequence[Turn],
        request: Request,
        progress: Progress,
        seed: int,
        save: str | os.PathLike[str] | None,
        save_every: int,
    ) -> None:
        self._model, self._turns, self._request = model, turns, request
        self._progress, self._seed = progress, seed
        self._save, self._save_every, self._unsaved = save, save_every, 0
        self._cache: dict[int, dict[str, LayerState]] = {}
        self._aims: dict[str, Aim] = {}

    @property
    def skipped(self) -> dict[str, str]:
        """Why layers that ran were not fitted, by module name."""
        found = self._progress.passes[0].found
        pairs = (text.partition(": ") for text in found.unread)
        skipped = {name: why for name, _, why in pairs}
        few = f"no row sees more than {self._request.knots[0] // 2} keys"
        for name, sums in found.layers.items():
            if not bool(sums.longest.any()):
                skipped[name] = few
        return skipped

    def run(self, advance: Advance | None) -> None:
        """Run passes until the law has converged or the maximum number is reached."""
        passes, request = self._progress.passes, self._request
        if advance is not None:
            for p, one in enumerate(passes):
                for turn in self._turns[: one.found.done]:
                    advance(_tokens(turn), p + 1, request.passes)
        while True:
            if not passes:
                passes.append(PassState(None))
            elif passes[-1].found.done == len(self._turns):
                following = self._next()
                if following is None:
                    return
                passes.append(following)
            index = len(passes) - 1

            def after(so_far: PassSums, turn: Turn, index: int = index) -> None:
                self._unsaved += turn.groups.numel()
                if self._save is not None and (
                    self._unsaved >= self._save_every or so_far.done == len(self._turns)
                ):
                    self._progress.save(self._save)
                    self._unsaved = 0
                if advance is not None:
                    advance(_tokens(turn), index + 1, request.passes)

            try:
                run_pass(
                    self._model,
                    self._turns,
                    request.target,
                    request.knots,
                    self._law(passes[-1]),
                    so_far=passes[-1].found,
                    windowed=request.windowed,
                    gaps=index == 0,
                    seed=self._seed,
                    after=after,
                )
            except KeyboardInterrupt:
                if self._save is not None and self._unsaved and not passes[-1].found.torn:
                    self._progress.save(self._save)
                raise

    def _next(self) -> PassState | None:
        """The next pass, with its factors; None if the calibration is finished."""
        passes, request = self._progress.passes, self._request
        if len(passes) >= request.passes or passes[-1].family:
            return None
        history = self._history(len(passes))
        factors, settled = {}, True
        for name, states in history.items():
            aim = self._aims[name]
            chosen, _ = decide(states, aim)
            if aim.bound and request.law == "constant":  # a mean would not keep it
                chosen = chosen.amin(0, keepdim=True).expand_as(chosen)
            # a bound's factors only change where it is exceeded
            least = 0.0 if aim.bound else _SETTLED
            settled &= bool(((chosen / states[-1].factors).log().abs() <= least).all())
            factors[name] = chosen
        family = request.law != "table"
        if settled and len(passes) > 1:
            return PassState(factors, family) if family else None
        return PassState(factors, family and len(passes) == request.passes - 1)

    def _history(self, passes: int) -> dict[str, list[LayerState]]:
        """For each module, factors applied and values measured in the first ``passes`` passes."""
        first = self._states(0)
        return {name: [self._states(p)[name] for p in range(passes)] for name in first}

    def _states(self, p: int) -> dict[str, LayerState]:
        """For each module, the factors applied and values measured in the finished pass ``p``.

        Raises:
            ValueError: if no layer can be calibrated.
        """
        if p in self._cache:
            return self._cache[p]
        one, request = self._progress.passes[p], self._request
        found = {}
        for name in sorted(one.found.layers):
            values = LayerValues.of(one.found.layers[name])
            if not values.knots:
                continue
            factors = torch.ones_like(values.value)
            if one.factors is not None:
                factors = self._in_force(one, name, values.knots)
            found[name] = LayerState(factors, values)
            if p == 0:
                at = request.knots.index(request.reference)
                self._aims[name] = aim_of(values, request.target, request.value, at, request.limit)
        if p == 0 and not found:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.skipped.items())
            raise ValueError(f"there is no layer to calibrate{': ' if why else ''}{why}")
        self._cache[p] = found
        return found

    # -- laws -------------------------------------------------------------------------------------

    def _law(self, one: PassState) -> Mapping[Any, Scaling] | None:
        """The law that is applied in a pass; None for the pass without a law."""
        if one.factors is None:
            return None
        law: dict[Any, Scaling] = {}
        for name, factors in one.factors.items():
            made = self._scaling(one, name, factors)
            if isinstance(made, dict):
                law.update({(name, head): part for head, part in made.items()})
            else:
                law[name] = made
        return law

    def _scaling(self, one: PassState, name: str, factors: Tensor) -> Scaling | dict[int, Scaling]:
        """The scaling of a layer in a pass, from factors (knots, heads): a table or a family."""
        states = self._states(0)[name]
        knots = states.values.knots
        if not one.family:
            return plain_table(knots, factors)
        aim = self._aims[name]
        reference = self._request.reference if aim.reference is None else knots[aim.reference]
        errors = self._factor_errors(name, factors)
        return family_scalings(self._request.law, knots, factors, errors, reference)

    def _factor_errors(self, name: str, factors: Tensor) -> Tensor:
        """Standard errors of a layer's factors, from the last finished pass under a table."""
        done = [
            p
            for p, one in enumerate(self._progress.passes)
            if not one.family and one.found.done == len(self._turns)
        ]
        values, aim = self._states(done[-1])[name].values, self._aims[name]
        error = values.estimate.error if aim.reference is None else values.difference(aim.reference)
        return factors * error / values.slope.abs().clamp(min=1e-9)

    def _in_force(self, one: PassState, name: str, knots: tuple[int, ...]) -> Tensor:
        """The factors that a pass applies to a layer at the knots, (knots, heads)."""
        assert one.factors is not None
        factors = one.factors[name]
        if not one.family:
            return factors
        made = self._scaling(one, name, factors)
        n = torch.tensor(knots)
        heads = range(factors.shape[1])
        if isinstance(made, dict):
            columns = [made[head].factor(n, dtype=torch.float64) for head in heads]
            return torch.stack(columns, 1)
        found = made.factor(n, dtype=torch.float64)
        return found.T if found.dim() == 2 else found.unsqueeze(1).expand(-1, len(heads))

    def fitted(self) -> list[FittedLayer]:
        """The results of each layer after the last pass."""
        passes = self._progress.passes
        history = self._history(len(passes))
        found = []
        for name, states in history.items():
            last, aim = states[-1], self._aims[name]
            _, expected = decide(states[:-1], aim)
            made = self._scaling(passes[-1], name, passes[-1].factors[name])  # type: ignore[index]
            scales = [passes[0].found.scales.get((name, k)) for k in states[0].values.bins]
            found.append(
                FittedLayer(name, aim, states[0], last, expected, made, passes[-1].family, scales)
            )
        return found


def _tokens(turn: Turn) -> int:
    """Number of tokens of a batch."""
    return turn.length * turn.groups.numel()
