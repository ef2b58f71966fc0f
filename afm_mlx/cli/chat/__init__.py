"""Talk with a model, turn by turn; /help in the chat lists its commands.

`loop.py` reads entries and runs commands, `dialogue.py` answers, `terminal.py` edits lines on a terminal.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import model_options, split_runs
from afm_mlx.cli.arguments import Argument, UsageError, count_or_all, unavailable
from afm_mlx.cli.images import IMAGES
from afm_mlx.cli.thoughts import THINK, Thoughts

if TYPE_CHECKING:
    from afm_mlx.adapters.pool import AdapterPool

ARGUMENTS = {
    "options": [
        *model_options.LOADING,
        *model_options.ADAPTERS,
        *IMAGES,
        Argument("--system-prompt", None, "instructions that come before the conversation"),
        THINK,
        Argument(
            "--max-tokens -m", count_or_all, "maximum tokens per answer; -1 for no limit", 256
        ),
        unavailable(
            "--pipeline",
            "start the command with mlx.launch to split the model",
            nargs=0,
        ),
    ],
    "draft tokens, which make answers faster and do not change them": model_options.SPECULATION,
    "sampling": model_options.sampling_arguments(seed=0),
    "KV cache": model_options.CACHE,
}


def run(args: argparse.Namespace) -> None:
    ranks = split_runs.joined(args, [args.model], ("mask", "adapter_memory"))
    model, tokenizer, adapters = model_options.load_with_adapters(args, ranks)
    if not split_runs.follows(ranks, model, tokenizer, adapters):
        with split_runs.leading(ranks):
            _chat(args, model, tokenizer, adapters)


def _chat(args: argparse.Namespace, model: Any, tokenizer: Any, adapters: AdapterPool) -> None:
    from afm_mlx.cli.chat.dialogue import Dialogue
    from afm_mlx.cli.chat.loop import ChatLoop, Lines
    from afm_mlx.model.model import is_afm

    if not tokenizer.has_chat_template:
        raise UsageError(
            f"{args.model} has no chat template; use afm-mlx generate, which needs none."
        )
    arguments = {
        "max_tokens": args.max_tokens,
        "sampler": model_options.sampler_of(args, model, tokenizer),
        "speculation": model_options.speculation_of(args, model, tokenizer, adapters.paths),
        **model_options.cache_options(args, model),
    }
    masks = model_options.prompt_masks(args, model, tokenizer, adapters)
    dialogue = Dialogue(
        model,
        tokenizer,
        lambda: model_options.new_cache(args, model, tokenizer),
        args.system_prompt,
        adapters,
        Thoughts(tokenizer, args.think),
        masks,
    )
    name = model_options.adapter_name(args)
    if name is not None and masks is None:  # masks run with the adapter
        dialogue.switch(name)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        print(f"{args.model}: /help lists the commands, Ctrl-D leaves.")
        print(f"adapters: {', '.join(adapters.registered) or 'none'}")
    loop = ChatLoop(
        dialogue,
        adapters,
        arguments,
        first_seed=args.seed,
        context=args.max_kv_size or getattr(model.args, "context_length", None),
        window_possible=is_afm(model),
        figures=terminal,
        image_mode=args.image_mode,
    )
    for path in args.image:  # with the first message
        loop.attach(Path(path).absolute())
    # Emacs' shell and others like it edit lines themselves, and have no cursor movements.
    if not terminal or os.environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        loop.run(Lines(terminal))
    else:
        from afm_mlx.cli.chat.terminal import TerminalEntries

        loop.run(TerminalEntries(adapters))
