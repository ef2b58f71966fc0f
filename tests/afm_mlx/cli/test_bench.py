"""`afm-mlx bench`."""

import csv
import dataclasses
import io
import json

import pytest

from afm_mlx import blas
from afm_mlx.cli import bench
from afm_mlx.config import PRESETS
from afm_mlx.measure import bandwidth, benchmark, process
from afm_mlx.measure.bandwidth import Bandwidth
from afm_mlx.measure.benchmark import run_case
from afm_mlx.model.model import Model


@pytest.fixture
def quick(monkeypatch):
    """A bandwidth without the gigabyte."""
    measured = Bandwidth(2e9, "by hand")
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda threads: measured)


SMALL = ("-p", "6,9", "-g", "4", "-b", "1,2", "-n", "2", "-d", "3")


def test_bench_prints_every_case(run, quick):
    status, out, err = run("bench", *SMALL, "-o", "json")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    rows = facts["results"]
    assert [(r["prompt_tokens"], r["batch"], r["depth"]) for r in rows] == [
        (6, 1, 3), (6, 2, 3), (9, 1, 3), (9, 2, 3),
    ]  # fmt: skip
    for row in rows:
        rate = row["decode_tokens_per_second"] * row["bytes_per_token"]
        assert row["share_of_bandwidth"] == pytest.approx(rate / 2e9)
    assert facts["bandwidth_measured_with"] == "by hand"
    status, out, _ = run("bench", *SMALL, "-o", "csv")
    read = list(csv.DictReader(io.StringIO(out)))
    assert [row["batch"] for row in read] == ["1", "2", "1", "2"]
    assert set(rows[0]) < set(read[0])
    status, out, _ = run("bench", *SMALL)
    table = out.split("\n\n")[0].splitlines()
    assert len(table) == 2 + 4
    assert {line.count("|") for line in table} == {15}
    assert "2.0 GB/s (by hand)" in out


def test_bench_counts_random_adapters(run, quick):
    argv = ("bench", "-p", "4", "-g", "3", "-n", "1", "--adapter-rank", "0,4,8")
    status, out, err = run(*argv, "-o", "json")
    assert (status, err) == (0, "")
    none, four, eight = json.loads(out)["results"]
    assert [row["adapter_rank"] for row in (none, four, eight)] == [0, 4, 8]
    assert none["adapter_bytes"] == 0
    # A and B of every pair, 16 bits a number: inputs and outputs of each projection.
    config = PRESETS["afm-nano"]
    d, kv = config.hidden_dim, config.num_kv_heads * config.head_dim
    pairs = config.num_layers * (4 * d + 3 * (d + config.ffn_dim))
    pairs += config.num_kv_layers * 2 * (d + kv)
    assert four["adapter_bytes"] == 2 * 4 * pairs
    assert eight["adapter_bytes"] == 2 * four["adapter_bytes"]
    assert four["bytes_per_token"] - none["bytes_per_token"] == four["adapter_bytes"]
    status, out, _ = run(*argv)
    cells = [line.split("|") for line in out.split("\n\n")[0].splitlines()]
    column = [cell.strip() for cell in cells[0]].index("rank")
    assert [line[column].strip() for line in cells[2:]] == ["0", "4", "8"]


def test_bench_of_a_preset(run, quick, monkeypatch):
    seen = []
    monkeypatch.setitem(PRESETS, "afm-3b", PRESETS["afm-nano"])

    def watch(model, *args, **options):
        seen.append(model)
        return run_case(model, *args, **options)

    monkeypatch.setattr(benchmark, "run_case", watch)
    argv = ("bench", "--preset", "afm-3b", "--random-weights", "-p", "4", "-g", "3", "-n", "1")
    status, out, _ = run(*argv, "--activation-bits", "8", "--kv", "float")
    assert status == 0
    assert "afm-3b (random)" in out
    assert "activations of 8 bits, float keys" in out
    (model,) = seen
    assert isinstance(model, Model)
    packed = [m for m in model.modules() if hasattr(m, "activation_bits")]
    config = PRESETS["afm-nano"]
    assert len(packed) == 1 + 5 * config.num_layers
    assert {m.activation_bits for m in packed} == {8}
    assert {m.bits for m in packed} == {2, 4}


def test_the_first_generation_has_its_own_formats(run, quick, monkeypatch):
    monkeypatch.setitem(PRESETS, "afm-2024", dataclasses.replace(PRESETS["afm-nano"], kv_bits=None))
    seen = []
    monkeypatch.setattr(
        benchmark, "run_case", lambda model, *a, **o: seen.append(model) or run_case(model, *a, **o)
    )
    argv = ("bench", "--preset", "afm-2024", "--random-weights", "-p", "4", "-g", "3", "-n", "1")
    assert run(*argv)[0] == 0
    packed = [m for m in seen[0].modules() if hasattr(m, "activation_bits")]
    assert {(m.mode, m.bits) for m in packed} == {("palette", 4), ("balanced", 8)}


def test_bench_refuses(fails):
    for argv, says in [
        (["--preset", "afm-3b"], "Add --random-weights"),
        (["--random-weights"], "--random-weights needs --preset"),
        (["--model", "x", "--preset", "afm-3b"], "can't both be given"),
        (["-p", "0"], "0 is out of range; allowed is 1 to 1048576"),
        (["-g", "2"], "2 is out of range; allowed is 3 to 1048576"),
        (["-b", "1,two"], "'two' is not an integer"),
        (["--adapter-rank", "0,-8"], "-8 is out of range; allowed is 0 to 65536"),
        (["-o", "yaml"], "choose from"),
    ]:
        assert says in fails("bench", *argv)


def test_bench_refuses_int8_activations_of_floats(folder, fails, quick):
    assert "this model has none" in fails("bench", "--model", folder, "--activation-bits", "8")


def test_threads_are_set_before_anything_computes(monkeypatch):
    limited = []
    monkeypatch.setattr(blas, "set_threads", limited.append)
    monkeypatch.setenv(bench.THREADS_VARIABLE, "9")
    assert process.threads_in_use() == 9
    bench._limit_threads(None)
    assert (limited, process.threads_in_use()) == ([], 9)
    bench._limit_threads(3)
    assert (limited, process.threads_in_use()) == ([3], 3)
