"""Adapters with random numbers, and ways to run them."""

import contextlib
import gc
import threading

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.adapters.lora import lora_tensors
from afm_mlx.adapters.resident import OpenAdapter
from afm_mlx.adapters.target_modules import target_shapes
from tests.tools.cases import until

SIZES = {
    "vocab_size": 64,
    "hidden_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 4,
    "num_kv_reuse_layers": 2,
    "hidden_dim_scale_factor": 2.0,
}
KINDS = ["float", "packed"]
WAIT = 60  # seconds until a test gives up on another thread; the machine may have much else to do


def randomize_lora(model, rng):
    """Random B, and all numbers such that float16 holds them, which adapters run in."""
    drawn = {
        name: drawn_like(tensor, rng) if ".lora_b" in name else tensor
        for name, tensor in lora_tensors(model).items()
    }
    model.load_weights(
        [(name, tensor.astype(mx.float16).astype(mx.float32)) for name, tensor in drawn.items()],
        strict=False,
    )


def drawn_like(array, rng):
    return mx.array(rng.normal(0, 0.5 * array.shape[0] ** -0.5, array.shape).astype(np.float32))


def some_tokens(rng, rows=2, length=9):
    return mx.array(rng.integers(0, SIZES["vocab_size"], (rows, length)))


def steps(model, cache, tokens):
    return mx.concatenate([model(token[:, None], cache) for token in tokens.T], axis=1)


def ragged_cache(model, prompts, kv):
    caches = []
    for prompt in prompts:
        caches.append(model.make_cache(kv))
        model.prefill(mx.array(prompt[None]), caches[-1])
    return [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]


def draw_tensors(model, rng, rank, keys="", strength=0.5):
    """Tensors of an adapter by their names in files; on the layers whose path contains `keys` only."""
    tensors = {}
    for path, sections in target_shapes(model).items():
        for end, (inputs, outputs) in sections.items():
            if keys in path:
                a = rng.normal(0, inputs**-0.5, (inputs, rank))
                b = rng.normal(0, strength * rank**-0.5, (rank, outputs))
                tensors[f"{path}.lora_a{end}"] = a.astype(np.float16)
                tensors[f"{path}.lora_b{end}"] = b.astype(np.float16)
    return tensors


def write_folder(folder, tensors, scale=0.5, fingerprint=None):
    """An adapter folder of such tensors."""
    (rank,) = {t.shape[1] for name, t in tensors.items() if ".lora_a" in name}
    arrays = {name: mx.array(tensor) for name, tensor in tensors.items()}
    save_adapter(folder, arrays, AdapterConfig(rank, scale, -1, base_model_fingerprint=fingerprint))
    return folder


def state(pool, name):
    return {entry["name"]: entry for entry in pool.describe()["adapters"]}[name]


def hold_and_wait(pool, held, waiting):
    """Leases of an adapter, and of another one that there is no memory for until the first is released."""
    holding = pool.request(held)
    assert holding.wait(WAIT)
    asked = pool.request(waiting)
    until(lambda: state(pool, waiting)["state"] == "waiting")
    return holding, asked


@contextlib.contextmanager
def gated_reads(monkeypatch):
    """Reads of adapters wait until the event is set; its `reached` says that one has begun."""
    opened, reached, read = threading.Event(), threading.Event(), OpenAdapter.read

    def gated(self):
        reached.set()
        assert opened.wait(WAIT)
        return read(self)

    monkeypatch.setattr(OpenAdapter, "read", gated)
    opened.reached = reached
    yield opened
    opened.set()


def memory_falls_to(nbytes):
    """Wait until MLX's arrays take no more than that: garbage, and other threads' frames, go a moment later."""

    def reached():
        gc.collect()
        return mx.get_active_memory() <= nbytes

    until(reached)


def deltas(resident, model):
    """What an adapter adds to each matrix, (N, K) float64, from its flat array."""
    numbers, added = np.array(resident.numbers, np.float64), {}
    for path, part in resident.parts.items():
        shapes = list(target_shapes(model)[path].values())
        inputs, outputs = shapes[0][0], sum(width for _, width in shapes)
        rank, blocks = part.rank, -(-outputs // 16)
        a = numbers[part.a : part.a + len(shapes) * rank * inputs].reshape(-1, rank, inputs)
        b = numbers[part.b : part.b + blocks * rank * 16].reshape(blocks, rank, 16)
        b = b.swapaxes(1, 2).reshape(-1, rank)[:outputs]
        ends = np.cumsum([width for _, width in shapes])[:-1]
        products = [part_b @ a[i] for i, part_b in enumerate(np.split(b, ends))]
        added[path] = resident.scale * np.concatenate(products)
    return added
