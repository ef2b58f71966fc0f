"""The fixture that runs the project's Metal kernels: on a GPU, or in the emulator without one."""

from unittest import mock

import mlx.core as mx
import pytest

from afm_mlx.kernels import dispatch
from tests.metal import toolchain
from tests.metal.emulator import emulated


@pytest.fixture
def metal():
    """Operations of `kernels` run as Metal kernels within the test, and MLX's own in the types of a Mac."""
    with dispatch.force("metal"):
        if mx.metal.is_available():
            yield
            return
        reason = toolchain.why_unavailable()
        if reason:
            pytest.skip(reason)
        with emulated(), mock.patch.object(dispatch, "device", return_value="gpu"):
            yield
