"""Measure steps of DPO on a model of mlx-lm with the shape of Qwen2.5-0.5B: ours, and mlx-lm-lora's.

    python -m venv PEER && PEER/bin/pip install mlx-lm-lora==5.10.2
    python -m bench.preferences --peer PEER/lib/python3.11/site-packages

Both train LoRA pairs of rank 16 on all linear layers, on the same random pairs, half of whose tokens are the
prompt. Each runs in a process of its own, in turns, with this environment's MLX and the BLAS that this package
installs; of the peer's environment, only what is missing here is taken. The peer runs its own `train_dpo`, with
a second copy of the model as the reference, as its command line does.

DPO on a packed AFM model with usual training next to it is a case of `bench.training`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import afm_mlx  # noqa: F401  before mlx.core: it installs a BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from afm_mlx.adapters.lora import add_lora
from afm_mlx.training.data.preferences import PreferenceBatches, PreferencePair
from afm_mlx.training.loop.losses import log_probabilities
from afm_mlx.training.loop.optimizers import AdamW
from afm_mlx.training.loop.preference_losses import PreferenceLoss
from afm_mlx.training.loop.step import TrainingStep
from bench.targets import Target, markdown, target_rows

RANK, VOCABULARY = 16, 151_936


def model() -> nn.Module:
    """Return a model of random weights, float32."""
    from mlx_lm.models import qwen2

    mx.random.seed(0)
    made = qwen2.Model(
        qwen2.ModelArgs(
            model_type="qwen2",
            hidden_size=896,
            num_hidden_layers=24,
            intermediate_size=4864,
            num_attention_heads=14,
            num_key_value_heads=2,
            rms_norm_eps=1e-6,
            vocab_size=VOCABULARY,
            rope_theta=1e6,
            tie_word_embeddings=True,
        )
    )
    mx.eval(made.parameters())
    return made


def pairs(count: int, length: int) -> list[PreferencePair]:
    """Return random pairs with answers of half of `length` tokens."""
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (count, 3, length // 2), np.int32)
    return [PreferencePair(*tokens, f"pair {i}") for i, tokens in enumerate(drawn)]


def ours(count: int, length: int, steps: int) -> list[float]:
    """Return the processor seconds of each step, the reference's computation not included."""
    trained = add_lora(model(), RANK, 0.5).train()
    batches = PreferenceBatches(
        pairs(count, length), batch_size=count, max_seq_length=length, packed=False
    )
    batch = batches(0)
    reference = np.zeros(batches.n_scored + 1)
    reference[np.array(batch.numbers)] = np.array(log_probabilities(trained, batch))
    batch = batches.with_reference(reference[:-1])(0)
    step = TrainingStep(trained, PreferenceLoss(), AdamW(1e-4), max_norm=1.0)
    seconds = []
    for _ in range(steps):
        start = time.process_time()
        step.evaluate(step([batch]))
        seconds.append(time.process_time() - start)
    return seconds


def theirs(count: int, length: int, steps: int) -> list[float]:
    """Return the processor seconds between reports of mlx-lm-lora's training, one for each step."""
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm_lora.trainer.dpo_trainer import DPOTrainingArgs, train_dpo

    trained, reference = model(), model()
    trained.freeze()
    settings = {"rank": RANK, "scale": 0.5, "dropout": 0.0}
    linear_to_lora_layers(trained, len(trained.layers), settings)
    half = length // 2
    data = [
        {
            "chosen": [*pair.prompt.tolist(), *pair.chosen.tolist()],
            "rejected": [*pair.prompt.tolist(), *pair.rejected.tolist()],
            "chosen_prompt_length": half,
            "rejected_prompt_length": half,
        }
        for pair in pairs(count, length)
    ]
    times = [time.process_time()]

    class Clock:
        def on_train_loss_report(self, report: dict[str, Any]) -> None:
            times.append(time.process_time())

    # What MLX knows of a CPU has no such number.
    known = mx.device_info()
    mx.device_info = lambda: {"max_recommended_working_set_size": 0, **known}
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOTrainingArgs(
            batch_size=count,
            iters=steps,
            steps_per_report=1,
            max_seq_length=length,
            adapter_file=f"{folder}/adapters.safetensors",
        )
        train_dpo(
            model=trained,
            ref_model=reference,
            optimizer=optim.AdamW(1e-4),
            train_dataset=data,
            args=arguments,
            training_callback=Clock(),
        )
    return [after - before for before, after in pairwise(times)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, required=True, help="site-packages with mlx-lm-lora")
    parser.add_argument("--pairs", type=int, default=2, help="pairs of a batch")
    parser.add_argument(
        "--length", type=int, default=128, help="tokens of a prompt with its answer"
    )
    parser.add_argument(
        "--steps", type=int, default=3, help="steps of a process; the first is left out"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--worker", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        sys.path.append(str(args.peer))
        run = {"ours": ours, "theirs": theirs}[args.worker]
        seconds = run(args.pairs, args.length, args.steps)[1:]
        print(json.dumps({"seconds": seconds, "bytes": mx.get_peak_memory()}))
        return
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for _ in range(args.rounds):
        for name, answers in found.items():
            command = [sys.executable, "-m", "bench.preferences", *(argv or sys.argv[1:])]
            done = subprocess.run([*command, "--worker", name], stdout=subprocess.PIPE, check=True)
            answers.append(json.loads(done.stdout.splitlines()[-1]))
    seconds, nbytes = (
        {
            name: statistics.median(figure(each) for each in answers)
            for name, answers in found.items()
        }
        for figure in (lambda each: statistics.median(each["seconds"]), lambda each: each["bytes"])
    )
    rows = [["", "CPU s a step", "peak GB"]]
    rows += [[name, f"{seconds[name]:.2f}", f"{nbytes[name] / 1e9:.2f}"] for name in found]
    print(markdown(rows), end="\n\n")
    targets = [
        Target("processor time of theirs over ours", seconds["theirs"] / seconds["ours"], 1.5),
        Target("memory of ours over theirs", nbytes["ours"] / nbytes["theirs"], 0.6, at_most=True),
    ]
    print(markdown(target_rows(targets)))


if __name__ == "__main__":
    main()
