"""What the cost model makes of counts."""

import pytest

from afm_mlx.measure import prediction
from afm_mlx.measure.prediction import CHIPS, Launch, chip_of

LANES = 128


def launch(operations=None, *, threadgroups=10_000, lane_bytes=0, memory_bytes=0):
    """Of threadgroups of two simdgroups."""
    return Launch("k", threadgroups, 2 * threadgroups, operations or {}, lane_bytes, memory_bytes)


def test_prices():
    """By hand, from the tables that prediction.py names."""

    def cycles(generation, **operations):
        return prediction.lane_cycles(launch(operations), generation)

    # M1: one operation a cycle, complex ones every four, which take two of the others' places.
    assert cycles(7, float=3, bit=2) == 5
    assert cycles(7, convert=1) == 4
    assert cycles(7, convert=1, float=3) == 5
    assert cycles(7, convert=2, float=1) == 8
    # M3: integers beside floats.
    assert cycles(9, float=3, bit=2) == 3
    assert cycles(9, float=1, bit=2, load=1) == 3
    assert (cycles(7, bfloat=1), cycles(9, bfloat=1)) == (4, 1)
    assert prediction.lane_cycles(launch(lane_bytes=8), 7) == 16  # 64 bytes a cycle for 128 lanes

    m1 = CHIPS["m1"]
    parts = prediction.seconds([launch({"float": 100})], m1)
    lanes = 2 * 10_000 * 32
    assert parts.arithmetic == pytest.approx(100 * lanes / (LANES * 8 * 1.278e9))
    assert parts.total == pytest.approx(parts.arithmetic + parts.launch)
    # A few threadgroups leave most cores without work, and each with too little to overlap.
    few = prediction.seconds([launch({"float": 100}, threadgroups=4)], m1)
    assert few.arithmetic == pytest.approx(6 * 100 * 2 * 32 / (LANES * 1.278e9))
    read = prediction.seconds([launch(memory_bytes=68 * 10**9)], m1)
    assert read.memory == pytest.approx(1 / prediction.BANDWIDTH_SHARE)
    # Where both limits are the same, neither is reached; where one is far, it doesn't matter.
    both = prediction.seconds([launch({"float": 10**6}, memory_bytes=1)], m1)
    even = both.arithmetic * prediction.BANDWIDTH_SHARE * 68e9
    equal = prediction.seconds([launch({"float": 10**6}, memory_bytes=int(even))], m1)
    assert equal.total == pytest.approx(both.arithmetic * 2 ** (1 / prediction.CORNER), rel=1e-4)
    # Side by side is one launch, one after the other is two.
    one = launch({"float": 100}, memory_bytes=10**6)
    launches = [
        prediction.chain([(2, [one])], 3, m1).launch,
        prediction.chain([(1, [one] * 2)], 0, m1).launch,
    ]
    assert launches == pytest.approx([5 * prediction.LAUNCH_SECONDS, prediction.LAUNCH_SECONDS])
    assert prediction.chain([], 0, m1).total == 0
    assert prediction.chain([], 0, m1, 61.2e9).total == pytest.approx(1)

    assert chip_of("Apple M4 Max") == CHIPS["m4-max"]
    assert chip_of("Apple M4 Max", 380e9) == CHIPS["m4-max-32"]
    assert chip_of("Apple M4 Max", 500e9) == CHIPS["m4-max"]
    assert chip_of("Apple M4 Max", 900e9) == CHIPS["m4-max"]
    assert chip_of("Apple M99") is None
