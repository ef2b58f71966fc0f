"""Make the model folder that the package carries, out of what `build.py` left.

    python examples/nano/package.py --source nano --out afm_mlx/models/afm-nano

Converts the checkpoint, quantizes it to MLX's stock affine format, measures it before and after, and
writes the figures into the model card.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

# Before mlx.core: it gives MLX its matrix product on Linux.
import afm_mlx  # isort: skip

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten
from train import greedy, model_config

from afm_mlx.config import PRESETS
from afm_mlx.converters import convert
from afm_mlx.converters.toolkit_keys import map_keys
from afm_mlx.evaluation import evaluate, load_examples
from afm_mlx.files import atomic_folder
from afm_mlx.perplexity import cut, load_documents, measure_perplexity
from afm_mlx.weights import save_weights

_CARD = Path(__file__).with_name("model_card_template.md")
_COPIED = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_DATA = ("evaluation.jsonl", "heldout.jsonl")
_GOLDEN_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder that build.py made")
    parser.add_argument("--out", type=Path, required=True, help="model folder; must not exist")
    parser.add_argument("--bits", type=int, default=4, help="per weight of the blocks")
    parser.add_argument("--embedding-bits", type=int, default=4, help="per weight of the embedding")
    parser.add_argument("--group-size", type=int, default=64)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch, atomic_folder(args.out) as folder:
        whole = Path(scratch) / "float"
        convert(args.source / "checkpoint", whole)
        config = json.loads((whole / "config.json").read_text())
        # tamm's configuration does not say how long the training sequences were.
        config["context_length"] = PRESETS["afm-nano"].context_length
        (whole / "config.json").write_text(json.dumps(config, indent=4, sort_keys=True) + "\n")
        for name in _COPIED:
            shutil.copy(whole / name, folder / name)
        for name in _DATA:
            shutil.copy(args.source / name, folder / name)
        write_quantized(whole, folder, config, args)
        figures = [("float32", measure(whole, folder)), (bits_label(args), measure(folder, folder))]
        (folder / "README.md").write_text(model_card(figures, folder))
        golden = golden_tokens(folder, args.source)
        (folder / "golden.json").write_text(json.dumps(golden) + "\n")


def bits_label(args: argparse.Namespace) -> str:
    return f"{args.bits}-bit, embedding {args.embedding_bits}-bit"


def write_quantized(
    whole: Path, folder: Path, config: dict[str, Any], args: argparse.Namespace
) -> None:
    """Write weights and config in mlx-lm's layout for quantized models."""
    model, _ = afm_mlx.load(whole)
    blocks = {"group_size": args.group_size, "bits": args.bits, "mode": "affine"}
    embedding = blocks | {"bits": args.embedding_bits}
    name = "model.embedding"
    nn.quantize(
        model,
        **blocks,
        class_predicate=lambda path, module: (
            hasattr(module, "to_quantized") and (embedding if path == name else True)
        ),
    )
    weights = {
        key: array.astype(mx.float16)
        if key.endswith((".scales", ".biases", "norm.weight"))
        else array
        for key, array in tree_flatten(model.parameters())
    }
    save_weights(folder, weights)
    quantization = blocks | {name: embedding}
    content = config | {"quantization": quantization, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(content, indent=4, sort_keys=True) + "\n")


def golden_tokens(folder: Path, source: Path) -> list[dict[str, list[int]]]:
    """tamm's greedy tokens with the very weights that ship, dequantized: what our engine must give."""
    state = torch.load(source / "checkpoint" / "base-model.pt", weights_only=True)
    keys = map_keys(state, str(source)).weights
    model, _ = afm_mlx.load(folder)
    for path, module in model.named_modules():
        if f"{path}.weight" in keys and hasattr(module, "scales"):
            weight = mx.dequantize(
                module.weight, module.scales, module.biases, module.group_size, module.bits
            )
        elif f"{path}.weight" in keys:
            weight = module.weight
        else:
            continue
        state[keys[f"{path}.weight"]] = torch.from_numpy(np.array(weight))
    state["output_transform.weight"] = state["embedding.weight"]
    reference = model_config().create_model().eval()
    reference.load_state_dict(state)
    golden = json.loads((source / "golden.json").read_text())
    with torch.no_grad():
        return [
            {"prompt": g["prompt"], "tokens": greedy(reference, g["prompt"], _GOLDEN_TOKENS)}
            for g in golden
        ]


def measure(model_folder: Path, data: Path) -> dict[str, float]:
    """Exact match per task, and perplexity of the held-out docstrings."""
    model, tokenizer = afm_mlx.load(model_folder)
    evaluation = evaluate(model, tokenizer, load_examples(data / "evaluation.jsonl"))
    figures = {task: score.accuracy for task, score in evaluation.tasks.items()}
    documents = cut(load_documents(data / "heldout.jsonl", tokenizer))
    figures["perplexity"] = measure_perplexity(model, documents).perplexity
    return figures


def model_card(figures: list[tuple[str, dict[str, float]]], folder: Path) -> str:
    header = "| | " + " | ".join(label for label, _ in figures) + " |"
    rows = [header, "| --- |" + " --- |" * len(figures)]
    for name in figures[0][1]:
        text = "{:.1f}" if name == "perplexity" else "{:.0%}"
        label = "perplexity, held-out docstrings" if name == "perplexity" else f"`{name}`"
        rows.append(f"| {label} | " + " | ".join(text.format(f[name]) for _, f in figures) + " |")
    size = (folder / "model.safetensors").stat().st_size
    return (
        _CARD.read_text()
        .replace("@FIGURES@", "\n".join(rows))
        .replace("@MEGABYTES@", f"{size / 1e6:.1f}")
        .replace("@PYTHON@", platform.python_version())
    )


if __name__ == "__main__":
    main()
