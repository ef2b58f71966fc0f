"""Speed next to busy processes: the benchmark's arithmetic by hand, and, slowly, what it promises."""

import pytest

from afm_mlx.kernels.cpu import extension
from afm_mlx.measure.machine import threads_in_use
from bench import busy
from bench.bystanders import Bystanders

needs_native = pytest.mark.skipif(
    not extension.status().available, reason=extension.status().reason
)


def test_ratios_are_to_the_same_threads_on_a_quiet_machine():
    speeds = {
        ("packed", 2, 0): [100.0, 90.0, 1.0],
        ("packed", 2, 2): [30.0, 45.0, 50.0],
        ("packed", 1, 0): [50.0],
        ("packed", 1, 2): [60.0],
    }
    assert busy.table(speeds)[1:] == [
        ["packed", "2", "90.0", "45.0 (0.50)"],
        ["packed", "1", "50.0", "60.0 (1.20)"],
    ]
    share, over_one = busy.targets(speeds, 2)
    assert (share.value, share.met) == (0.5, True)
    assert (over_one.value, over_one.met) == (0.75, False)


def test_neighbours_end_with_the_measurement():
    with pytest.raises(ZeroDivisionError), busy.neighbours(2) as started:
        assert [process.poll() for process in started] == [None, None]
        1 / 0  # noqa: B018
    assert None not in [process.poll() for process in started]


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize("workload", ["packed, 1 row", "packed, 64 rows", "dense, 512 x 512 x 512"])
def test_a_third_of_the_speed_is_left_beside_a_neighbour_per_core(tmp_path, workload):
    """Half of it is what neighbours leave when the system divides its cores fairly."""
    cores, bystanders = threads_in_use(), Bystanders()
    peer = busy.start_worker(cores)
    try:
        speeds = busy.measure({cores: peer}, [workload], [0, cores], 7, 1.0)
    finally:
        peer.close()
    share = busy.targets(speeds, cores)[0]
    others = bystanders.processors()
    if not share.met and others is not None and others > 0.3:
        pytest.skip(f"{share.value:.2f}, but others kept {others:.1f} processors busy meanwhile")
    assert share.met, f"{share.value:.2f} of the quiet speed: {speeds}"
