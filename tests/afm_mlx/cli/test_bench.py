"""`afm-mlx bench`."""

import csv
import dataclasses
import io
import json

import pytest

from afm_mlx import blas
from afm_mlx.cli import bench
from afm_mlx.config import PRESETS
from afm_mlx.errors import AFMError
from afm_mlx.measure import benchmark, machine
from afm_mlx.measure.benchmark import run_case
from tests.tools.vision import TINY, with_images


@pytest.fixture
def models(monkeypatch):
    """The models that were measured; presets have the sizes of the embedded one."""
    seen = []
    for name, bits in (("afm-3b", 8), ("afm-2024", None)):
        nano = dataclasses.replace(PRESETS["afm-nano"], kv_bits=bits)
        monkeypatch.setitem(PRESETS, name, nano)
    monkeypatch.setattr(
        benchmark, "run_case", lambda model, *a, **o: seen.append(model) or run_case(model, *a, **o)
    )
    return seen


def table(text):
    rows = csv.reader(text.partition("\n\n")[0].splitlines(), delimiter="|")
    names, _, *others = [[cell.strip() for cell in row] for row in rows]
    return [dict(zip(names, row, strict=True)) for row in others]


@pytest.mark.usefixtures("quick")
def test_every_case_is_measured_in_each_form(done):
    argv = "bench -p 6,9 -g 4 -b 1,2 -n 2 -d 3".split()
    facts = json.loads(done(*argv, "-o", "json"))
    rows = facts["results"]
    cases = [(6, 1, 3), (6, 2, 3), (9, 1, 3), (9, 2, 3)]
    assert [(r["prompt_tokens"], r["batch"], r["depth"]) for r in rows] == cases
    for row in rows:
        rate = row["decode_tokens_per_second"] * row["bytes_per_token"]
        assert row["share_of_bandwidth"] == pytest.approx(rate / 2e9)
    assert facts["bandwidth_measured_with"] == "by hand"
    read = list(csv.DictReader(io.StringIO(done(*argv, "-o", "csv"))))
    assert [row["batch"] for row in read] == ["1", "2", "1", "2"]
    common = facts.keys() - {"runtime", "results"}
    assert read[0].keys() == common | {"device"} | rows[0].keys()
    text = done(*argv)
    assert [(row["prompt"], row["rows"]) for row in table(text)] == [
        (str(prompt), str(rows)) for prompt, rows, _ in cases
    ]
    assert "2.0 GB/s (by hand)" in text
    assert "mean ± deviation of 2 runs" in text


@pytest.mark.usefixtures("quick")
def test_images_are_encoded_in_every_mode_asked_for(done, fails, monkeypatch):
    monkeypatch.setitem(PRESETS, "afm-3b-vision", with_images(PRESETS["afm-nano"]))
    argv = "bench --preset afm-3b-vision --random-weights -n 2 --image high,rapid".split()
    facts = json.loads(done(*argv, "-o", "json"))
    found = [(row["mode"], row["tiles"], row["tokens"]) for row in facts["results"]]
    assert found == [("high", 5, 80), ("rapid", 1, 4)]
    for row in facts["results"]:
        flops = row["encoder_flops_per_second"] * row["seconds"]
        assert flops == pytest.approx(TINY.encoder_flops(row["mode"]))
        assert row["peak_memory_bytes"] > 0
    assert [row["mode"] for row in table(done(*argv))] == ["high", "rapid"]
    read = list(csv.DictReader(io.StringIO(done(*argv, "-o", "csv"))))
    assert [row["tokens"] for row in read] == ["80", "4"]
    assert "reads text only" in fails("bench", "--image", "high")
    assert "is no list of high" in fails("bench", "--image", "high,low")
    assert "leave out the draft tokens" in fails("bench", "--image", "high", "--prompt-lookup")


@pytest.mark.usefixtures("quick")
def test_random_adapters_are_counted(done):
    argv = "bench -p 4 -g 3 -n 1 -b 2 --adapter-rank 0,4,8".split()
    none, four, eight = json.loads(done(*argv, "-o", "json"))["results"]
    assert none["adapter_bytes"] == 0
    assert eight["adapter_bytes"] == 2 * four["adapter_bytes"] > 0
    rows = table(done(*argv[:-1], "4", "--adapters", "1,2"))
    assert [row["rank"] for row in rows] == ["4", "4 x 2"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("preset", "flags", "formats"),
    [
        ("afm-3b", "--activation-bits 8 --kv float", {("balanced", 2, 8), ("balanced", 4, 8)}),
        ("afm-2024", "", {("palette", 4, 16), ("balanced", 8, 16)}),  # the first generation
    ],
)
def test_a_preset_has_random_codes(done, models, preset, flags, formats):
    argv = f"bench --preset {preset} --random-weights -p 4 -g 3 -n 1 {flags}"
    text = done(*argv.split())
    assert f"{preset} (random)" in text
    assert "bits, float keys and values" in text
    packed = [m for m in models[0].modules() if hasattr(m, "activation_bits")]
    assert len(packed) == 1 + 5 * PRESETS["afm-nano"].num_layers
    assert {(m.mode, m.bits, m.activation_bits) for m in packed} == formats


@pytest.mark.usefixtures("quick")
def test_bench_refuses(folder, fails):
    for argv, says in {
        "--preset afm-3b": "Add --random-weights",
        "--random-weights": "--random-weights needs --preset",
        "--model x --preset afm-3b": "can't both be given",
        "-p 0": "0 is out of range; allowed is 1 to 1048576",
        "-g 2": "2 is out of range; allowed is 3 to 1048576",
        "-b 1,two": "'two' is not an integer",
        "--adapter-rank 0,-8": "-8 is out of range; allowed is 0 to 65536",
        f"-p {'1,' * 10_000}1": "the lists make 10,001 cases; allowed are 10,000",
        "-o yaml": "choose from",
        f"--model {folder} --activation-bits 8": "this model has none",
    }.items():
        assert says in fails("bench", *argv.split())


def test_threads_are_set_before_anything_computes(fails, monkeypatch):
    limited = []

    def measure(threads):
        raise AFMError(f"{threads} threads, {limited}")

    monkeypatch.setattr(blas, "set_threads", limited.append)
    monkeypatch.setattr(machine, "measure_bandwidth", measure)
    monkeypatch.setenv(bench.THREADS_VARIABLE, "9")
    assert "9 threads, []" in fails("bench")
    assert "3 threads, [3]" in fails("bench", "--threads", 3)
