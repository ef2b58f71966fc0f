"""Packages compared with MLX, with an interpreter in Core ML's place."""

import os
import shutil

import numpy as np
import pytest

from afm_mlx.errors import AFMError
from afm_mlx.loading.load import load_model
from afm_mlx.measure import coreml_report as coreml
from tests.tools.cases import each
from tests.tools.coreml import ADAPTER, edit_spec, set_config


@pytest.fixture
def here(monkeypatch, interpreted):
    """Runs stay in this process, where the interpreter is."""
    monkeypatch.setattr(coreml, "in_own_process", lambda function, *arguments: function(*arguments))


@pytest.fixture
def references(core_ml, rng):
    return coreml.make_references(load_model(core_ml.folder), rng)


def test_a_package_and_its_model(core_ml, here, references):
    facts = coreml.run_package(core_ml.package, "CPU_ONLY", None, references, True)
    assert facts["failure"] is None
    assert 0 < facts["error"] < 1e-3
    assert facts["same_tokens"] == facts["steps"] == 20


def lose_the_state(model):
    model._state = model._decode.make_state()


def stay_at_the_start(model):
    model.position = 0


def put_nan(model):
    model._state["values"][:] = np.nan


def skip_a_token(model):
    model.position += 1


PREFILL = coreml.CoreMLModel.prefill


@each("fault", [lose_the_state, stay_at_the_start, put_nan, skip_a_token])
def test_faults_are_found(core_ml, here, references, monkeypatch, fault):
    """What may go wrong between two functions: keys and values that are lost, or lie elsewhere."""

    def faulty(model, tokens):
        PREFILL(model, tokens)
        fault(model)

    monkeypatch.setattr(coreml.CoreMLModel, "prefill", faulty)
    facts = coreml.run_package(core_ml.package, "CPU_ONLY", None, references, True)
    assert "of their size away from MLX's; 0.05 is allowed" in facts["failure"]


def test_an_examination(core_ml, here, monkeypatch):
    """One kind of unit works, another one gives an error, and the last has an adapter forgotten."""
    run, asked, planned = coreml.run_package, [], coreml.planned_devices

    def but_for_the_cpu(path, units, adapter):
        if units == "CPU_ONLY":
            raise ValueError("no plan")
        return planned()

    def by_unit(path, units, adapter, references, quick):
        asked.append((units, adapter))
        if units == "CPU_AND_GPU":
            raise RuntimeError("{\n  NSLocalizedDescription = no GPU;\n}")
        return run(path, units, None if units == "CPU_AND_NE" else adapter, references, quick)

    monkeypatch.setattr(coreml, "run_package", by_unit)
    monkeypatch.setattr(coreml, "planned_devices", but_for_the_cpu)
    steps = []
    facts = coreml.examine_coreml(
        {"own": core_ml.package},
        core_ml.folder,
        adapter=ADAPTER,
        seed=3,
        progress=lambda *counts: steps.append(counts),
    )
    assert asked == [("CPU_ONLY", ADAPTER), ("CPU_AND_GPU", ADAPTER), ("CPU_AND_NE", ADAPTER)]
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (facts["ok"], facts["not_run"], facts["seed"]) == (False, None, 3)
    mlx, cpu, gpu, engine = facts["runs"]
    for timed in (mlx, cpu, engine):
        assert timed["prompt_tokens"] == 48
        assert timed["prefill_tokens_per_second"] > 0
        assert timed["decode_tokens_per_second"] > 0
    assert (mlx["failure"], cpu["failure"]) == (None, None)
    assert facts["failures"] == {
        "own, CPU_AND_GPU": "RuntimeError: { NSLocalizedDescription = no GPU; }",
        "own, CPU_AND_NE": engine["failure"],
    }
    assert {"error", "devices"}.isdisjoint(gpu)
    assert (cpu["devices"], engine["devices"]) == ("ValueError: no plan", planned())
    assert facts["packages"]["own"]["prompt_lengths"] == [4, 12]
    assert str(core_ml.folder.parent) not in str(facts)


def test_another_model(core_ml, tmp_path):
    package = tmp_path / "other.mlpackage"
    shutil.copytree(core_ml.package, package)
    edit_spec(package, lambda spec: set_config(spec, rope_theta=500.0))
    words = r"another model than .*: its rope_theta is 500.0, the folder's 10000.0"
    with pytest.raises(AFMError, match=words):
        coreml.examine_coreml({"other": package}, core_ml.folder)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(AFMError, match=r"of the type 'llama'; .* 'afm7' only"):
        coreml.examine_coreml({}, tmp_path)


def test_what_ends_the_process_ends_another_one():
    with pytest.raises(AFMError, match="The process that it ran in has ended"):
        coreml.in_own_process(os.abort)
