"""`afm-mlx doctor --coreml`; tests/afm_mlx/measure/test_kernel_report.py has the kernels."""

import json
import platform
from importlib import import_module
from pathlib import Path

import pytest

from afm_mlx.errors import AFMError
from afm_mlx.measure import coreml_report as coreml
from afm_mlx.measure import exported_models
from tests.tools.coreai import OWN
from tests.tools.coreml import ADAPTER


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Reports go to the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def here(monkeypatch, interpreted):
    monkeypatch.setattr(coreml, "in_own_process", lambda function, *arguments: function(*arguments))


def test_packages_that_are_made(core_ml, here, done, monkeypatch):
    monkeypatch.setattr(coreml, "UNITS", ("CPU_AND_NE",))
    out = done(
        "doctor", "--coreml", "--quick", "--model", core_ml.folder, "--adapter-path", ADAPTER
    )
    (report,) = Path().glob("afm-mlx-report-coreml-*.json")
    assert out.endswith(f"All is well. Report: {report}\n")
    assert [line.split()[-1] for line in out.splitlines() if " of 20 " in line] == ["ok"] * 2
    assert "  linear: CPU and Neural Engine, prefill: CPU 25%, Neural Engine 75%\n" in out
    facts = json.loads(report.read_text())
    assert {run.get("package") for run in facts["runs"]} == {None, "linear", "neural_engine"}
    assert facts["packages"]["neural_engine"]["arrangement"] == "neural_engine"
    assert [path.name for path in Path().iterdir()] == [report.name]


def test_what_can_not_be_made_is_left_out(core_ml, here, done, fails, monkeypatch):
    monkeypatch.setattr(coreml, "UNITS", ("CPU_ONLY",))
    converting = import_module("afm_mlx.converters.convert")
    made, refused = converting.convert, {True}

    def some(folder, path, *, ane, **options):
        if ane in refused:
            raise AFMError(f"{folder} has what Core ML can't load. Write float weights.")
        return made(folder, path, ane=ane, **options)

    monkeypatch.setattr(converting, "convert", some)
    arguments = ("doctor", "--coreml", "--quick", "--model", core_ml.folder, "--report", "r.json")
    out = done(*arguments)
    assert "\n  neural_engine: model has what Core ML can't load. Write float weights.\n" in out
    assert [line for line in out.splitlines() if line.startswith("linear: CPU ")]
    assert list(json.loads(Path("r.json").read_text())["not_made"]) == ["neural_engine"]
    refused.add(False)
    assert "has what Core ML can't load" in fails(*arguments)


def test_a_package_that_fails(core_ml, here, run, monkeypatch):
    monkeypatch.setattr(coreml, "UNITS", ("CPU_AND_GPU",))
    monkeypatch.setattr(exported_models, "ERROR_BOUND", 0.0)
    arguments = ("--coreml", core_ml.package, "--model", core_ml.folder, "--report", "r.json")
    status, out, err = run("doctor", *arguments)
    assert (status, err) == (1, "")
    mlx, *rows = [line for line in out.splitlines() if line.startswith(("MLX", "tiny.mlpackage:"))]
    assert mlx.split()[:4] == ["MLX", "-", "-", "-"]
    assert [row.split()[-1] for row in rows] == ["FAILED"]
    assert "\nFAILED: tiny.mlpackage, CPU_AND_GPU\n  logits are " in out
    assert out.endswith("Please send the report in. Report: r.json\n")
    status, out, _ = run("doctor", *arguments, "--quick", "--json")
    assert (status, json.loads(out)["ok"]) == (1, False)


@pytest.mark.skipif(platform.system() == "Darwin", reason="Core ML runs there")
def test_a_system_without_core_ml(core_ml, done, fails):
    reason = f"Core ML needs macOS 15 or later, and this is {platform.system()}: use a Mac"
    for package in ((), (core_ml.package,)):
        out = done("doctor", "--coreml", *package, "--model", core_ml.folder, "--report", "r.json")
        assert out.endswith(f"\nnot run here\n  {reason}\n\nNothing was compared. Report: r.json\n")
    assert json.loads(Path("r.json").read_text())["not_run"] == reason
    assert "another model" in fails("doctor", "--coreml", core_ml.package, "--model", "afm-nano")


def test_core_ai(core_ai, done, fails):
    """In a process of its own, with a bundle that is named; and one that is made and removed."""
    options = ("--quick", "--report", "r.json", "--model", core_ai.folder)
    out = done("doctor", "--coreai", core_ai.bundle, *options)
    assert "Core AI compared with MLX" in out
    assert out.endswith("\nAll is well. Report: r.json\n")
    assert json.loads(Path("r.json").read_text())["runs"][1]["same_tokens"] == 20
    adapter = core_ai.folder / "adapters" / "tone"
    out = done("doctor", "--coreai", *options, "--adapter-path", adapter)
    assert {path.name for path in adapter.parent.iterdir()} == {"tone", OWN}
    assert "adapter rank    4" in out
    assert out.endswith("\nAll is well. Report: r.json\n")
    assert "--coreml does not go with --coreai" in fails("doctor", "--coreml", "--coreai")


def test_arguments(fails):
    assert "name that with --model" in fails("doctor", "--coreml", "x.mlpackage")
    assert "--model is for --coreml" in fails("doctor", "--model", "afm-nano")
    assert "--adapter-path is for --coreml" in fails("doctor", "--adapter-path", "tone")
    assert "--retry does not go with --coreml" in fails("doctor", "--coreml", "--retry")
    missing = fails("doctor", "--coreml", "x.mlpackage", "--model", "afm-nano")
    assert "x.mlpackage is no folder" in missing
    assert list(Path().iterdir()) == []
