"""Arguments that several commands share, and the models, samplers and caches that are made from them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from afm_mlx.cli.argument_table import FLAG, Argument, unavailable
from afm_mlx.cli.parser import UsageError, integer, number
from afm_mlx.errors import shown
from afm_mlx.loading.resolve import EMBEDDED_MODEL

MAX_SEED = 2**64 - 1


# fmt: off
MODEL = Argument("--model", None, "model folder, hub id, or the name of the embedded model", EMBEDDED_MODEL)

ACTIVATION_BITS = Argument(
    "--activation-bits", integer(1, 16),
    "8 lets packed layers round their input to int8, which is faster on a CPU and less exact",
    16, choices=[16, 8])

JSON = Argument("--json", FLAG, "print one JSON object, for programs")

TRUST_REMOTE_CODE = Argument(
    "--trust-remote-code", FLAG,
    "let code in the folder of a model that mlx-lm loads run; AFM folders have none")

LOADING = [
    MODEL,
    Argument("--adapter-path", None, "LoRA adapter: its path, or the name of one that comes with the model"),
    Argument("--force", FLAG, "run an adapter that was made for another model, if its shapes fit"),
    ACTIVATION_BITS,
    TRUST_REMOTE_CODE,
]
# fmt: on


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and the tokenizer that `LOADING`'s arguments name."""
    from afm_mlx.loading.load import load

    return load(
        args.model,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        activation_bits=args.activation_bits,
        force_adapter=args.force,
    )


def named_path(text: str) -> tuple[str, str]:
    """`NAME=PATH`, for argparse."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no NAME=PATH, such as tidy=my-adapters/tidy"
        )
    return name, path


def gigabytes(text: str) -> int:
    """A number of gigabytes as bytes, at least one, for argparse."""
    nbytes = round(number(0, 10**6)(text) * 1e9)
    if nbytes < 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} holds no adapter; one takes some 0.001 to 0.3 GB"
        )
    return nbytes


# fmt: off
ADAPTERS = [
    Argument("--adapter", named_path,
             "another adapter to switch to; may be repeated. Those that come with the model are there anyway",
             [], action="append", metavar="NAME=PATH"),
    Argument("--adapter-memory", gigabytes,
             "memory that all adapters may take; those that were not used for longest make room. No limit by "
             "default",
             metavar="GB"),
]
# fmt: on


def load_with_adapters(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """The model, the tokenizer, and a pool of the adapters that the arguments name.

    `--adapter-path` is registered as what it was given as.
    """
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.loading.load import load
    from afm_mlx.loading.resolve import model_adapters, resolve_adapter, resolve_model

    names = [name for name, _ in args.adapter]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"--adapter gives {', '.join(repeated)} more than once; each needs a name of its own."
        )
    folder = resolve_model(args.model)
    given = {name: resolve_adapter(path, folder) for name, path in args.adapter}
    if args.adapter_path is not None:
        path = resolve_adapter(args.adapter_path, folder)
        if not given.setdefault(args.adapter_path, path).samefile(path):
            raise UsageError(
                f"--adapter-path is {args.adapter_path}, and --adapter gives that name to "
                f"{given[args.adapter_path]}; choose another name."
            )
    named = model_adapters(folder) | given
    model, tokenizer = load(
        folder, trust_remote_code=args.trust_remote_code, activation_bits=args.activation_bits
    )
    pool = AdapterPool(model, budget=args.adapter_memory, base_folder=folder, force=args.force)
    for name, path in named.items():
        pool.register(name, path)
    return model, tokenizer, pool


# -- sampling


# fmt: off
_SAMPLING = [
    Argument("--temp", number(0), "temperature; 0 takes the most likely token", 0.0),
    Argument("--top-p", number(0, 1), "keep the most likely tokens, up to this sum of probabilities", 1.0),
    Argument("--min-p", number(0, 1), "drop tokens below this share of the best one's probability", 0.0),
    Argument("--top-k", integer(0), "keep this many tokens; 0 keeps all", 0),
    Argument("--xtc-probability", number(0, 1), "how often XTC drops top choices", 0.0),
    Argument("--xtc-threshold", number(0, 0.5), "probability that makes a token one of XTC's top choices", 0.1),
    Argument("--min-tokens-to-keep", integer(1), "tokens that --min-p never drops", 1),
]
# fmt: on


def sampling(seed: int | None) -> list[Argument]:
    """The arguments of sampling, with a seed by default."""
    return [
        *_SAMPLING,
        Argument("--seed", integer(0, MAX_SEED), "seed of the random numbers", seed),
    ]


def sampler_of(args: argparse.Namespace, model: Any, tokenizer: Any) -> Any:
    """The sampler that `sampling`'s arguments describe; None for the most likely token.

    Raises:
        UsageError: when they contradict each other or the model's vocabulary.
    """
    if args.temp == 0:
        if args.xtc_probability:
            raise UsageError(
                "--xtc-probability has no effect at --temp 0, which takes the most likely token. "
                "Raise --temp, or leave it out."
            )
        return None
    vocab_size = getattr(model.args, "vocab_size", None)
    if vocab_size is not None and args.top_k >= vocab_size:
        raise UsageError(
            f"--top-k is {args.top_k}; this model has {vocab_size} tokens. Use 0 to keep all."
        )
    from afm_mlx.engine.samplers import make_sampler

    return make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )


# -- speculation


# fmt: off
SPECULATION = [
    Argument("--draft-model", None,
             "smaller model that guesses tokens, which the model checks several at a time: its folder or hub "
             "id, or auto for the one in the model's folder. Answers stay the same",
             metavar="PATH"),
    Argument("--num-draft-tokens", integer(1, 7), "guesses at a time; by default as many as pay"),
    Argument("--prompt-lookup", FLAG,
             "guess what followed the last few tokens where they stood before: for answers that copy"),
]
# fmt: on


def check_speculation(args: argparse.Namespace) -> None:
    """Raise `UsageError` for a number of guesses without anything that guesses."""
    if args.num_draft_tokens is not None and args.draft_model is None and not args.prompt_lookup:
        raise UsageError("--num-draft-tokens needs --draft-model or --prompt-lookup, which guess.")


def speculation_of(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    adapters: Mapping[str, Path] | None = None,
) -> Any:
    """The `Speculation` that `SPECULATION`'s arguments ask for; None for none.

    Args:
        args: the arguments.
        model, tokenizer: what they are for.
        adapters: paths of the adapters that may answer, by their names: draft models may come with them.

    Raises:
        UsageError: for a number of guesses without anything that guesses.
    """
    check_speculation(args)
    if args.draft_model is None and not args.prompt_lookup:
        return None
    from afm_mlx.engine.speculation.drafting import Speculation
    from afm_mlx.loading.load import load_drafts
    from afm_mlx.loading.resolve import AUTO, adapter_draft, resolve_adapter, resolve_model

    folder, path = resolve_model(args.model), args.draft_model
    if path == AUTO and adapters is None and args.adapter_path is not None:
        # The one adapter that all rows have.
        path = adapter_draft(resolve_adapter(args.adapter_path, folder)) or AUTO
    draft, own = load_drafts(path, model, tokenizer, folder, adapters)
    return Speculation(draft, args.prompt_lookup, own, args.num_draft_tokens)


# -- the cache of keys and values


_NO_KV_GROUPS = (
    "an AFM model's int8 keys and values have the checkpoint's own scales; only --kv-bits 8 or 16"
)

# fmt: off
_CACHE = [
    Argument("--max-kv-size", integer(1),
             "tokens that prompt and answer may have together; the model's context by default"),
    Argument("--sliding-window", FLAG,
             "when the context is full, forget the oldest tokens instead of ending with an error"),
    Argument("--kv-bits", integer(1, 16),
             "8 for the checkpoint's int8 (the default where it has scales), 16 for floats"),
    Argument("--prefill-step-size", integer(1), "prompt tokens at a time, at most; fewer need less memory",
             2048),
]
CACHE = [
    *_CACHE,
    unavailable("--kv-group-size", _NO_KV_GROUPS),
    unavailable("--quantized-kv-start", _NO_KV_GROUPS),
]
# fmt: on


def cache_options(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The arguments of `stream_generate` that `CACHE` gives.

    Raises:
        UsageError: for what the model can't honour.
    """
    from afm_mlx.model.model import is_afm

    if args.sliding_window and not is_afm(model):
        raise UsageError(
            "--sliding-window is for AFM models; mlx-lm's forget the oldest tokens past --max-kv-size "
            "by themselves."
        )
    return {row.name: getattr(args, row.name) for row in _CACHE}


def new_cache(args: argparse.Namespace, model: Any, tokenizer: Any) -> list[Any]:
    """An empty cache of the kind that `CACHE`'s arguments ask for."""
    from afm_mlx.engine.engine import Engine

    engine = Engine(
        model,
        tokenizer,
        max_kv_size=args.max_kv_size,
        sliding_window=args.sliding_window,
        kv="float" if args.kv_bits == 16 else "int8",
    )
    return engine.make_cache()
