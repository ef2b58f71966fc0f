"""Running packages: an interpreter replaces Core ML, and the package's model has the expected logits."""

from pathlib import Path
from unittest.mock import create_autospec

import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.coreml import CoreMLModel, coreml_model
from afm_mlx.coreml.availability import import_coremltools
from afm_mlx.errors import AFMError
from afm_mlx.loading.load import load_model
from tests.tools.cases import each
from tests.tools.compare import assert_close
from tests.tools.coreml import ADAPTER, LENGTHS
from tests.tools.exports import (
    assert_a_prompt_in_parts_and_steps,
    assert_prompts_of_all_lengths,
    logits_of,
    tokens_of,
)

# States are float16.
BOUND = 2e-3


@pytest.fixture(scope="module")
def model(core_ml):
    return load_model(core_ml.folder)


@pytest.fixture
def runner(core_ml, interpreted):
    return CoreMLModel(core_ml.package, "CPU_ONLY")


def test_prompts_of_all_lengths(rng, runner, model):
    assert_prompts_of_all_lengths(rng, runner, model, LENGTHS, BOUND)


def test_a_prompt_in_parts_and_steps(rng, runner, model):
    assert_a_prompt_in_parts_and_steps(rng, runner, model, BOUND)


def test_an_adapter(rng, runner, core_ml):
    tokens = tokens_of(rng, runner, 9)
    adapted = load_model(core_ml.folder)
    attach_adapter(adapted, core_ml.folder / "adapters" / ADAPTER)
    with_adapter = CoreMLModel(core_ml.package, adapter=ADAPTER)
    assert_close(with_adapter.logits(tokens), logits_of(adapted, tokens)[-1], BOUND)
    assert np.abs(with_adapter.decode(0) - runner.logits([*tokens, 0])).max() > 0.1


def test_greedy_answers(rng, runner):
    prompt = tokens_of(rng, runner, 6)
    answer = list(runner.greedy(prompt, 8))
    assert runner.position == len(prompt) + 7
    runner.rewind()
    for i, token in enumerate(answer):
        assert token == (runner.logits(prompt) if i == 0 else runner.decode(answer[i - 1])).argmax()
    runner.rewind()
    end = answer[3]
    assert list(runner.greedy(prompt, 8, {end})) == answer[: answer.index(end)]
    assert list(runner.greedy([0], 0)) == []


def test_an_adapter_that_the_package_lacks(core_ml, interpreted):
    with pytest.raises(AFMError, match="did you mean tone"):
        CoreMLModel(core_ml.package, adapter="tonne")


def test_lengths_that_core_ml_takes_for_others(runner, monkeypatch):
    """Core ML has run the default of several shapes before, whatever it was given."""
    predict = runner._prefill.predict
    first = {"tokens": np.zeros((1, LENGTHS[0]), np.int32)}
    monkeypatch.setattr(runner._prefill, "predict", lambda i, state: predict(i | first, state))
    with pytest.raises(AFMError, match="read 4 tokens of 12, on CPU_ONLY"):
        runner.prefill([0] * 12)


# -- coremltools' functions, with its own signatures; what they do needs a Mac


@pytest.fixture
def tools(monkeypatch):
    pytest.importorskip("coremltools", reason="pip install '.[coreml]'")
    models = import_coremltools().models
    monkeypatch.setattr(coreml_model, "obstacle", lambda: None)
    for owner, name in (
        (models.utils, "compile_model"),
        (models, "CompiledMLModel"),
        (models.compute_plan.MLComputePlan, "load_from_path"),
    ):
        monkeypatch.setattr(owner, name, create_autospec(getattr(owner, name)))
    models.utils.compile_model.side_effect = lambda package, compiled: (
        Path(compiled).mkdir() or compiled
    )
    return import_coremltools()


def test_functions_are_loaded(tools, tmp_path):
    package = coreml_model.CompiledPackage(tmp_path / "my.mlpackage")
    source, compiled = tools.models.utils.compile_model.call_args.args
    assert (source, Path(compiled).name) == (str(tmp_path / "my.mlpackage"), "my.mlmodelc")
    assert len(package.load(("prefill", "decode"), "CPU_AND_NE")) == 2
    units = tools.ComputeUnit.CPU_AND_NE
    calls = tools.models.CompiledMLModel.call_args_list
    assert [call.args for call in calls] == [(compiled, units)] * 2
    assert [call.kwargs for call in calls] == [{"function_name": n} for n in ("prefill", "decode")]
    plan = tools.models.compute_plan.MLComputePlan.load_from_path
    assert package.plan("CPU_AND_NE") is plan.return_value
    plan.assert_called_once_with(compiled, units)
    assert Path(compiled).exists()
    del package
    assert not Path(compiled).parent.exists()


def test_what_core_ml_refuses(tools, tmp_path):
    package = coreml_model.CompiledPackage(tmp_path / "my.mlpackage")
    with pytest.raises(AFMError, match="compute_units is 'GPU'; allowed are CPU_ONLY, CPU_AND_GPU"):
        package.load(("prefill",), "GPU")
    tools.models.CompiledMLModel.side_effect = RuntimeError("{\n    no memory\n}")
    with pytest.raises(AFMError, match=r"can't load prefill, decode of .* for ALL: { no memory }"):
        package.load(("prefill", "decode"), "ALL")
    tools.models.utils.compile_model.side_effect = RuntimeError("bad op")
    with pytest.raises(AFMError, match=r"Core ML can't compile .*my\.mlpackage: bad op"):
        coreml_model.CompiledPackage(tmp_path / "my.mlpackage")


# -- devices


class MLGPUComputeDevice: ...


class MLNeuralEngineComputeDevice: ...


class Plan:
    """coremltools' `MLComputePlan`, as far as it is asked: of operations that are (device, cost)."""

    def __init__(self, **functions):
        blocks = {name: Answer(block=Answer(operations=o)) for name, o in functions.items()}
        self.model_structure = Answer(program=Answer(functions=blocks) if blocks else None)

    def get_compute_device_usage_for_mlprogram_operation(self, operation):
        device, _ = operation
        return None if device is None else Answer(preferred_compute_device=device())

    def get_estimated_cost_for_mlprogram_operation(self, operation):
        return None if operation[1] is None else Answer(weight=operation[1])


class Answer:
    def __init__(self, **values):
        self.__dict__.update(values)


GPU, ENGINE = MLGPUComputeDevice, MLNeuralEngineComputeDevice


@each(
    "functions, adapter, shares",
    [
        (
            {"prefill": [(None, None), (GPU, 0.125), (ENGINE, 0.375)], "decode": [(GPU, 2.0)]},
            None,
            {"prefill": {"GPU": 0.25, "Neural Engine": 0.75}, "decode": {"GPU": 1}},
        ),
        # Without costs, operations are counted; and without devices, nothing is said.
        (
            {
                "prefill_tone": [(GPU, None)] * 2 + [(ENGINE, None)] * 2,
                "decode_tone": [(None, 0.5)],
            },
            ADAPTER,
            {"prefill": {"GPU": 0.5, "Neural Engine": 0.5}},
        ),
        ({}, None, {}),
    ],
)
def test_shares_of_devices(core_ml, monkeypatch, functions, adapter, shares):
    compiled = Answer(plan=lambda units: Plan(**functions))
    monkeypatch.setattr(coreml_model, "CompiledPackage", lambda path: compiled)
    assert coreml_model.planned_devices(core_ml.package, "CPU_AND_GPU", adapter) == shares
