"""The record of the branches that launches of Metal kernels take, and the list of those never taken."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels.metal import runtime as metal_runtime
from tests.metal import branches, emulator, machine, toolchain
from tests.metal.emulator import emulated

_reason = toolchain.why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

SOURCE = """// if (a) b ? c : d; in a comment
constexpr int FOUR = N > 2 ? 4 : 2;
const uint i = thread_position_in_grid.x;
const uint last = x_shape[0] - 1;
float sum = 0.0f;
for (uint k = i / 32; k < n[0]; k++) {
  sum += k % 2 == 0 ? x[metal::min(i + k, last)] : 0.0f;
}
UNROLL for (int k = 0; k < FOUR; k++) sum += float(k);
if (i > 1000 || (i >= 32 && sum != sum)) sum = -1.0f;
y[i] = N == 2 ? sum
              : max(sum, -1e30f);
#if N > 1 && N < 9
#endif
"""


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Launches a kernel file with the record on; gives the sums, and then what was never taken."""

    def forget():
        metal_runtime._read.cache_clear()
        metal_runtime.form.cache_clear()
        emulator.project_kernel.cache_clear()
        branches.sites.cache_clear()
        branches.start.cache_clear()

    (tmp_path / "probe.metal").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "common.metal").write_text(metal_runtime._read("common"), encoding="utf-8")
    monkeypatch.setattr(metal_runtime, "FOLDER", tmp_path)
    monkeypatch.setattr(branches, "FOLDER", tmp_path)
    monkeypatch.setenv(branches.SWITCH, str(tmp_path / "records"))
    forget()

    def launch(n, template):
        with emulated():
            (y,) = metal_runtime.launch(
                metal_runtime.Kernel("probe", ("x", "n"), ("y",)),
                [mx.ones(64), mx.array([n])],
                template=(("N", template),),
                grid=(64, 1, 1),
                threadgroup=(64, 1, 1),
                output_shapes=[(64,)],
                output_dtypes=[mx.float32],
            )
        found = branches.untaken(tmp_path / "records")
        return np.array(y), [line.removeprefix("probe.metal:") for line in found]

    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "0123456789abcdef-1.taken").write_bytes(b"\1")  # of other texts
    with pytest.raises(ValueError, match="no records of these texts"):
        branches.untaken(tmp_path / "records")
    yield launch
    forget()
    machine.record_to(None)


def test_what_was_never_taken_is_listed_until_it_is(probe):
    y, found = probe(1, 2)
    assert y.tolist() == [2.0] * 32 + [1.0] * 32  # 0 + 1, and one number for the first simdgroup
    never = [
        "6: loop `uint k = i / 32; k < n[0]; k++` was never run several times",
        "7: condition `k % 2 == 0` was never false",
        "7: min `i + k, last` was never its second argument",
        "10: condition `i > 1000` was never true",
        "10: condition `i > 1000 || (i >= 32 && sum != sum)` was never true",
        "10: condition `(i >= 32 && sum != sum)` was never true",
        "10: condition `sum != sum` was never true",
        "11: condition `N == 2` was never false",
        "12: max `sum, -1e30f` was never its first argument",
        "12: max `sum, -1e30f` was never its second argument",
    ]
    assert sorted(found) == sorted(never)
    _, found = probe(4, 3)
    assert sorted(found) == sorted(
        line
        for line in never
        if line.startswith("10:") or line.endswith("-1e30f` was never its second argument")
    )
