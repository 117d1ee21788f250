"""Bad input to a score: one sentence that names the argument, the value and the rule."""

from __future__ import annotations

import pytest
import torch

from acutance import scores
from acutance.scores import Additive, Cosine, Dot, General, Location

Q, K = torch.ones(1, 4, 3, 4), torch.ones(1, 2, 5, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: scores.get("cosin"),
            ValueError,
            "is not one of scaled_dot, .*; did you mean 'cosin",
        ),
        (lambda: scores.get("§"), ValueError, "score='§' is not one of [a-z_, ]*$"),
        (lambda: scores.get(3), TypeError, "score must be a name, a score or a function, got int"),
        (lambda: scores.get(Dot), TypeError, "score must be an instance, got the class Dot"),
        (lambda: Cosine(0.0), ValueError, "temperature must be a finite number above 0, got 0.0"),
        (lambda: Cosine(-1.0), ValueError, "temperature must be a finite number above 0, got -1.0"),
        (lambda: Cosine(eps=0.0), ValueError, "eps must be a finite number above 0, got 0.0"),
        (
            lambda: General(torch.ones(4)),
            ValueError,
            r"weight must have shape \(Eq, Ek\), or one .* got \(4,\)",
        ),
        (lambda: General([1.0]), TypeError, "weight must be a Tensor, got list"),
        (
            lambda: General(torch.ones(4, 4).long()),
            TypeError,
            "weight must be a floating-point tensor, got",
        ),
        (
            lambda: General(torch.ones(3, 4)).transform(Q, K),
            ValueError,
            r"weight must have shape \(Eq, Ek\) = \(4, 4\) or \(Hq, Eq, Ek\) = \(4, 4, 4\), "
            r"got \(3, 4\)",
        ),
        (
            lambda: General(torch.ones(2, 4, 4)).transform(Q, K),
            ValueError,
            r"got \(2, 4, 4\) \(query \(1, 4, 3, 4\), key \(1, 2, 5, 4\)\)",
        ),
        (
            lambda: Additive(torch.ones(8, 4), torch.ones(7, 4), torch.ones(8)),
            ValueError,
            r"key_weight must have shape \(hidden, Ek\) = \(8, Ek\), .*, got \(7, 4\)",
        ),
        (
            lambda: Additive(torch.ones(8, 4), torch.ones(8, 4), torch.ones(9)),
            ValueError,
            r"vector must have shape \(hidden,\) = \(8,\), .*, got \(9,\)",
        ),
        (
            lambda: Additive(torch.ones(8, 4), torch.ones(8, 4), torch.ones(8), torch.ones(1)),
            ValueError,
            r"bias must have shape \(hidden,\) = \(8,\), .*, got \(1,\)",
        ),
        (
            lambda: Additive(torch.ones(8, 4), torch.ones(8, 5), torch.ones(8)).tile(Q, K),
            ValueError,
            "key_weight and its input must have the same width, got 5 and 4",
        ),
        (
            lambda: Additive(torch.ones(3, 8, 4), torch.ones(8, 4), torch.ones(8)).tile(Q, K),
            ValueError,
            "query_weight has 3 heads, but there are 4",
        ),
        (
            lambda: Additive(torch.ones(8, 4), torch.ones(4, 8, 4), torch.ones(8)).tile(Q, K),
            ValueError,
            "key_weight has 4 heads, but there are 2",
        ),
        (
            lambda: Location(torch.ones(4, 4)).tile(Q, K),
            ValueError,
            "a row for each of at most S_max=4 keys, got keys 0 to 5",
        ),
        (
            lambda: Location(torch.ones(9, 4)).tile(Q, K, 5),
            ValueError,
            "at most S_max=9 keys, got keys 5 to 10",
        ),
        (lambda: Location(torch.ones(9, 3)).tile(Q, K), ValueError, "the query's width E=4, got 3"),
        (
            lambda: Location(torch.ones(4, 9, 4)).transform(Q, K),
            ValueError,
            "weight has 4 key heads, but there are 2",
        ),
        (lambda: scores.dot(Q[0], K), ValueError, "query must have four dimensions .* got 3"),
        (lambda: scores.dot(Q, K[..., :3]), ValueError, "same width E: query has E=4, key ha"),
        (lambda: scores.dot(Q[:, :3], K), ValueError, "must be a multiple of the number of key"),
        (lambda: scores.dot(Q, torch.ones(2, 2, 5, 4)), ValueError, "same batch size B"),
        (
            lambda: scores.dot(Q.long(), K),
            TypeError,
            "query must be a floating-point tensor, got torch.int64",
        ),
        (lambda: scores.dot(None, K), TypeError, "query must be a Tensor, got NoneType"),
    ],
)
def test_bad_input_is_named(call, error: type[Exception], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=message):
        call()
