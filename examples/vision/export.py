"""Write what `train.py` trained as a model folder, and as an adapter for its text model.

    python examples/vision/export.py --source vision --model eyes --adapter eyes/adapters/see

The folder has the embedded model's packed text, bit for bit, and the encoder with its adaptor in 16 bits. With
the adapter, the text model answers questions about pictures; without it, it answers everything else as before.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
import torch
from torch_text import RANK, SCALE
from torch_vision import CONFIG

from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import ModelConfig
from afm_mlx.loading.resolve import resolve_model

_KEPT = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


def write_model(state: dict, folder: Path) -> None:
    """Write the embedded model's folder with the vision part of a training state."""
    base = resolve_model("afm-nano")
    folder.mkdir(parents=True)
    for name in (*_KEPT, "LICENSE-PYTHON.txt"):
        shutil.copy(base / name, folder)
    values = json.loads((base / "config.json").read_text())
    values["vision_config"] = CONFIG.to_dict()
    (folder / "config.json").write_text(json.dumps(values, indent=4) + "\n")
    weights = mx.load(str(base / "model.safetensors"))
    for name, tensor in state["eyes"].items():
        if name.startswith(("encoder.", "adaptor.")):
            weights[f"vision.{name}"] = mx.array(tensor.numpy()).astype(mx.float16)
    config = ModelConfig.from_dict(values, "config.json")
    save_weights(folder, weights, total_parameters=config.num_parameters)


def write_adapter(state: dict, folder: Path, model: Path) -> None:
    """Write the text model's adapter, for the model folder `model`."""
    names = {name.removeprefix("lora."): tensor for name, tensor in state["text"].items()}
    tensors = {
        name.replace("/", "."): mx.array(tensor.numpy()).astype(mx.float16)
        for name, tensor in names.items()
    }
    config = ModelConfig.from_file(model / "config.json")
    keys = {name.split(".", 3)[3].rpartition(".lora_")[0] for name in tensors}
    adapter = AdapterConfig(
        rank=RANK,
        scale=SCALE,
        num_layers=config.num_layers,
        keys=tuple(sorted(keys)),
        base_model_fingerprint=folder_fingerprint(config, model),
    )
    save_adapter(folder, tensors, adapter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder of train.py")
    parser.add_argument("--model", type=Path, required=True, help="model folder to make")
    parser.add_argument("--adapter", type=Path, required=True, help="adapter folder to make")
    options = parser.parse_args()
    state = torch.load(options.source / "state.pt", weights_only=True)
    write_model(state, options.model)
    write_adapter(state, options.adapter, options.model)


if __name__ == "__main__":
    main()
