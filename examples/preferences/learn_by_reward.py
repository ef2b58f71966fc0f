"""Teach the embedded model wordings that it has never seen, by rewards alone.

It suggests replies: to a message it accepts, declines or asks back. It knows nine ways to ask for these ("Say
yes.", "Decline.", ...). Here are nine others, and no example of an answer: GRPO samples eight answers to each
prompt, and rewards the right ones. Names, places, times and amounts of the test occur in no other prompt.

    python examples/preferences/learn_by_reward.py --out my-rewards --seed 0
    python examples/preferences/learn_by_reward.py --prompts 16 > train.jsonl    # prompts alone

Prints exact match on 200 held-out prompts before and after, the distance from the model (KL), and the time.
Interrupted? The same command continues.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "nano"))
import text_tasks
from values import Values

from afm_mlx.training.loop.trainer import Event, Report, Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.policy_training import PolicyTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.train import train_lora

STANCES = (
    ("Agree.", "I want to go for it.", "Be glad about it."),
    ("Refuse.", "I don't want to.", "Turn it down politely."),
    ("I need to know more.", "Find out more first.", "Be curious."),
)
"""New wordings for accept, decline and ask back."""
SPLITS = {"train": 400, "valid": 60, "test": 200}
STEPS, PROMPTS, ANSWERS = 100, 8, 8


def draw_prompts(split: str, count: int, seed: int) -> list[dict[str, str]]:
    """Draw prompts with new wordings, and the right answer to each."""
    values = Values(random.Random(f"{split}-{seed}"), "test" if split == "test" else "train")
    found: dict[str, str] = {}
    while len(found) < count:
        messages, _ = text_tasks.suggest_reply(values)
        message, _, known = messages[0]["content"].rpartition("\n")
        (stance,) = (i for i, own in enumerate(text_tasks.STANCES) if known in own)
        found[f"{message}\n{values.rng.choice(STANCES[stance])}"] = messages[1]["content"]
    return [{"prompt": prompt, "answer": answer} for prompt, answer in found.items()]


def show(event: Event) -> None:
    if isinstance(event, Report | Validation):
        kind = "valid" if isinstance(event, Validation) else "train"
        names = ("reward", "no_advantage", "kl", "length", "sampler_gap")
        figures = [f"{name} {event.metrics[name]:.3g}" for name in names if name in event.metrics]
        print(f"step {event.step}, {kind}: {', '.join(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("my-rewards"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", choices=["grpo", "rloo", "mdloo"], default="grpo")
    parser.add_argument("--prompts", type=int, help="print this many prompts, and end")
    args = parser.parse_args()
    if args.prompts is not None:
        for record in draw_prompts("train", args.prompts, args.seed):
            print(json.dumps(record))
        return
    data, adapter = args.out / "data", args.out / "adapter"
    data.mkdir(parents=True, exist_ok=True)
    for split, count in SPLITS.items():
        lines = map(json.dumps, draw_prompts(split, count, args.seed))
        (data / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    options = TrainingOptions(
        iters=STEPS,
        learning_rate=3e-3,
        warmup_iters=2,
        schedule="constant",
        steps_per_eval=25,
        val_batches=-1,
        best_by="reward",
        seed=args.seed,
    )
    method = PolicyTraining(
        objective=args.objective,
        rewards=("exact",),
        group_size=ANSWERS,
        max_completion_tokens=40,
        temperature=1.3,  # explores: at 1, two of three groups have equal rewards
        beta=0.02,
    )
    recipe = Recipe(data, options, batch_size=PROMPTS, test=True)
    begin, used = time.perf_counter(), time.process_time()
    result = train_lora(
        recipe, adapter, method, resume=(adapter / "run" / "run.json").exists(), on_event=show
    )
    minutes, cpu = (time.perf_counter() - begin) / 60, (time.process_time() - used) / 60
    assert result.test is not None
    assert result.test.trained is not None
    before, after = result.test.untrained.metrics["reward"], result.test.trained.metrics["reward"]
    print(f"{SPLITS['test']} held-out prompts: {before:.1%} right before, {after:.1%} after")
    print(f"{result.outcome.steps} steps, {minutes:.1f} minutes, {cpu:.1f} of processor time")


if __name__ == "__main__":
    main()
