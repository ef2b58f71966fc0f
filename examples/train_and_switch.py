"""From JSONL to an adapter that rows switch to.

    python examples/adapters/inbox.py todo 1000 > todos.jsonl
    python examples/train_and_switch.py todos.jsonl my-adapter --iters 300

It trains an adapter on the embedded model, and writes it as an `.fmadapter` package, the form of Apple's
framework. Then it asks two of the questions in one batch: with the new adapter, with one that comes with the
model, and without one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from afm_mlx import AdapterPool, batch_generate, load
from afm_mlx.converters.adapter_conversion import BaseFolder, convert_adapter
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.training import LoRATraining, Recipe, TrainingOptions, train_lora

MODEL = "afm-nano"


def train(data: Path, folder: Path, iters: int) -> None:
    """Train, and save a folder of mlx-lm's layout."""
    options = TrainingOptions(iters=iters, learning_rate=5e-3, warmup_iters=iters // 10)
    recipe = Recipe(data, options, model=MODEL, batch_size=16, packing=False)
    train_lora(recipe, folder, LoRATraining(rank=16))


def questions(data: Path, count: int) -> list[str]:
    """The first questions of the data."""
    lines = data.read_text(encoding="utf-8").splitlines()[:count]
    chats = [json.loads(line)["messages"] for line in lines]
    return [next(m["content"] for m in chat if m["role"] == "user") for chat in chats]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, help="JSONL of chats")
    parser.add_argument("adapter", type=Path, help="folder to make")
    parser.add_argument("--iters", type=int, default=300, help="training steps of 16 chats")
    given = parser.parse_args()

    train(given.data, given.adapter, given.iters)
    # Apple's framework takes names of letters, digits and _ only.
    package = given.adapter.with_name(given.adapter.name.replace("-", "_") + ".fmadapter")
    convert_adapter(given.adapter, package, "fmadapter", base=BaseFolder.read(resolve_model(MODEL)))
    print(f"{package}: {sum(f.stat().st_size for f in package.iterdir()):,} bytes")

    model, tokenizer = load(MODEL)
    pool = AdapterPool(model, base_folder=resolve_model(MODEL))
    pool.register("mine", package)
    pool.register("triage", resolve_model(MODEL) / "adapters" / "triage")
    asked = questions(given.data, 2)
    rows = [(question, adapter) for question in asked for adapter in ("mine", "triage", None)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        for question, _ in rows
    ]
    adapters = [adapter for _, adapter in rows]
    done = batch_generate(model, tokenizer, prompts, max_tokens=60, adapter=adapters, adapters=pool)
    for (question, adapter), text in zip(rows, done.texts, strict=True):
        print(f"\n{question}\n[{adapter or 'no adapter'}] {text}")


if __name__ == "__main__":
    main()
