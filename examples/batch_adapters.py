"""Asks three adapters about one message, in one batch: each row names its own.

python examples/batch_adapters.py "Good morning, I am Maria. Can you call me at 14:30?"
"""

from __future__ import annotations

import argparse

from afm_mlx import AdapterPool, batch_generate, load
from afm_mlx.loading.resolve import resolve_model

QUESTIONS = {
    "redact": "Redact this message:",
    "todo": "List the to-dos:",
    "triage": "Triage this message:",
}


def answers(message: str) -> dict[str, str]:
    """Return the answer of each adapter of the embedded model to a message."""
    model, tokenizer = load("afm-nano")
    pool = AdapterPool(model, budget=16 << 20)  # bytes; what was not used for longest makes room
    prompts = []
    for name, question in QUESTIONS.items():
        pool.register(
            name, resolve_model("afm-nano") / "adapters" / name
        )  # read when a row asks for it
        chat = [{"role": "user", "content": f"{question}\n{message}"}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True))
    done = batch_generate(model, tokenizer, prompts, adapter=list(QUESTIONS), adapters=pool)
    return dict(zip(QUESTIONS, done.texts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("message")
    for name, answer in answers(parser.parse_args().message).items():
        print(f"{name}:\n{answer}\n")


if __name__ == "__main__":
    main()
