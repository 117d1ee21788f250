"""Parameters of a prediction that are left out, and those that no mechanism has."""

from __future__ import annotations

import pytest

from acutance.theory import predict


def test_an_unknown_parameter_is_refused_even_as_none() -> None:
    with pytest.raises(ValueError, match=r'^logit_sd: "softmax" takes logit_std, .*got logit_sd'):
        predict("softmax", 64, logit_std=1.0, logit_sd=None)


def test_another_mechanism_s_parameter_may_be_left_out_as_none() -> None:
    assert predict("softmax", 64, logit_std=1.0, lam=None).parameters.keys() == {
        "n",
        "family",
        "logit_std",
        "value_variance",
    }
    with pytest.raises(ValueError, match=r'^lam: "softmax" takes'):
        predict("softmax", 64, logit_std=1.0, lam=0.5)
