"""Fixtures of hostile tests."""

import pytest

from tests.hostile.folders import write_folders


@pytest.fixture
def folders(tmp_path, rng):
    """Tiny model folders of every kind, by name."""
    return write_folders(tmp_path, rng)
