"""The report: what it says, what it hides, and `afm-mlx doctor` around it."""

import getpass
import json
import socket
from pathlib import Path

import mlx.core as mx
import pytest

from afm_mlx.cli import main
from afm_mlx.kernels import dispatch, reference, settings
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.dispatch import Variant
from afm_mlx.kernels.selftest import checks, specs
from afm_mlx.kernels.selftest.specs import Spec
from afm_mlx.measure import kernel_report as doctor
from afm_mlx.measure.machine import Bandwidth

SMALL = {"in_dims": 256, "out_dims": 64, "bits": 2, "mode": "balanced", "granularity": "row"}


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A machine of 100 GB/s without a verdict, with one kernel per backend, and a small model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(settings.CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(dispatch.SWITCH, raising=False)
    monkeypatch.delenv(checks.SWITCH, raising=False)
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.setattr(doctor, "measure_bandwidth", lambda threads: Bandwidth(1e11, "a stub"))
    small = [Spec("packed_matmul", mx.bfloat16, 3, **SMALL, norm=True)]
    monkeypatch.setattr(specs, "full_specs", lambda: small)
    ops = ("packed_matmul", "packed_argmax")
    monkeypatch.setattr(specs, "model_specs", lambda dtype: [Spec(o, dtype, **SMALL) for o in ops])
    offer(monkeypatch, reference.packed_matmul)
    yield
    monkeypatch.undo()
    dispatch.select.cache_clear()


def offer(monkeypatch, run):
    """Kernels of one operation: one that this machine lacks, and `run`."""

    def listed(op):
        own = Variant(op, "reference", getattr(reference, op), lambda case: None)
        if op != "packed_matmul":
            return (own,)
        metal = Variant(op, "metal/fake", run, lambda case: None)
        many = Variant(op, "cpu/many", run, lambda case: "takes many rows")
        return (metal, many, Variant(op, "cpu/fake", run, lambda case: None), own)

    monkeypatch.setattr(dispatch, "variants", listed)
    dispatch.select.cache_clear()


def faulty(x, weight, options):
    return reference.packed_matmul(x, weight, options) * 1.5


@pytest.fixture
def run(capsys):
    def run(*argv):
        status = main(["doctor", *map(str, argv)])
        return status, *capsys.readouterr()

    return run


def test_a_sound_machine(run):
    status, out, err = run()
    assert (status, err) == (0, "")
    (report,) = Path().glob("afm-mlx-report-*.json")
    assert out.endswith(f"All is well. Report: {report}\n")
    assert "metal/*: runs on metal only" in out
    assert "packed_matmul  cpu/many (2): takes many rows" in out
    assert "bandwidth gb per s" in out
    timed = out[out.index("calls of a 3B model") :].splitlines()
    assert timed[2] == "packed_matmul: 1 row, 64x256, 2-bit balanced row, float32"
    assert timed[3].split()[:2] == [">", "cpu/fake"]
    assert timed[4].split()[0] == "reference"
    facts = json.loads(report.read_text())
    assert (facts["ok"], facts["failures"]) == (True, {})
    assert facts["machine"]["bandwidth_gb_per_s"] == 100
    assert facts["machine"]["memory_gb"] > 0
    assert facts["runtime"]["versions"]["mlx"]
    assert [p["variant"] for p in facts["problems"]] == ["cpu/fake", "reference"]
    lines = {(line["op"], line["variant"]): line for line in facts["timed"]}
    fake = lines["packed_matmul", "cpu/fake"]
    assert fake["chosen"]
    assert fake["error"] <= fake["bound"]
    assert fake["gb_per_s"] == pytest.approx(fake["bytes"] / fake["microseconds"] / 1e3)
    assert fake["share_of_bandwidth"] == pytest.approx(fake["gb_per_s"] / 100)
    assert lines["packed_matmul", "metal/fake"]["not_run"] == "runs on metal only"
    assert lines["packed_matmul", "cpu/many"]["not_run"] == "takes many rows"
    assert lines["packed_argmax", "reference"]["chosen"]
    chosen = {k["variant"]: k["chosen"] for k in facts["kernels"] if k["op"] == "packed_matmul"}
    assert chosen == {"metal/fake": 0, "cpu/many": 0, "cpu/fake": 2, "reference": 0}


def test_a_faulty_kernel(run, monkeypatch):
    offer(monkeypatch, faulty)
    status, out, _ = run("--report", "r.json")
    assert status == 1
    assert "FAILED, and switched off from now on: cpu/fake\n  packed_matmul, 3 rows" in out
    assert "is over its bound" in out
    assert "reference runs instead" in out
    assert "Please send the report in." in out
    facts = json.loads(Path("r.json").read_text())
    assert (facts["ok"], list(facts["failures"])) == (False, ["cpu/fake"])
    assert {k["variant"]: k["failed"] for k in facts["kernels"]}["cpu/fake"] == 1
    # The loader will know without testing again.
    monkeypatch.setattr(dispatch, "_disabled", {})
    checks.ensure_checked.cache_clear()
    with pytest.warns(RuntimeWarning, match="cpu/fake failed its self-test"):
        checks.ensure_checked()
    checks.ensure_checked.cache_clear()
    # And a kernel that was fixed is back after the next test.
    offer(monkeypatch, reference.packed_matmul)
    assert run()[0] == 0
    assert dispatch.disabled() == {}


def test_a_kernel_that_ended_the_process_runs_only_on_request(run):
    checks.Verdict().end({"cpu/fake": checks.ENDED})
    status, out, _ = run()
    assert status == 1
    assert f"cpu/fake\n  {checks.ENDED}" in out
    assert run("--retry")[0] == 0
    assert checks.Verdict().failures == {}


def test_a_quick_report_times_nothing_and_names_no_folder(run, monkeypatch):
    monkeypatch.setattr(doctor, "measure_bandwidth", lambda threads: pytest.fail("not quick"))
    status, out, _ = run("--quick", "--json", "--report", "r.json", "--seed", "7")
    facts = json.loads(out)
    assert facts == json.loads(Path("r.json").read_text())
    assert (status, facts["timed"], facts["seed"]) == (0, [], 7)
    assert {p["op"] for p in facts["problems"]} == set(dispatch.OPS)
    for folder in (f"{Path.home()}/", Path.cwd(), Path(doctor.__file__).parent):
        assert str(folder) not in out


def test_what_was_asked_for_is_no_verdict(run, monkeypatch, tmp_path):
    offer(monkeypatch, faulty)
    monkeypatch.setenv(dispatch.SWITCH, "reference")
    dispatch.select.cache_clear()
    status, out, _ = run()
    assert status == 0
    assert "Only reference was tested" in out
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("path", ["missing/r.json", "."])
def test_a_report_that_cannot_be_written(run, path):
    status, out, err = run("--report", path)
    assert (status, out) == (2, "")
    assert f"--report {path} can't be written" in err


def test_nothing_private_in_a_report(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "janes-mac.local")
    monkeypatch.setenv("HOME", "/Users/Jane Doe")
    facts = {
        "a": ["/Users/Jane Doe/models/x.metal:3: error", 3, None, 0.5],
        "b": {"c": Path("/opt/venv/lib/_afm_cpu.so")},
        "d": "janes-mac.local of jane, janet",
        "e": "12 GB/s, 4/2 heads, [metal::load] no/yes",
    }
    assert doctor.without_private_words(facts) == {
        "a": ["x.metal:3: error", 3, None, 0.5],
        "b": {"c": "_afm_cpu.so"},
        "d": "<host> of <user>, janet",
        "e": "12 GB/s, 4/2 heads, [metal::load] no/yes",
    }
    # A name of one letter is a word that anything may be, and one of none lies between all words.
    for user, said in (("", "a jo / 2"), ("a", "a jo / 2"), ("jo", "a <user> / 2")):
        monkeypatch.setattr(getpass, "getuser", lambda user=user: user)
        monkeypatch.setenv("HOME", "/")
        assert doctor.without_private_words("a jo / 2") == said


@pytest.mark.parametrize("reason", ["", "no compiler was found"])
def test_the_machine_and_its_native_extension(monkeypatch, reason):
    status = extension.Status(reason, None, instruction_set="avx2", threads=0 if reason else 3)
    monkeypatch.setattr(extension, "status", lambda: status)
    monkeypatch.setattr(doctor, "threads_in_use", lambda: 5)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M4 Max"})
    facts = doctor.describe_machine(None)
    assert facts["bandwidth_published_gb_per_s"] == [410, 546]
    assert "bandwidth_gb_per_s" not in facts
    if reason:
        assert facts["threads"] == 5
        assert doctor.native_extension() == "not used: no compiler was found"
    else:
        assert facts["threads"] == 3
        assert doctor.native_extension()["instruction_set"] == "avx2"
