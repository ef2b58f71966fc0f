"""Talk with a model, turn by turn. A line with q quits, r starts anew, /adapter switches, h helps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import options
from afm_mlx.cli.parser import UsageError, integer
from afm_mlx.errors import (
    AFMError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    TokenizerError,
)

if TYPE_CHECKING:
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.cli.conversation import Conversation

_HELP = (
    "q quits, r forgets the conversation, /adapter NAME switches to an adapter and /adapter alone "
    "back to none, h shows this; Ctrl-C stops an answer."
)
_PROMPT = ">> "
_SWITCH = "/adapter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    options.add_adapters(parser)
    parser.add_argument("--system-prompt", help="instructions that come before the conversation")
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=integer(-1),
        default=256,
        help="tokens per answer; -1 for no limit",
    )
    options.add_sampling(parser, seed=0)
    options.add_cache(parser)
    options.add_unavailable(
        parser, "running on several machines is not available", "--pipeline", nargs=0
    )


def run(args: argparse.Namespace) -> None:
    from afm_mlx.cli.conversation import Conversation

    model, tokenizer, adapters = options.load_with_adapters(args)
    if not tokenizer.has_chat_template:
        raise UsageError(
            f"{args.model} has no chat template; use afm-mlx generate, which needs none."
        )
    arguments = {
        "max_tokens": args.max_tokens,
        "sampler": options.sampler_of(args, model, tokenizer),
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
        print(f"{args.model}: {_HELP}")
        print(f"adapters: {', '.join(adapters.registered) or 'none'}")
    _converse(conversation, adapters, terminal, arguments, args.seed)


def _converse(
    conversation: Conversation,
    adapters: AdapterPool,
    terminal: bool,
    arguments: dict[str, Any],
    first_seed: int,
) -> None:
    """Do what line after line says, until q or the end of input."""
    seed = first_seed
    for line in _lines(terminal):
        if line == "q":
            break
        if line == "r":
            conversation.reset()
            seed = first_seed
            _note("The conversation is forgotten.")
        elif line == "h":
            _note(_HELP)
        elif line.split(maxsplit=1)[:1] == [_SWITCH]:
            _switch(conversation, adapters, line.removeprefix(_SWITCH).strip())
        elif line.strip():
            _turn(conversation, line, terminal, {**arguments, "seed": seed})
            seed = (seed + 1) % options.MAX_SEED  # the same draws would repeat themselves


def _switch(conversation: Conversation, adapters: AdapterPool, name: str) -> None:
    try:
        conversation.switch(name or None)
    except AFMError as error:
        _note(" ".join(str(error).split()))
        return
    except KeyboardInterrupt:  # while it was loaded
        _note("Stopped; the adapter is the one before.")
        return
    others = ", ".join(adapters.registered) or "none"
    _note(f"Adapter: {name}." if name else f"No adapter; there are: {others}.")


def _lines(terminal: bool) -> Iterator[str]:
    """What the user says, until the end of input."""
    if terminal:
        import contextlib
        import importlib

        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives input() its editing keys
        while True:
            try:
                yield input(_PROMPT)
            except EOFError:
                print()
                return
    for number, line in enumerate(iter(sys.stdin.buffer.readline, b""), start=1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError(f"line {number} of standard input is not UTF-8 text.") from None


def _turn(conversation: Any, line: str, terminal: bool, arguments: dict[str, Any]) -> None:
    shown = False

    def show(text: str) -> None:
        nonlocal shown
        shown = shown or bool(text)
        print(text, end="", flush=True)

    try:
        response = conversation.ask(line, show, **arguments)
    except (CheckpointError, ConfigError, ContextLengthError, TokenizerError) as error:
        if shown:
            print(flush=True)
        message = " ".join(str(error).split())
        _note(
            f"{message} The question is left out of the conversation: ask another, or r starts anew."
        )
        return
    print(flush=True)
    if response is None:
        _note("Stopped.")
    elif terminal:
        _note(f"[{response.generation_tokens} tokens, {response.generation_tps:.1f} per second]")


def _note(text: str) -> None:
    """Say something that is no part of the conversation."""
    print(text, file=sys.stderr, flush=True)
