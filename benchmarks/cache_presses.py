r"""Loss of cache plans beside kvpress's presses and transformers' QuantizedCache, at equal bytes.

Every window is read up to its last tokens into a cache, which is then compressed, and these last
tokens are scored with it: the protocol that presses are made for. Plans run in the same way, with
their real cache. Bytes are of 16-bit numbers for the tokens before those that are scored. Results
are added to a JSON file after each window, and what is in it is not measured again; a file of other
windows, or of another model or measure, is refused.

kvpress needs an older transformers than the project's constraints, so it has an environment:

    python -m venv /tmp/kvpress
    /tmp/kvpress/bin/pip install "kvpress==0.5.5" "transformers==5.2.0" optimum-quanto ninja scipy
    PYTHONPATH=src /tmp/kvpress/bin/python benchmarks/cache_presses.py --model DIRECTORY \
        --tokens windows.pt --plan plan.json --ratio 0.5 --json presses.json

``--tokens`` is a file of torch.save with windows of tokens, (windows, length). With ``--recall``
spans of random tokens are planted in them, see :func:`acutance.caching.plant`, and the share
of them that the model repeats is measured instead of the loss.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import acutance
from acutance.caching.planted import plant
from acutance.files import write_text

#: kvpress's presses by name: each of a ratio of keys that are dropped.
PRESSES = ("StreamingLLM", "SnapKV", "TOVA", "ExpectedAttention", "KeyDiff", "Knorm")


def press(name: str, ratio: float) -> Any:
    """A press that drops this ratio of the keys; ``AdaKV+`` before the name shares heads' keys."""
    import kvpress

    kind = getattr(kvpress, f"{name.removeprefix('AdaKV+')}Press")
    extra = {"epsilon": 1e-2} if kind is kvpress.ExpectedAttentionPress else {}
    one = kind(compression_ratio=ratio, **extra)
    return kvpress.AdaKVPress(one) if name.startswith("AdaKV+") else one


def windows_of(path: Path, count: int) -> Tensor:
    """The first windows of a file, (windows, length)."""
    tokens = torch.load(path)
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise SystemExit(f"{path} must hold int64 tokens (windows, length)")
    return tokens[:count]


class Scorer:
    """Logits of the last tokens of a window after the cache of the others was compressed."""

    def __init__(self, model: torch.nn.Module, scored: int) -> None:
        self.model, self.scored = model, scored

    @torch.no_grad()
    def pressed(
        self, ids: Tensor, cache: Any, during: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor:
        """Logits for the last tokens of ``ids`` (1, L), and after them, (1, scored + 1, V).

        Args:
            ids: a window.
            cache: an empty cache.
            during: gives the context in which the cache is filled.
        """
        model: Any = self.model
        first = ids.shape[1] - self.scored
        with during():
            hidden = model.model(ids[:, :first], past_key_values=cache).last_hidden_state[:, -1:]
        at = torch.arange(first, ids.shape[1])
        kept = cache.layers[0].keys.shape[2]
        mask = torch.ones(self.scored, kept + self.scored, dtype=torch.bool).tril(kept)
        rest = model(
            ids[:, first:], past_key_values=cache, position_ids=at[None], cache_position=at,
            attention_mask=mask[None, None],
        )  # fmt: skip
        return torch.cat([model.lm_head(hidden), rest.logits], 1)

    @torch.no_grad()
    def whole(
        self,
        ids: Tensor,
        cache: Any = None,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Tensor:
        """The same with a cache that stores what it likes, as those of plans do.

        Args:
            ids: a window.
            cache: an empty cache; None for the model's.
            context: gives the context in which all tokens are read.
        """
        model: Any = self.model
        first = ids.shape[1] - self.scored
        with context():
            before = model.model(ids[:, :first], past_key_values=cache, use_cache=True)
            rest = model(ids[:, first:], past_key_values=before.past_key_values)
        return torch.cat([model.lm_head(before.last_hidden_state[:, -1:]), rest.logits], 1)


def mean_loss(logits: Tensor, ids: Tensor) -> float:
    """Mean loss of the last tokens of a window, in nats."""
    logits = logits[0, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, -len(logits) :]))


def contenders(
    options: argparse.Namespace, scorer: Scorer
) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is measured, by name: the logits for the last tokens of a window (1, L)."""
    from transformers import DynamicCache, QuantizedCache

    model: Any = scorer.model
    found: dict[str, Callable[[Tensor], Tensor]] = {"full": scorer.whole}
    for path in options.plan:
        plan = acutance.CachePlan.load(path).check(scorer.model)
        found[f"plan {path.stem}"] = lambda ids, plan=plan: scorer.whole(
            ids, context=lambda: acutance.apply(model, plan)
        )
    for bits in options.bits:
        found[f"QuantizedCache {bits}"] = lambda ids, bits=bits: scorer.whole(
            ids, QuantizedCache("quanto", model.config, nbits=bits)
        )
    for ratio in options.ratio:
        for name in options.press:
            found[f"{name} {ratio:g}"] = lambda ids, name=name, ratio=ratio: scorer.pressed(
                ids, DynamicCache(), lambda: press(name, ratio)(model)
            )
    return found


def read_losses(path: Path, settings: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The results of a file by contender and window; raises SystemExit for other settings."""
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    for name, now in settings.items():
        before = record.get("settings", {}).get(name)
        if before != now:
            raise SystemExit(f"{path} is for other {name}: {before}, not {now}")
    losses: dict[str, dict[str, float]] = record["losses"]
    return losses


def show(losses: Mapping[str, Mapping[str, float]]) -> None:
    """Print mean differences from the full cache with standard errors over windows."""
    full = losses["full"]
    for name, own in losses.items():
        deltas = [value - full[window] for window, value in own.items() if window in full]
        error = statistics.stdev(deltas) / math.sqrt(len(deltas)) if len(deltas) > 1 else math.nan
        each = " ".join(f"{one:+.3f}" for one in deltas)
        print(f"{name:28} {statistics.fmean(deltas):+.4f} ± {error:.4f}  {each}")


def main() -> None:
    """Read the options, measure what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", required=True, help="directory of a causal model")
    parser.add_argument("--tokens", type=Path, required=True, help="windows, a file of torch.save")
    parser.add_argument("--windows", type=int, default=4, help="the first so many; default 4")
    parser.add_argument("--scored", type=int, default=256, help="last tokens; default 256")
    parser.add_argument("--plan", type=Path, action="append", default=[])
    parser.add_argument("--ratio", type=float, action="append", default=[], help="dropped keys")
    parser.add_argument("--press", action="append", help=f"default: {', '.join(PRESSES)}")
    parser.add_argument("--bits", type=int, action="append", default=[], help="QuantizedCache")
    parser.add_argument(
        "--recall", action="store_true", help="plant spans and measure how much is repeated"
    )
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.press = options.press or list(PRESSES)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    windows = windows_of(options.tokens, options.windows)
    planted = plant(windows)
    scored = windows.shape[1] - planted.context if options.recall else options.scored
    settings = {
        "model": str(Path(options.model).resolve()),
        "tokens": hashlib.sha256(torch.load(options.tokens).numpy().tobytes()).hexdigest()[:16],
        "scored": scored,
        "measure": "recall" if options.recall else "loss",
    }
    losses = read_losses(options.json, settings)
    some = contenders(options, Scorer(model, scored))
    for index, ids in enumerate((planted.tokens if options.recall else windows).split(1)):
        for name, logits in some.items():
            own = losses.setdefault(name, {})
            if str(index) in own:
                continue
            if options.recall:
                one = replace(planted, tokens=ids)
                own[str(index)] = float(one.accuracy(logits(ids)).mean())
            else:
                own[str(index)] = mean_loss(logits(ids), ids)
            record = {"settings": settings, "losses": losses}
            write_text(options.json, json.dumps(record, indent=1) + "\n")
    show(losses)


if __name__ == "__main__":
    main()
