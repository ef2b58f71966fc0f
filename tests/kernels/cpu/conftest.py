"""The instruction sets of this machine, one after the other."""

import pytest

from afm_mlx.kernels.cpu import extension

native = extension.module()


@pytest.fixture(params=native.instruction_sets() if native else [])
def isa(request):
    before = native.instruction_set()
    assert native.use_instruction_set(request.param)
    yield request.param
    assert native.use_instruction_set(before)
