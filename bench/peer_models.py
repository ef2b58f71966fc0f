"""What the peers run: their names, a model with random weights for each, and how each is started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from bench.peer_gguf import Shapes, write_gguf
from bench.peer_onnx import Sizes
from bench.targets import Target

EXACT, INT8, MLX_LM = "afm-mlx exact", "afm-mlx int8", "mlx-lm"
LLAMA = "llama.cpp"
ONNX, ONNX_LOOKUP = "onnxruntime", "onnxruntime, lookup"
HERE = Path(__file__).parent

Medians: TypeAlias = dict[str, dict[str, float]]
"""Figures by peer and measurement; tokens per second unless the name says otherwise."""


@dataclass(frozen=True)
class LlamaFormat:
    """The formats in which llama.cpp stores a model.

    Args:
        body: format of the blocks' matrices, a key of `peer_gguf.FORMATS`.
        embedding: format of the embedding.
        repack: True to let llama.cpp rearrange weights for the processor, its default.
    """

    body: str
    embedding: str
    repack: bool = True

    @property
    def peer(self) -> str:
        """Name of the peer that runs this format, for tables."""
        return f"{LLAMA} {self.body}" + ("" if self.repack else ", not repacked")


@dataclass(frozen=True)
class PeerModel:
    """A model that the programs are compared on.

    Args:
        name: the model's name on the command line.
        config: content of the model's config.json.
        shapes: the model that llama.cpp runs.
        formats: llama.cpp's formats of the model; each is a peer.
        write_folder: writes the folder that this package loads, with random codes.
        mlx_lm_arguments: arguments of mlx-lm's worker, given that folder.
        prompt_weights: weights of matrices that a peer multiplies for a prompt token, given its name.
        targets: makes the targets of medians and of the measured bandwidth in bytes per second.
        onnx: sizes of the products that ONNX Runtime runs; None leaves it out.
    """

    name: str
    config: dict[str, Any]
    shapes: Shapes
    formats: tuple[LlamaFormat, ...]
    write_folder: Callable[[Path], None]
    mlx_lm_arguments: Callable[[Path], list[str]]
    prompt_weights: Callable[[str], int]
    targets: Callable[[Medians, float], list[Target]]
    onnx: Sizes | None = None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.shapes.num_layers} blocks"


def commands(
    model: PeerModel,
    folder: Path,
    threads: int,
    capacity: int,
    llama_python: str | None,
    onnx_python: str | None = None,
) -> dict[str, list[str]]:
    """Return the command line that starts each peer, by name; write the models that are missing.

    Args:
        model: the model that the peers run.
        folder: folder of the model's files.
        threads: number of threads of each peer.
        capacity: maximum number of tokens in llama.cpp's cache.
        llama_python: a Python that has llama-cpp-python; None leaves llama.cpp out.
        onnx_python: a Python that has onnx and onnxruntime, which writes its own model; None leaves it out.
    """
    ours = folder / "afm-mlx"
    if not ours.exists():
        model.write_folder(ours)
    start = [sys.executable, "-m", "bench.peer_ours", "--folder", str(ours), "--activation-bits"]
    found = {EXACT: [*start, "16"], INT8: [*start, "8"]}
    if llama_python is not None:
        for format in model.formats:
            path = folder / f"{format.body}.gguf"
            if not path.exists():
                write_gguf(path, model.shapes, format.body, format.embedding)
            options = ["--threads", str(threads), "--capacity", str(capacity)]
            options += [] if format.repack else ["--no-repack"]
            worker = str(HERE / "peer_llama.py")
            found[format.peer] = [llama_python, worker, "--model", str(path), *options]
    if onnx_python is not None and model.onnx is not None:
        sizes = json.dumps(model.onnx._asdict())
        start = [onnx_python, "-m", "bench.peer_onnx", "--model", str(folder / "products.onnx")]
        found[ONNX] = [*start, "--sizes", sizes, "--threads", str(threads)]
        found[ONNX_LOOKUP] = [*found[ONNX], "--lookup"]
    arguments = model.mlx_lm_arguments(ours)
    found[MLX_LM] = [sys.executable, "-m", "bench.peer_mlx_lm", *arguments]
    return found
