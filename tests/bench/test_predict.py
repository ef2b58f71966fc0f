"""The cost model's seconds, and `python -m bench.predict`."""

import csv
import io
import json

import pytest

from bench import apple_gpus, predict
from bench.apple_gpus import CHIPS, LAUNCH_SECONDS, Launch, product
from bench.predict import CONTEXTS, PROMPT, PROMPT_WAYS
from tests.tools.cases import each

LANES = 128


def launch(operations=None, *, threadgroups=10_000, lane_bytes=0, memory_bytes=0):
    """Of threadgroups of two simdgroups."""
    return Launch("k", threadgroups, 2 * threadgroups, operations or {}, lane_bytes, memory_bytes)


def test_prices():
    """By hand, from the tables that apple_gpus.py names."""

    def cycles(generation, **operations):
        return apple_gpus.lane_cycles(launch(operations), generation)

    # M1: one operation a cycle, complex ones every four, which take two of the others' places.
    assert cycles(7, float=3, bit=2) == 5
    assert cycles(7, convert=1) == 4
    assert cycles(7, convert=1, float=3) == 5
    assert cycles(7, convert=2, float=1) == 8
    # M3: integers and floats overlap.
    assert cycles(9, float=3, bit=2) == 3
    assert cycles(9, float=1, bit=2, load=1) == 3
    assert (cycles(7, bfloat=1), cycles(9, bfloat=1)) == (4, 1)
    assert (cycles(7, bfloat_float=1), cycles(9, bfloat_float=1)) == (12, 1)  # three shifts
    assert (
        cycles(7, bfloat_float=1, float=10) == 1 + 10 + 3 * 2 + 3
    )  # and what they take from others
    assert apple_gpus.lane_cycles(launch(lane_bytes=8), 7) == 16  # 64 bytes a cycle for 128 lanes

    m1 = CHIPS["m1"]
    parts = apple_gpus.seconds([launch({"float": 100})], m1)
    lanes = 2 * 10_000 * 32
    assert parts.arithmetic == pytest.approx(100 * lanes / (LANES * 8 * 1.278e9))
    assert parts.total == pytest.approx(parts.arithmetic + parts.launch)
    # A few threadgroups leave most cores without work, and each with too little to overlap.
    few = apple_gpus.seconds([launch({"float": 100}, threadgroups=4)], m1)
    assert few.arithmetic == pytest.approx(6 * 100 * 2 * 32 / (LANES * 1.278e9))
    read = apple_gpus.seconds([launch(memory_bytes=68 * 10**9)], m1)
    assert read.memory == pytest.approx(1 / apple_gpus.BANDWIDTH_SHARE)
    # Where both limits are the same, neither is reached; where one is far, it doesn't matter.
    both = apple_gpus.seconds([launch({"float": 10**6}, memory_bytes=1)], m1)
    even = both.arithmetic * apple_gpus.BANDWIDTH_SHARE * 68e9
    equal = apple_gpus.seconds([launch({"float": 10**6}, memory_bytes=int(even))], m1)
    assert equal.total == pytest.approx(both.arithmetic * 2 ** (1 / apple_gpus.CORNER), rel=1e-4)
    # Launches cost as much side by side as one after the other; their work overlaps.
    ultra, m5 = CHIPS["m1-ultra"], CHIPS["m5"]
    assert [chip.launch_class for chip in (m1, ultra, m5)] == ["up to M4", "two dies", "from M5"]
    one = launch({"float": 100}, memory_bytes=10**6)
    for chip in (m1, ultra, m5):
        launches = [
            apple_gpus.chain([(2, [one])], 3, chip).launch,
            apple_gpus.chain([(1, [one] * 2)], 0, chip).launch,
        ]
        cost = LAUNCH_SECONDS[chip.launch_class]
        assert launches == pytest.approx([5 * cost, 2 * cost])
    assert apple_gpus.chain([], 0, m1).total == 0
    assert apple_gpus.chain([], 0, m1, 61.2e9).total == pytest.approx(1)


def test_products_of_many_rows():
    """By hand: operations over a share of the peak, bytes over a share of the bandwidth, whole tiles."""
    m3, m5 = CHIPS["m3-max"], CHIPS["m5-max"]

    def peak(chip):
        return 2 * LANES * chip.cores * chip.gigahertz * 1e9

    n, k, rows = 4096, 8192, 512
    for way, share in ("MLX qmm", 0.79), ("own tiled", 0.71), ("matmul", 0.85):
        seconds = product(way, rows, n, k, 4, m3)
        assert seconds.arithmetic == pytest.approx(2 * rows * n * k / (share * peak(m3)))
        assert seconds.launch == LAUNCH_SECONDS["up to M4"]
    bandwidth = apple_gpus.BANDWIDTH_SHARE * m3.bandwidth * 1e9
    packed = n * k / 2 + n * k / 64 * 4 + 2 * rows * (n + k)
    assert product("MLX qmm", rows, n, k, 4, m3, group=64).memory == pytest.approx(
        packed / bandwidth
    )
    # A tile of 32 rows costs the same whether it is full or not; dense products have tiles of 64.
    costs = [product("MLX qmm", rows, n, k, 2, m3).arithmetic for rows in (33, 64, 65)]
    assert costs[0] == costs[1] < costs[2]
    assert (
        product("matmul", 65, n, k, 16, m3).arithmetic
        == product("matmul", 128, n, k, 16, m3).arithmetic
    )
    # Few tiles leave cores idle.
    few = product("MLX qmm", 32, 32, k, 2, m3).arithmetic
    assert few == product("MLX qmm", 32, 32 * m3.cores, k, 2, m3).arithmetic

    # Unpacking writes the matrix and the product reads it: 2^25 numbers at a time, of which results are joined.
    whole, blocks = (product("dequantize + matmul", rows, n * i, k, 2, m3) for i in (1, 2))
    dense, activations = 2 * n * k, 2 * rows * (n + k)
    assert whole.memory == pytest.approx((n * k / 4 + 4 * n + 2 * dense + activations) / bandwidth)
    assert (whole.launch, blocks.launch) == pytest.approx((2 * m3.launch, 5 * m3.launch))
    joined = 4 * rows * 2 * n + 2 * rows * k
    both = 2 * (n * k / 4 + 4 * n + 2 * dense) + 4 * rows * n + joined
    assert blocks.memory == pytest.approx(both / bandwidth)

    # The accelerators are reached by MLX's products, and four times as fast.
    for way, share in ("MLX qmm", 0.70), ("MLX qmm_nax", 0.70), ("matmul", 0.79):
        fast = product(way, rows, n, k, 4, m5).arithmetic
        assert fast == pytest.approx(2 * rows * n * k / (share * 4 * peak(m5)))
    lanes = product("own tiled", rows, n, k, 4, m5).arithmetic
    assert lanes == pytest.approx(2 * rows * n * k / (0.71 * peak(m5)))
    assert product("MLX qmm", rows, n, k, 4, m5, share=0.35).arithmetic == pytest.approx(
        2 * product("MLX qmm", rows, n, k, 4, m5).arithmetic
    )
    with pytest.raises(ValueError, match="has no neural accelerators"):
        product("MLX qmm_nax", rows, n, k, 4, m3)
    # Bfloat16 costs more where GPUs don't know it.
    for chip, slower in ("m2", True), ("m3", False), ("m5", False):
        types = [
            product("MLX qmm", rows, n, k, 4, CHIPS[chip], half=half).total
            for half in (True, False)
        ]
        assert (types[0] < types[1]) == slower

    # Attention grows with the square of the prompt.
    short, long = (apple_gpus.between(0, 0, 2048, tokens, m3).total for tokens in (512, 1024))
    assert long == pytest.approx(4 * short)


def test_every_preset_on_every_chip(capsys):
    def printed(*argv):
        predict.main(argv)
        return capsys.readouterr().out

    for preset in predict.TEXT_PRESETS:
        found = json.loads(printed("all", "--preset", preset, "-o", "json"))
        assert (found["predicted"], found["preset"]) == (True, preset)
        rows, prompts = found["results"], found["prompts"]
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
            low, high = (row[f"decode_tokens_per_second_{end}"] for end in ("low", "high"))
            assert low < row["decode_tokens_per_second"] < high
            # Two dies are predicted worse.
            assert (high / low > 1.15) == ("ultra" in row["chip"])
        ways = PROMPT_WAYS if preset == "afm-3b" else ("dequantize + matmul", "own tiled")
        assert len(prompts) == len(CHIPS) * len(ways)
        for row in prompts:
            assert row["way"].removesuffix(", on the accelerators") in ways
            assert row["prefill_tokens_per_second"] == pytest.approx(PROMPT / row["seconds"])
            low, high = (row[f"prefill_tokens_per_second_{end}"] for end in ("low", "high"))
            assert low < row["prefill_tokens_per_second"] < high

    m4_max = CHIPS["m4-max"]
    short, long = (predict.predict("afm-3b", context, m4_max) for context in CONTEXTS)
    assert long.nbytes - short.nbytes == 56 * 512 * (4096 - 512)
    assert long.seconds.total > short.seconds.total
    assert predict.predict("afm-2024", 512, CHIPS["m1"]).over_mlx == {}  # no palettes in MLX
    for chip in CHIPS.values():
        over = predict.predict("afm-3b", 512, chip).over_mlx
        assert over["bfloat16, 64"] > over["bfloat16, 128"] > 1
        assert (over["bfloat16, 64"] > over["half, 64"]) == (chip.generation <= 8)

    text = printed("m4-max")
    assert text.startswith("predicted: one row of afm-3b")
    assert text.count("m4-max") == len(CONTEXTS) + len(PROMPT_WAYS)
    assert "A prediction, not a measurement" in text
    rows = list(csv.DictReader(io.StringIO(printed("m1", "-o", "csv"))))
    assert len(rows) == len(CONTEXTS) + len(PROMPT_WAYS)
    assert (rows[0]["predicted"], rows[0]["chip"], rows[0]["context"]) == ("True", "m1", "512")
    assert (rows[-1]["way"], rows[-1]["prompt_tokens"]) == ("own tiled", "512")


# Shares of the peak that products behind a norm reach, and others; up to M2 those are in float16.
@each(
    "name, way, normed, others, dense",
    [
        ("m3-max", "dequantize + matmul", 0.85, 0.85, 0.85),
        ("m3-max", "MLX qmm", 0.79, 0.79, 0.85),
        ("m3-max", "own tiled", 0.71, 0.71, 0.85),
        ("m2-max", "dequantize + matmul", 0.74, 0.64, 0.64),
        ("m2-max", "MLX qmm", 0.74, 0.50, 0.64),
        ("m2-max", "own tiled", 0.66, 0.66, 0.64),
    ],
)
def test_a_prompt_runs_the_writing_blocks_and_then_one_step(name, way, normed, others, dense):
    chip = CHIPS[name]
    step = predict.predict("afm-3b", PROMPT, chip).seconds
    seconds = predict.prompt_seconds("afm-3b", chip, way)
    blocks = seconds.arithmetic - step.arithmetic
    weights = 35 * 2048 * (2048 + 2 * 256 + 2 * 6656) / normed
    weights += 35 * 2048 * (2048 + 6656) / others
    flops = 2 * weights * PROMPT + 35 * 2 * 2048 * (PROMPT - 1) ** 2 / dense
    assert blocks == pytest.approx(
        flops / (2 * LANES * chip.cores * chip.gigahertz * 1e9), rel=1e-3
    )
    assert seconds.total > step.total + blocks
