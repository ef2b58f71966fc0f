"""A worker that measures this package, on a model folder and through its engine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.loading.load import load_model
from afm_mlx.measure.benchmark import Bench, BenchmarkCase, BenchmarkResult, run_case, step_cost
from afm_mlx.quantization.packed_layers import set_activation_bits
from bench.peer_protocol import Answer, peak_resident, serve


class Ours:
    """A model, and the cases that have been warmed up."""

    def __init__(self, folder: Path, activation_bits: int):
        start = time.perf_counter()
        self.model = load_model(folder)
        self.load_seconds = time.perf_counter() - start
        set_activation_bits(self.model, activation_bits)
        self._warm: set[BenchmarkCase] = set()

    def run(self, case: BenchmarkCase) -> tuple[float, float]:
        """Seconds to the first token, and from there to the last but one."""
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
        cost = step_cost(self.model, case, "int8")
        return {
            "tokens_per_second": rows * tokens / seconds,
            "bytes_per_step": cost.weight_bytes + cost.kv_bytes,
            "operations_per_step": cost.operations,
        }

    def memory(self, prompt: int, tokens: int) -> Answer:
        result: BenchmarkResult = run_case(self.model, BenchmarkCase(prompt, tokens), 1)
        assert result.cost is not None
        return {
            "peak_memory_bytes": result.peak_memory,
            "peak_resident_bytes": result.peak_resident or peak_resident(),
            "cache_bytes": result.cost.cache_bytes,
            "weight_bytes": result.cost.weight_bytes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--activation-bits", type=int, required=True)
    options = parser.parse_args()
    ours = Ours(options.folder, options.activation_bits)
    hello: dict[str, Any] = {
        "load_seconds": ours.load_seconds,
        "device": str(mx.default_device()),
        "weight_bytes": step_cost(ours.model, BenchmarkCase(), "int8").weight_bytes,
    }
    names = ("warm_up", "prefill", "decode", "memory")
    serve(hello, {name: getattr(ours, name) for name in names})


if __name__ == "__main__":
    main()
