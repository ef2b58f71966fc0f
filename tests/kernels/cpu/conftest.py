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
def isas():
    """A function that goes through the instruction sets: one test for all of them."""
    if native is None:
        pytest.skip(extension.unavailable())
    before = native.instruction_set()

    def each():
        for name in native.instruction_sets():
            assert native.use_instruction_set(name)
            yield name

    yield each
    assert native.use_instruction_set(before)


@pytest.fixture
def set_threads(ops):
    before = native.threads()
    yield native.set_threads
    native.set_threads(before)


@pytest.fixture
def ops():
    """The operations by their names, as `dispatch` calls them."""
    if native is None:
        pytest.skip(extension.unavailable())
    return SimpleNamespace(**{variant.op: variant.run for variant in cpu.VARIANTS})
