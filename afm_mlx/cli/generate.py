"""Continue a prompt, and print the answer while it grows."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import model_options, split_runs
from afm_mlx.cli.arguments import (
    FLAG,
    MAX_ROWS,
    Argument,
    UsageError,
    boolean,
    count_or_all,
    flag_of,
    integer,
    json_object,
    unavailable,
)
from afm_mlx.cli.images import IMAGES, message_content, read_picture
from afm_mlx.cli.output import (
    input_bytes,
    note,
    one_line,
    print_answer,
    print_json,
    progress_bar,
)
from afm_mlx.cli.thoughts import THINK, ThoughtPrinter, Thoughts
from afm_mlx.errors import CacheFileError, reason_of, shown
from afm_mlx.loading.resolve import AUTO

if TYPE_CHECKING:
    import mlx.nn as nn

    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.adapters.prompt_masks import PromptMasks
    from afm_mlx.engine.generation import GenerationResponse
    from afm_mlx.guidance.answer_parts import AnySplitter
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.tokenizer.protocol import Tokenizer
    from afm_mlx.vision.prompt_image import PromptImage

MAX_PROMPT_BYTES = 16 << 20
MAX_FILE_BYTES = 16 << 20
"""Maximum bytes of a file that holds a schema, a grammar or a type."""
DEFAULT_PROMPT = "hello"
_RULE = "=" * 10
_FACTS = "finish_reason prompt_tokens prompt_tps generation_tokens generation_tps".split()

_CONSTRAINT_NAMES = ("json_schema", "regex", "choices", "grammar")
_TYPE = re.compile(r"(?P<file>.+\.py)?(?P<module>[\w.]+)?:(?P<name>[\w.]+)")

# fmt: off
CONSTRAINT = [
    Argument("--json-schema", None,
             "a JSON value of this schema: a file, or a type, module:Class or path/to/file.py:Class, whose "
             "code is run. A chat shows the schema to the model",
             metavar="FILE.json|TYPE"),
    Argument("--regex", None, "a text that this pattern matches as a whole", metavar="PATTERN"),
    Argument("--choices", None, "one of these texts", nargs="+", metavar="TEXT"),
    Argument("--grammar", None, "a text of this grammar: Lark's or, in .gbnf, llama.cpp's",
             metavar="FILE.lark|FILE.gbnf"),
    Argument("--at-limit", ["error", "complete"],
             "what to do if --max-tokens ends an answer too early: an error, or its shortest completion",
             "error"),
]
_SEARCH = [
    Argument("--best-of", integer(2, MAX_ROWS), "sample N answers, and choose one of them", metavar="N"),
    Argument("--smc", integer(2, MAX_ROWS),
             "the same, with stepwise resampling: --value looks at each answer after every line, and "
             "promising ones multiply",
             metavar="N"),
    model_options.VERIFY,
    Argument("--reward", None, "what makes an answer good, as for --verify; the best one is chosen",
             metavar="DIR|REWARD"),
    Argument("--value", None,
             "chance that an unfinished answer will pass, 0 or more: FILE.py:NAME of a function of prompt, "
             "answer and sample, or another check", metavar="VALUE"),
    Argument("--select", ["weighted", "majority", "best", "first"],
             "which answer is chosen: the one with the largest sum of rewards (the default with --verify), the "
             "most frequent one, the best (the default with --reward), or the first to pass"),
]
ARGUMENTS = {
    "options": [
        Argument("text", None, "the prompt, in quotation marks; short for --prompt TEXT",
                 nargs="?", metavar="TEXT"),
        *model_options.LOADING,
        Argument("--prompt -p", None,
                 r"prompt, with \n and \t for line break and tab; "
                 "- reads standard input, without its last line break "
                 f"(default: {DEFAULT_PROMPT})"),
        *IMAGES,
        Argument("--system-prompt", None, "instructions that come before the prompt"),
        Argument("--prefill-response", None, "beginning of the answer, for the model to continue"),
        Argument("--ignore-chat-template", FLAG,
                 "continue the prompt as plain text, in which names such as <turn_end> are control tokens"),
        Argument("--chat-template-config", json_object, "variables for the chat template", metavar="JSON"),
        THINK,
        Argument("--max-tokens -m", count_or_all, "maximum new tokens; -1 for no limit", 100),
        Argument("--stop", None, "stop strings, which end the answer and are not part of it", [],
                 nargs="+", metavar="TEXT"),
        Argument("--extra-eos-token", None, "additional tokens that end the answer", [],
                 nargs="+", metavar="TOKEN"),
        Argument("--prompt-cache-file", None,
                 "file with the KV cache of an earlier prompt: the part with which both prompts begin is "
                 "not computed again. The file is created if it does not exist, and never changed",
                 metavar="FILE.safetensors"),
        Argument("--verbose", boolean, "False prints the answer alone, without figures", True),
        model_options.JSON,
        unavailable("--quantize-activations -qa", "quantized activations are not available", nargs=0),
        unavailable("--use-default-chat-template",
                    "remove chat_template.jinja from the model folder to use AFM's own template", nargs=0),
    ],
    "what the answer must look like, at most one of the first four": CONSTRAINT,
    "draft tokens, which make answers faster and do not change them": model_options.SPECULATION,
    "sampling": model_options.sampling_arguments(seed=None),
    "several samples, of which one is the answer": _SEARCH,
    "KV cache": model_options.CACHE,
}
# fmt: on
_WHOLE_ONLY = ("mask", "prompt_cache_file", "best_of", "smc")
"""Arguments that need the whole model in one process."""
ALTERNATIVES = (
    *(
        (one, other, "what the answer must look like")
        for one, other in itertools.combinations(_CONSTRAINT_NAMES, 2)
    ),
    ("text", "prompt", "what the prompt is"),
    ("best_of", "smc", "how many samples there are"),
    ("verify", "reward", "what makes an answer good"),
)


def run(args: argparse.Namespace) -> None:
    text = _prompt_text(args)
    form = answer_constraint(args)
    if form is not None and args.prefill_response is not None:
        raise UsageError(
            "--prefill-response can't be combined with a constraint, which holds for the whole answer."
        )
    _check_search(args)
    if args.image and args.prompt_cache_file is not None:
        raise UsageError(
            "--prompt-cache-file can't be combined with --image: the file would not know which pictures its "
            "tokens are of."
        )
    searches = args.best_of is not None or args.smc is not None
    if args.mask == AUTO and (searches or args.prompt_cache_file is not None):
        raise UsageError(
            "--mask auto can't be combined with --best-of, --smc or --prompt-cache-file. Make the mask "
            "first: afm-mlx prune --criterion predictor."
        )
    ranks = split_runs.joined(args, [args.model], _WHOLE_ONLY)
    pool = masks = None
    if searches or args.mask == AUTO:  # reward adapters take turns with the one that answers
        model, tokenizer, pool = model_options.load_with_adapters(args)
        masks = model_options.prompt_masks(args, model, tokenizer, pool)
    else:
        model, tokenizer = model_options.load_model(args, ranks)
    if split_runs.follows(ranks, model, tokenizer):
        return
    with split_runs.leading(ranks):
        _run(args, text, form, searches, model, tokenizer, pool, masks)


def _run(
    args: argparse.Namespace,
    text: str,
    form: AnswerConstraint | None,
    searches: bool,
    model: nn.Module,
    tokenizer: Tokenizer,
    pool: AdapterPool | None,
    masks: PromptMasks | None,
) -> None:
    from afm_mlx.engine.generation import stream_generate

    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    is_text = args.ignore_chat_template or not tokenizer.has_chat_template
    thoughts = None if is_text else Thoughts(tokenizer, args.think)
    prompt, images = _encode(args, text, tokenizer, form, thoughts)
    options: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "sampler": model_options.sampler_of(args, model, tokenizer),
        "seed": args.seed,
        "stop": args.stop,
        "at_limit": args.at_limit,
        "speculation": model_options.speculation_of(args, model, tokenizer),
        "images": images,
        **model_options.cache_options(args, model),
    }
    constraint = None if form is None else form.constraint
    if thoughts is not None:
        options |= thoughts.options(prompt, constraint)
    elif constraint is not None:
        options |= {"constraint": constraint, "heal": True}
    if searches and pool is not None:
        splitter = None if thoughts is None else partial(thoughts.splitter, prompt)
        _search(args, model, tokenizer, pool, text, prompt, form, splitter, options)
        return
    if masks is not None:
        options |= {"adapter": masks.name_for(prompt), "adapters": pool}
    with _cached(args, model, tokenizer, prompt) as (rest, prompt_cache):
        responses = stream_generate(
            model, tokenizer, rest, prompt_cache=prompt_cache, logprobs=False, **options
        )
        _print(args, responses, form, None if thoughts is None else thoughts.splitter(prompt))


def _prompt_text(args: argparse.Namespace) -> str:
    given = args.prompt if args.text is None else args.text
    for name in ("choices", "stop", "extra_eos_token", "image") if given is None else ():
        # A flag that takes all texts after it has probably taken the prompt, too.
        if (
            flag_of(name) in shlex.split(args.command_line)
            and len(taken := getattr(args, name)) > 1
        ):
            raise UsageError(
                f"there is no prompt: {flag_of(name)} takes all texts after it, {shown(taken[-1])} too. Write "
                f"the prompt before {flag_of(name)}, or as --prompt TEXT."
            )
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


def _encode(
    args: argparse.Namespace,
    text: str,
    tokenizer: Tokenizer,
    form: AnswerConstraint | None,
    thoughts: Thoughts | None,
) -> tuple[list[int], Sequence[PromptImage]]:
    """Return the prompt's token ids, and its images."""
    if thoughts is None:
        why = "--ignore-chat-template leaves out" if args.ignore_chat_template else "is missing"
        for name in ("system_prompt", "prefill_response", "chat_template_config", "think"):
            if (given := getattr(args, name)) is not None:
                flag = "--no-think" if given is False else flag_of(name)
                raise UsageError(f"{flag} needs the chat template, which {why}.")
        if args.image:
            raise UsageError(f"--image needs the chat template, which {why}.")
        return tokenizer.encode(text, add_special_tokens=True), ()
    pictures = [read_picture(path, args.image_mode, tokenizer) for path in args.image]
    content = message_content(text, [{"type": "image", "image": picture} for picture in pictures])
    message: dict[str, Any] = {"role": "user", "content": content}
    if form is not None and form.response_format is not None:
        message["response_format"] = form.response_format
    messages = [message]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": args.system_prompt})
    if args.prefill_response is not None:
        messages.append({"role": "assistant", "content": args.prefill_response})
    own: dict[str, Any] = {
        "add_generation_prompt": args.prefill_response is None,
        "continue_final_message": args.prefill_response is not None,
    }
    variables = args.chat_template_config or {}
    if taken := sorted({*own, "messages", "conversation", "tokenize", "self"} & set(variables)):
        raise UsageError(f"--chat-template-config can't set {', '.join(taken)}: the command does.")
    options: dict[str, Any] = own | thoughts.variables | variables
    from afm_mlx.tokenizer.chat_images import ChatImages

    images = ChatImages()
    if pictures:
        options["images"] = images
    ids = thoughts.ended(tokenizer.apply_chat_template(messages, **options))
    return ids, images.placed


def _print(
    args: argparse.Namespace,
    responses: Iterable[GenerationResponse],
    form: AnswerConstraint | None,
    splitter: AnySplitter | None,
) -> None:
    """Print an answer while it grows, and figures after it; thoughts on standard error."""
    from afm_mlx.engine.generation import summary

    framed = args.verbose and not args.json
    text, tokens = "", list[int]()
    response: Any = None
    printer = ThoughtPrinter(args.json)
    try:
        for response in responses:
            if framed and not tokens:
                print(_RULE, flush=True)
            said = printer.said(splitter, response)
            text += said
            tokens.append(response.token)
            if said and not args.json:
                print_answer(said)
    finally:
        printer.close()
        # An error's line must start at the beginning of a line, too.
        if text and not args.json:
            print()
    if form is not None and form.check is not None:
        form.check(text)
    if args.json:
        facts = {name: getattr(response, name) for name in _FACTS}
        if (counts := response.draft_counts) is not None:
            facts |= {"proposed": counts.proposed, "accepted": counts.accepted}
        facts["peak_memory_gb"] = response.peak_memory
        parsed = {} if args.json_schema is None else {"value": json.loads(text)}
        thought = {"thought": printer.text} if printer.text else {}
        print_json({"text": text, **thought, **parsed, "tokens": tokens, **facts})
    elif framed and response is not None:
        print(_RULE)
        print(summary(response))


def _check_search(args: argparse.Namespace) -> None:
    """Raise `UsageError` for arguments of `_SEARCH` that don't go together, or with others."""
    given = [row.name for row in _SEARCH if getattr(args, row.name) is not None]
    if not given:
        return
    if args.best_of is None and args.smc is None:
        raise UsageError(
            f"{flag_of(given[0])} needs --best-of N or --smc N: how many samples there are."
        )
    if args.smc is not None and (
        args.value is None or (args.verify is None and args.reward is None)
    ):
        raise UsageError("--smc needs --value, and --verify or --reward for whole answers.")
    if args.value is not None and args.smc is None:
        raise UsageError("--value needs --smc N; --best-of looks at whole answers only.")
    if args.temp == 0:
        raise UsageError("at --temp 0 all samples are alike; raise it, for example to --temp 1.")
    if args.prompt_cache_file is not None:
        raise UsageError("--prompt-cache-file is for one sample; leave it out.")


def _search(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: Tokenizer,
    pool: AdapterPool,
    text: str,
    prompt: list[int],
    form: AnswerConstraint | None,
    splitter: Callable[[], AnySplitter | None] | None,
    options: dict[str, Any],
) -> None:
    """Sample several answers, and print the chosen one and how the others compare."""
    from afm_mlx.engine.generation import kv_storage
    from afm_mlx.engine.search import search
    from afm_mlx.guidance.answer_parts import Text, split
    from afm_mlx.measure.reward_model import RewardModel
    from afm_mlx.measure.rewards import PASSES, make_rewards

    sample: dict[str, Any] = {"prompt": text}
    if form is not None and form.response_format is not None:
        sample["schema"] = form.response_format["json_schema"]["schema"]

    def reward(name: str | None) -> Callable[[str], float] | None:
        if name is None:
            return None
        rewards = make_rewards([name], adapter=partial(RewardModel.in_pool, model, tokenizer, pool))
        return lambda answer: rewards(text, answer, sample)

    def answer_of(whole: str, tokens: Sequence[int]) -> str:
        if splitter is None or (each := splitter()) is None:
            return whole
        parts = split(each, whole, tokens, is_last=True)
        return "".join(part.text for part in parts if isinstance(part, Text))

    kv_bits = options.pop("kv_bits")
    names = ("max_kv_size", "sliding_window", "prefill_step_size", "speculation")
    engine_options = {name: options.pop(name) for name in names} | {"adapters": pool}
    if kv_bits is not None:
        engine_options["kv"] = kv_storage(model, kv_bits)
    # What the code of rewards prints goes to standard error.
    with redirect_stdout(sys.stderr), progress_bar("sampling", "answer") as progress:
        verify = reward(args.reward or args.verify)
        found = search(
            model,
            tokenizer,
            prompt,
            args.best_of or args.smc,
            verify=verify,
            select=args.select or ("weighted" if args.reward is None else "best"),
            value=reward(args.value),
            answer_of=answer_of,
            adapter=model_options.adapter_name(args),
            engine_options=engine_options,
            progress=progress,
            **options,
        )
        chosen = found.answers[0]
        passes = verify is None or verify(chosen) >= PASSES
    if args.verify is not None and not passes:
        note("No sample passes --verify; the answer is the best of the others.")
    if form is not None and form.check is not None:
        form.check(chosen)
    if args.json:
        parsed = {} if args.json_schema is None else {"value": json.loads(chosen)}
        print_json({"text": chosen, **parsed, **found._asdict()})
        return
    if args.verbose:
        print(_RULE)
    print_answer(f"{chosen}\n")
    if args.verbose:
        print(_RULE)
        for answer, weight in zip(found.answers, found.weights, strict=True):
            print_answer(f"{weight:8.3f}  {one_line(answer)}\n")


@contextmanager
def _cached(
    args: argparse.Namespace, model: nn.Module, tokenizer: Tokenizer, prompt: list[int]
) -> Iterator[tuple[list[int], list[Any] | None]]:
    """Yield the part of the prompt that `--prompt-cache-file` lacks, and its cache; then write a new file."""
    if args.prompt_cache_file is None:
        yield prompt, None
        return
    from afm_mlx.engine import prompt_cache
    from afm_mlx.model.model import is_afm

    flag, path = "--prompt-cache-file", Path(args.prompt_cache_file)
    if not is_afm(model):
        raise UsageError(f"{flag} is for AFM models; mlx_lm.generate has it for others.")
    if args.sliding_window:
        raise UsageError(
            f"{flag} can't be combined with --sliding-window, which drops the beginning."
        )
    if path.suffix != ".safetensors":
        raise UsageError(f"{flag} is {path}; the name of a .safetensors file is needed.")
    if not path.parent.is_dir():
        raise UsageError(f"{flag} is {path}, and there is no folder {path.parent}.")
    caches = prompt_cache.PromptCaches(partial(model_options.new_cache, args, model, tokenizer))
    if is_there := path.exists():
        cache, metadata = prompt_cache.load_prompt_cache(path, model)
        try:
            held = json.loads(metadata["tokens"])
        except (KeyError, ValueError, RecursionError):
            held = None
        if not isinstance(held, list) or len(held) != prompt_cache.tokens_in(cache):
            raise CacheFileError(
                f"{path} does not say which tokens it holds; it was not made by `afm-mlx generate`. "
                "Give the name of a new file, which is then made."
            )
        caches.keep(cache, held)
    with caches.continuing(prompt) as run:
        yield run.rest, run.cache
    if not is_there:
        layers = [layer.copy(len(prompt)) for layer in run.cache]
        metadata = {"tokens": json.dumps(prompt)}
        prompt_cache.save_prompt_cache(path, layers, model, metadata=metadata)


# -- constraints


@dataclass(frozen=True)
class AnswerConstraint:
    """A constraint on the answer, the form in which a chat shows it to the model, and a check of the answer."""

    constraint: Constraint
    response_format: dict[str, Any] | None = None  # None shows nothing
    check: Callable[[str], Any] | None = None  # raises ConstraintError for a text that doesn't fit


def answer_constraint(args: argparse.Namespace) -> AnswerConstraint | None:
    """Return the constraint that the arguments ask for, or None."""
    if all(getattr(args, name) is None for name in _CONSTRAINT_NAMES):
        if args.at_limit != "error":
            flags = ", ".join(map(flag_of, _CONSTRAINT_NAMES))
            raise UsageError(
                f"--at-limit needs one of {flags}: answers without a constraint may end anywhere."
            )
        return None
    from afm_mlx.guidance.constraint import Constraint  # and llguidance

    if args.json_schema is not None:
        return _of_schema(args.json_schema)
    if args.regex is not None:
        return AnswerConstraint(Constraint.regex(args.regex))
    if args.choices is not None:
        return AnswerConstraint(Constraint.choices(args.choices))
    kinds = {".lark": Constraint.lark, ".gbnf": Constraint.gbnf}
    path = Path(args.grammar)
    if path.suffix not in kinds:
        raise UsageError(f"--grammar is {path}; a .lark or .gbnf file is needed.")
    return AnswerConstraint(kinds[path.suffix](_read_text(path, "--grammar")))


def _read_text(path: Path, flag: str) -> str:
    from afm_mlx.files import read_file

    try:
        # Editors may write a byte order mark.
        return read_file(path, MAX_FILE_BYTES, pipes=True).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag}: {path} can't be read ({reason_of(error)}).") from None


def _of_schema(text: str) -> AnswerConstraint:
    """Return the constraint of a schema's file or of a type."""
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.guidance.types import answer_type

    schema: Any
    if text.endswith(".json"):
        try:
            schema = json.loads(_read_text(Path(text), "--json-schema"))
        except UsageError:
            raise
        except (ValueError, RecursionError) as error:
            raise UsageError(f"--json-schema: {Path(text)} is not JSON ({error}).") from None
        if not isinstance(schema, dict | bool):
            raise UsageError(
                f"--json-schema: {Path(text)} holds {shown(schema)}; a JSON schema is an object."
            )
    else:
        kind = _type(text)
        if getattr(kind, "_generable", False) is not True:  # not of afm_mlx.fm
            answers = answer_type(kind)
            return AnswerConstraint(answers.constraint, answers.response_format, answers.instance)
        try:
            schema = kind.generation_schema().to_dict()
        except Exception as error:  # errors of afm_mlx.fm are not AFMErrors
            raise UsageError(f"--json-schema: {text} can't be generated: {error}") from error
    constraint, shown_schema = Constraint.json_schema(schema), None
    if isinstance(schema, dict):
        described = {"description": schema["description"]} if "description" in schema else {}
        named = {"name": schema.get("title", "Response"), **described, "schema": schema}
        shown_schema = {"type": "json_schema", "json_schema": named}
    return AnswerConstraint(constraint, shown_schema)


def _type(text: str) -> Any:
    """Return the type that `module:Class` or `file.py:Class` names; runs its module."""
    found = _TYPE.fullmatch(text)
    if found is None or (found["file"] is None) == (found["module"] is None):
        raise UsageError(
            f"--json-schema is {shown(text)}; a .json file, module:Class or path/to/file.py:Class is needed."
        )
    from afm_mlx.python_file import importing_from, run_python_file

    source = found["file"] or found["module"]
    try:
        with redirect_stdout(sys.stderr):  # standard output is for the answer
            if found["file"]:
                kind: Any = run_python_file(Path(source))
            else:
                with importing_from(Path.cwd()):
                    kind = importlib.import_module(source)
            for name in found["name"].split("."):
                if not hasattr(kind, name):
                    raise UsageError(f"--json-schema: {source} has no {name}.")
                kind = getattr(kind, name)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # whatever the code raises
        raise UsageError(
            f"--json-schema: {source} can't be run ({type(error).__name__}: {error})."
        ) from error
    return kind
