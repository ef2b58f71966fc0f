"""Fixtures of hostile tests."""

import pytest

from tests.hostile.folders import write_folders


@pytest.fixture
def folders(tmp_path, rng):
    return write_folders(tmp_path, rng)
