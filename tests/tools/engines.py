"""Engines with adapters in tests: small models, adapters and what they are defined as, prompts, responses."""

import copy

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.target_modules import target_modules
from afm_mlx.engine.engine import Engine
from afm_mlx.quantization.quantize_model import dequantize_model, quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.adapters import SIZES, draw_tensors, write_folder
from tests.tools.models import random_config, random_model

BITS = {"float": None, "2-bit": 2, "4-bit": 4}


def tiny(rng, kind="float", kv_bits=None):
    model = random_model(random_config(rng, **SIZES, kv_bits=kv_bits), rng)
    if BITS[kind]:
        quantize_model(model, {}, QuantizationRule(BITS[kind]), QuantizationRule(4))
    return model.eval()


class Adapters:
    """Random adapters in folders, and what each adds to each matrix."""

    def __init__(self, model, rng, folder):
        self.model, self.rng, self.folder = model, rng, folder
        self.added = {}

    def add(self, pool, name, rank, keys=""):
        scale = float(self.rng.uniform(0.3, 1))
        tensors = draw_tensors(self.model, self.rng, rank, keys)
        write_folder(self.folder / name, tensors, scale)
        self.added[name] = scale, tensors
        pool.register(name, self.folder / name)

    def merged(self, weights):
        """A float model whose weights have the adapters added: the definition."""
        model = dequantize_model(copy.deepcopy(self.model))
        for name, weight in weights.items():
            scale, tensors = self.added[name]
            for place in target_modules(model):
                parts = []
                for end, (inputs, outputs) in place.shapes.items():
                    a = tensors.get(f"{place.path}.lora_a{end}", np.zeros((inputs, 1)))
                    b = tensors.get(f"{place.path}.lora_b{end}", np.zeros((1, outputs)))
                    parts.append((a.astype(np.float64) @ b.astype(np.float64)).T)
                delta = weight * scale * np.concatenate(parts)
                place.linear.weight = place.linear.weight + mx.array(delta.astype(np.float32))
        return model.eval()


def some_prompt(rng, length):
    return rng.integers(0, SIZES["vocab_size"], int(length)).tolist()


def forced(tokens):
    """A sampler that takes these tokens, so that runs with other rounding see the same ones."""
    left = list(tokens)
    return lambda logprobs: mx.array([left.pop(0)])


def run(engine):
    found = {}
    for response in engine.run():
        found.setdefault(response.row, []).append(response)
    return found


def run_one(model, tokenizer, request, **options):
    """Responses of one request alone, in an engine with these options."""
    engine = Engine(model, tokenizer, **options)
    row = engine.submit(request)
    return run(engine)[row]


def naive_greedy(model, prompt, count):
    """The likeliest next tokens, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1]).item()))
    return tokens[len(prompt) :]


def tokens_of(found):
    return {row: [response.token for response in responses] for row, responses in found.items()}


def logprobs_of(responses):
    assert all(r.error is None for r in responses), responses[-1].error
    return np.stack([np.array(r.logprobs, np.float64) for r in responses])


def wanted_logprobs(model, prompt, tokens):
    logits = np.array(model(mx.array([prompt + tokens]))[0], np.float64)[len(prompt) - 1 : -1]
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
