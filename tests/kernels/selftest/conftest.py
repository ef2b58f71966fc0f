"""Fixtures: a machine without a verdict, and a variant before the reference."""

import pytest

from afm_mlx.kernels import dispatch, reference, settings
from afm_mlx.kernels.dispatch import Variant
from afm_mlx.kernels.selftest import checks


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The folder of verdicts, which isn't there yet, nor the one that it is in."""
    folder = tmp_path / "caches" / "afm-mlx"
    monkeypatch.setenv(settings.CACHE, str(folder))
    monkeypatch.delenv(checks.SWITCH, raising=False)
    checks.ensure_checked.cache_clear()
    yield folder
    checks.ensure_checked.cache_clear()


@pytest.fixture
def offer(monkeypatch):
    """Put one variant before the reference of one operation; nothing else can run."""

    def put(op="", run=None, name="cpu/fake"):
        def listed(asked):
            first = [Variant(op, name, run, lambda case: None)] if asked == op else []
            own = Variant(asked, "reference", getattr(reference, asked), lambda case: None)
            return (*first, own)

        monkeypatch.setattr(dispatch, "variants", listed)
        dispatch.enable(name)
        checks.ensure_checked.cache_clear()

    put()
    return put
