"""What `doctor` says about compiling and command buffers on a Mac; a stand-in measures here."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from afm_mlx.cli import main
from afm_mlx.config import PRESETS
from afm_mlx.kernels.selftest import specs
from afm_mlx.measure import benchmark, command_buffers, kernel_report
from afm_mlx.measure.command_buffers import SETTINGS, examine, in_child, measure

COMPILING = {"libraries": 12, "seconds": 2.5}


def measured(rates):
    """A stand-in for a measurement: `rates` has the tokens per second of each setting."""

    def run(setting):
        return {"tokens_per_second": rates[setting]} | ({} if setting else {"compiling": COMPILING})

    return run


@pytest.mark.parametrize(
    ("rates", "recommended"),
    [
        ((50, 50.5, 51.4, 49), None),  # within what chance may do
        ((50, 52, 51.6, 49), ("100", "100")),
        ((50, 52, 51.6, 60), ("500", "2000")),
        ((60, 52, 51.6, 49), None),
    ],
)
def test_the_fastest_setting_is_recommended_if_it_is_clearly_faster(rates, recommended):
    found = examine(measured(dict(zip((None, *SETTINGS), rates, strict=True))))
    assert found["compiling"] == COMPILING
    assert [each["tokens_per_second"] for each in found["command_buffers"]] == list(rates)
    assert [each["operations"] for each in found["command_buffers"]] == [None, 100, 200, 500]
    names = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
    assert found["recommended"] == (recommended and dict(zip(names, recommended, strict=True)))


def test_a_child_has_the_variables_and_what_ends_it_is_said(monkeypatch, tmp_path):
    child = tmp_path / "child"
    child.write_text(
        '#!/bin/sh\n[ "$MLX_MAX_MB_PER_BUFFER" = 2000 ] && { echo No Metal device >&2; exit 3; }\n'
        'echo "{\\"tokens_per_second\\": ${MLX_MAX_OPS_PER_BUFFER:-40}, \\"argument\\": \\"$3\\"}"\n'
    )
    child.chmod(0o755)
    monkeypatch.setattr(command_buffers.sys, "executable", str(child))
    monkeypatch.delenv("MLX_MAX_OPS_PER_BUFFER", raising=False)
    assert in_child(None) == {"tokens_per_second": 40, "argument": "compile"}
    assert in_child((100, 100)) == {"tokens_per_second": 100, "argument": ""}
    with pytest.raises(OSError, match="ended with 3: No Metal device"):
        in_child((500, 2000))


def test_a_measurement_times_decode_steps_of_a_model_with_a_blocks_real_sizes(monkeypatch):
    models = []

    def run_case(model, case, repetitions):
        models.append(model)
        return benchmark.BenchmarkResult(
            case, *[benchmark.Spread(40.0, 50.0, 1.0)] * 3, None, 0, None
        )

    monkeypatch.setattr(benchmark, "run_case", run_case)
    monkeypatch.setitem(PRESETS, "afm-3b", PRESETS["afm-nano"])
    monkeypatch.setattr(command_buffers, "_BLOCKS", 2)
    monkeypatch.setattr(command_buffers, "_REUSE_BLOCKS", 1)
    assert measure(compiling=False) == {"tokens_per_second": 50.0}
    found = measure(compiling=True)
    # Without Metal there is nothing to compile.
    assert found["compiling"]["libraries"] == 0
    assert found["compiling"]["seconds"] > 0
    assert [len(model.layers) for model in models] == [2, 2]


@pytest.fixture
def doctor(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AFM_MLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_report, "measure_bandwidth", lambda threads: None)
    monkeypatch.setattr(specs, "full_specs", list)
    monkeypatch.setattr(specs, "model_specs", lambda dtype: [])

    def run(find, *arguments, has_metal=True):
        monkeypatch.setattr(mx.metal, "is_available", lambda: has_metal)
        monkeypatch.setattr(command_buffers, "examine", find)
        assert main(["doctor", "--report", "r.json", *arguments]) == 0
        return capsys.readouterr().out, json.loads(Path("r.json").read_text())["steps"]

    return run


def test_doctor_prints_it_on_metal(doctor):
    found = examine(measured({None: 50, (100, 100): 51, (200, 400): 61.04, (500, 2000): 50}))
    out, steps = doctor(lambda: found)
    assert steps == found
    assert "compiling what a server can meet: 12 libraries, 2.5 s\n" in out
    assert [line.split() for line in out.splitlines() if "61.0" in line] == [["200", "400", "61.0"]]
    assert (
        "Faster here: MLX_MAX_OPS_PER_BUFFER=200 MLX_MAX_MB_PER_BUFFER=400, set before Python starts.\n"
        in out
    )
    out, _ = doctor(lambda: {**found, "recommended": None})
    assert "No other size is clearly faster.\n" in out


def test_doctor_goes_on_without_it(doctor):
    def fail():
        raise OSError("a process that timed decode steps ended with -9: no message")

    out, _ = doctor(fail)
    assert "decode steps were not timed: a process that timed decode steps ended with -9" in out
    assert doctor(fail, "--quick")[1] is None
    assert doctor(fail, has_metal=False)[1] is None
