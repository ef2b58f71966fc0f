"""Talk with a model, turn by turn; /help in the chat lists its commands.

entry (terminal.py, or lines.py without one) -> command (commands.py), or message -> answer (session.py)
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from afm_mlx.cli import options
from afm_mlx.cli.argument_table import Argument, unavailable
from afm_mlx.cli.parser import UsageError, integer

if TYPE_CHECKING:
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.cli.chat.lines import Entries


ARGUMENTS = {
    "options": [
        *options.LOADING,
        *options.ADAPTERS,
        Argument("--system-prompt", None, "instructions that come before the conversation"),
        Argument("--max-tokens -m", integer(-1), "tokens per answer; -1 for no limit", 256),
        unavailable("--pipeline", "running on several machines is not available", nargs=0),
    ],
    "guesses, which make answers faster and change nothing of them": options.SPECULATION,
    "sampling": options.sampling(seed=0),
    "keys and values": options.CACHE,
}


def run(args: argparse.Namespace) -> None:
    from afm_mlx.cli.chat.conversation import Conversation
    from afm_mlx.cli.chat.session import Session
    from afm_mlx.model.model import is_afm

    model, tokenizer, adapters = options.load_with_adapters(args)
    if not tokenizer.has_chat_template:
        raise UsageError(
            f"{args.model} has no chat template; use afm-mlx generate, which needs none."
        )
    arguments = {
        "max_tokens": args.max_tokens,
        "sampler": options.sampler_of(args, model, tokenizer),
        "speculation": options.speculation_of(args, model, tokenizer, adapters.paths),
        **options.cache_options(args, model),
    }
    conversation = Conversation(
        model,
        tokenizer,
        lambda: options.new_cache(args, model, tokenizer),
        args.system_prompt,
        adapters,
    )
    if args.adapter_path is not None:
        conversation.switch(args.adapter_path)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        print(f"{args.model}: /help lists the commands, Ctrl-D leaves.")
        print(f"adapters: {', '.join(adapters.registered) or 'none'}")
    session = Session(
        conversation,
        adapters,
        arguments,
        first_seed=args.seed,
        context=args.max_kv_size or getattr(model.args, "context_length", None),
        window_possible=is_afm(model),
        figures=terminal,
    )
    session.run(_entries(terminal, adapters))


def _entries(terminal: bool, adapters: AdapterPool) -> Entries:
    from afm_mlx.cli.chat.lines import Lines

    # Emacs' shell and others like it edit lines themselves, and know no cursor movements.
    if not terminal or os.environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        return Lines(terminal)
    from afm_mlx.cli.chat.terminal import Terminal

    return Terminal(adapters)
