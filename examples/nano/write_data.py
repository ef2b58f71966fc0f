"""Write the training data of the quantized variants: JSONL files for `afm-mlx qat` and `afm-mlx lora`.

    python examples/nano/write_data.py --source nano --out nano/data --seed 0

The chats and texts are those that the float model was trained on, in the shares in which it saw them: the
stream of `tasks.training_samples`, and docstrings and further texts, whole. Neither the values of the test
split nor a held-out docstring occurs in them. `valid.jsonl` has chats of its own, and texts that
`train.jsonl` lacks; the float model has seen those texts, so its loss there shows what it remembers.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from afm_mlx.files import atomic_folder
from afm_mlx.tokenizer.tokenizer import AFMTokenizer, load_tokenizer

import docstrings  # isort: skip
import tasks

# Makes one token in five a text's, as in the batches of `batches.py`: texts have 93 tokens on average,
# chats 112.
TEXT_SHARE = 0.225
_SAMPLES = 37_000
_VALID_SAMPLES = 400

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder that build.py made")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--samples", type=int, default=_SAMPLES, help="lines of train.jsonl; about 108 tokens each"
    )
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists already; remove it, or give another folder.")
    tokenizer = load_tokenizer(args.source / "checkpoint")
    texts = docstrings.gather()
    train, valid = draw_lines(texts.docstrings + texts.further, args.seed, args.samples)
    with atomic_folder(args.out) as folder:
        for name, lines in (("train", train), ("valid", valid)):
            content = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (folder / f"{name}.jsonl").write_text(content)
            print(f"{args.out / name}.jsonl: {describe(lines, tokenizer)}")


def draw_lines(
    texts: list[str], seed: int, samples: int, valid_samples: int = _VALID_SAMPLES
) -> tuple[list[Line], list[Line]]:
    """Draw the lines of train.jsonl and valid.jsonl; equal arguments give equal lines.

    Each of the texts comes once before one comes twice. A line is `{"text"}` or `{"messages", "tools"?}`.
    """
    rng = random.Random(f"data-{seed}")
    chats = map(_chat_line, tasks.training_samples(seed))
    # Few texts in all, as in a test, still leave some to either file.
    held = min(round(valid_samples * TEXT_SHARE), len(texts) // 10)
    shuffled = rng.sample(texts, len(texts))

    def draw(own: list[str], texts: int, count: int) -> list[Line]:
        lines: list[Line] = [{"text": text} for text in islice(cycle(own), texts)]
        lines.extend(islice(chats, count - len(lines)))
        rng.shuffle(lines)
        return lines

    valid = draw(shuffled[:held], held, valid_samples)
    return draw(shuffled[held:], round(samples * TEXT_SHARE), samples), valid


def _chat_line(sample: dict[str, Any]) -> Line:
    return {key: value for key, value in sample.items() if key != "task"}


def describe(lines: list[Line], tokenizer: AFMTokenizer) -> str:
    """Numbers of lines and tokens, and the share of texts."""
    tokens = {"text": 0, "chat": 0}
    for line in lines:
        if "text" in line:
            tokens["text"] += len(tokenizer.encode(line["text"], add_special_tokens=True))
        else:
            ids = tokenizer.apply_chat_template(line["messages"], tools=line.get("tools"))
            tokens["chat"] += len(ids)
    total = sum(tokens.values())
    return f"{len(lines):,} lines, {total:,} tokens, {tokens['text'] / total:.1%} of them of texts"


if __name__ == "__main__":
    main()
