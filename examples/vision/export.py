"""Write what `train.py` trained as a model folder, and as an adapter for its text model.

    python examples/vision/export.py --source vision --model eyes --adapter eyes/adapters/see --bits 8

The folder has the embedded model's packed text, bit for bit, and the encoder with its adaptor in 16 bits, or in
`--bits` 8 or 4. With the adapter, the text model answers questions about pictures; without it, it answers
everything else as before.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import torch
from mlx.utils import tree_flatten
from torch_text import RANK, SCALE
from torch_vision import CONFIG

from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.config import ModelConfig
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.quantization.quantize_model import layer_rules, pack_layer, replace_modules
from afm_mlx.quantization.rule import VISION_RULE
from afm_mlx.vision.vision import Vision

_KEPT = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


def write_model(state: dict, folder: Path, bits: int | None = None) -> None:
    """Write the embedded model's folder with a state's vision part, which is packed if `bits` are given."""
    base = resolve_model("afm-nano")
    folder.mkdir(parents=True)
    for name in (*_KEPT, "LICENSE-PYTHON.txt"):
        shutil.copy(base / name, folder)
    values = json.loads((base / "config.json").read_text())
    values["vision_config"] = CONFIG.to_dict()
    config = ModelConfig.from_dict(values, "config.json")
    model = nn.Module()
    model.vision = Vision(CONFIG, config.hidden_dim)
    parts = [(n, t) for n, t in state["eyes"].items() if n.startswith(("encoder.", "adaptor."))]
    model.vision.load_weights([(n, mx.array(t.numpy()).astype(mx.float16)) for n, t in parts])
    if bits is not None:
        rules = layer_rules(model, vision_rule=replace(VISION_RULE, bits=bits))
        layers = dict(model.named_modules())
        for path, rule in rules.items():
            replace_modules(model, [(path, pack_layer(layers[path], rule, path))])
            for key in ("quantization", "quantization_config"):
                values[key][path] = rule.to_dict()
    (folder / "config.json").write_text(json.dumps(values, indent=4) + "\n")
    text, vision = (folder / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    shutil.copy(base / "model.safetensors", text)
    mx.save_safetensors(str(vision), dict(tree_flatten(model.parameters())), {"format": "mlx"})


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
    parser.add_argument(
        "--bits", type=int, choices=(4, 8), help="of the vision part; 16 by default"
    )
    options = parser.parse_args()
    state = torch.load(options.source / "state.pt", weights_only=True)
    write_model(state, options.model, options.bits)
    write_adapter(state, options.adapter, options.model)


if __name__ == "__main__":
    main()
