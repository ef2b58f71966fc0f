"""Adapters of mlx-lm's architectures: rows of one batch, each with its own, give mlx-lm's numbers."""

import copy
import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.lora import add_lora, save_lora
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.checkpoint.stored_layers import repack_mlx_layers
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import AFMError, RequestError
from afm_mlx.loading.load import load
from afm_mlx.model.zoo_blocks import replace_blocks
from afm_mlx.quantization.quantize_model import dequantize_model, quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.adapters import SIZES, drawn_like, randomize_lora, some_tokens
from tests.tools.compare import assert_close, error
from tests.tools.engines import logprobs_of, naive_greedy, some_prompt, wanted_logprobs
from tests.tools.models import WordTokenizer
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

# Mistral runs in Llama's class. Phi-3 has fused queries, keys and values; LFM2 and Falcon-H1 have states.
DENSE = ["llama", "qwen3", "gemma3_text", "phi3", "lfm2", "falcon_h1"]
EXPERTS = ["gpt_oss", "qwen3_moe"]


@pytest.fixture
def zoo(rng):
    """A function (model type) -> a random model with a small vocabulary."""
    return lambda kind: zoo_model(kind, SIZES["vocab_size"], int(rng.integers(2**31)))


def is_plain(path, layer):
    return type(layer) in (nn.Linear, nn.Embedding)


@pytest.mark.parametrize("stored", ["float", "mlx-lm", "balanced"])
@pytest.mark.parametrize("kind", [*DENSE, *EXPERTS])
def test_rows_with_different_adapters(zoo, rng, tmp_path, kind, stored):
    """The third adapter is loaded while rows with the first two decode, and takes the first one's memory."""
    model = zoo(kind)
    if stored == "mlx-lm":
        nn.quantize(model, group_size=32, bits=4)
    elif stored == "balanced":
        rules = QuantizationRule(2), QuantizationRule(4)
        quantize_model(model, {}, *rules, predicate=is_plain)
    wanted = {None: dequantize_model(copy.deepcopy(model)) if stored == "balanced" else model}
    for name, rank in zip("abc", (4, 3, 8), strict=True):
        trained = add_lora(copy.deepcopy(model), rank, 0.7, seed=rank)
        randomize_lora(trained, rng)
        save_lora(trained, tmp_path / name)
        wanted[name] = load_adapters(copy.deepcopy(wanted[None]), str(tmp_path / name)).eval()

    runs = copy.deepcopy(model)
    repack_mlx_layers(runs)
    replace_blocks(runs)
    tokenizer = WordTokenizer(SIZES["vocab_size"])
    tokenizer.eos_token_ids = set()
    asked = {}
    with AdapterPool(runs.eval()) as pool:
        for name in "abc":
            pool.register(name, tmp_path / name)
        engine = Engine(runs, tokenizer, adapters=pool)

        def submit(adapter, length):
            prompt = some_prompt(rng, length)
            row = engine.submit(Request(prompt, max_tokens=6, adapter=adapter))
            asked[row] = adapter, prompt

        for adapter, length in [(None, 5), ("a", 30), ("b", 3)]:
            submit(adapter, length)
        responses = [response for _ in range(4) for response in engine.step()]
        submit("c", 9)
        responses += list(engine.run())
    for row, (adapter, prompt) in asked.items():
        mine = [response for response in responses if response.row == row]
        found, tokens = logprobs_of(mine), [response.token for response in mine]
        assert_close(found, wanted_logprobs(wanted[adapter], prompt, tokens), what=(adapter, kind))
        assert tokens == naive_greedy(wanted[adapter], prompt, 6)


@pytest.mark.parametrize("kind", [*DENSE, *EXPERTS])
def test_adapters_of_mlx_lm(zoo, rng, tmp_path, kind):
    """Trained by mlx-lm: on the last block; LoRA, DoRA and whole layers; on experts, too."""
    folder, tokens = tmp_path / "model", some_tokens(rng)
    write_zoo_folder(folder, kind, zoo(kind), word_tokenizer_json(SIZES["vocab_size"]))
    settings = None
    for tune_type in ("lora", "dora", "full"):
        path = tmp_path / tune_type
        theirs = load(folder)[0]
        theirs.freeze()
        if tune_type == "full":
            theirs.layers[-1].unfreeze()
        else:
            is_dora, settings = tune_type == "dora", {"rank": 3, "scale": 2.0, "dropout": 0.0}
            if is_dora and kind in EXPERTS:  # mlx-lm has no DoRA of experts
                settings["keys"] = ["self_attn.v_proj"]
            linear_to_lora_layers(theirs, 1, settings, use_dora=is_dora)
        trained = tree_flatten(theirs.trainable_parameters())
        weights = {n: a + 0.2 * drawn_like(a, rng).astype(mx.float16) for n, a in trained}
        theirs.load_weights(list(weights.items()), strict=False)
        path.mkdir()
        mx.save_safetensors(str(path / "adapters.safetensors"), weights)
        values = {"fine_tune_type": tune_type, "num_layers": 1, "lora_parameters": settings}
        (path / "adapter_config.json").write_text(json.dumps(values))
        wanted = theirs.eval()(tokens)
        assert error(wanted, load(folder)[0](tokens)) > 0.01
        assert_close(load(folder, adapter_path=str(path))[0](tokens), wanted, 1e-5)
        switched = load(folder)[0]
        if tune_type == "lora" and kind in DENSE:
            assert_close(attach_adapter(switched, path)(tokens), wanted)
        else:
            message = f"fine_tune_type is '{tune_type}'; 'lora' is the kind that works here"
            if tune_type == "lora":
                message = r"changes each expert of model\.layers\.1\.mlp\..*down_proj, .*--keys"
            with pytest.raises(AFMError, match=message):
                attach_adapter(switched, path)


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_no_layers_to_train(zoo, kind):
    model = zoo(kind)
    name = next(path for path, layer in model.layers[0].named_modules() if "down_proj" in path)
    with pytest.raises(
        RequestError, match=f"No block has a linear layer {name} that an adapter can change"
    ):
        add_lora(model, 2, 1.0, keys=[name])
