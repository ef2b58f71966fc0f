"""`--adapter-path`, where a model runs."""

import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.attach import attach_adapter, detach_adapter
from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.loading import load
from tests.tools.cli import answer, lines


@pytest.fixture
def adapter(folder, tmp_path, rng):
    """An adapter of the tiny model that changes what it says."""
    model, _ = load(folder)
    add_lora(model, 4, 0.5, seed=int(rng.integers(2**31)))
    drawn = {
        n: mx.array(rng.normal(0, 0.5, t.shape).astype(np.float32)) if ".lora_b" in n else t
        for n, t in lora_tensors(model).items()
    }
    model.load_weights(list(drawn.items()), strict=False)
    save_lora(model, tmp_path / "adapter", folder)
    return tmp_path / "adapter"


def test_load_attaches(folder, adapter):
    tokens = mx.array([[1, 2, 3]])
    bare, adapted = load(folder)[0], load(folder, adapter_path=str(adapter))[0]
    plain, wanted = bare(tokens), attach_adapter(bare, adapter)(tokens)
    assert mx.array_equal(adapted(tokens), wanted)
    assert not mx.allclose(wanted, plain, atol=0.05)
    assert mx.array_equal(detach_adapter(adapted)(tokens), plain)


def test_commands_run_it(folder, adapter, run, tmp_path):
    data = lines(tmp_path / "texts.jsonl", {"text": "A list of names and what they are for."})
    found = {}
    for command, argv in {
        "generate": ("-p", "A list", "-m", 12),
        "perplexity": ("--data-path", data),
    }.items():
        outputs = []
        for options in ((), ("--adapter-path", adapter)):
            status, out, err = run(command, "--model", folder, *argv, "--json", *options)
            assert (status, err) == (0, "")
            outputs.append(json.loads(out))
        found[command] = outputs
    texts = [result["text"] for result in found["generate"]]
    assert texts[0] == answer(folder, "A list")
    assert texts[1] != texts[0]
    plain, adapted = (result["perplexity"] for result in found["perplexity"])
    assert plain != pytest.approx(adapted, rel=1e-3)


def test_a_prompt_cache_is_not_shared(folder, adapter, run, fails, tmp_path):
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 3)
    cache = ("--prompt-cache-file", tmp_path / "cache.safetensors")
    assert run(*argv, *cache)[0] == 0
    assert run(*argv, *cache)[0] == 0
    assert "made with another adapter" in fails(*argv, *cache, "--adapter-path", adapter)


def test_another_model_s_adapter_is_one_line(adapter, fails):
    line = fails("generate", "--adapter-path", adapter, "-p", "x")  # the embedded model
    assert "was made for the model with fingerprint" in line
