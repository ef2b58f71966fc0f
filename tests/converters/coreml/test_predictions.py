"""What packages compute, by an interpreter of Apple's descriptions of operations, against the model."""

import shutil
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.converters.convert import convert
from afm_mlx.converters.coreml import layouts
from afm_mlx.converters.coreml.package_writer import package_size
from afm_mlx.loading.load import load_model
from afm_mlx.loading.resolve import resolve_model
from tests.converters.conftest import edit_config
from tests.tools.cases import all_pairs
from tests.tools.exports import PACKINGS, assert_same_answers, decoded, held, packable, rules_of
from tests.tools.mil import Package
from tests.tools.models import random_config

STEPS = 20


def run_both(rng, package, model, folder, adapter=None, kv="int8", cuts=(16, 8)):
    """A prompt in several calls of `prefill`, then greedy steps of the package; the model is fed the same.

    Returns:
        `logits` and `wanted` (STEPS, vocab_size); how many codes of each writing block differ (`moved`), and by
        how much at most (`largest`); the largest key behind the last column (`unseen`).
    """
    suffix = "" if adapter is None else f"_{adapter}"
    prefill, decode = (package.function(f"{name}{suffix}") for name in ("prefill", "decode"))
    if adapter is not None:
        attach_adapter(model, folder / "adapters" / adapter)
    config = model.args
    cache, state, position = model.make_cache(kv), decode.make_state(), 0
    for length in cuts:
        tokens = rng.integers(0, config.vocab_size, (1, length)).astype(np.int32)
        found = prefill.predict({"tokens": tokens, "position": at(position)}, state)
        position += length
        assert found["next_position"] == position
        model.prefill(mx.array(tokens), cache)
    token, logits, wanted = int(rng.integers(config.vocab_size)), [], []
    for _ in range(STEPS):
        inputs = {"tokens": np.full((1, 1), token, np.int32), "position": at(position)}
        logits.append(decode.predict(inputs, state)["logits"][0])
        step = model(mx.array([[token]]), cache)[0, -1]
        wanted.append(np.array(step.astype(mx.float32)))
        token, position = int(logits[-1].argmax()), position + 1
    differences = [
        [
            np.abs(state[name][i, :, :position] - held(cache[i], block.self_attn, name, config))
            for name in ("keys", "values")
        ]
        for i, block in enumerate(model.model.layers)
    ]
    return SimpleNamespace(
        logits=np.stack(logits),
        wanted=np.stack(wanted),
        moved=[int(np.sum(np.array(d) > 0.5)) for d in differences],
        largest=np.max(differences),
        unseen=np.abs(state["keys"][:, :, position:]).max(initial=0),
    )


def at(position):
    return np.array([position], np.int32)


@pytest.mark.parametrize(
    ("packing", "ane", "adapter", "kv_bits"),
    [
        *all_pairs([None, *PACKINGS][:4], [False, True], [None, "a"], [None, 8]),
        ("scales behind tables", False, None, 8),
    ],
)
def test_a_prompt_and_twenty_steps(
    rng, write_model, tmp_path, monkeypatch, packing, ane, adapter, kv_bits
):
    """In float32, so that only an error in the program can make a difference of more than 1e-5.

    The model computes with floats of the int8 grid: its kernels for codes round, too. A sum on the boundary of
    two codes may still be rounded to either.
    """
    monkeypatch.setattr(layouts, "_MAX_ROWS", 40)
    if packing is None:
        config = random_config(rng, context_length=100, kv_bits=kv_bits)
    else:
        config = packable(rng, kv_bits=kv_bits)
    rules = [] if packing is None else rules_of(packing)
    folder = write_model(config, rules, adapters=["a"] if adapter else [])
    options = {"to": "coreml", "ane": ane, "dtype": "float32", "prompt_lengths": [16, 8]}
    path = convert(folder, tmp_path / "m.mlpackage", **options)
    package = Package(path, compute=np.float64)
    found = run_both(rng, package, decoded(folder, config), folder, adapter, kv="float")
    assert found.unseen == 0
    moved = next(filter(None, found.moved), 0)  # later blocks differ as a consequence
    assert moved <= (2 if kv_bits else 0)
    assert_same_answers(found, 1e-2 if moved else 1e-5)


@pytest.mark.parametrize(("ane", "adapter"), [(False, None), (True, "triage")])
def test_afm_nano_in_float16(rng, tmp_path, ane, adapter):
    """Rounded after each operation, as on a device: close to the engine with its packed products."""
    folder = tmp_path / "nano"
    left_out = {"draft", "redact", "todo"} | ({"triage"} - {adapter})
    shutil.copytree(
        resolve_model("afm-nano"), folder, ignore=shutil.ignore_patterns(*left_out, "*.json*l")
    )
    edit_config(folder, context_length=64)
    path = convert(folder, tmp_path / "m.mlpackage", to="coreml", ane=ane, prompt_lengths=[16, 8])
    weights, _ = package_size(path)
    stored = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
    assert abs(weights / stored - 1) < 0.03
    package = Package(path, round_floats=True)
    found = run_both(rng, package, load_model(folder), folder, adapter)
    assert found.largest <= 2
    assert_same_answers(found, 1e-2)
