"""On a CPU, `mx.compile` runs a C++ compiler for every new expression: tests ask for it where it matters."""

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True)
def _uncompiled(request):
    if "compiled" in request.fixturenames:
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def compiled():
    """Leave `mx.compile` on."""
