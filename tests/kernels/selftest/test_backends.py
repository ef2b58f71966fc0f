"""The self-test on the kernels that there are: on this machine's own, and on Metal's."""

import mlx.core as mx
import pytest

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.selftest import checks, specs
from tests.metal import toolchain
from tests.metal.emulator import emulated


@pytest.fixture(autouse=True)
def nothing_disabled(monkeypatch):
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.delenv(dispatch.SWITCH, raising=False)
    yield
    monkeypatch.undo()
    dispatch.select.cache_clear()


def test_every_variant_of_this_machine_passes(rng):
    results = checks.check(specs.full_specs(), rng)
    assert [f"{r.variant}: {r.summary}" for r in results if r.failure is not None] == []
    tested = {r.spec.op for r in results if r.obstacle is None and r.variant != "reference"}
    if dispatch.device() == "cpu" and extension.status().available:
        assert tested == set(dispatch.OPS)


def test_the_quick_test_passes_in_the_emulator(rng):
    if reason := toolchain.why_unavailable():
        pytest.skip(reason)
    with dispatch.force("metal"), emulated():
        # Not in bfloat16: MLX's own kernels run on the CPU here, where they add up in bfloat16.
        results = checks.check(specs.quick_specs(mx.float32), rng)
    assert [f"{r.variant}: {r.summary}" for r in results if r.failure is not None] == []
    tested = {(r.spec.op, r.variant.split("/")[0]) for r in results if r.obstacle is None}
    # On a GPU these two are MLX's own kernels: a prompt's attention, over converted codes, and a scatter.
    ours = set(dispatch.OPS) - {"causal_attention", "write_tokens"}
    assert {op for op, backend in tested if backend == "metal"} == ours
