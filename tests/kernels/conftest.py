"""A fixture that resets the choice of variants for each test."""

import pytest

from afm_mlx.kernels import dispatch


@pytest.fixture(autouse=True)
def nothing_disabled(monkeypatch):
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.delenv(dispatch.SWITCH, raising=False)
    dispatch.select.cache_clear()
    yield
    monkeypatch.undo()
    dispatch.select.cache_clear()
