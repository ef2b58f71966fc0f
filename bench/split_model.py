"""Compare a model that one process holds with the same model over several ranks of this machine.

A model of a real shape with random packed weights answers prompts, some of them with an adapter, alone and over
ranks. Each process has one thread. Memory is the most that MLX held at a time in one process, while it loaded
the model and answered; and the process's own maximum, Python and libraries included.

    python -m bench.split_model --preset afm-3b --ranks 2 --rows 8
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ADAPTER = "random"


def write_model(folder: Path, preset: str) -> None:
    """Write a packed model whose answers have tokens of the embedded model's tokenizer alone."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from afm_mlx.adapters.active import random_adapter
    from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
    from afm_mlx.checkpoint.weights import save_weights
    from afm_mlx.config import PRESETS, read_config_json
    from afm_mlx.loading.resolve import resolve_model
    from afm_mlx.measure.random_model import random_packed_model
    from afm_mlx.tokenizer.tokenizer import load_tokenizer

    embedded = resolve_model("afm-nano")
    for name in (
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ):
        shutil.copy(embedded / name, folder / name)
    model = random_packed_model(PRESETS[preset])
    tokenizer = load_tokenizer(folder)
    ends = mx.array(sorted(tokenizer.eos_token_ids))
    embedding = model.model.embedding
    embedding.scales[len(tokenizer) :] = 0  # logits of 0 are not the highest
    embedding.scales[ends] = 0
    save_weights(folder, dict(tree_flatten(model.parameters())))
    values = read_config_json(embedded / "config.json")
    packing = {name: values[name] for name in ("quantization", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(PRESETS[preset].to_dict() | packing))
    tensors = {name: mx.array(array) for name, array in random_adapter(model, 16).items()}
    save_adapter(folder / ADAPTER, tensors, AdapterConfig(16, 1.0, -1))


def answer(folder: Path, rows: int, tokens: int) -> dict[str, Any] | None:
    """Load this rank's part, and answer; return figures and tokens, or None on ranks after the first."""
    import mlx.core as mx

    from afm_mlx import load
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.engine import Engine, Request
    from afm_mlx.engine.follow import follow
    from afm_mlx.engine.lockstep import dismiss
    from afm_mlx.ranks import join_ranks

    ranks = join_ranks()
    mx.reset_peak_memory()
    model, tokenizer = load(folder, ranks=ranks)
    pool = AdapterPool(model, base_folder=folder)
    pool.register(ADAPTER, folder / ADAPTER)
    answers: dict[int, list[int]] = {}
    seconds = 0.0
    if ranks.is_first:
        engine = Engine(model, tokenizer, max_batch=rows, adapters=pool)
        for i in range(rows):
            prompt = [(7 * i + 11 * k) % 4000 + 20 for k in range(64)]
            answers[
                engine.submit(
                    Request(prompt, tokens, adapter=ADAPTER if i % 2 else None, logprobs=False)
                )
            ] = []
        start = time.perf_counter()
        for response in engine.run():
            if response.error is not None:
                raise response.error
            answers[response.row].append(response.token)
        seconds = time.perf_counter() - start
        dismiss(ranks)
    else:
        follow(model, tokenizer, adapters=pool)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1024 if sys.platform == "darwin" else 1
    )
    peaks = ranks.gather([mx.get_peak_memory(), kilobytes * 1024])
    found = {"peaks": peaks, "seconds": seconds, "answers": list(answers.values())}
    return found if ranks.is_first else None


def run(folder: Path, ranks: int, rows: int, tokens: int) -> dict[str, Any]:
    """Answer in one process, or over ranks."""
    command = [sys.executable, "-m", "bench.split_model", "--folder", str(folder)]
    command += ["--rows", str(rows), "--tokens", str(tokens)]
    if ranks > 1:
        launcher = str(Path(sys.executable).with_name("mlx.launch"))
        command = [launcher, "--backend", "ring", "-n", str(ranks), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        sys.exit(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(lines[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="afm-3b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        if (found := answer(Path(args.folder), args.rows, args.tokens)) is not None:
            print(json.dumps(found), flush=True)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, args.preset)
        alone, together = (run(folder, n, args.rows, args.tokens) for n in (1, args.ranks))
    for i, what in enumerate(("MLX's memory", "the process's memory")):
        whole, most = alone["peaks"][0][i], max(each[i] for each in together["peaks"])
        print(
            f"{what}: {whole / 1e6:.0f} MB alone, {most / 1e6:.0f} MB at most: {most / whole:.3f}"
        )
    print(f"time: {together['seconds'] / alone['seconds']:.2f} of one process's")
    pairs = list(zip(alone["answers"], together["answers"], strict=True))
    same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in pairs]
    print(f"equal tokens of each answer, of {args.tokens}: {same}")


if __name__ == "__main__":
    main()
