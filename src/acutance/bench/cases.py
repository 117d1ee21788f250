"""CASES: the shapes that are measured, by name, and the sets they are run in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

REFERENCE = "sdpa"
EVERYONE = (REFERENCE, "acutance", "acutance-statistics", "entropy-trick", "naive")
#: Not float64: the gate's reference is float64 itself.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One attention call to measure: inputs are standard normal, the scale is 1/√E.

    Attributes:
        name: how the case is asked for and cited.
        queries: L, query rows.
        keys: S, key rows.
        causal: whether row i sees only keys j ≤ i.
        padded: whether the last keys of a batch entry are padding: S are real in the first entry,
            fewer in each next one, S/2 in the last.
        batch: B.
        heads: Hq, query heads.
        key_heads: H, key heads; fewer than Hq is grouped-query attention.
        width: E and Ev.
        dtype: of query, key and value.
        contenders: names from :data:`acutance.bench.contenders.CONTENDERS`, in the table's order.

    Example:
        >>> CASES["causal-4096"].shape
        'B=1 H=8 L=S=4096 E=64 float32 causal'
    """

    name: str
    queries: int
    keys: int
    causal: bool = False
    padded: bool = False
    batch: int = 1
    heads: int = 8
    key_heads: int = 8
    width: int = 64
    dtype: str = "float32"
    contenders: tuple[str, ...] = EVERYONE

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.heads % self.key_heads:
            raise ValueError(
                f"heads is a multiple of key_heads, got heads={self.heads} and "
                f"key_heads={self.key_heads}"
            )

    @property
    def shape(self) -> str:
        """The shapes and options on one line."""
        grouped = self.heads != self.key_heads
        heads = f"Hq={self.heads} H={self.key_heads}" if grouped else f"H={self.heads}"
        square = self.queries == self.keys
        length = f"L=S={self.keys}" if square else f"L={self.queries} S={self.keys}"
        words = [f"B={self.batch}", heads, length, f"E={self.width}", self.dtype]
        words += ["causal"] * self.causal + ["padded"] * self.padded
        return " ".join(words)


def _named(*cases: Case) -> dict[str, Case]:
    return {case.name: case for case in cases}


CASES: dict[str, Case] = _named(
    Case("causal-1024", 1024, 1024, causal=True),
    Case("full-1024", 1024, 1024),
    Case("causal-4096", 4096, 4096, causal=True),
    Case("full-4096", 4096, 4096),
    Case("causal-16384", 16384, 16384, causal=True),
    Case("full-16384", 16384, 16384),
    Case("bfloat16-causal-4096", 4096, 4096, causal=True, dtype="bfloat16"),
    Case("gqa-causal-4096", 4096, 4096, causal=True, heads=16, key_heads=2),
    Case("padded-1024", 1024, 1024, padded=True, batch=4),
    Case("decode-4096", 1, 4096),
)

#: ``quick`` takes minutes, ``full`` (every case) the better part of an hour.
SETS: dict[str, tuple[str, ...]] = {
    "quick": ("causal-1024", "full-1024", "causal-4096", "full-4096"),
    "full": tuple(CASES),
}


def choose(cases: str | Case | Iterable[str | Case]) -> tuple[Case, ...]:
    """The cases asked for by name, by set or as they are, each once.

    Raises:
        ValueError: if there are none, if a name is unknown, or if two different cases share a name.

    Example:
        >>> [case.name for case in choose(["decode-4096", "quick"])][:2]
        ['decode-4096', 'causal-1024']
        >>> choose("casual-1024")
        Traceback (most recent call last):
        ValueError: no benchmark case is named 'casual-1024'; did you mean 'causal-1024'?
    """
    chosen: dict[str, Case] = {}
    for entry in [cases] if isinstance(cases, str | Case) else cases:
        for case in [entry] if isinstance(entry, Case) else _find(entry):
            if chosen.setdefault(case.name, case) != case:
                raise ValueError(f"two different benchmark cases are named {case.name!r}")
    if not chosen:
        raise ValueError(f"no benchmark case was asked for: choose from {_names()}")
    return tuple(chosen.values())


def _find(name: str) -> list[Case]:
    if name in SETS:
        return [CASES[member] for member in SETS[name]]
    if name in CASES:
        return [CASES[name]]
    close = difflib.get_close_matches(str(name), [*CASES, *SETS], n=1, cutoff=0.4)
    nearest = f"; did you mean {close[0]!r}?" if close else f": choose from {_names()}"
    raise ValueError(f"no benchmark case is named {name!r}{nearest}")


def _names() -> str:
    return ", ".join([*SETS, *CASES])
