"""CASES: the calls that are measured, by name, and the groups they are asked for in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from benchmarks.cpu.goals import GOALS

REFERENCE = "sdpa"
#: Not float64: the gate's reference is float64 itself.
DTYPES = ("float32", "bfloat16", "float16")
MASKS = ("", "padding", "boolean", "additive")
PASSES = ("forward", "backward", "step", "memory")

#: Sizes of an attention call that a record may state.
MOST, MOST_HEADS = 1 << 31, 1 << 16
_LEAST = {"queries": 1, "keys": 1, "window": 1, "batch": 1, "heads": 1, "key_heads": 0} | {
    "width": 1,
    "rounds": 0,
}

PAIR = (REFERENCE, "acutance")
EVERYONE = (
    *(*PAIR, "acutance-unread", "acutance-metrics", "acutance-avx2", "acutance-baseline"),
    *("blocked", "entropy-trick", "naive", "flex"),
)


@dataclass(frozen=True)
class Case:
    """One attention call to measure: inputs are standard normal, the scale is 1/√E.

    Attributes:
        name: how the case is asked for and cited.
        queries: L, query rows.
        keys: S, key rows.
        group: what it belongs to.
        causal: whether row i sees only keys j ≤ i.
        window: how many keys a row sees, its own the last, or None; causal only.
        mask: "padding" (S real keys in the first entry of a batch, fewer in each next one, S/2 in
            the last), "boolean" (L × S, half of them hidden), "additive" (L × S), or empty.
        batch: B.
        heads: Hq, query heads.
        key_heads: H; 0 for as many as query heads, fewer is grouped-query attention.
        width: E and Ev.
        dtype: of query, key and value.
        timing: what is timed: the "forward" pass, the "backward" pass alone, both as a "step", or
            nothing where only "memory" is measured.
        loss: whose gradients: "all" a contender gives, or of its "entropy" alone; that of the
            reference, which has none, is of its output.
        contenders: names from :data:`benchmarks.cpu.contenders.CONTENDERS`, in the table's order.
        goals: names from :data:`benchmarks.cpu.goals.GOALS` that it decides.
        rounds: rounds at most, where one is long; 0 for as many as are asked for.
        quick: whether it is one of the few cases of a quick run.
        weigh: whether peak memory is measured too.

    Example:
        >>> CASES["causal-4096"].shape
        'B=1 H=8 L=S=4096 E=64 float32 causal'
    """

    name: str
    queries: int
    keys: int
    group: str = ""
    causal: bool = False
    window: int | None = None
    mask: str = ""
    batch: int = 1
    heads: int = 8
    key_heads: int = 0
    width: int = 64
    dtype: str = "float32"
    timing: Literal["forward", "backward", "step", "memory"] = "forward"
    loss: Literal["all", "entropy"] = "all"
    contenders: tuple[str, ...] = PAIR
    goals: tuple[str, ...] = ()
    rounds: int = 0
    quick: bool = False
    weigh: bool = False

    def __post_init__(self) -> None:
        for what, got, allowed in (
            ("dtype", self.dtype, DTYPES),
            ("mask", self.mask, MASKS),
            ("timing", self.timing, PASSES),
            ("loss", self.loss, ("all", "entropy")),
        ):
            if got not in allowed:
                raise ValueError(
                    f"{what} must be one of {', '.join(map(repr, allowed))}, got {got!r}"
                )
        for what, least in _LEAST.items():
            size = getattr(self, what)
            if size is not None and not (type(size) is int and least <= size <= MOST):
                raise ValueError(
                    f"{what} must be a whole number from {least} to {MOST}, got {size!r}"
                )
        if self.batch * self.heads > MOST_HEADS:
            raise ValueError(f"batch times heads is at most {MOST_HEADS}, got {self.batch} heads")
        if self.key_heads and self.heads % self.key_heads:
            raise ValueError(
                f"heads must be a multiple of key_heads, got heads={self.heads} and "
                f"key_heads={self.key_heads}"
            )
        for goal in self.goals:
            if goal not in GOALS:
                raise ValueError(f"goals must be among {', '.join(GOALS)}, got {goal!r}")
            if GOALS[goal].contender not in self.contenders:
                raise ValueError(
                    f"goal {goal!r} is of {GOALS[goal].contender!r}, which is no contender of case "
                    f"{self.name!r}"
                )

    @property
    def groups_of(self) -> int:
        """Query heads that share a key head."""
        return self.heads // (self.key_heads or self.heads)

    @property
    def backward(self) -> bool:
        """Whether gradients are computed."""
        return self.timing in ("backward", "step")

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that have to be multiplied, over batch and heads.

        Those that the causal order, the window and padding leave; what an L × S mask hides counts.
        """
        if not self.causal:
            return self.heads * self.queries * sum(self.lengths)
        found = 0
        for length in self.lengths:
            end = min(self.window or length, length)
            rising = min(self.queries, end)  # rows that see one key more than the row before
            found += rising * (rising + 1) // 2 + (self.queries - rising) * end
        return self.heads * found

    @property
    def lengths(self) -> tuple[int, ...]:
        """Real keys of each entry of the batch: S, and with padding down to S/2 evenly."""
        least = (self.keys + 1) // 2 if self.mask == "padding" else self.keys
        steps = max(self.batch - 1, 1)
        return tuple(
            round(self.keys + (least - self.keys) * entry / steps) for entry in range(self.batch)
        )

    @property
    def shape(self) -> str:
        """The shapes and options on one line."""
        grouped = self.groups_of > 1
        heads = f"Hq={self.heads} H={self.key_heads}" if grouped else f"H={self.heads}"
        square = self.queries == self.keys
        length = f"L=S={self.keys}" if square else f"L={self.queries} S={self.keys}"
        words = [f"B={self.batch}", heads, length, f"E={self.width}", self.dtype]
        words += ["causal"] * self.causal + [f"window={self.window}"] * bool(self.window)
        words += [f"{self.mask} mask"] * bool(self.mask)
        words += {"backward": ["backward"], "step": ["forward + backward"]}.get(self.timing, [])
        words += ["of the entropy"] * (self.loss == "entropy")
        return " ".join(words)


#: Heads and rounds by length: long sequences take fewer of both.
_HEADS = {16384: 2, 32768: 2, 65536: 2}
_ROUNDS = {16384: 5, 32768: 3, 65536: 3}
_KINDS = ("full", "causal")


def _square(name: str, n: int, kind: str, group: str, **options: object) -> Case:
    given = {"heads": _HEADS.get(n, 8), "rounds": _ROUNDS.get(n, 0), **options}
    return Case(name, n, n, group=group, causal=kind == "causal", **given)  # type: ignore[arg-type]


def _forward() -> Iterable[Case]:
    quick = {(1024, "full", 64), (1024, "causal", 64)}
    for width, n, kind in product((64, 128), (1024, 4096, 16384, 32768), _KINDS):
        wide = width == 128
        goals: tuple[str, ...] = (f"forward-{kind}", "forward-avx2")
        contenders: tuple[str, ...] = (*PAIR, "acutance-avx2")
        if not wide and n <= 4096:
            contenders = EVERYONE
            goals = (*goals, "blocked-1", "blocked-2")
        elif not wide and n == 16384:
            contenders = (*contenders, "blocked", "entropy-trick")
            goals = (*goals, "blocked-1", "blocked-2")
        heads = {"heads": 4} if wide and n <= 4096 else {}
        yield _square(
            f"{kind}-{n}" + "-e128" * wide, n, kind, "forward", width=width, goals=goals,
            contenders=contenders, quick=(n, kind, width) in quick,
            weigh=not wide and n == 4096, **heads,
        )  # fmt: skip
    for kind in _KINDS:
        yield _square(f"{kind}-65536", 65536, kind, "scaling")


def _parts() -> Iterable[Case]:
    for name, n, kind in product(("statistics", "noise"), (1024, 4096, 16384), _KINDS):
        yield _square(
            f"{name}-{kind}-{n}", n, kind, name, contenders=(REFERENCE, name), goals=(name,),
            quick=n == 1024 and kind == "causal",
        )  # fmt: skip


def _gaps() -> Iterable[Case]:
    for kind in _KINDS:
        yield _square(
            f"gaps-{kind}-4096", 4096, kind, "statistics",
            contenders=(REFERENCE, "statistics", "gaps"),
        )  # fmt: skip


def _few() -> Iterable[Case]:
    read = (REFERENCE, "acutance-unread", "acutance")
    for queries, keys in product((1, 2, 4), (1024, 8192, 32768)):
        yield Case(
            f"decode-{queries}x{keys}", queries, keys, "decode", contenders=read,
            goals=("decode",), quick=queries == 1 and keys == 8192,
        )  # fmt: skip
    for n, kind in product((64, 128, 256, 512), _KINDS):
        yield _square(
            f"short-{kind}-{n}", n, kind, "short", contenders=read, goals=("short",),
            quick=n == 256 and kind == "causal",
        )  # fmt: skip
    for n, heads in product((1, 4, 16, 32), (1, 8)):
        yield Case(
            f"tiny-{n}-h{heads}", n, n, "tiny", heads=heads, contenders=read, goals=("tiny",),
            quick=n == 16 and heads == 1,
        )  # fmt: skip


def _dtypes() -> Iterable[Case]:
    for dtype, n, kind in product(("bfloat16", "float16"), (1024, 4096), _KINDS):
        brain = dtype == "bfloat16"
        yield _square(
            f"{dtype}-{kind}-{n}", n, kind, "dtype", dtype=dtype,
            contenders=(*PAIR, *["acutance-avx512"] * brain),
            goals=("bfloat16",) * brain, quick=brain and n == 1024 and kind == "causal",
        )  # fmt: skip


def _masks() -> Iterable[Case]:
    for n in (1024, 4096):
        yield Case(
            f"boolean-{n}", n, n, "mask", mask="boolean", contenders=(*PAIR, "blocked"),
            goals=("boolean",), quick=n == 1024,
        )  # fmt: skip
        yield Case(f"additive-{n}", n, n, "mask", mask="additive")
    yield Case("padded-1024", 1024, 1024, "mask", mask="padding", batch=4, heads=4)
    yield Case("window-4096", 4096, 4096, "mask", causal=True, window=512)
    yield Case("gqa-causal-4096", 4096, 4096, "mask", causal=True, heads=16, key_heads=2)


def _gradients() -> Iterable[Case]:
    for n, kind in product((1024, 4096, 16384), _KINDS):
        if (n, kind) == (16384, "full"):
            continue
        for loss, contender in (("all", "acutance"), ("entropy", "statistics")):
            name = "backward" if loss == "all" else "entropy-backward"
            extra = ("blocked", "naive") if loss == "all" and n == 1024 else ()
            yield _square(
                f"{name}-{kind}-{n}", n, kind, "backward", timing="backward", loss=loss,
                contenders=(REFERENCE, contender, *extra), goals=(name,),
                quick=n == 1024 and kind == "causal",
            )  # fmt: skip
    for n, kind in ((1024, "full"), (4096, "causal")):
        yield _square(f"step-{kind}-{n}", n, kind, "backward", timing="step")


def _memory() -> Iterable[Case]:
    for kind in _KINDS:
        yield _square(
            f"memory-{kind}-16384", 16384, kind, "memory", heads=8, timing="memory", weigh=True,
            contenders=(*PAIR, "acutance-unread", "statistics"), goals=("memory",),
        )  # fmt: skip


#: Every case, by name.
CASES: dict[str, Case] = {
    case.name: case
    for part in (_forward, _parts, _gaps, _few, _dtypes, _masks, _gradients, _memory)
    for case in part()
}
#: The groups, each a set of cases.
GROUPS: dict[str, tuple[str, ...]] = {
    group: tuple(name for name, case in CASES.items() if case.group == group)
    for group in dict.fromkeys(case.group for case in CASES.values())
}
#: ``quick`` takes a minute, ``all`` an hour or more.
SETS: dict[str, tuple[str, ...]] = {
    "all": tuple(CASES),
    "quick": tuple(name for name, case in CASES.items() if case.quick),
    **GROUPS,
}


def choose(cases: str | Case | Iterable[str | Case], *, quick: bool = False) -> tuple[Case, ...]:
    """The cases asked for by name, by group, by set or as they are, each once.

    Args:
        cases: names from :data:`CASES` or :data:`SETS`, or cases.
        quick: of a group or set take only its quick cases.

    Raises:
        ValueError: if there are none, if a name is unknown, or if two different cases share a name.

    Example:
        >>> [case.name for case in choose(["noise-full-4096", "statistics"], quick=True)]
        ['noise-full-4096', 'statistics-causal-1024']
        >>> choose("casual-1024")
        Traceback (most recent call last):
        ValueError: no benchmark case is named 'casual-1024'; did you mean 'causal-1024'?
    """
    chosen: dict[str, Case] = {}
    for entry in [cases] if isinstance(cases, str | Case) else cases:
        for case in [entry] if isinstance(entry, Case) else _find(entry, quick):
            if chosen.setdefault(case.name, case) != case:
                raise ValueError(f"two different benchmark cases are named {case.name!r}")
    if not chosen:
        raise ValueError(f"no benchmark case was asked for: choose from {', '.join(SETS)}")
    return tuple(chosen.values())


def _find(name: str, quick: bool) -> list[Case]:
    if name in CASES:
        return [CASES[name]]
    if name in SETS:
        return [CASES[member] for member in SETS[name] if CASES[member].quick or not quick]
    close = difflib.get_close_matches(str(name), [*CASES, *SETS], n=1, cutoff=0.4)
    nearest = f"; did you mean {close[0]!r}?" if close else f": choose from {', '.join(SETS)}"
    raise ValueError(f"no benchmark case is named {name!r}{nearest}")
