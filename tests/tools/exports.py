"""Model folders to export to Core ML and Core AI, and the answers that exports must give."""

import itertools
import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import MODEL_TYPE
from afm_mlx.converters.graph_source import half_split
from afm_mlx.loading.load import load_model
from afm_mlx.model.model import Model
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.adapters import draw_tensors, write_folder
from tests.tools.compare import assert_close, error
from tests.tools.models import random_config, random_model


def packable(rng, **fixed):
    """Random sizes of which groups and words of codes are whole."""
    sizes = {"vocab_size": 96, "hidden_dim": 64, "num_layers": 3, "context_length": 100}
    sizes |= {"num_heads": int(rng.choice([2, 4, 8])), "num_kv_heads": int(rng.choice([1, 2]))}
    sizes |= {"num_kv_reuse_layers": int(rng.integers(0, 3))}
    sizes |= {"hidden_dim_scale_factor": float(rng.choice([2.0, 3.0]))}
    return random_config(rng, **(sizes | fixed))


PACKINGS = {
    "2 bits": ((2, "balanced"), (4, "balanced")),
    "4 bits": ((4, "balanced"), (8, "balanced", "tensor")),
    "all that the Neural Engine loads": (
        (2, "balanced"),
        (4, "balanced", "group", 32),
        (8, "balanced", "row"),
        (4, "affine"),
        (2, "affine", "tensor"),
        (8, "affine", "row"),
        (2, "palette"),
        (4, "palette", "row"),
        (2, "palette", "tensor"),
        (8, "balanced", "group", 32),
        (2, "balanced", "tensor"),
        (4, "palette", "group", 32),
    ),
    "scales behind tables": ((2, "balanced", "group", 32), (2, "affine"), (2, "affine", "row")),
}
"""Rules of layers, by what they are about; the embedding has the last one."""


def rules_of(name):
    return [QuantizationRule(*rule) for rule in PACKINGS[name]]


def write_model(folder, rng, config, rules=(), adapters=()):
    """Layers take the rules in turn; the last one is the embedding's. Without rules it is a float model."""
    model = random_model(config, rng)
    folder.mkdir()
    for path in adapters:
        write_folder(folder / "adapters" / path, draw_tensors(model, rng, 4))
    values = {"model_type": MODEL_TYPE, **config.to_dict()}
    if rules:
        turns = itertools.cycle(rules)

        def choose(path, module):
            return True if path == "model.embedding" else next(turns)

        model, values = quantize_model(model, values, rules[0], rules[-1], choose)
    save_weights(folder, dict(tree_flatten(model.parameters())))
    mx.eval(model.parameters())
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def decoded(folder, config):
    """The folder's model with float weights: its kernels for packed ones round by more than 1e-4."""
    packed, model = load_model(folder), Model(config)
    for path, module in packed.named_modules():
        if hasattr(module, "dequantize"):
            weight = module.dequantize(mx.float32)
            model.load_weights([(f"{path}.weight", weight)], strict=False)
    own = dict(tree_flatten(model.parameters()))
    kept = [(n, a) for n, a in tree_flatten(packed.parameters()) if own.get(n, a).shape == a.shape]
    model.load_weights([(n, a) for n, a in kept if n in own], strict=False)
    return model.eval()


def held(cache, attention, name, config):
    """What the states have to hold by the model's cache, (heads, columns, head_dim): floats, or int8 codes."""
    part = cache.keys_and_values()[("keys", "values").index(name)]
    numbers = np.array(part[0].astype(mx.float32))
    if config.kv_bits and not cache.int8:
        numbers = numbers / np.array(getattr(attention, f"quant_{name[:-1]}_scale"))
    return numbers[..., half_split(config.head_dim)] if name == "keys" else numbers


def assert_same_answers(found, bound):
    """The same logits, and in each step the same greatest one, unless two are as close as the bound."""
    assert error(found.logits, found.wanted) <= bound
    best = found.wanted.max(axis=1)
    chosen = np.take_along_axis(found.wanted, found.logits.argmax(axis=1)[:, None], axis=1)[:, 0]
    assert (best - chosen <= 2 * bound * np.abs(found.wanted).max()).all()


# -- loaded exports


def tokens_of(rng, runner, count):
    return rng.integers(0, runner.config.vocab_size, count).tolist()


def logits_of(model, tokens):
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def assert_prompts_of_all_lengths(rng, runner, model, lengths, bound):
    """Up to the context's last column, where no padding fits; the states still hold keys of longer prompts."""
    context = runner.config.context_length
    tokens = tokens_of(rng, runner, context)
    logits = logits_of(model, tokens)
    for length in rng.permutation([1, 2, *lengths, 5, 13, 17, 30, context - 1, context]).tolist():
        runner.rewind()
        assert_close(runner.logits(tokens[:length]), logits[length - 1], bound, f"{length} tokens")
        assert runner.position == length


def assert_a_prompt_in_parts_and_steps(rng, runner, model, bound):
    tokens = tokens_of(rng, runner, 30)
    runner.prefill(tokens[:7])
    runner.prefill([])
    runner.prefill(tokens[7:20])
    found = [runner.decode(token) for token in tokens[20:]]
    assert_close(np.stack(found), logits_of(model, tokens)[20:], bound)
    other = [*tokens[:11], *tokens_of(rng, runner, 5)]
    runner.rewind(11)
    assert_close(runner.logits(other[11:]), logits_of(model, other)[-1], bound)
