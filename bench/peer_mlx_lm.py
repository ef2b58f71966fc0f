"""A worker that measures mlx-lm, on a folder that it can load, or on its own `afm7`.

mlx-lm can't quantize `afm7` (its fused layer takes no `mode`), so the quantized layers are put in here, with
random codes: 2-bit affine groups of 128, and a 4-bit embedding. Nothing of afm-mlx is imported: MLX runs with
the BLAS that it came with.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import afm7
from mlx_lm.utils import load_model

from bench.peer_protocol import Answer, peak_resident, serve


def quantized_model(sizes: dict[str, Any]) -> afm7.Model:
    """Make the model with random codes; its float weights are never computed, as nothing reads them."""
    model = afm7.Model(afm7.ModelArgs(model_type="afm7", **sizes))
    leaves = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            leaves.append((path, _linear(module)))
        elif isinstance(module, nn.Embedding):
            leaves.append(
                (path, _filled(nn.QuantizedEmbedding(1, 128, 128, 4), module.weight.shape))
            )
    for path, layer in leaves:
        owner: Any = model
        *parents, last = path.split(".")
        for key in parents:
            owner = owner[int(key)] if key.isdecimal() else owner[key]
        owner[last] = layer
    mx.eval(model.parameters())
    return model.eval()


def _linear(module: nn.Linear) -> nn.Module:
    if isinstance(module, afm7.FusedLinear):
        layer: nn.Module = afm7.FusedQuantizedLinear(128, [1], group_size=128, bits=2)
        layer.indices = module.indices
    else:
        layer = nn.QuantizedLinear(128, 1, bias=False, group_size=128, bits=2)
    return _filled(layer, module.weight.shape)


def _filled(layer: Any, shape: tuple[int, ...]) -> Any:
    rows, inputs = shape
    words = (rows, inputs * layer.bits // 32)
    layer.weight = mx.random.randint(0, 2**31 - 1, words).astype(mx.uint32)
    step = (12 / (4**layer.bits - 1) / inputs) ** 0.5
    layer.scales = mx.full((rows, inputs // layer.group_size), step)
    layer.biases = layer.scales * -((2**layer.bits - 1) / 2)
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--folder", type=Path, help="a folder that mlx-lm loads")
    source.add_argument("--sizes", type=json.loads, help="ModelArgs of `afm7` as JSON")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.folder is not None:
        model, _ = load_model(options.folder)
    else:
        model = quantized_model(options.sizes)
    load_seconds = time.perf_counter() - start
    # As from its `convert --dtype float32`: in bfloat16 a token takes 8 times as long on a CPU.
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    model.eval()

    def generate(prompt: int, tokens: int) -> list[float]:
        """Generate tokens; return the times in seconds of the start and of each token."""
        ids = mx.random.randint(0, model.args.vocab_size, (prompt,))
        mx.eval(ids)
        times = [time.perf_counter()]
        for _ in generate_step(ids, model, max_tokens=tokens):
            times.append(time.perf_counter())
        return times

    def warm_up() -> Answer:
        generate(1, 1)
        return {}

    def prefill(tokens: int) -> Answer:
        start, first = generate(tokens, 1)
        return {"tokens_per_second": tokens / (first - start)}

    def decode(tokens: int, rows: int, depth: int) -> Answer:
        if rows != 1:
            raise ValueError("mlx-lm is measured with one row")
        times = generate(depth, tokens + 2)
        # As in afm-mlx: no step is submitted with the last token.
        return {"tokens_per_second": tokens / (times[-2] - times[1])}

    def memory() -> Answer:
        return {"peak_resident_bytes": peak_resident(), "peak_memory_bytes": mx.get_peak_memory()}

    hello: Answer = {"weight_bytes": sum(a.nbytes for _, a in tree_flatten(model.parameters()))}
    if options.folder is not None:
        hello["load_seconds"] = load_seconds
    measurements = {"warm_up": warm_up, "prefill": prefill, "decode": decode, "memory": memory}
    serve(hello, measurements)


if __name__ == "__main__":
    main()
