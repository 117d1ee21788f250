"""Calls and files of a walk are counted in its second run."""

from __future__ import annotations

from acutance import theory
from benchmarks.walks import attention_walks, count


def test_calls_of_the_package_are_counted() -> None:
    runs: list[object] = []
    walk = count("entropy", lambda: runs.append(theory.predict("softmax", 16, logit_std=1.0)))
    assert len(runs) == 2
    assert walk.calls >= 2
    assert 1 <= walk.files <= walk.calls
    assert count("nothing", lambda: len("abc")).calls == 0


def test_a_gradient_takes_more_calls() -> None:
    plain, gradient = attention_walks()
    assert 0 < plain.calls < gradient.calls
    assert 0 < plain.files < gradient.files
