"""What ONNX Runtime runs has AFM's weights, and computes what NumPy computes of the same graph."""

import dataclasses
import importlib.util
import json
import sys

import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.model.model import Model
from bench.peer_afm import onnx_sizes
from bench.peer_onnx import GROUP, Sizes, nodes
from bench.peer_protocol import Peer
from tests.tools.cases import each


@each("reuse", [0, 1, 2])
def test_its_products_are_afms(config, reuse):
    config = dataclasses.replace(config, num_layers=3, num_kv_reuse_layers=reuse)
    graph = list(nodes(onnx_sizes(config)))
    made = {
        "x": False,
        "wanted": None,
        "parts": None,
    }  # name: whether its rows are the wanted ones alone
    weights, cut = {2: 0, 4: 0}, {}
    for node in graph:
        read = [name for name in node.inputs if name in made and made[name] is not None]
        assert read, node
        assert len({made[name] for name in read}) == 1, node
        wanted = node.kind == "Gather" or made[read[0]]
        made |= dict.fromkeys(node.outputs, wanted)
        if node.kind == "MatMulNBits":
            assert not {name for name in node.inputs[1:] if name in made}
            rows, inputs, bits = (node.attributes[key] for key in ("N", "K", "bits"))
            weights[bits] += rows * inputs
            cut[node.outputs[0]] = wanted
    arrays = dict(tree_flatten(Model(config).parameters()))
    matrices = {name: a for name, a in arrays.items() if a.ndim == 2}
    embedding = next(a.size for name, a in matrices.items() if "embedding" in name)
    assert weights == {2: sum(a.size for a in matrices.values()) - embedding, 4: embedding}
    assert made["logits"]
    assert [cut[f"blocks.{i}.down"] for i in range(3)] == [i >= 3 - reuse for i in range(3)]
    assert len([name for name in made if name.endswith(".kv")]) == 3 - reuse


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))), reason="needs onnxruntime"
)
@each("lookup", [False, True])
def test_it_computes_the_graph(lookup, tmp_path, monkeypatch):
    import onnx
    from onnx import numpy_helper

    from bench.peer_onnx import Products, write_model

    sizes = Sizes(3, 1, 256, 384, 128, 640, 1e-5)
    path = tmp_path / "model.onnx"
    write_model(path, sizes)
    products = Products(path, sizes, 1, lookup)
    found = products.run(5, 2)
    model = onnx.load(str(path))
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    values |= {"x": products._x[:5].astype(np.float64), "wanted": np.array([3, 4])}
    for node in nodes(sizes):
        given = [values[name] for name in node.inputs]
        values |= zip(node.outputs, COMPUTE[node.kind](node.attributes, *given), strict=True)
    assert found.shape == (2, sizes.vocab_size)
    error = found - values["logits"]
    assert np.linalg.norm(error) < 0.05 * np.linalg.norm(values["logits"])  # 8-bit activations
    sizes = json.dumps(sizes._asdict())
    command = [sys.executable, "-m", "bench.peer_onnx", "--model", str(path), "--sizes", sizes]
    peer = Peer("onnxruntime", [*command, "--threads", "1", *["--lookup"] * lookup], threads=1)
    try:
        assert peer.hello["weight_bytes"] >= sum(t.nbytes for t in values.values() if t.ndim > 2)
        peer.measure("warm_up")
        assert peer.measure("prefill", tokens=700)["tokens_per_second"] > 0
        assert peer.measure("decode", tokens=2, rows=8, depth=128)["tokens_per_second"] > 0
    finally:
        peer.close()


def multiply(attributes, x, codes, scales):
    bits = attributes["bits"]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (codes[..., None] >> shifts & (2**bits - 1)).reshape(*scales.shape, GROUP)
    weight = (numbers - 2.0 ** (bits - 1)) * scales[..., None]
    return [x @ weight.reshape(attributes["N"], attributes["K"]).T]


COMPUTE = {
    "MatMulNBits": multiply,
    "SimplifiedLayerNormalization": lambda a, x, weight: [
        weight * x / np.sqrt((x * x).mean(-1, keepdims=True) + a["epsilon"])
    ],
    "Gather": lambda a, x, wanted: [x[wanted]],
    "Split": lambda a, x, parts: np.split(x, np.cumsum(parts)[:-1], axis=-1),
    "Add": lambda a, x, y: [x + y],
    "Mul": lambda a, x, y: [x * y],
    "Sigmoid": lambda a, x: [1 / (1 + np.exp(-x))],
}
