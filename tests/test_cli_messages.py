"""What a new user is told when something is missing: what it is, and what to do."""

from __future__ import annotations

import pytest

from acutance.calibration.law import named_law
from acutance.corpus import load_model


def test_a_failed_download_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    try:
        try:
            raise TimeoutError("name resolution took too long")
        except TimeoutError as first:
            raise OSError("We couldn't connect to the hub") from first
    except OSError as error:
        told = load_model._Source("some/model", "some/model").why(error)
    assert told.endswith("the model hub: TimeoutError: name resolution took too long")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = load_model._Source("some/model", "some/model").why(OSError("cannot connect"))
    assert "HF_HUB_OFFLINE is set" in told


def test_a_law_without_its_parameters_is_told_once() -> None:
    with pytest.raises(ValueError, match="law: log_n needs parameters") as caught:
        named_law("log_n")
    assert str(caught.value).count("parameters") == 1
