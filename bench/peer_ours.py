"""A worker that measures this package, on a model folder and through its engine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.config import is_afm_config, read_config_json
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Embedding, Request
from afm_mlx.loading.load import load_model
from afm_mlx.measure.benchmark import Bench, BenchmarkCase, BenchmarkResult, run_case, step_cost
from afm_mlx.model.model import is_afm
from afm_mlx.quantization.packed_layers import set_activation_bits
from bench.peer_protocol import Answer, peak_resident, serve

NO_TOKENIZER: Any = SimpleNamespace(
    eos_token_ids=set(), detokenizer=SimpleNamespace(add_token=lambda token: None)
)
"""What an engine needs of a tokenizer if no row generates."""


def load(folder: Path) -> tuple[nn.Module, float]:
    """Load the model of a folder, without a tokenizer; return it and the seconds that loading took."""
    if is_afm_config(read_config_json(folder / "config.json")):
        start = time.perf_counter()
        return load_model(folder), time.perf_counter() - start
    # What is imported is no part of the loading, here and in the other programs.
    import mlx_lm.utils  # noqa: F401

    from afm_mlx.loading.mlx_lm_models import open_mlx_lm_model, read_model

    start = time.perf_counter()
    model, _ = open_mlx_lm_model(folder)
    read_model(model, folder)
    return model, time.perf_counter() - start


class Ours:
    """A model, and the cases that have been warmed up."""

    def __init__(self, folder: Path, activation_bits: int):
        self.model, self.load_seconds = load(folder)
        set_activation_bits(self.model, activation_bits)
        self._warm: set[BenchmarkCase] = set()

    def run(self, case: BenchmarkCase) -> tuple[float, float]:
        """Run a case; return seconds to the first token, and from there to the last but one."""
        bench = Bench(self.model, case, "int8", None, np.random.default_rng(len(self._warm)))
        if case not in self._warm:
            bench.run(3)
            self._warm.add(case)
        return bench.run(case.generated_tokens)

    def warm_up(self) -> Answer:
        self.run(BenchmarkCase(8, 3))
        return {}

    def prefill(self, tokens: int) -> Answer:
        first, _ = self.run(BenchmarkCase(tokens, 3))
        return {"tokens_per_second": tokens / first}

    def decode(self, tokens: int, rows: int, depth: int) -> Answer:
        case = BenchmarkCase(1, tokens + 2, rows, depth)
        _, seconds = self.run(case)
        answer = {"tokens_per_second": rows * tokens / seconds}
        if not is_afm(self.model):
            return answer
        cost = step_cost(self.model, case, "int8")
        return answer | {
            "bytes_per_step": cost.weight_bytes + cost.kv_bytes,
            "operations_per_step": cost.operations,
        }

    def embed(self, lengths: list[int], together: bool) -> Answer:
        """Compute the vector of each text's last token, all together or one at a time."""
        engine = Engine(self.model, NO_TOKENIZER, max_batch=32 if together else 1)
        size = int(self.model.args.vocab_size)
        rng = np.random.default_rng(0)
        start = time.perf_counter()
        for length in lengths:
            prompt = rng.integers(8, size, length).tolist()
            engine.submit(Request(prompt, 0, embedding=Embedding()))
        for response in engine.run():
            if response.error is not None:
                raise response.error
        return {"texts_per_second": len(lengths) / (time.perf_counter() - start)}

    def memory(self, prompt: int, tokens: int) -> Answer:
        result: BenchmarkResult = run_case(self.model, BenchmarkCase(prompt, tokens), 1)
        answer = {
            "peak_memory_bytes": result.peak_memory,
            "peak_resident_bytes": result.peak_resident or peak_resident(),
            "weight_bytes": weight_bytes(self.model),
        }
        return answer if result.cost is None else answer | {"cache_bytes": result.cost.cache_bytes}


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters in memory."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--activation-bits", type=int, required=True)
    options = parser.parse_args()
    ours = Ours(options.folder, options.activation_bits)
    hello: dict[str, Any] = {
        "load_seconds": ours.load_seconds,
        "device": str(mx.default_device()),
        "weight_bytes": weight_bytes(ours.model),
    }
    names = ("warm_up", "prefill", "decode", "memory", "embed")
    serve(hello, {name: getattr(ours, name) for name in names})


if __name__ == "__main__":
    main()
