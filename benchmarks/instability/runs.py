"""The catalogue of trainings: which fault, how strong, from which step, on which decoder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from benchmarks.instability.decoder import Fault, Shape

#: Steps of a training, of one whose fault shows soon or never, of one with a slow fault, and of the
#: longest controls.
STEPS, SHORT_STEPS, SLOW_STEPS, HEALTHY_STEPS = 500, 320, 640, 800
SMALL = Shape()
DEEP = Shape(width=64, layers=4, heads=4)
WIDE = Shape(width=128, layers=2, heads=4)
WINDOWED = Shape(window=16)
NORMED = Shape(qk_norm=True)
BARE = Shape(norm=False)
#: Difference of the seeds of two repetitions of the catalogue.
SEEDS = 5000
#: Learning rate of the decoders; four times as much trains as well, eight times slightly worse.
RATE = 4e-3


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        kind: of the fault, or of the healthy run.
        level: strength of the fault, in the unit of its kind.
        start: step from which the fault acts; 0 is the whole run.
        healthy: whether this is a control.
        seed: of the weights and the batches.
        shape: of the decoder.
        rate: learning rate at its peak.
        warmup: steps until the peak.
        cosine: whether the rate then falls to 0 along a cosine over the run.
        fault: what the attention does wrong from ``start`` on.
        factor: of the learning rate from ``start`` on.
        growth: of the learning rate, each step from ``start`` on.
        betas: of AdamW.
        eps: of AdamW.
        from_start: options of AdamW apply from step 0; else from ``start``.
        fault_steps: steps for which ``factor`` acts; 0 is until the end.
        head_growth: of the query and key weights of head 0 in layer 0, each step.
        value_growth: of the value and output weights of layer 0, each step.
        scale_growth: of the scale of every head's scores, each step.
        bad_steps: number of steps with bytes drawn at random.
        bad_every: repeat the bad steps every so many steps; 0 for once.
        noise_growth: share of bytes drawn at random, growing by this much each step.
        repeat_growth: share of sequences that are always the same one, growing likewise.
        rounded: to bfloat16 after each step: "weights", "moments" (Adam's second) or "" for none.
        clip: of the gradient's norm; None for none.
        decay: weight decay.
        data: "text", "first" (each sequence begins with byte 0) or "copy" (the second half of
            each sequence repeats the first).
        batch: sequences.
        steps: of the run.
    """

    kind: str
    level: float = 0.0
    start: int = 0
    healthy: bool = False
    seed: int = 0
    shape: Shape = field(default_factory=Shape)
    rate: float = RATE
    warmup: int = 30
    cosine: bool = False
    fault: Fault = ""
    factor: float = 1.0
    growth: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    fault_steps: int = 0
    head_growth: float = 1.0
    value_growth: float = 1.0
    scale_growth: float = 1.0
    bad_steps: int = 0
    bad_every: int = 0
    noise_growth: float = 0.0
    repeat_growth: float = 0.0
    rounded: str = ""
    clip: float | None = 1.0
    decay: float = 0.1
    data: str = "text"
    batch: int = 16
    steps: int = STEPS

    @property
    def key(self) -> str:
        """A name that changes with anything in the description, and with no new field."""
        usual = {field.name: field.default for field in fields(self)}
        said = {name: value for name, value in asdict(self).items() if value != usual[name]}
        text = json.dumps(said, sort_keys=True)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def fast() -> list[Run]:
    """The trainings whose fault acts at once: on several decoders, from several steps."""
    made: list[Run] = []

    def add(
        kind: str, level: float, starts: tuple[int, ...], shapes: list[Shape], **more: Any
    ) -> None:
        for shape in shapes:
            for start in starts:
                made.append(Run(kind, level, start, seed=len(made) % 97, shape=shape, **more))

    late, any_time = (120, 240), (0, 120, 240)
    for level in (8.0, 32.0, 128.0):
        add("rate", level, any_time, [SMALL, DEEP, WIDE], factor=level)
    for level in (2.0, 8.0):
        add("rate_no_norm", level, any_time, [BARE, replace(BARE, layers=4)], factor=level)
    for level in (64.0, 512.0):
        add("rate_spike", level, late, [SMALL, WIDE], factor=level, fault_steps=5)
    for level in (4.0, 16.0, 64.0):
        add("no_warmup", level, (0,), [SMALL, DEEP, BARE], warmup=0, rate=RATE * level)
    for level in (1.015, 1.025, 1.04, 1.06):
        add("rate_growth", level, (60, 160), [SMALL, DEEP, WIDE], growth=level)
    long = len(made)
    for level in (1.0, 4.0, 16.0):
        add("scale_1_qk_norm", level, (0, 120), [NORMED, replace(NORMED, width=128)],
            fault="scale_1", rate=RATE * level)  # fmt: skip
        add("scale_1", level, (0, 120), [SMALL], fault="scale_1", rate=RATE * level)
    for level in (4.0, 16.0):
        add("wide_heads", level, (0, 120), [Shape(width=128, layers=4, heads=2)],
            factor=level, batch=8)  # fmt: skip
    for fault in ("bf16_scores", "fp8_scores", "bf16_sums"):
        add(fault, 1.0, (0, 120), [SMALL], fault=fault)
        add(fault, 8.0, (120,), [SMALL], fault=fault, rate=RATE * 8)
    for level in (1e-15, 1e-3):
        add("adam_eps", level, (0, 120), [SMALL, BARE], eps=level)
    for level in (0.0, 0.5, 0.9999):
        add("adam_beta2", level, (0, 120), [SMALL, BARE], betas=(0.9, level))
    for level in (0.0, 0.99, 0.999):
        add("adam_beta1", level, (0, 120), [SMALL], betas=(level, 0.95))
    for level in (1, 5, 20):
        add("bad_batch", level, late, [SMALL, BARE], bad_steps=level, fault_steps=level)
        add("bad_batch_no_clip", level, late, [SMALL], bad_steps=level, fault_steps=level,
            clip=None, rate=4 * RATE)  # fmt: skip
    for fault in ("mask_future", "mask_first"):
        add(fault, 1.0, any_time, [SMALL], fault=fault)
    add("window_off_by_one", 1.0, any_time, [WINDOWED, Shape(window=4)], fault="window")
    for level in (1.01, 1.02, 1.04):
        add("head_growth", level, (60, 180), [SMALL, DEEP], head_growth=level)
    for level in (1.01, 1.02, 1.04):
        add("value_growth", level, (60, 180), [SMALL], value_growth=level)
    for level in (-3.0, -10.0):
        add("weight_growth", level, (0, 120), [SMALL, BARE], decay=level)
    return [
        replace(run, steps=SHORT_STEPS) if number >= long else run
        for number, run in enumerate(made)
    ]


def slow() -> list[Run]:
    """The trainings whose fault grows, or acts for hundreds of steps before the loss shows it."""
    made: list[Run] = []

    def add(kind: str, level: float, shapes: list[Shape], count: int = 2, **more: Any) -> None:
        for shape in shapes:
            for start in (60, 120, 90)[:count]:
                seed = 200 + len(made)
                made.append(Run(kind, level, start, seed=seed, shape=shape, **(sizes | more)))

    bare_deep, slow_moments = replace(BARE, layers=4), (0.9, 0.999)
    sizes: dict[str, Any] = {"steps": SLOW_STEPS, "batch": 16}
    for level in (1.005, 1.0075, 1.01):
        add("slow_rate", level, [SMALL, NORMED], growth=level, rate=4 * RATE)
        add("slow_rate_no_clip", level, [SMALL], growth=level, rate=4 * RATE, clip=None,
            betas=slow_moments)  # fmt: skip
    sizes["batch"] = 8
    for level in (1.004, 1.006, 1.01):
        add("slow_rate_no_norm", level, [BARE, bare_deep], growth=level)
    for level in (4.0, 5.0, 6.0):
        add("hot_no_norm", level, [BARE], 3, factor=level)
        add("hot_no_norm_no_clip", level, [BARE], 1, factor=level, clip=None, betas=slow_moments)
    for level in (-0.5, -1.0, -1.5):
        add("slow_weight_growth", level, [BARE], 3, decay=level)
    for level in (1.01, 1.02):
        add("scale_growth", level, [SMALL, BARE], scale_growth=level)
        add("slow_value_growth", level, [BARE], value_growth=level)
        add("slow_head_growth", level, [BARE], head_growth=level)
    for level in (2.0, 4.0):
        add("bursts", level, [SMALL, BARE], 1, bad_steps=3, bad_every=50, rate=level * RATE,
            clip=None, betas=slow_moments)  # fmt: skip
        add("rounded_weights", level, [BARE], 1, rounded="weights", factor=level)
        add("rounded_moments", level, [BARE], 1, rounded="moments", factor=level,
            betas=slow_moments)  # fmt: skip
    add("noise_growth", 0.003, [SMALL, BARE], 1, noise_growth=0.003)
    add("repeat_growth", 0.004, [SMALL, BARE], 1, repeat_growth=0.004)
    return made


def faulty() -> list[Run]:
    """Every training with a fault."""
    return fast() + slow()


def healthy() -> list[Run]:
    """The controls, among them runs that look odd and are well."""
    made: list[Run] = []
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("plain", {}),
        ("deep", {"shape": DEEP}),
        ("wide", {"shape": WIDE}),
        ("sinks", {"data": "first"}),
        ("induction", {"data": "copy"}),
        ("previous_token", {"shape": Shape(window=4)}),
        ("qk_norm", {"shape": NORMED}),
        ("fast", {"rate": 2.5 * RATE}),
        ("slow", {"rate": RATE / 4}),
        ("small_batch", {"batch": 6}),
    ]
    for seed in range(8):
        sizes = {"steps": HEALTHY_STEPS} if seed < 3 else {"steps": STEPS, "batch": 8}
        for kind, more in kinds:
            made.append(Run(kind, healthy=True, seed=1000 + seed, **(sizes | more)))
    others: list[tuple[str, dict[str, Any]]] = [  # schedules, and what some faults begin with
        ("long_warmup", {"warmup": 300}),
        ("cosine", {"cosine": True}),
        ("no_norm", {"shape": BARE}),
        ("no_norm_deep", {"shape": replace(BARE, layers=4)}),
        ("hot", {"rate": 4 * RATE}),
        ("hot_no_clip", {"rate": 4 * RATE, "clip": None, "betas": (0.9, 0.999)}),
    ]
    for seed in range(5):
        for number, (kind, more) in enumerate(others):
            run = Run(kind, healthy=True, seed=1000 + seed, steps=STEPS, batch=8, **more)
            made.insert(8 * seed + number, run)
    return made


def catalogue(repeat: int = 0) -> list[Run]:
    """Every training, faulty ones and controls in turn, so that a part is a sample of the whole.

    Args:
        repeat: number of the repetition: the same trainings with other weights and batches.
    """
    parts = fast(), slow(), healthy()
    order = [(i / len(part), run) for part in parts for i, run in enumerate(part)]
    runs = [run for _, run in sorted(order, key=lambda pair: pair[0])]
    return [replace(run, seed=run.seed + SEEDS * repeat) for run in runs]
