"""A package's runner, with an interpreter in Core ML's place, against the package's model."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.attach import attach_adapter
from afm_mlx.coreml import CoreMLModel
from afm_mlx.errors import AFMError, ContextLengthError
from afm_mlx.loading.load import load_model
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
    """Logits behind each token."""
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def test_prompts_of_all_lengths(rng, runner, model):
    tokens = tokens_of(rng, runner, CONTEXT)
    logits = wanted(model, tokens)
    # Up to the context's last column, where no padding fits; keys and values of other prompts lie behind each.
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
