"""Running packages: an interpreter replaces Core ML, and the package's model has the expected logits."""

import functools
from pathlib import Path
from unittest.mock import create_autospec

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.coreml import CoreMLModel, coreml_model
from afm_mlx.coreml.availability import import_coremltools
from afm_mlx.errors import AFMError, ContextLengthError
from afm_mlx.loading.load import load_model
from afm_mlx.model.exported_model import ONE_TOKEN, prompt_chunks
from tests.tools.cases import each
from tests.tools.compare import assert_close
from tests.tools.coreml import ADAPTER, CONTEXT, LENGTHS

# States are float16.
BOUND = 2e-3


@pytest.fixture(scope="module")
def model(core_ml):
    return load_model(core_ml.folder)


@pytest.fixture
def runner(core_ml, interpreted):
    return CoreMLModel(core_ml.package, "CPU_ONLY")


def tokens_of(rng, runner, count):
    return rng.integers(0, runner.package.config.vocab_size, count).tolist()


def wanted(model, tokens):
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def test_prompts_of_all_lengths(rng, runner, model):
    tokens = tokens_of(rng, runner, CONTEXT)
    logits = wanted(model, tokens)
    # Up to the context's last column, where no padding fits; the states still hold keys of longer prompts.
    for length in rng.permutation([1, 2, *LENGTHS, 5, 13, 17, 30, CONTEXT - 1, CONTEXT]).tolist():
        runner.rewind()
        assert_close(runner.logits(tokens[:length]), logits[length - 1], BOUND, f"{length} tokens")
        assert runner.position == length


def test_a_prompt_in_parts_and_steps(rng, runner, model):
    tokens = tokens_of(rng, runner, 30)
    runner.prefill(tokens[:7])
    runner.prefill([])
    runner.prefill(tokens[7:20])
    found = [runner.decode(token) for token in tokens[20:]]
    assert_close(np.stack(found), wanted(model, tokens)[20:], BOUND)
    other = [*tokens[:11], *tokens_of(rng, runner, 5)]
    runner.rewind(11)
    assert_close(runner.logits(other[11:]), wanted(model, other)[-1], BOUND)


def test_an_adapter(rng, runner, core_ml):
    tokens = tokens_of(rng, runner, 9)
    adapted = load_model(core_ml.folder)
    attach_adapter(adapted, core_ml.folder / "adapters" / ADAPTER)
    with_adapter = CoreMLModel(core_ml.package, adapter=ADAPTER)
    assert_close(with_adapter.logits(tokens), wanted(adapted, tokens)[-1], BOUND)
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


@each(
    "use, kind, words",
    [
        (lambda r: r.logits([]), AFMError, "no tokens"),
        (lambda r: r.decode(300), AFMError, "token 300 is none of this model; ids are 0 to 299"),
        (lambda r: r.prefill([-1]), AFMError, "token -1 is none"),
        (lambda r: r.logits([0] * 65), ContextLengthError, "65 tokens after 0 are more than .* 64"),
        (lambda r: r.rewind(1), AFMError, "position is 1; 0 to 0"),
        (lambda r: CoreMLModel(r.package.path, adapter="tonne"), AFMError, "did you mean tone"),
    ],
)
def test_what_is_refused(runner, use, kind, words):
    runner.rewind()
    with pytest.raises(kind, match=words):
        use(runner)
    assert runner.position == 0


def test_lengths_that_core_ml_takes_for_others(runner, monkeypatch):
    """Core ML has run the default of several shapes before, whatever it was given."""
    predict = runner._prefill.predict
    first = {"tokens": np.zeros((1, LENGTHS[0]), np.int32)}
    monkeypatch.setattr(runner._prefill, "predict", lambda i, state: predict(i | first, state))
    with pytest.raises(AFMError, match="read 4 tokens of 12, on CPU_ONLY"):
        runner.prefill([0] * 12)


# -- prompts


@each(
    "count, lengths, room, chunks",
    [
        (0, (64, 512), 100, []),
        (512, (64, 512), 0, [512]),
        (64 + 512, (64, 512), 100, [512, 64]),
        (40, (64, 512), 100, [64]),  # padding is cheaper than 40 steps
        (1, (64, 512), 100, [ONE_TOKEN]),  # and a step cheaper than padding
        (40, (64, 512), 23, [ONE_TOKEN] * 40),  # padding would pass the context's end
        (70, (64, 512), 0, [64, *[ONE_TOKEN] * 6]),
        (3, (1, 64), 0, [1, 1, 1]),
    ],
)
def test_some_prompts(count, lengths, room, chunks):
    found = prompt_chunks(count, lengths, room)
    assert sorted(found) == sorted(chunks)


def test_random_prompts_are_read_whole_and_in_the_least_time(rng):
    for _ in range(300):
        count, room = int(rng.integers(1, 60)), int(rng.integers(0, 20))
        lengths = tuple(rng.choice([1, 2, 5, 8, 16, 31, 64], 2, replace=False).tolist())
        chunks = prompt_chunks(count, lengths, room)
        read = [length or 1 for length in chunks]
        # Only the last call may have padding, and one token of the prompt at least.
        assert sum(read[:-1]) < count <= sum(read) <= count + room
        assert sum(map(seconds, chunks)) == least(count, lengths, room)


def seconds(length):
    return 66 if length == ONE_TOKEN else 32 + length


@functools.cache
def least(count, lengths, room):
    if count <= 0:
        return 0
    ways = [seconds(n) + least(count - n, lengths, room) for n in lengths if n - count <= room]
    return min([*ways, seconds(ONE_TOKEN) + least(count - 1, lengths, room)])


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
