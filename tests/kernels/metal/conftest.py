"""The fixture that runs the project's Metal kernels: on the GPU where there is one, else in the emulator."""

import mlx.core as mx
import pytest

from afm_mlx.kernels import dispatch
from tests.metal import toolchain
from tests.metal.emulator import emulated


@pytest.fixture
def metal():
    """Operations of `kernels` run as Metal kernels within the test."""
    with dispatch.force("metal"):
        if mx.metal.is_available():
            yield
            return
        reason = toolchain.why_unavailable()
        if reason:
            pytest.skip(reason)
        with emulated():
            yield
