"""The instruction sets of this machine, one after the other, and the operations that run on them."""

from types import SimpleNamespace

import pytest

from afm_mlx.kernels import cpu
from afm_mlx.kernels.cpu import extension

native = extension.module()


@pytest.fixture(params=native.instruction_sets() if native else [])
def isa(request):
    before = native.instruction_set()
    assert native.use_instruction_set(request.param)
    yield request.param
    assert native.use_instruction_set(before)


@pytest.fixture
def ops():
    """The operations by their names, as `dispatch` calls them."""
    if native is None:
        pytest.skip(extension.unavailable())
    return SimpleNamespace(**{variant.op: variant.run for variant in cpu.VARIANTS})
