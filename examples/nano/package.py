"""Make the model folder that the package carries, out of a packed variant that `quantize.py` made.

    python examples/nano/package.py --source nano --model nano/models/qat-row \\
        --adapter nano/models/recovery-row --out afm_mlx/embedded/afm-nano

Weights are copied as they are, so the figures of `quality.json` hold for the folder and go into its card. New
are the test data, the length of the context, and golden tokens, which tamm gives with the same weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sysconfig
from pathlib import Path
from typing import Any

# Before mlx.core: it gives MLX its matrix product on Linux.
import afm_mlx  # isort: skip

import numpy as np
import quality
import torch
from tamm.models.afm_text import AFMTextV7
from train import greedy, model_config

from afm_mlx.adapters.adapter_folder import CONFIG_NAME, TENSORS_NAME, load_adapter
from afm_mlx.checkpoint.toolkit_checkpoint import KeyMap, map_keys
from afm_mlx.config import PRESETS
from afm_mlx.files import atomic_folder
from afm_mlx.measure.describe import describe_folder
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear

ADAPTER = Path("adapters") / "recovery"
GOLDEN = "golden.json"
_CARD = Path(__file__).with_name("model_card_template.md")
_COPIED = ("*.safetensors", "*.safetensors.index.json", "tokenizer*", "chat_template.jinja")
_DATA = ("evaluation.jsonl", "heldout.jsonl")
_GOLDEN_TOKENS = 32
_PYTHON_LICENCE = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")

State = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder that build.py made")
    parser.add_argument("--model", type=Path, required=True, help="packed model folder to ship")
    parser.add_argument("--adapter", type=Path, help="its recovery adapter")
    parser.add_argument("--out", type=Path, required=True, help="model folder; must not exist")
    args = parser.parse_args()
    columns = figures(args.source, args.model, args.adapter)
    if columns is None:
        parser.error("quality.json has no figures of these very files; run `quantize.py report`.")

    with atomic_folder(args.out) as folder:
        copy_model(args.model, folder)
        for name in _DATA:
            shutil.copy(args.source / name, folder)
        if args.adapter is not None:
            (folder / ADAPTER).mkdir(parents=True)
            for name in (TENSORS_NAME, CONFIG_NAME):
                shutil.copy(args.adapter / name, folder / ADAPTER)
        write_golden(folder, args.source)
        (folder / "README.md").write_text(model_card(columns, folder))
        shutil.copy(
            _PYTHON_LICENCE, folder / "LICENSE-PYTHON.txt"
        )  # the held-out docstrings are Python's


def figures(
    source: Path, model: Path, adapter: Path | None
) -> list[tuple[str, quality.Row]] | None:
    """Return the figures of float and of what ships, by heading; None when some were not measured."""
    report = source / "report" / "quality.json"
    rows = json.loads(report.read_text())["variants"] if report.is_file() else []
    by_key = {row["key"]: row for row in rows}
    found = {
        "float32": next((row for row in rows if row["name"] == "float"), None),
        "2-bit": by_key.get(quality.content_key(model, None, source)),
    }
    if adapter is not None:
        key = quality.content_key(model, adapter, source)
        found["2-bit + recovery adapter"] = by_key.get(key)
    columns = [(heading, row) for heading, row in found.items() if row is not None]
    return columns if len(columns) == len(found) else None


def copy_model(model: Path, folder: Path) -> None:
    """Copy weights, tokenizer and config."""
    for pattern in _COPIED:
        for file in model.glob(pattern):
            shutil.copy(file, folder)
    config = json.loads((model / "config.json").read_text())
    # tamm's configuration does not say how long the training sequences were.
    config["context_length"] = PRESETS["afm-nano"].context_length
    (folder / "config.json").write_text(json.dumps(config, indent=4, sort_keys=True) + "\n")


# -- golden tokens


def write_golden(folder: Path, source: Path) -> None:
    """Write tamm's greedy tokens with the very weights that ship: what our engine must give."""
    state = shipped_state(folder, source)
    prompts = [golden["prompt"] for golden in json.loads((source / GOLDEN).read_text())]
    _write_tokens(folder / GOLDEN, state, prompts)
    if (folder / ADAPTER).is_dir():
        add_adapter(state, folder / ADAPTER, map_keys(state, str(folder)))
        _write_tokens(folder / ADAPTER / GOLDEN, state, prompts)


def shipped_state(folder: Path, source: Path) -> State:
    """Return a model folder's weights, dequantized, under tamm's names."""
    state = torch.load(source / "checkpoint" / "base-model.pt", weights_only=True)
    keys = map_keys(state, str(source))
    model, _ = afm_mlx.load(folder)
    for path, module in model.named_modules():
        key = keys.weights.get(f"{path}.weight")
        if key is not None:
            is_packed = isinstance(module, PackedLinear | PackedEmbedding)
            weight = module.dequantize() if is_packed else module.weight
            state[key] = torch.from_numpy(np.array(weight, np.float32))
        for kind in ("key", "value"):
            ranges = keys.kv_ranges.get(f"{path}.quant_{kind}_scale")
            if ranges is not None:
                scale = float(module[f"quant_{kind}_scale"])
                state[ranges["range"]] = torch.tensor([-128.0, 127.0]) * scale
    _tie_head(state, keys)
    return state


def add_adapter(state: State, adapter: Path, keys: KeyMap) -> None:
    """Add an adapter's product to the weights, in place."""
    tensors, config = load_adapter(adapter)
    products: dict[str, list[np.ndarray]] = {}
    # Sections of a fused layer are numbered, and their outputs follow each other.
    for name in sorted(name for name in tensors if ".lora_a" in name):
        a, b = (np.array(tensors[each]) for each in (name, name.replace(".lora_a", ".lora_b")))
        products.setdefault(name.partition(".lora_a")[0], []).append(a @ b)
    for path, parts in products.items():
        delta = config.scale * np.concatenate(parts, axis=1).T
        key = keys.weights[f"{path}.weight"]
        state[key] = state[key] + torch.from_numpy(delta)
    _tie_head(state, keys)


def _tie_head(state: State, keys: KeyMap) -> None:
    if keys.tied_head is not None:
        state[keys.tied_head] = state[keys.weights["model.embedding.weight"]]


def _write_tokens(path: Path, state: State, prompts: list[list[int]]) -> None:
    reference: AFMTextV7 = model_config().create_model().eval()
    reference.load_state_dict(state)
    with torch.no_grad():
        golden = [
            {"prompt": prompt, "tokens": greedy(reference, prompt, _GOLDEN_TOKENS)}
            for prompt in prompts
        ]
    path.write_text(json.dumps(golden) + "\n")


# -- model card


def model_card(columns: list[tuple[str, quality.Row]], folder: Path) -> str:
    """Return the card, with a column of figures for float and for each thing that ships."""
    facts: dict[str, Any] = describe_folder(folder)
    return (
        _CARD.read_text()
        .replace("@FIGURES@", _table(columns))
        .replace("@MEGABYTES@", f"{facts['weights']['bytes'] / 1e6:.1f}")
        .replace("@FORMATS@", " and ".join(facts["packed_layers"]))
        .replace("@BITS@", f"{facts['weights']['bits_per_weight']:.2f}")
        .replace("@ADAPTER@", _adapter_text(folder))
        .replace("@PYTHON@", platform.python_version())
    )


def _adapter_text(folder: Path) -> str:
    if not (folder / ADAPTER).is_dir():
        return ""
    rank = load_adapter(folder / ADAPTER)[1].rank
    return (
        f"A recovery adapter lies in `{ADAPTER.as_posix()}`: a LoRA of rank {rank} that was trained, on "
        "the frozen packed weights,\nto imitate the float model. `--adapter-path` loads it, and adapters for "
        "tasks may start from it.\n\n"
    )


def _table(columns: list[tuple[str, quality.Row]]) -> str:
    headings, rows = zip(*columns, strict=True)
    lines = [f"| | {' | '.join(headings)} |", "| --- |" + " --- |" * len(headings)]
    for task in rows[0]["tasks"]:
        lines.append(_line(f"`{task}`", [f"{row['tasks'][task]:.0%}" for row in rows]))
    for key, label in (
        ("perplexity_of_all", "perplexity, held-out docstrings"),
        ("perplexity", "the same, without each text's first token"),
    ):
        lines.append(_line(label, [f"{row[key]:.1f}" for row in rows]))
    return "\n".join(lines)


def _line(label: str, cells: list[str]) -> str:
    return f"| {label} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
