"""Continue a prompt, and print the answer while it grows."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from afm_mlx.cli import constraints, options
from afm_mlx.cli.argument_table import FLAG, Argument, flag_of, unavailable
from afm_mlx.cli.constraints import Asked
from afm_mlx.cli.output import input_bytes, print_answer, print_json
from afm_mlx.cli.parser import UsageError, boolean, integer, json_object
from afm_mlx.errors import CacheFileError

MAX_PROMPT_BYTES = 16 << 20
DEFAULT_PROMPT = "hello"
_RULE = "=" * 10
_FACTS = "finish_reason prompt_tokens prompt_tps generation_tokens generation_tps".split()

# fmt: off
ARGUMENTS = {
    "options": [
        Argument("text", None, "the prompt, as with --prompt", nargs="?", metavar="TEXT"),
        *options.LOADING,
        Argument("--prompt -p", None,
                 r"what to say to the model, with \n and \t for line break and tab; "
                 "- reads standard input, but for its last line break "
                 f"(default: {DEFAULT_PROMPT})"),
        Argument("--system-prompt", None, "instructions that come before the prompt"),
        Argument("--prefill-response", None, "beginning of the answer, for the model to continue"),
        Argument("--ignore-chat-template", FLAG,
                 "continue the prompt as plain text, in which names such as <turn_end> are control tokens"),
        Argument("--chat-template-config", json_object, "variables for the chat template", metavar="JSON"),
        Argument("--max-tokens -m", integer(-1), "new tokens at most; -1 for no limit", 100),
        Argument("--stop", None, "texts that end the answer, left out of it", [], nargs="+", metavar="TEXT"),
        Argument("--extra-eos-token", None, "more tokens that end the answer", [], nargs="+", metavar="TOKEN"),
        Argument("--prompt-cache-file", None,
                 "keys and values of an earlier prompt: what both prompts begin with is not computed again. "
                 "The file is made when there is none, and never changed after",
                 metavar="FILE.safetensors"),
        Argument("--verbose", boolean, "False prints the answer and no figures", True),
        options.JSON,
        unavailable("--quantize-activations -qa", "quantized activations are not available", nargs=0),
        unavailable("--image", "these models read text only", nargs="+"),
        unavailable("--use-default-chat-template",
                    "remove chat_template.jinja from the model folder to use AFM's own template", nargs=0),
    ],
    "what the answer must look like, at most one of the first four": constraints.ARGUMENTS,
    "guesses, which make answers faster and change nothing of them": options.SPECULATION,
    "sampling": options.sampling(seed=None),
    "keys and values": options.CACHE,
}
# fmt: on
ALTERNATIVES = (*constraints.ALTERNATIVES, ("text", "prompt", "what the prompt is"))


def run(args: argparse.Namespace) -> None:
    text = _prompt_text(args)
    asked = constraints.asked_of(args)
    if asked is not None and args.prefill_response is not None:
        raise UsageError(
            "--prefill-response can't be combined with what the answer must look like, which is said of the "
            "whole answer."
        )
    model, tokenizer = options.load_model(args)
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    prompt = _encode(args, text, tokenizer, asked)
    generate = _generate if args.prompt_cache_file is None else _generate_with_file
    generate(
        args,
        model,
        tokenizer,
        prompt,
        asked,
        max_tokens=args.max_tokens,
        sampler=options.sampler_of(args, model, tokenizer),
        seed=args.seed,
        stop=args.stop,
        at_limit=args.at_limit,
        speculation=options.speculation_of(args, model, tokenizer),
        **options.cache_options(args, model),
    )


def _prompt_text(args: argparse.Namespace) -> str:
    given = args.prompt if args.text is None else args.text
    text = (DEFAULT_PROMPT if given is None else given).replace("\\n", "\n").replace("\\t", "\t")
    if text == "-":
        try:
            data = input_bytes().read(MAX_PROMPT_BYTES + 1)
            if len(data) > MAX_PROMPT_BYTES:
                raise UsageError(
                    f"standard input has more than {MAX_PROMPT_BYTES:,} bytes, which no context holds. Give a "
                    "shorter prompt."
                )
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"standard input is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}. "
                "Convert it first, for example with iconv."
            ) from None
        text = text.removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise UsageError("the prompt is empty; give a text with --prompt, or on standard input.")
    return text


def _encode(args: argparse.Namespace, text: str, tokenizer: Any, asked: Asked | None) -> list[int]:
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        why = "--ignore-chat-template leaves out" if args.ignore_chat_template else "is missing"
        for name in ("system_prompt", "prefill_response", "chat_template_config"):
            if getattr(args, name) is not None:
                raise UsageError(f"{flag_of(name)} needs the chat template, which {why}.")
        return tokenizer.encode(text, add_special_tokens=True)
    message: dict[str, Any] = {"role": "user", "content": text}
    if asked is not None and asked.response_format is not None:
        message["response_format"] = asked.response_format
    messages = [message]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    if args.prefill_response is not None:
        messages.append({"role": "assistant", "content": args.prefill_response})
    own = {
        "add_generation_prompt": args.prefill_response is None,
        "continue_final_message": args.prefill_response is not None,
    }
    variables = args.chat_template_config or {}
    if taken := sorted({*own, "messages", "conversation", "tokenize", "self"} & set(variables)):
        raise UsageError(f"--chat-template-config can't set {', '.join(taken)}: the command does.")
    return tokenizer.apply_chat_template(messages, **own, **variables)


def _generate(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    asked: Asked | None,
    **arguments: Any,
) -> None:
    from afm_mlx.engine.generation import stream_generate, summary

    if asked is not None:
        is_text = args.ignore_chat_template or not tokenizer.has_chat_template
        arguments |= {"constraint": asked.constraint, "heal": is_text}
    framed = args.verbose and not args.json
    text, tokens = "", list[int]()
    response: Any = None
    try:
        for response in stream_generate(model, tokenizer, prompt, logprobs=False, **arguments):
            if framed and not tokens:
                print(_RULE)
            text += response.text
            tokens.append(response.token)
            if response.text and not args.json:
                print_answer(response.text)
    finally:
        # An error's one line, too, starts at the beginning of a line.
        if text and not args.json:
            print()
    if asked is not None and asked.check is not None:
        asked.check(text)
    if args.json:
        facts = {name: getattr(response, name) for name in _FACTS}
        if response.draft_counts is not None:
            facts |= {
                name: getattr(response.draft_counts, name) for name in ("proposed", "accepted")
            }
        facts["peak_memory_gb"] = response.peak_memory
        parsed = {} if args.json_schema is None else {"value": json.loads(text)}
        print_json({"text": text, **parsed, "tokens": tokens, **facts})
    elif framed and response is not None:
        print(_RULE)
        print(summary(response))


# -- prompt cache files


def _generate_with_file(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    asked: Asked | None,
    **arguments: Any,
) -> None:
    from afm_mlx.engine.prompt_cache import PromptCaches, save_prompt_cache

    path = _checked_cache_path(args, model)
    caches = PromptCaches(partial(options.new_cache, args, model, tokenizer))
    if is_there := path.exists():
        caches.keep(*_read_cache(path, model))
    with caches.continuing(prompt) as run:
        _generate(args, model, tokenizer, run.rest, asked, prompt_cache=run.cache, **arguments)
    if not is_there:
        of_prompt = [layer.copy(len(prompt)) for layer in run.cache]
        save_prompt_cache(path, of_prompt, model, metadata={"tokens": json.dumps(prompt)})


def _checked_cache_path(args: argparse.Namespace, model: Any) -> Path:
    from afm_mlx.model.model import is_afm

    path = Path(args.prompt_cache_file)
    if not is_afm(model):
        raise UsageError(
            "--prompt-cache-file is for AFM models; mlx_lm.generate has it for others."
        )
    if args.sliding_window:
        raise UsageError(
            "--prompt-cache-file can't be combined with --sliding-window, which forgets the beginning."
        )
    if path.suffix != ".safetensors":
        raise UsageError(
            f"--prompt-cache-file is {path}; the name of a .safetensors file is needed."
        )
    if not path.parent.is_dir():
        raise UsageError(f"--prompt-cache-file is {path}, and there is no folder {path.parent}.")
    return path


def _read_cache(path: Path, model: Any) -> tuple[list[Any], list[int]]:
    from afm_mlx.engine.prompt_cache import load_prompt_cache, tokens_in

    cache, metadata = load_prompt_cache(path, model)
    try:
        held = json.loads(metadata["tokens"])
    except (KeyError, ValueError, RecursionError):
        held = None
    if not isinstance(held, list) or len(held) != tokens_in(cache):
        raise CacheFileError(
            f"{path} does not say which tokens it holds; it was not made by `afm-mlx generate`. "
            "Give the name of a new file, which is then made."
        )
    return cache, held
