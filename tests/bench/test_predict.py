"""The cost model's seconds, and `python -m bench.predict`."""

import csv
import io
import json

import pytest

from afm_mlx.config import PRESETS
from bench import predict as prediction
from bench.predict import CHIPS, CONTEXTS, Launch, predict

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
    # M3: integers and floats overlap.
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


def test_every_preset_on_every_chip(capsys):
    def printed(*argv):
        prediction.main(argv)
        return capsys.readouterr().out

    for preset in PRESETS:
        found = json.loads(printed("all", "--preset", preset, "-o", "json"))
        assert (found["predicted"], found["preset"]) == (True, preset)
        rows = found["results"]
        assert [(r["chip"], r["context"]) for r in rows] == [
            (c, n) for c in CHIPS for n in CONTEXTS
        ]
        for row in rows:
            seconds = 1 / row["decode_tokens_per_second"]
            parts = [row[f"{part}_seconds"] for part in ("arithmetic", "memory", "launch")]
            assert max(parts) < seconds < sum(parts) * 1.01
            limit = row["bytes_per_token"] / row["bandwidth_bytes_per_second"]
            assert row["share_of_bandwidth"] == pytest.approx(limit / seconds)
            assert 0 < row["share_of_bandwidth"] < 1
    short, long = (predict("afm-3b", context, CHIPS["m4-max"]) for context in CONTEXTS)
    assert long.nbytes - short.nbytes == 56 * 512 * (4096 - 512)
    assert long.seconds.total > short.seconds.total
    assert short.over_mlx is not None
    assert predict("afm-2024", 512, CHIPS["m1"]).over_mlx is None  # no palettes in MLX

    text = printed("m4-max")
    assert text.startswith("predicted: one row of afm-3b")
    assert text.count("m4-max") == len(CONTEXTS)
    assert "A prediction, not a measurement" in text
    (row, _) = csv.DictReader(io.StringIO(printed("m1", "-o", "csv")))
    assert (row["predicted"], row["chip"], row["context"]) == ("True", "m1", "512")
