"""The draft model of an `.fmadapter` package: what its text computes, and which ones are refused."""

import functools
import itertools
import json
import shutil
import sys

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.formats import read_metadata
from afm_mlx.cli import main
from afm_mlx.converters.adapter_conversion import BaseFolder, convert_adapter
from afm_mlx.converters.coreml import draft
from afm_mlx.converters.coreml.mil_text import program_text
from afm_mlx.converters.coreml.plan import plan_package
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.loading.load import load_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.converters.coreml.conftest import packable
from tests.tools.adapters import draw_tensors, write_folder
from tests.tools.cases import each
from tests.tools.compare import error
from tests.tools.mil.blobs import BlobStorage
from tests.tools.mil.text import TextProgram, parse
from tests.tools.models import random_config, random_model

FILES = ["adapter_weights.bin", "draft.mil", "draft_weights.bin", "metadata.json"]
STEPS = 6
ROWS = (4, "balanced", "row"), (4, "balanced", "row")
PALETTES = (4, "palette"), (4, "palette", "row")


@pytest.fixture
def adapter(rng, tmp_path, write_model):
    """A function that writes an adapter with a draft model in its folder; returns it, and the base model."""
    numbers = itertools.count()

    def write(rules=(), **own):
        number, config = next(numbers), random_config(rng, vocab_size=96)
        folder = tmp_path / f"adapter-{number}"
        write_folder(folder, draw_tensors(random_model(config, rng), rng, 4))
        base = shutil.move(write_model(config), tmp_path / f"base-{number}")
        drawn = packable(rng, **({"num_kv_reuse_layers": 0, "num_layers": 2} | own))
        shutil.move(
            write_model(drawn, [QuantizationRule(*rule) for rule in rules]), folder / "draft"
        )
        return folder, BaseFolder.read(base)

    return write


@each(
    ("rules", "own", "dtype", "bound"),
    [
        ((), {"kv_bits": None}, "float32", 1e-5),
        ((), {"kv_bits": 8}, "float16", 5e-2),
        (ROWS, {"kv_bits": None}, "float32", 5e-3),
        (PALETTES, {"num_kv_reuse_layers": 1, "num_layers": 3}, "float16", 5e-2),
    ],
)
def test_a_draft_model_proposes_what_ours_does(
    adapter, tmp_path, monkeypatch, rng, rules, own, dtype, bound
):
    """A prompt, filled up to the length that `prefill` takes, and greedy steps.

    What is written is float16. In float32 nothing but an error in the program can make a difference of 1e-5 to
    a model of floats; our kernels for packed weights round more, and int8 codes may fall to either side.
    """
    monkeypatch.setattr(draft, "plan_package", functools.partial(plan_package, dtype=dtype))
    source, base = adapter(rules, **own)
    package = source.with_suffix(".fmadapter")
    convert_adapter(
        source, package, "fmadapter", base=base, package={"name": "a", "draft": source / "draft"}
    )
    assert sorted(path.name for path in package.iterdir()) == FILES
    functions = TextProgram(package / "draft.mil").functions
    assert sorted(functions) == ["decode", "prefill"]
    prefill, decode = functions["prefill"], functions["decode"]
    ((_, length),) = prefill.inputs["tokens"].shapes
    assert length == 64
    model = load_model(source / "draft")
    cache, state = model.make_cache(), decode.make_state()
    prompt = rng.integers(0, 96, 20).astype(np.int32)
    model.prefill(mx.array(prompt[None]), cache)
    filled = np.zeros((1, length), np.int32)
    filled[0, : len(prompt)] = prompt
    prefill.predict({"tokens": filled, "position": np.zeros(1, np.int32)}, state)
    token = int(rng.integers(96))
    for position in range(len(prompt), len(prompt) + STEPS):
        inputs = {"tokens": np.full((1, 1), token, np.int32)}
        inputs["position"] = np.array([position], np.int32)
        logits = decode.predict(inputs, state)["logits"][0]
        wanted = np.array(model(mx.array([[token]]), cache)[0, -1].astype(mx.float32))
        assert error(logits, wanted) <= bound
        token = int(wanted.argmax())


def test_packed_weights_stay_packed_and_the_text_is_the_program(adapter, tmp_path, monkeypatch):
    programs = []

    def text_of(program, **options):
        programs.append(program)
        return program_text(program, **options)

    monkeypatch.setattr(draft, "program_text", text_of)
    source, base = adapter(ROWS)
    own = {"draft": source / "draft"}
    convert_adapter(source, tmp_path / "a.fmadapter", "fmadapter", base=base, package=own)
    assert parse(program_text(programs[0], {}))[0].functions == programs[0].functions
    storage = BlobStorage(tmp_path / "a.fmadapter" / "draft_weights.bin")
    held = [storage.read(offset) for offset in storage.offsets()]
    packed = sum(array.size for kind, array in held if kind.name == "UINT4")
    matrices = load_model(source / "draft")
    numbers = sum(
        np.prod(module.dequantize(mx.float32).shape)
        for _, module in matrices.named_modules()
        if hasattr(module, "dequantize")
    )
    assert packed == numbers


def test_drafts_that_are_left_out_or_refused(adapter, tmp_path, monkeypatch, write_model, rng):
    source, base = adapter()
    out = tmp_path / "a.fmadapter"

    def refused(words, kind=CheckpointError, **package):
        with pytest.raises(kind, match=words) as caught:
            convert_adapter(source, out, "fmadapter", base=base, package=package)
        assert "Without a draft model: --draft none." in str(caught.value)
        assert not out.exists()

    other = write_model(packable(rng, vocab_size=64))
    refused("vocabulary of 64 tokens, and the base model one of 96", draft=other)
    config = other / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "llama"}))
    refused("is of the type 'llama'", draft=other)
    (source / "draft" / "model.safetensors").unlink()
    own = source / "draft"
    refused(r"The draft model .*model\.safetensors", AFMError, draft=own)
    with monkeypatch.context() as without:
        for name in [n for n in sys.modules if n.startswith("afm_mlx.converters.coreml.")]:
            without.delitem(sys.modules, name)
        without.setitem(sys.modules, "coremltools", None)
        refused(r"pip install .*\[coreml\]", AFMError, draft=own)
    convert_adapter(source, out, "fmadapter", base=base)
    assert read_metadata(out)[0].draft is None


def test_the_command_line_says_whose_program_it_is(adapter, tmp_path, capsys):
    source, _ = adapter()
    command = ["adapter", "convert", "--to", "fmadapter", "--name", "a", "--model"]
    for number, options in enumerate([[], ["--draft", str(source / "draft")], ["--draft", "none"]]):
        out, here = tmp_path / f"{number}.fmadapter", tmp_path / "base-0"
        main([*command, str(here), str(source), "--output", str(out), *options])
        said = (
            "Its draft model is a program of this package's own making" in capsys.readouterr().out
        )
        assert said == (read_metadata(out)[0].draft is not None) == (number == 1)
