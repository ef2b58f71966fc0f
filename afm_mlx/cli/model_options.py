"""Arguments that several commands share: which model to load, and how to sample, draft and cache."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.arguments import FLAG, Argument, UsageError, integer, number, unavailable
from afm_mlx.errors import shown
from afm_mlx.loading.resolve import AUTO, EMBEDDED_MODEL

if TYPE_CHECKING:
    import mlx.nn as nn

    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.adapters.prompt_masks import PromptMasks
    from afm_mlx.engine.request import Sampler
    from afm_mlx.engine.speculation.drafting import Speculation
    from afm_mlx.ranks import Ranks
    from afm_mlx.tokenizer.protocol import Tokenizer

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
    "run Python code from the model's folder, which some mlx-lm models need; AFM folders have none")

LOADING = [
    MODEL,
    Argument("--adapter-path", None, "LoRA adapter: its path, or the name of one that comes with the model"),
    Argument("--mask", None,
             "task mask, with which the model reads only the feed-forward channels that a task needs: its "
             "path, or the name of one that comes with the model; alone, or with --adapter-path. generate and "
             "chat take auto: the model's own predictor chooses a mask for the first prompt", metavar="DIR"),
    Argument("--force", FLAG, "run an adapter that was made for another model, if its shapes fit"),
    ACTIVATION_BITS,
    TRUST_REMOTE_CODE,
]
# fmt: on


def load_model(args: argparse.Namespace, ranks: Ranks | None = None) -> tuple[Any, Any]:
    """Load the model that the arguments of `LOADING` name, or a rank's part; return it and its tokenizer."""
    from afm_mlx.loading.load import load

    return load(
        args.model,
        adapter_path=args.adapter_path,
        trust_remote_code=args.trust_remote_code,
        activation_bits=args.activation_bits,
        force_adapter=args.force,
        mask=args.mask,
        ranks=ranks,
    )


def check_ranks(args: argparse.Namespace, ranks: Ranks, model: nn.Module, data: Any) -> None:
    """Raise `ConfigError` on every rank if the ranks' commands, weights or data (a JSON value) differ."""
    if ranks.size == 1:
        return
    import hashlib
    import json

    from mlx.utils import tree_flatten

    from afm_mlx.checkpoint.fingerprint import arrays_fingerprint

    weights = arrays_fingerprint(None, dict(tree_flatten(model.parameters())))
    digest = hashlib.sha256(json.dumps(data).encode()).hexdigest()
    ranks.check_alike({"the command": args.command_line, "model_weights": weights, "data": digest})


def adapter_name(args: argparse.Namespace) -> str | None:
    """Return the name of what `--adapter-path` and `--mask` stand for together; None without both."""
    mask = None if args.mask == AUTO else args.mask
    return "+".join(filter(None, (args.adapter_path, mask))) or None


def prompt_masks(
    args: argparse.Namespace, model: Any, tokenizer: Any, pool: AdapterPool
) -> PromptMasks | None:
    """Return the masks that the model's predictor chooses for prompts if `--mask` is auto, else None.

    Raises `AFMError` if the model has no predictor of masks.
    """
    if args.mask != AUTO:
        return None
    from afm_mlx.adapters.prompt_masks import PromptMasks
    from afm_mlx.checkpoint.fingerprint import folder_fingerprint
    from afm_mlx.loading.load import load_predictor
    from afm_mlx.loading.resolve import resolve_adapter, resolve_model

    folder = resolve_model(args.model)
    predictor = load_predictor(folder, model.args)
    path = args.adapter_path
    adapter = None if path is None else resolve_adapter(path, folder)
    return PromptMasks(pool, predictor, tokenizer, folder_fingerprint(model.args, folder), adapter)


def named_path(text: str) -> tuple[str, str]:
    """Convert the argument `NAME=PATH`."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        problem = f"{shown(text)} is not NAME=PATH, such as tidy=my-adapters/tidy"
        raise argparse.ArgumentTypeError(problem)
    return name, path


def gigabytes(text: str) -> int:
    """Convert a number of gigabytes to bytes, at least one."""
    nbytes = round(number(0, 10**6)(text) * 1e9)
    if nbytes < 1:
        problem = f"{shown(text)} is too little for an adapter, which takes 0.001 to 0.3 GB"
        raise argparse.ArgumentTypeError(problem)
    return nbytes


# fmt: off
ADAPTERS = [
    Argument("--adapter", named_path,
             "another adapter to switch to; may be repeated. Adapters that come with the model need no flag",
             [], action="append", metavar="NAME=PATH"),
    Argument("--adapter-memory", gigabytes,
             "gigabytes that all loaded adapters together may take; the least recently used are evicted. No "
             "limit by default",
             metavar="GB"),
]
# fmt: on


def named_adapters(given: list[tuple[str, str]]) -> dict[str, str]:
    """Return the paths of `--adapter` by name; raise `UsageError` if a name is given twice."""
    names = [name for name, _ in given]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(
            f"--adapter gives {', '.join(repeated)} more than once; each needs a name of its own."
        )
    return dict(given)


def load_with_adapters(
    args: argparse.Namespace, ranks: Ranks | None = None
) -> tuple[Any, Any, AdapterPool]:
    """Load the model, or a rank's part; return it, its tokenizer, and a pool of the adapters in the arguments.

    Commands without the arguments `ADAPTERS` have `--adapter-path` and `--mask` alone, which are registered
    as one, under their `adapter_name`.
    """
    from afm_mlx.adapters.pool import AdapterPool
    from afm_mlx.loading.load import check_predictor, load
    from afm_mlx.loading.resolve import (
        model_adapters,
        resolve_adapter,
        resolve_mask,
        resolve_model,
    )

    paths = named_adapters(getattr(args, "adapter", []))
    folder = resolve_model(args.model)
    given = {name: resolve_adapter(path, folder) for name, path in paths.items()}
    if args.adapter_path is not None:
        path = resolve_adapter(args.adapter_path, folder)
        if not given.setdefault(args.adapter_path, path).samefile(path):
            raise UsageError(
                f"--adapter-path is {args.adapter_path}, and --adapter gives that name to "
                f"{given[args.adapter_path]}; choose another name."
            )
    named = model_adapters(folder) | given
    if args.mask == AUTO:
        check_predictor(folder)
    mask = None if args.mask in (None, AUTO) else resolve_mask(args.mask, folder)
    model, tokenizer = load(
        folder,
        trust_remote_code=args.trust_remote_code,
        activation_bits=args.activation_bits,
        ranks=ranks,
    )
    pool = AdapterPool(
        model, budget=getattr(args, "adapter_memory", None), base_folder=folder, force=args.force
    )
    for name, path in named.items():
        pool.register(name, path)
    both = adapter_name(args)
    if mask is not None and both is not None and both not in named:
        if args.adapter_path is None:
            pool.register(both, mask)
        else:
            pool.register(both, named[args.adapter_path], mask=mask)
    return model, tokenizer, pool


# -- sampling


# fmt: off
_SAMPLING = [
    Argument("--top-p", number(0, 1), "keep the most likely tokens, up to this sum of probabilities", 1.0),
    Argument("--min-p", number(0, 1), "drop tokens less likely than this share of the most likely one", 0.0),
    Argument("--top-k", integer(0), "keep only this many most likely tokens; 0 keeps all", 0),
    Argument("--xtc-probability", number(0, 1), "probability with which XTC drops the top choices of a "
                                                "step", 0.0),
    Argument("--xtc-threshold", number(0, 0.5), "probability that makes a token one of XTC's top choices", 0.1),
    Argument("--min-tokens-to-keep", integer(1), "tokens that --min-p never drops", 1),
]
# fmt: on


def sampling_arguments(seed: int | None, temp: float = 0.0) -> list[Argument]:
    """Return the arguments of sampling; `seed` and `temp` are the defaults of `--seed` and `--temp`."""
    return [
        Argument("--temp", number(0), "temperature; 0 takes the most likely token", temp),
        *_SAMPLING,
        Argument("--seed", integer(0, MAX_SEED), "seed of the random numbers", seed),
    ]


def sampler_of(args: argparse.Namespace, model: nn.Module, tokenizer: Tokenizer) -> Sampler | None:
    """Make the sampler that the arguments describe; return None to take the most likely token."""
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


# -- rewards

_REWARD = "exact, regex:PATTERN, schema[:FILE.json], length:N, adapter:DIR, or FILE.py:NAME, whose code is run"

# fmt: off
REWARDS = [
    Argument("--rewards", None, f"what makes an answer good, several are added up: {_REWARD}",
             nargs="+", metavar="REWARD"),
    Argument("--reward-weights", number(-1e6, 1e6), "factor of each reward; 1 by default",
             nargs="+", metavar="W"),
]
VERIFY = Argument("--verify", None, f"a check, which an answer passes with 1 or more: {_REWARD}",
                  metavar="CHECK")
# fmt: on


# -- speculation


# fmt: off
SPECULATION = [
    Argument("--draft-model", None,
             "smaller model that drafts tokens, which the model verifies several at a time: its folder or hub "
             "id, or auto for the one in the model's folder. Answers stay the same",
             metavar="PATH"),
    Argument("--num-draft-tokens", integer(1, 7), "draft tokens at a time; by default as many as pay off"),
    Argument("--prompt-lookup", FLAG,
             "draft by copying: find where the last few tokens occurred before, and propose what followed "
             "there: for answers that copy"),
]
# fmt: on


def check_speculation(args: argparse.Namespace) -> None:
    """Raise `UsageError` for a number of draft tokens without a draft model or prompt lookup."""
    if args.num_draft_tokens is not None and args.draft_model is None and not args.prompt_lookup:
        raise UsageError(
            "--num-draft-tokens needs --draft-model or --prompt-lookup, which draft tokens."
        )


def speculation_of(
    args: argparse.Namespace,
    model: nn.Module,
    tokenizer: Tokenizer,
    adapters: Mapping[str, Path] | None = None,
) -> Speculation | None:
    """Make the `Speculation` that the arguments ask for; return None if they ask for plain decoding.

    `adapters` has the paths of the adapters that may answer, by name; draft models may come with them.
    """
    check_speculation(args)
    if args.draft_model is None and not args.prompt_lookup:
        return None
    from afm_mlx.engine.speculation.drafting import Speculation
    from afm_mlx.loading.load import load_drafts
    from afm_mlx.loading.resolve import adapter_draft, resolve_adapter, resolve_model

    folder, path = resolve_model(args.model), args.draft_model
    if path == AUTO and adapters is None and args.adapter_path is not None:
        # All rows use this one adapter.
        path = adapter_draft(resolve_adapter(args.adapter_path, folder)) or AUTO
    draft, own = load_drafts(path, model, tokenizer, folder, adapters)
    return Speculation(draft, args.prompt_lookup, own, args.num_draft_tokens)


# -- the KV cache


NO_KV_GROUPS = (
    "an AFM model's int8 keys and values have the checkpoint's own scales; only --kv-bits 8 or 16"
)

# fmt: off
_CACHE = [
    Argument("--max-kv-size", integer(1),
             "maximum tokens of prompt and answer together; the model's context by default"),
    Argument("--sliding-window", FLAG,
             "when the context is full, forget the oldest tokens instead of ending with an error"),
    Argument("--kv-bits", integer(1, 16),
             "8 for the checkpoint's int8 (the default where it has scales), 16 for floats"),
    Argument("--prefill-step-size", integer(1), "prompt tokens that are computed at a time, at most; fewer "
                                                "need less memory",
             2048),
]
CACHE = [
    *_CACHE,
    unavailable("--kv-group-size", NO_KV_GROUPS),
    unavailable("--quantized-kv-start", NO_KV_GROUPS),
]
# fmt: on


def cache_options(args: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    """Return the arguments of `stream_generate` that the arguments of `CACHE` set."""
    from afm_mlx.model.model import is_afm

    if args.sliding_window and not is_afm(model):
        raise UsageError(
            "--sliding-window is for AFM models; mlx-lm's forget the oldest tokens past --max-kv-size "
            "by themselves."
        )
    return {row.name: getattr(args, row.name) for row in _CACHE}


def new_cache(args: argparse.Namespace, model: nn.Module, tokenizer: Tokenizer) -> list[Any]:
    """Make an empty KV cache as the arguments of `CACHE` say."""
    from afm_mlx.engine.engine import Engine

    kv = "float" if args.kv_bits == 16 else "int8"
    sizes = {"max_kv_size": args.max_kv_size, "sliding_window": args.sliding_window}
    return Engine(model, tokenizer, kv=kv, **sizes).make_cache()
