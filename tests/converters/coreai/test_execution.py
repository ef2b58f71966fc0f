"""What bundles compute when Apple's runtime executes them, on Linux too, against the model."""

import itertools
import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.converters.convert import convert
from afm_mlx.converters.coreai.adapter_file import write_adapter_file
from afm_mlx.coreai.adapter_file import read_adapter_arrays
from afm_mlx.coreai.bundle import CoreAIBundle
from afm_mlx.loading.load import load_model
from afm_mlx.loading.resolve import resolve_model
from tests.conftest import SEED
from tests.tools.adapters import draw_tensors, write_folder
from tests.tools.compare import error
from tests.tools.coreai import Executed, ints, make_states
from tests.tools.exports import assert_same_answers, decoded, held, packable, rules_of
from tests.tools.models import random_config

LENGTH = 12


def run_both(rng, executed, model, folder, *, adapter=None, own=False, steps=12):
    """A prompt of two calls, the second with padding, then steps; the model is fed the same.

    The adapter is an input, or with `own` it has functions. A sum on the boundary of two int8 codes may be
    rounded to either, which later blocks amplify: after each call, the states get the model's codes.

    Returns:
        `logits` and `wanted` (calls, vocab_size), and `moved` (calls,), see `synchronize`.
    """
    bundle = CoreAIBundle.read(executed.path)
    config, states = model.args, make_states(bundle.config, bundle.dtype)
    suffix, arrays = "", {}
    if own:
        suffix = f"_{adapter}"
    elif adapter is not None:
        suffix = "_adapter"
        arrays = read_adapter_arrays(executed.path / "adapter.safetensors", bundle)
    if adapter is not None:
        attach_adapter(model, folder / "adapters" / adapter, force=True)
    tokens = rng.integers(0, config.vocab_size, 2 * LENGTH - 3 + steps).astype(np.int32)
    cache, logits, wanted, moved = model.make_cache("float"), [], [], []

    def feed(first, count):
        part = np.zeros((1, LENGTH if count > 1 else 1), np.int32)
        part[0, :count] = tokens[first : first + count]
        inputs = {"tokens": part, "position": ints(first), **arrays}
        name = f"step{suffix}"
        if count > 1:
            inputs["count"], name = ints(count), f"prompt_{LENGTH}{suffix}"
        logits.append(executed.call(name, inputs, states)[0])
        fed = mx.array(tokens[None, first : first + count])
        wanted.append(np.array(model(fed, cache)[0, -1].astype(mx.float32)))
        moved.append(synchronize(states, cache, model, first + count))

    feed(0, LENGTH)
    feed(LENGTH, LENGTH - 3)
    for i in range(steps):
        feed(2 * LENGTH - 3 + i, 1)
    return SimpleNamespace(logits=np.stack(logits), wanted=np.stack(wanted), moved=np.array(moved))


def synchronize(states, cache, model, count):
    """Give the states the model's codes where they are the next ones.

    Returns:
        how many differed in the first block where any did: later blocks have other inputs then.
    """
    moved = np.zeros(len(model.model.layers), int)
    for name in states:
        array = states[name].numpy().copy()
        for i, block in enumerate(model.model.layers):
            right = held(cache[i], block.self_attn, name, model.args)
            found = array[i, 0, :, :count]
            difference = np.abs(found - right)
            moved[i] += (difference > 0.5).sum()
            if model.args.kv_bits:
                found[...] = np.where(difference < 1.5, np.rint(right), found)
        states[name] = type(states[name])(array)
    return next(filter(None, moved.tolist()), 0)


def assert_equal(found, kv_bits, codes=2, bound=1e-4):
    """Equal logits in calls where no code moved, and nearly equal ones where up to `codes` did."""
    moved = found.moved > 0
    assert found.moved.max() <= (codes if kv_bits else 0)
    assert moved.mean() <= 0.2
    assert_same_answers(found, 1e-2)
    scale = np.abs(found.wanted).max()
    assert np.abs(found.logits - found.wanted)[~moved].max() <= bound * scale


@pytest.mark.parametrize(
    ("packing", "adapter", "kv_bits", "writing", "reuse"),
    [
        (None, "a", None, 2, 0),
        (None, None, 8, 1, 1),
        ("2 bits", "a", 8, 1, 1),
        ("4 bits", None, None, 1, 1),
        ("all that the Neural Engine loads", None, 8, 2, 1),
        ("scales behind tables", "a", 8, 2, 0),
    ],
)
def test_a_prompt_in_two_calls_and_steps(
    rng, write_model, tmp_path, packing, adapter, kv_bits, writing, reuse
):
    """In float32: floats, and codes of 2, 4 and 8 bits as the asset ships them; and `main` of each asset."""
    # Few blocks: compiling the functions takes most of the time.
    sizes = {"num_layers": writing + reuse, "num_kv_reuse_layers": reuse}
    draw = random_config if packing is None else packable
    config = draw(rng, context_length=80, kv_bits=kv_bits, **sizes)
    rules = [] if packing is None else rules_of(packing)
    folder = write_model(config, rules, adapters=["a"])
    path = convert(
        folder,
        tmp_path / "bundle",
        to="coreai",
        dtype="float32",
        prompt_lengths=[LENGTH],
        adapter_rank=6 if adapter else None,  # the adapter has rank 4
    )
    if adapter:
        bundle = CoreAIBundle.read(path)
        write_adapter_file(folder / "adapters" / "a", bundle, path / "adapter.safetensors")
    model = decoded(folder, config)
    with Executed(path) as executed:
        check_main(rng, executed, model)
        found = run_both(rng, executed, model, folder, adapter=adapter, steps=50)
    assert_equal(found, kv_bits)


def test_adapters_with_functions_of_their_own(rng, write_model, tmp_path):
    """Several in an asset, one for some of the matrices: equal to the model's, and `main` too.

    For Apple's Swift code a folder for each is the same bundle with another `main`.
    """
    config = packable(rng, context_length=50, kv_bits=None, num_layers=2, num_kv_reuse_layers=1)
    folder = write_model(config, rules_of("2 bits"), adapters=["a"])
    some = draw_tensors(load_model(folder), rng, 3, keys="mlp")
    write_folder(folder / "adapters" / "b", some)
    options = {"dtype": "float32", "prompt_lengths": [LENGTH], "adapter_functions": ["a", "b"]}
    path = convert(folder, tmp_path / "bundle", to="coreai", **options)
    model, answers = decoded(folder, config), []
    with Executed(path) as executed:
        for adapter in ("b", None, "a"):
            child = np.random.default_rng(SEED)
            found = run_both(child, executed, model, folder, adapter=adapter, own=bool(adapter))
            assert_equal(found, None)
            answers.append(found.wanted)
            view = path / "adapters" / adapter if adapter else path
            metadata = json.loads((view / "metadata.json").read_text())
            (main,) = metadata["language"]["function_map"]["main"]
            assert (view / metadata["assets"]["main"]).samefile(path / "bundle.aimodel")
            assert (view / "tokenizer").is_dir()
            check_main(rng, executed, model, main)
            detach_adapter(model)
    for one, other in itertools.combinations(answers, 2):
        assert error(one, other) > 1e-2


def check_main(rng, executed, model, name="main"):
    """`main` with sizes that are known only when it runs: parts of a prompt, and states of other lengths."""
    config = model.args
    cache, states = model.make_cache("float"), make_states(config, np.float32, columns=30)
    tokens = rng.integers(0, config.vocab_size, (1, 25)).astype(np.int32)
    for first, after in ((0, 9), (9, 24), (24, 25)):
        inputs = {
            "input_ids": tokens[:, first:after],
            "position_ids": np.arange(after, dtype=np.int32)[None],
        }
        logits = executed.call(name, inputs, states)
        wanted = model(mx.array(tokens[:, first:after]), cache)
        moved = synchronize(states, cache, model, after)
        assert error(logits, wanted) < (1e-2 if moved else 1e-4)  # see `assert_equal`
        assert moved <= (2 if config.kv_bits else 0)


def test_float16(rng, write_model, tmp_path):
    config = packable(rng, context_length=50, num_layers=2, num_kv_reuse_layers=1)
    folder = write_model(config, rules_of("2 bits"))
    path = convert(folder, tmp_path / "bundle", to="coreai", prompt_lengths=[LENGTH])
    with Executed(path) as executed:
        found = run_both(rng, executed, decoded(folder, config), folder, steps=4)
    assert error(found.logits, found.wanted) < 3e-2


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, "triage"])
def test_afm_nano_with_fifty_steps(rng, tmp_path, adapter):
    folder = resolve_model("afm-nano")
    path = tmp_path / "bundle"
    options = {"context": 128, "adapter_rank": 16 if adapter else None}
    convert(folder, path, to="coreai", dtype="float32", prompt_lengths=[LENGTH], **options)
    if adapter:
        bundle = CoreAIBundle.read(path)
        write_adapter_file(folder / "adapters" / adapter, bundle, path / "adapter.safetensors")
    model = decoded(folder, load_model(folder).args)
    with Executed(path) as executed:
        found = run_both(rng, executed, model, folder, adapter=adapter, steps=50)
    assert_equal(found, 8, codes=20)
