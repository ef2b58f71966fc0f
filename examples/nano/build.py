"""Build the embedded model from nothing: tokenizer, data, training, checkpoint folder.

    python examples/nano/build.py --out DIR --seed 0

Needs `tamm`, `torch` and `sentencepiece` (`pip install ".[tamm]"` in the repository). Run it again on the
same folder to resume a run that was interrupted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import docstrings
import tasks
from batches import Batches
from tamm.models.afm_text import AFMTextV7
from tamm.preprocessors.instruct_lm.afm import AFMChatTemplateV6Preprocessor
from train import Plan, evaluate, greedy, train
from train_tokenizer import load_tokenizer, train_tokenizer

_TEST_SAMPLES_PER_TASK = 50
_REPORT_TEXTS = 60
_GOLDEN_PROMPTS, _GOLDEN_TOKENS = 3, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the checkpoint and test data"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400, help="training steps of 4,096 tokens")
    parser.add_argument("--report-every", type=int, default=500, help="steps between reports")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()

    checkpoint = args.out / "checkpoint"
    checkpoint.mkdir(parents=True, exist_ok=True)
    texts = docstrings.gather()
    if (checkpoint / "tokenizer.model").exists():
        tokenizer = load_tokenizer(checkpoint)
    else:
        tokenizer = train_tokenizer(checkpoint, texts.docstrings, args.seed)

    samples = tasks.test_samples(args.seed, _TEST_SAMPLES_PER_TASK)
    _write_lines(args.out / "evaluation.jsonl", samples)
    _write_lines(args.out / "heldout.jsonl", [{"text": text} for text in texts.held_out])

    plan = Plan(args.steps, args.seed, args.report_every, args.threads)
    batches = Batches(tokenizer, texts, args.seed)
    model = train(args.out, plan, batches, samples[::4], texts.held_out[:_REPORT_TEXTS])

    report = evaluate(model, batches.preprocessor, samples, texts.held_out)
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    _write_golden(args.out / "golden.json", model, batches.preprocessor, samples)
    print(json.dumps(report, indent=2))


def _write_golden(
    path: Path, model: AFMTextV7, preprocessor: AFMChatTemplateV6Preprocessor, samples: list[dict]
) -> None:
    """Write what tamm itself answers to a few prompts, the reference of another runtime's tests."""
    golden = []
    for sample in samples[:: len(samples) // _GOLDEN_PROMPTS + 1]:
        prompt, _ = tasks.encode(preprocessor, sample, generate=True)
        golden.append({"prompt": prompt, "tokens": greedy(model, prompt, _GOLDEN_TOKENS)})
    path.write_text(json.dumps(golden) + "\n")


def _write_lines(path: Path, objects: list[dict]) -> None:
    path.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in objects))


if __name__ == "__main__":
    main()
