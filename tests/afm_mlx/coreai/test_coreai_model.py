"""Running bundles by Apple's runtime, with the model's logits as the expected ones."""

import gc
import threading

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.coreai import CoreAIModel
from afm_mlx.coreai.availability import import_coreai, obstacle
from afm_mlx.errors import AFMError
from afm_mlx.loading.load import load_model
from afm_mlx.vision.prompt_image import read_image
from tests.tools.compare import assert_close
from tests.tools.coreai import ADAPTER, LENGTHS, OWN
from tests.tools.exports import (
    assert_a_prompt_in_parts_and_steps,
    assert_prompts_of_all_lengths,
    logits_of,
    tokens_of,
)
from tests.tools.vision import TINY, picture

BOUND = 1e-4


@pytest.fixture(scope="module")
def model(core_ai):
    return load_model(core_ai.folder)


@pytest.fixture(scope="module")
def loaded(core_ai):
    return CoreAIModel(core_ai.bundle)


@pytest.fixture
def runner(loaded):
    loaded.rewind()
    loaded.set_adapter(None)
    return loaded


def test_prompts_of_all_lengths(rng, runner, model):
    assert_prompts_of_all_lengths(rng, runner, model, LENGTHS, BOUND)


def test_a_prompt_in_parts_and_steps(rng, runner, model):
    assert_a_prompt_in_parts_and_steps(rng, runner, model, BOUND)


def test_adapters_are_swapped_without_compiling(rng, runner, core_ai, model, monkeypatch):
    tokens = tokens_of(rng, runner, 9)
    adapted = attach_adapter(load_model(core_ai.folder), core_ai.folder / "adapters" / ADAPTER)
    base, other = logits_of(model, tokens)[-1], logits_of(adapted, tokens)[-1]
    assert np.abs(base - other).max() > 0.1
    compiled = []
    asset = import_coreai("coreai.authoring").AIModelAsset
    monkeypatch.setattr(asset, "_write_odix", lambda *_, **__: compiled.append(1))
    for file, expected in ((core_ai.adapter, other), (None, base), (core_ai.adapter, other)):
        runner.rewind()
        runner.set_adapter(file)
        assert_close(runner.logits(tokens), expected, BOUND)
    assert not compiled
    with pytest.raises(AFMError):  # what compiles is what was replaced
        CoreAIModel(core_ai.bundle)
    assert compiled


def test_adapters_are_swapped_between_two_steps(rng, runner, core_ai):
    """In one conversation, whose earlier keys and values stay: as in our engine, and with other functions."""
    tokens = tokens_of(rng, runner, 12)
    model = load_model(core_ai.folder)
    cache, found, wanted = model.make_cache("float"), [], []
    files = {ADAPTER: core_ai.adapter, OWN: OWN, None: None}
    parts = [tokens[:7], *([token] for token in tokens[7:])]
    for part, adapter in zip(parts, (ADAPTER, ADAPTER, None, OWN, ADAPTER, OWN), strict=True):
        runner.set_adapter(files[adapter])
        if adapter is not None:
            attach_adapter(model, core_ai.folder / "adapters" / adapter)
        found.append(runner.logits(part) if len(part) > 1 else runner.decode(part[0]))
        wanted.append(np.array(model(mx.array([part]), cache)[0, -1]))
        detach_adapter(model)
    assert_close(np.stack(found), np.stack(wanted), BOUND)


def test_an_adapter_with_functions_of_its_own(rng, runner, core_ai, model):
    tokens = tokens_of(rng, runner, 9)
    adapted = attach_adapter(load_model(core_ai.folder), core_ai.folder / "adapters" / OWN)
    other, base = logits_of(adapted, tokens), logits_of(model, tokens)
    assert np.abs(base[-1] - other[-1]).max() > 0.1
    for name, expected in ((OWN, other), (None, base), (OWN, other)):
        runner.rewind()
        runner.set_adapter(name)
        assert_close(runner.logits(tokens[:8]), expected[7], BOUND)
        assert_close(runner.decode(tokens[8]), expected[8], BOUND)


def test_greedy_answers(rng, runner, model):
    prompt = tokens_of(rng, runner, 6)
    answer = list(runner.greedy(prompt, 8))
    assert runner.position == len(prompt) + 7
    logits = logits_of(model, [*prompt, *answer])
    assert answer == logits[5:-1].argmax(1).tolist()
    runner.rewind()
    assert list(runner.greedy(prompt, 8, end_tokens={answer[0]})) == []


def test_a_model_that_is_dropped_ends_its_threads(core_ai):
    before = threading.active_count()
    runner = CoreAIModel(core_ai.bundle)
    runner.decode(0)
    assert threading.active_count() > before
    del runner
    gc.collect()
    assert threading.active_count() == before


def test_a_bundle_without_an_encoder_takes_no_images(rng, runner):
    image = read_image(picture(rng, 20, 28), TINY, "rapid")
    for call in (lambda: runner.encode(image), lambda: runner.show(np.zeros((1, 64)))):
        with pytest.raises(AFMError, match="takes no images: it was made of a model without"):
            call()


def test_without_coreai_core(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'coreai'", name="coreai")

    monkeypatch.setattr("afm_mlx.coreai.availability.import_module", missing)
    assert "coreai-core is not installed" in obstacle()
    monkeypatch.setattr("afm_mlx.coreai.availability.import_module", broken)
    assert "can't be imported (no glibc)" in obstacle()


def broken(name):
    raise ImportError("no glibc", name=name)
