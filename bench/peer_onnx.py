"""A worker that measures ONNX Runtime's `MatMulNBits` on AFM's matrices; runs in that package's environment.

Everything of the model but attention: RMSNorm, products, SwiGLU and residuals, with the queries in the place of
what attention would make of them; so its figures are upper bounds. Weights are random codes of 2 bits, of 4 in
the head; keys and values are computed where AFM computes them, and thrown away. As in AFM, only tokens whose
logits are wanted run through the blocks that reuse keys and values.

Nothing of afm-mlx is imported but the pipe's protocol.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.peer_protocol import Answer, peak_resident, serve

GROUP = 128  # weights of a scale: of the sizes that its 2-bit kernels take, the one with the fewest bytes
INT8 = 4  # `accuracy_level` of products with activations of 8 bits


class Node(NamedTuple):
    """An operation of the graph; a name among `inputs` that no node has as an output is a tensor of weights."""

    kind: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]


class Sizes(NamedTuple):
    """The sizes of AFM's configuration that its products follow from."""

    num_layers: int
    num_kv_reuse_layers: int
    hidden_dim: int
    ffn_dim: int
    kv_dim: int
    vocab_size: int
    rms_norm_eps: float


def nodes(sizes: Sizes) -> Iterator[Node]:
    """Yield the graph from `x` (tokens, hidden_dim) to `logits` of the tokens that `wanted` numbers."""
    d = sizes.hidden_dim
    x = "x"
    writing = sizes.num_layers - sizes.num_kv_reuse_layers

    def product(name: str, source: str, rows: int, inputs: int, bits: int = 2) -> Node:
        attributes = {
            "K": inputs,
            "N": rows,
            "bits": bits,
            "block_size": GROUP,
            "accuracy_level": INT8,
        }
        return Node("MatMulNBits", [source, f"{name}.codes", f"{name}.scales"], [name], attributes)

    def norm(name: str, source: str) -> Node:
        attributes = {"epsilon": sizes.rms_norm_eps, "axis": -1}
        return Node("SimplifiedLayerNormalization", [source, f"{name}.weight"], [name], attributes)

    for block in range(sizes.num_layers):
        if block == writing:
            yield Node("Gather", [x, "wanted"], ["rest"], {"axis": 0})
            x = "rest"
        own = f"blocks.{block}."
        yield norm(own + "norm", x)
        if block < writing:
            yield product(own + "qkv", own + "norm", d + 2 * sizes.kv_dim, d)
            parts = [own + "queries", own + "kv"]
            yield Node("Split", [own + "qkv", "parts"], parts, {"axis": -1})
        else:
            yield product(own + "queries", own + "norm", d, d)
        yield product(own + "output", own + "queries", d, d)
        yield Node("Add", [x, own + "output"], [own + "middle"], {})
        yield norm(own + "ffn_norm", own + "middle")
        yield product(own + "gate", own + "ffn_norm", sizes.ffn_dim, d)
        yield product(own + "up", own + "ffn_norm", sizes.ffn_dim, d)
        yield Node("Sigmoid", [own + "gate"], [own + "sigmoid"], {})
        yield Node("Mul", [own + "gate", own + "sigmoid"], [own + "silu"], {})
        yield Node("Mul", [own + "silu", own + "up"], [own + "product"], {})
        yield product(own + "down", own + "product", d, sizes.ffn_dim)
        yield Node("Add", [own + "middle", own + "down"], [own + "out"], {})
        x = own + "out"
    if sizes.num_kv_reuse_layers == 0:
        yield Node("Gather", [x, "wanted"], ["rest"], {"axis": 0})
        x = "rest"
    yield norm("norm", x)
    yield product("logits", "norm", sizes.vocab_size, d, bits=4)


def write_model(path: Path, sizes: Sizes, seed: int = 0) -> None:
    """Write the graph and its weights to an ONNX file, and the weights' bytes to a second file.

    Scales keep activations in a trained model's range; norms are 1.
    """
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(seed)
    graph = list(nodes(sizes))
    tensors: dict[str, Any] = {
        "parts": np.array([sizes.hidden_dim, 2 * sizes.kv_dim], dtype=np.int64)
    }
    for node in graph:
        if node.kind == "MatMulNBits":
            rows, inputs, bits = (node.attributes[key] for key in ("N", "K", "bits"))
            shape = (rows, inputs // GROUP)
            _, codes, scales = node.inputs
            tensors[codes] = rng.integers(0, 256, (*shape, GROUP * bits // 8), dtype=np.uint8)
            deviation = ((4**bits + 2) / 12) ** 0.5  # of uniform codes less 2**(bits - 1)
            tensors[scales] = np.full(shape, inputs**-0.5 / deviation, dtype=np.float32)
        elif node.kind == "SimplifiedLayerNormalization":
            tensors[node.inputs[1]] = np.ones(sizes.hidden_dim, dtype=np.float32)
    kv = [name for node in graph for name in node.outputs if name.endswith(".kv")]
    own = {"MatMulNBits": "com.microsoft"}
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    value = helper.make_tensor_value_info
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node(
                    n.kind, n.inputs, n.outputs, domain=own.get(n.kind), **n.attributes
                )
                for n in graph
            ],
            "products",
            [
                value("x", TensorProto.FLOAT, ["tokens", sizes.hidden_dim]),
                value("wanted", TensorProto.INT64, ["rows"]),
            ],
            [
                value("logits", TensorProto.FLOAT, ["rows", sizes.vocab_size]),
                *(value(name, TensorProto.FLOAT, ["tokens", 2 * sizes.kv_dim]) for name in kv),
            ],
            [numpy_helper.from_array(array, name) for name, array in tensors.items()],
        ),
        opset_imports=domains,
        ir_version=10,
    )
    onnx.save_model(model, str(path), save_as_external_data=True, location=path.name + ".weights")


class Products:
    """The graph as a session of ONNX Runtime.

    Args:
        path: the ONNX file.
        threads: number of threads.
        lookup: let it look products up in tables instead of multiplying (`mlas.use_lut_gemm`).
    """

    def __init__(self, path: Path, sizes: Sizes, threads: int, lookup: bool):
        import numpy as np
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Its threads loop after a run; the other peers' turns come then.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if lookup:
            options.add_session_config_entry("mlas.use_lut_gemm", "1")
        start = time.perf_counter()
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.load_seconds = time.perf_counter() - start
        self.version = onnxruntime.__version__
        self._numpy = np
        self._x = np.random.default_rng(0).standard_normal((512, sizes.hidden_dim), np.float32)

    def run(self, tokens: int, wanted: int) -> Any:
        """Return the logits (wanted, vocab_size) of the last of `tokens` tokens."""
        last = self._numpy.arange(tokens - wanted, tokens)
        return self._session.run(["logits"], {"x": self._x[:tokens], "wanted": last})[0]

    def warm_up(self) -> Answer:
        self.run(8, 1)
        return {}

    def prefill(self, tokens: int) -> Answer:
        start = time.perf_counter()
        for done in range(0, tokens, len(self._x)):
            self.run(min(len(self._x), tokens - done), 1)
        return {"tokens_per_second": tokens / (time.perf_counter() - start)}

    def decode(self, tokens: int, rows: int, depth: int) -> Answer:
        start = time.perf_counter()
        for _ in range(tokens):
            self.run(rows, rows)
        return {"tokens_per_second": rows * tokens / (time.perf_counter() - start)}

    def memory(self) -> Answer:
        return {"peak_resident_bytes": peak_resident()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="written if it is missing")
    parser.add_argument("--sizes", type=json.loads, required=True, help="of `Sizes`, as JSON")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lookup", action="store_true")
    options = parser.parse_args()
    sizes = Sizes(**options.sizes)
    if not options.model.exists():
        write_model(options.model, sizes)
    products = Products(options.model, sizes, options.threads, options.lookup)
    hello = {
        "version": products.version,
        "load_seconds": products.load_seconds,
        "weight_bytes": options.model.with_name(options.model.name + ".weights").stat().st_size,
    }
    names = ("warm_up", "prefill", "decode", "memory")
    serve(hello, {name: getattr(products, name) for name in names})


if __name__ == "__main__":
    main()
