"""Processor time of others, from readings by hand."""

import numpy as np
import pytest

from bench.bystanders import Bystanders


def test_bystanders_are_what_is_busy_and_not_ours(monkeypatch, rng):
    start = rng.uniform(0, 100, 3)
    clock, others, mine = rng.uniform(1, 5, 3)
    readings = iter([tuple(start), tuple(start + np.array([clock, others + mine, mine]))])
    monkeypatch.setattr(Bystanders, "_now", staticmethod(lambda: next(readings)))
    assert Bystanders().processors() == pytest.approx(others / clock)
