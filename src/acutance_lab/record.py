"""Claims, rows of predicted beside measured, the verdicts judged on them, and the record of a run.

A claim says beforehand how its rows are compared and what verdict is expected; the verdict itself
is a function of the rows alone (:func:`judge`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from acutance.plugins import AnyFloat, as_json, checked, read_json, sealed_json, write_text

SCHEMA = 1
#: A measurement may be this many standard errors away from what is predicted.
Z = 4.0
#: A prediction that is off by this share must be noticed (:attr:`Judgement.decided`).
OFF = 0.05

Relation = Literal["=", "<=", ">="]
Kind = Literal["holds", "holds only where", "does not hold"]
Value = float | int | str


class Estimate(NamedTuple):
    """A measured mean or median with its standard error.

    Attributes:
        value: the mean or median.
        error: its standard error.
        samples: how many independent numbers it was computed from; 0 if it was computed from other
            estimates.
        skewness: of the distribution of the mean: skewness of the numbers over the root of their
            count. Up to about 0.3 the mean is close to normal, so that four standard errors can be
            trusted.
    """

    value: float
    error: float
    samples: int = 0
    skewness: float = 0.0

    def __sub__(self, other: Estimate) -> Estimate:
        """This estimate less an independent one.

        Example:
            >>> Estimate(5.0, 0.3) - Estimate(2.0, 0.4)
            Estimate(value=3.0, error=0.5, samples=0, skewness=0.0)
        """
        return Estimate(self.value - other.value, math.hypot(self.error, other.error))

    def __truediv__(self, other: Estimate) -> Estimate:
        """The ratio to an independent estimate.

        Example:
            >>> Estimate(6.0, 0.3) / Estimate(2.0, 0.0)
            Estimate(value=3.0, error=0.15, samples=0, skewness=0.0)
        """
        ratio = self.value / other.value
        share = math.hypot(self.error / self.value, other.error / other.value)
        return Estimate(ratio, ratio * share)


@dataclass(frozen=True)
class Claim:
    """One statement an experiment tests.

    Attributes:
        key: names it among the experiment's claims.
        text: the statement, one line.
        source: who makes it; "" for what follows from the mathematics of this library.
        expected: the verdict expected, stated before anything runs.
        relation: how a measurement must compare with its prediction.
        within: tolerance, as a share of the prediction, of a claim that is an approximation.
        rounding: absolute difference allowed for float64 rounding.
        bound: the condition that limits the claim, a key of its rows' conditions; "" for none.
        sense: whether it holds up to a value of ``bound``, from a value on, or in categories.
        theorem: whether it follows by algebra, so that no measurement can refute it and agreement
            only shows that the code computes what it says.
    """

    key: str
    text: str
    source: str = ""
    expected: Kind = "holds"
    relation: Relation = "="
    within: float = 0.0
    rounding: float = 1e-12
    bound: str = ""
    sense: Literal["up to", "from", "in"] = "up to"
    theorem: bool = False

    def row(
        self,
        quantity: str,
        predicted: float,
        measured: float | Estimate,
        where: Mapping[str, Value],
    ) -> Row:
        """Compare a measurement with its prediction.

        Args:
            quantity: what is measured, with its unit if it has one.
            predicted: from theory.
            measured: from a run; a plain number if nothing in it is random.
            where: the condition: n, γ, kind of logits, ...

        Returns:
            The row. It agrees if the measurement is no further on the wrong side of the prediction
            than 4 standard errors, ``rounding`` and the share ``within`` together. A row of
            :data:`UNTESTED` has no prediction and always agrees.

        Example:
            >>> claim = Claim("mean", "the mean is 1")
            >>> claim.row("mean", 1.0, Estimate(1.03, 0.01), {"n": 100}).agrees
            True
            >>> claim.row("mean", 1.05, Estimate(1.0, 0.01), {"n": 100}).agrees
            False
        """
        if not isinstance(measured, Estimate):
            measured = Estimate(float(measured), 0.0)
        predicted, (value, error, samples, skewness) = float(predicted), measured
        if self.key:
            allowed = Z * error + self.rounding + self.within * abs(predicted)
            # False if anything is NaN
            agrees = _beyond(self.relation, predicted, value) <= allowed
        else:
            predicted, allowed, agrees = math.nan, math.inf, True
        return Row(
            self.key, quantity, dict(where), self.relation, predicted, value, error, allowed,
            agrees, samples, skewness,
        )  # fmt: skip


#: A claim that follows by algebra, one that is expected to fail, and those of inequalities.
theorem, refuted = partial(Claim, theorem=True), partial(Claim, expected="does not hold")
at_least, at_most = partial(Claim, relation=">="), partial(Claim, relation="<=")
#: Claims that are expected to hold only up to, or from, a value of ``bound``, or in some kinds.
up_to = partial(Claim, expected="holds only where")
beyond, among = partial(up_to, sense="from"), partial(up_to, sense="in")

#: The claim of rows that test none: what they measure is recorded for the figure.
UNTESTED = Claim("", "")


@dataclass(frozen=True)
class Row:
    """A prediction beside its measurement.

    Attributes:
        claim: key of the claim it tests.
        quantity: what was measured.
        condition: the settings it was measured at, by name, such as n and γ.
        relation: how the measurement must compare with the prediction.
        predicted: from theory.
        measured: from the run.
        error: standard error of the measurement.
        allowed: largest difference from the prediction that agrees with the claim.
        agrees: whether the difference is within ``allowed``.
        samples: how many independent numbers were measured (:class:`Estimate`).
        skewness: of their mean.
    """

    claim: str
    quantity: str
    condition: Mapping[str, Value]
    relation: Relation
    predicted: AnyFloat
    measured: AnyFloat
    error: AnyFloat
    allowed: AnyFloat
    agrees: bool
    samples: int = 0
    skewness: AnyFloat = 0.0

    def tested_by(self, claim: Claim) -> Row:
        """The same measurement compared with the prediction as another claim says."""
        estimate = Estimate(self.measured, self.error, self.samples, self.skewness)
        return claim.row(self.quantity, self.predicted, estimate, self.condition)

    @property
    def miss(self) -> float:
        """Difference from the prediction divided by ``allowed``; negative on the permitted side."""
        gap = _beyond(self.relation, self.predicted, self.measured)
        if math.isnan(gap):
            return math.inf
        if not self.allowed:
            return math.copysign(math.inf, gap) if gap else 0.0
        return gap / self.allowed


def _beyond(relation: Relation, predicted: float, measured: float) -> float:
    """How far a measurement lies on the wrong side of its prediction."""
    gap = measured - predicted
    return {"=": abs(gap), "<=": gap, ">=": -gap}[relation]


@dataclass(frozen=True)
class Judgement:
    """The verdict of the rows on one claim.

    Attributes:
        claim: the claim.
        kind: "holds", "holds only where" or "does not hold".
        condition: where it holds, in words, for the second kind; else "".
        agree: how many rows agree.
        rows: how many there are.
        worst: the row with the largest :attr:`Row.miss`.
        decided: whether the measurements are good enough for the verdict to mean something. A claim
            of equality that holds, anywhere or everywhere, must get another verdict with every
            prediction 5 % too high, or 5 % too low. One that does not hold must still not hold with
            either, so that it is not refuted by a hair. For an inequality, the opposite inequality
            must get another verdict.
    """

    claim: Claim
    kind: Kind
    condition: str
    agree: int
    rows: int
    worst: Row
    decided: bool

    @property
    def verdict(self) -> str:
        """The verdict as a sentence."""
        return f"{self.kind} {self.condition}".strip()

    @property
    def as_expected(self) -> bool:
        """Whether the verdict is of the kind stated beforehand."""
        return self.kind == self.claim.expected


def judge(claim: Claim, rows: Sequence[Row]) -> Judgement:
    """The verdict on a claim, from its rows alone.

    It *holds* if every row agrees. If the claim names a condition that may bound it, take the
    longest run of that condition's values, from its safe end, in which every row agrees: with at
    least two rows in it the claim *holds only where* the condition is in that range. For a
    condition that is a kind rather than a number, the range is the kinds of which every row
    agrees. Otherwise it *does not hold*.

    Args:
        claim: the claim.
        rows: the rows that test it, and possibly others.

    Raises:
        ValueError: if no row tests it.

    Example:
        >>> claim = Claim("root", "√(1 + x) is 1 + x/2", within=0.01, bound="x")
        >>> rows = [
        ...     claim.row("√", 1 + x / 2, (1 + x) ** 0.5, {"x": x}) for x in (0.1, 0.2, 0.5, 1.0)
        ... ]
        >>> judge(claim, rows).verdict
        'holds only where x ≤ 0.2'

        An error as large as the difference that the claim is about decides nothing:

        >>> claim = Claim("gain", "the gain is positive", relation=">=")
        >>> rows = [claim.row("gain", 0.0, Estimate(0.1, error), {}) for error in (0.01, 1)]
        >>> [judge(claim, [row]).decided for row in rows]
        [True, False]
    """
    rows = [row for row in rows if row.claim == claim.key]
    if not rows:
        raise ValueError(
            f"rows must have at least one result for the claim {claim.key!r}, got none"
        )
    kind, condition = _verdict(claim, rows)
    agree, worst = sum(row.agrees for row in rows), max(rows, key=lambda row: row.miss)
    return Judgement(claim, kind, condition, agree, len(rows), worst, _decided(claim, rows))


def _verdict(claim: Claim, rows: Sequence[Row]) -> tuple[Kind, str]:
    """Kind and condition of the verdict on a claim that all of the rows test."""
    if all(row.agrees for row in rows):
        return "holds", ""
    condition = _domain(claim, rows) if claim.bound else ""
    return ("holds only where" if condition else "does not hold"), condition


def _domain(claim: Claim, rows: Sequence[Row]) -> str:
    """The range of the claim's ``bound`` in which all rows agree, such as "n ≥ 64"; "" if none."""
    failed = {row.condition[claim.bound] for row in rows if not row.agrees}
    agree = {value: value not in failed for value in values(rows, claim.bound)}
    if claim.sense == "in":
        good = [value for value in agree if agree[value]]
        kinds = [kind if isinstance(kind, str) else f"{kind:g}" for kind in good]
        return f"{claim.bound}: {' or '.join(kinds)}" if kinds else ""
    falling = claim.sense == "from"
    safe = list(takewhile(agree.__getitem__, sorted(agree, key=float, reverse=falling)))
    if sum(row.condition[claim.bound] in safe for row in rows) < 2:
        return ""
    last = float(safe[-1])
    shown = f"{last:,.0f}" if last.is_integer() else f"{last:.3g}"
    return f"{claim.bound} {'≥' if falling else '≤'} {shown}"


def _decided(claim: Claim, rows: Sequence[Row]) -> bool:
    """Whether the verdict is :attr:`Judgement.decided`, of rows that all test the claim."""
    kind, condition = _verdict(claim, rows)

    def same(changed: Claim, factor: float) -> bool:
        """Whether the verdict stays under another claim, or with other predictions."""
        moved = [replace(row, predicted=factor * row.predicted).tested_by(changed) for row in rows]
        return _verdict(changed, moved) == (kind, condition)

    if claim.relation != "=":
        return not same(replace(claim, relation=">=" if claim.relation == "<=" else "<="), 1.0)
    stays = [same(claim, factor) for factor in (1 + OFF, 1 - OFF)]
    return all(stays) if kind == "does not hold" else not any(stays)


@dataclass(frozen=True)
class Record:
    """The results of one run of an experiment.

    Attributes:
        name: the experiment's.
        title: what it is about.
        prediction: what was stated before it ran.
        claims: what was tested.
        rows: every prediction beside its measurement.
        seed: of all its random numbers.
        quick: whether it ran at the small size.
        seconds: how long the measurement took.
        about: versions of what it ran with and the digest of its code.
    """

    name: str
    title: str
    prediction: str
    claims: tuple[Claim, ...]
    rows: tuple[Row, ...]
    seed: int
    quick: bool
    seconds: float
    about: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def judgements(self) -> tuple[Judgement, ...]:
        """A verdict for each claim; the first is the experiment's."""
        return tuple(judge(claim, self.rows) for claim in self.claims)

    @property
    def as_expected(self) -> bool:
        """Whether every verdict is of the kind stated beforehand."""
        return all(judgement.as_expected for judgement in self.judgements)

    def of(self, claim: str, **condition: Value) -> list[Row]:
        """The rows of a claim, in order, that meet conditions."""
        return [
            row for row in self.rows
            if row.claim == claim and condition.items() <= row.condition.items()
        ]  # fmt: skip

    def untested(self, quantity: str, **condition: Value) -> list[Row]:
        """The rows of a quantity that test no claim, in order, that meet conditions."""
        return [row for row in self.of("", **condition) if row.quantity == quantity]

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values; numbers that are not finite become strings."""
        claims = [
            {
                **asdict(judgement.claim), "verdict": judgement.verdict, "kind": judgement.kind,
                "where": judgement.condition, "as_expected": judgement.as_expected,
                "decided": judgement.decided, "agree": judgement.agree,
                "rows": judgement.rows, "worst": self.rows.index(judgement.worst),
            }
            for judgement in self.judgements
        ]  # fmt: skip
        verdict = {"verdict": self.judgements[0].verdict, "as_expected": self.as_expected}
        plain = {"schema": SCHEMA, **asdict(self), **verdict}
        plain |= {"claims": claims, "rows": plain.pop("rows")}  # rows last, for who reads the file
        encoded = json.loads(json.dumps(plain), parse_constant=lambda name: str(float(name)))
        return encoded  # type: ignore[no-any-return]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, atomically; :func:`load` reads it back."""
        record = sealed_json(self.to_dict())
        write_text(path, as_json(record, indent=1, ascii_only=False) + "\n")


def values(rows: Iterable[Row], key: str) -> list[Any]:
    """The distinct values of a condition, in order of appearance.

    Example:
        >>> claim = Claim("mean", "the mean is 1")
        >>> values([claim.row("", 1, 1, {"n": n}) for n in (16, 16, 64)], "n")
        [16, 64]
    """
    return list(dict.fromkeys(row.condition[key] for row in rows))


def load(path: str | os.PathLike[str]) -> Record:
    """Read a record that :meth:`Record.save` wrote.

    Whether each row agrees, and the verdicts, are computed again from the stored numbers.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a record, is damaged, or has another schema.
    """
    try:
        return _record(read_json(path))
    except ValueError as error:
        why = f"{os.fspath(path)} is not a record of acutance reproduce: {error}"
        raise ValueError(why) from error


def _record(read: dict[str, Any]) -> Record:
    """The record of a file's content, each of its rows compared again with its prediction."""
    if (schema := read.pop("schema", None)) != SCHEMA:
        raise ValueError(f"its schema is {schema!r:.60}, but this version reads {SCHEMA}")
    for name in ("verdict", "as_expected"):  # judged again
        read.pop(name, None)
    stated = read.get("claims")
    if not isinstance(stated, list) or not stated or not all(isinstance(c, dict) for c in stated):
        raise ValueError(f"its claims must be a list of one or more objects, got {stated!r:.60}")
    names = {field.name for field in fields(Claim)}
    read["claims"] = [{name: c[name] for name in names & c.keys()} for c in stated]
    stored = checked(Record, read)
    claims = {claim.key: claim for claim in (*stored.claims, UNTESTED)}
    return replace(stored, rows=tuple(_compared(row, claims) for row in stored.rows))


def _compared(row: Row, claims: Mapping[str, Claim]) -> Row:
    """A row of a file, with ``agrees`` computed again from its claim."""
    if row.error < 0 or row.samples < 0:
        raise ValueError(
            f"error and samples of a row must be at least 0, got {row.error} and {row.samples}"
        )
    claim = claims.get(row.claim)
    if claim is None:
        raise ValueError(f"a row tests the claim {row.claim!r:.60}, which the record does not have")
    if claim.bound and claim.bound not in row.condition:
        raise ValueError(f"a row of {claim.key!r:.60} lacks the condition {claim.bound!r:.60}")
    return row.tested_by(claim)
