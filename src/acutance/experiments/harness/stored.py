"""Records of experiments in files: what their JSON holds, checked as it is read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from acutance.experiments.harness.record import (
    SCHEMA,
    Claim,
    Estimate,
    Record,
    Relation,
    Row,
    Value,
    judge,
    seen,
)
from acutance.from_json import checked, read_json


def load(path: str | os.PathLike[str]) -> Record:
    """Read a record that :meth:`Record.save` wrote.

    Whether a row agrees, and the verdicts, are judged again from what was predicted and measured.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no such record, damaged, or of another schema.
    """
    try:
        read = read_json(path)
        if (schema := read.pop("schema", None)) != SCHEMA:
            raise ValueError(f"its schema is {schema!r:.60}, but this version reads {SCHEMA}")
        for name in ("verdict", "as_expected"):  # judged again
            read.pop(name, None)
        claims = read.get("claims")
        if isinstance(claims, list) and all(isinstance(claim, dict) for claim in claims):
            kept = Claim.__dataclass_fields__
            read["claims"] = [{key: c[key] for key in kept if key in c} for c in claims]
        return checked(_Stored, read, "it").judged()
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)} is not a record of acutance reproduce: {error}"
        ) from error


@dataclass(frozen=True)
class _StoredRow:
    """A row as a file has it: numbers that are not finite are text."""

    claim: str
    quantity: str
    condition: Mapping[str, Value]
    relation: Relation
    predicted: float | str
    measured: float | str
    error: float | str
    allowed: float | str
    agrees: bool
    samples: int = 0
    skewness: float = 0.0

    def judged(self, claims: Mapping[str, Claim]) -> Row:
        """The row, whether it agrees judged by its claim alone."""
        predicted, value, error = map(_decode, (self.predicted, self.measured, self.error))
        if error < 0:
            raise ValueError(f"a standard error must be at least 0, got {error}")
        if self.samples < 0:
            raise ValueError(f"a number of samples must be at least 0, got {self.samples}")
        measured = Estimate(value, error, self.samples, self.skewness)
        if not self.claim:
            return seen(self.quantity, measured, self.condition)
        if self.claim not in claims:
            raise ValueError(f"a row refers to claim {self.claim!r:.60}, which does not exist")
        claim = claims[self.claim]
        bound = self.condition.get(claim.bound) if claim.bound else 0
        words = isinstance(bound, str) and bound not in ("inf", "-inf")
        if bound is None or (words and claim.sense != "in"):
            raise ValueError(f"a row of the claim {self.claim!r:.60} has no {claim.bound!r:.60}")
        return claim.row(self.quantity, predicted, measured, self.condition)


@dataclass(frozen=True)
class _Stored:
    """A record as a file has it."""

    name: str
    title: str
    prediction: str
    claims: tuple[Claim, ...]
    rows: tuple[_StoredRow, ...]
    seed: int
    quick: bool
    seconds: float
    about: Mapping[str, str]

    def judged(self) -> Record:
        """The record, every row and claim judged again."""
        claims = {claim.key: claim for claim in self.claims}
        if not claims:
            raise ValueError("it has no claims")
        rows = tuple(row.judged(claims) for row in self.rows)
        return Record(
            self.name, self.title, self.prediction,
            tuple(judge(claim, rows) for claim in self.claims),
            rows, self.seed, self.quick, self.seconds, self.about,
        )  # fmt: skip


def _decode(value: float | str) -> float:
    """A number, be it text because it is not finite."""
    if isinstance(value, str) and value not in ("inf", "-inf", "nan"):
        raise ValueError(f"a number must be a float, inf, -inf or nan, got {value!r:.60}")
    return float(value)
