"""Show, convert, check and add up adapters, of every format that their authors use."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.arguments import FLAG, Action, Argument, UsageError, flag_of, number
from afm_mlx.cli.model_options import JSON
from afm_mlx.cli.output import print_facts, print_json
from afm_mlx.errors import CheckpointError, named, shown
from afm_mlx.loading.resolve import EMBEDDED_MODEL

if TYPE_CHECKING:
    from afm_mlx.adapters.adapter_folder import AdapterConfig
    from afm_mlx.converters.adapter_conversion import BaseFolder

# The names of afm_mlx.adapters.formats, which imports MLX.
_FORMATS = ["mlx-lm", "peft", "toolkit", "fmadapter"]
_CORE_AI = "coreai"
_DTYPES = ["float16", "bfloat16", "float32"]

# fmt: off
_SOURCE = [
    Argument("adapter", None,
             "a folder of mlx-lm or PEFT, a .pt file of Apple's toolkit, an .fmadapter package, or the name of "
             "an adapter that comes with the model",
             nargs="?", metavar="ADAPTER"),
    Argument("--adapter-path", None, "ADAPTER, as a flag", metavar="ADAPTER"),
    Argument("--alpha", number(0),
             "alpha of a .pt file; by default from the config next to it, without one 16 for rank 32"),
]

_FORCE = Argument(
    "--force", FLAG, "take an adapter that was made for another base model, if its shapes fit")

_PACKAGE_FIELDS = [
    Argument("--name", None, "name of the package: letters, digits and '_'; by default the output's"),
    Argument("--author", None, "who made the adapter"),
    Argument("--description", None, "what the adapter does"),
    Argument("--license", None, "license of the adapter"),
    Argument("--base-signature", None, "40 hex digits that name the base model to Apple's runtime"),
    Argument("--draft", None,
             "draft model of another package: a folder with draft.mil and draft_weights.bin, which are copied; "
             "by default the source package's, which `none` leaves out"),
]
_ANY_RANK = Argument("--any-rank", FLAG, "write ranks above 32, which Apple's runtime does not load")
_PACKAGE = {".fmadapter packages": [*_PACKAGE_FIELDS, _ANY_RANK]}


def _model_argument(purpose: str) -> Argument:
    """Return the argument that names the base model, which the command needs for `purpose`."""
    return Argument("--model", None, f"folder, hub id or name of the base model: {purpose}")


def _output(default: str | None, formats: Sequence[str] = _FORMATS) -> list[Argument]:
    """Return the arguments of the adapter to write; pass None as the `default` format if it must be given."""
    return [
        Argument("--to", [*formats], "format of what is written", default),
        Argument("--output", None,
                 "what to write, which must not exist: a folder, NAME.pt or NAME.fmadapter"),
        Argument("--dtype", _DTYPES,
                 "type of the numbers; by default the source's. .pt files are float32, and packages "
                 "float16"),
        Argument("--qkv", ["fused", "split"],
                 "what a PEFT folder calls queries, keys and values: qkv_proj, or q_proj, k_proj and v_proj",
                 "fused"),
    ]
# fmt: on


def _output_options(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `write_adapter`'s options, and the given fields of an .fmadapter package.

    Raises `UsageError` for arguments that have no effect on the format.
    """
    fields = {row.name: getattr(args, row.name) for row in _PACKAGE_FIELDS}
    given = {name: value for name, value in fields.items() if value is not None}
    if args.to != "fmadapter" and (given or args.any_rank):
        flag = flag_of(next(iter(given), "any_rank"))
        raise UsageError(
            f"{flag} is for .fmadapter packages; it has no effect on {args.to}. Leave it out."
        )
    if args.qkv != "fused" and args.to != "peft":
        raise UsageError(f"--qkv is for PEFT folders; it has no effect on {args.to}. Leave it out.")
    if args.dtype is not None and args.to in ("toolkit", "fmadapter", _CORE_AI):
        raise UsageError(
            f"--dtype is {args.dtype}, and {args.to} has a type of its own. Leave it out."
        )
    if "draft" in given:
        given["draft"] = None if given["draft"] == "none" else Path(given["draft"])
    import mlx.core as mx

    dtype = None if args.dtype is None else getattr(mx, args.dtype)
    return {"dtype": dtype, "any_rank": args.any_rank, "qkv": args.qkv}, given


def _require(args: argparse.Namespace, action: str, **missing: str) -> None:
    """Set `adapter_path` from a positional ADAPTER; raise `UsageError` for two, or a missing argument.

    `missing` has the required arguments of the action, with what each of them says.
    """
    if (adapter := getattr(args, "adapter", None)) is not None:
        if args.adapter_path is not None:
            raise UsageError(
                f"two adapters were given, {named(adapter)} and --adapter-path {named(args.adapter_path)}; "
                "leave one out."
            )
        args.adapter_path = adapter
    for name, purpose in missing.items():
        if getattr(args, name) in (None, []):
            flag = "ADAPTER" if name == "adapter_path" else flag_of(name)
            raise UsageError(
                f"{flag} is missing; it says {purpose}. afm-mlx adapter {action} --help explains."
            )


def _locate(args: argparse.Namespace, names: Sequence[str]) -> tuple[list[Path], BaseFolder | None]:
    """Return the paths of adapters that paths or names stand for, and the base model.

    The base model is the one of `--model`, else the embedded one if a name is one of its adapters', else None.
    """
    from afm_mlx.converters.adapter_conversion import BaseFolder
    from afm_mlx.loading.resolve import resolve_adapter, resolve_model

    folder = None if args.model is None else resolve_model(args.model)
    paths = []
    for name in names:
        path = Path(os.path.expanduser(name))
        if not (name and path.exists()):
            folder = folder or resolve_model(EMBEDDED_MODEL)
            path = resolve_adapter(name, folder)
        paths.append(path)
    return paths, None if folder is None else BaseFolder.read(folder)


def _print_written(output: str, config: AdapterConfig) -> None:
    from afm_mlx.converters.adapter_conversion import stored_bytes

    size = stored_bytes(output)
    print(f"{output}: {size / 1e6:,.1f} MB, rank {config.rank}, scale {config.scale:g}")


# -- the actions


def _info(args: argparse.Namespace) -> None:
    _require(args, "info", adapter_path="what to show")
    from afm_mlx.converters.adapter_conversion import describe_adapter

    (path,), base = _locate(args, [args.adapter_path])
    facts = describe_adapter(path, base, args.alpha)
    if args.json:
        print_json(facts)
    else:
        facts["base_model_fingerprint"] = facts["base_model_fingerprint"] or "none"
        print_facts(facts)


def _convert(args: argparse.Namespace) -> None:
    if args.to == _CORE_AI:
        _convert_to_core_ai(args)
        return
    wanted = {"adapter_path": "what to convert", "to": "what to convert it to"}
    _require(args, "convert", **wanted, output="what to write")
    options, package = _output_options(args)
    from afm_mlx.converters.adapter_conversion import base_of, convert_adapter

    (path,), base = _locate(args, [args.adapter_path])
    config = convert_adapter(
        path,
        args.output,
        args.to,
        base=base or base_of(path),
        alpha=args.alpha,
        package=package,
        force=args.force,
        **options,
    )
    _print_written(args.output, config)


def _convert_to_core_ai(args: argparse.Namespace) -> None:
    needed = "the Core AI bundle that runs the adapter"
    _require(args, "convert", adapter_path="what to convert", model=needed)
    _output_options(args)
    from afm_mlx.converters.coreai.adapter_file import write_adapter_file
    from afm_mlx.coreai.bundle import CoreAIBundle
    from afm_mlx.loading.resolve import resolve_adapter, resolve_model

    bundle = CoreAIBundle.read(args.model)
    path = Path(os.path.expanduser(args.adapter_path))
    if not path.exists():
        path = resolve_adapter(args.adapter_path, resolve_model(EMBEDDED_MODEL))
    output = args.output or bundle.adapter_file(path)
    write_adapter_file(path, bundle, Path(output), alpha=args.alpha, force=args.force)
    size = Path(output).stat().st_size
    print(f"{output}: {size / 1e6:,.1f} MB, rank {bundle.adapter_rank} of {bundle.path}")


def _verify(args: argparse.Namespace) -> None:
    _require(args, "verify", adapter_path="what to look at")
    from afm_mlx.converters.adapter_conversion import verify_adapter

    (path,), base = _locate(args, [args.adapter_path])
    verdict = verify_adapter(path, base, alpha=args.alpha, base_signature=args.base_signature)
    if args.json:
        result = {"ok": not verdict.problems, "problems": verdict.problems, "notes": verdict.notes}
        print_json(result | (verdict.facts or {"adapter": args.adapter_path}))
    else:
        for problem in verdict.problems:
            print(f"wrong: {problem}")
        for note in verdict.notes:
            print(f"note: {note}")
    if verdict.problems:
        count = len(verdict.problems)
        raise CheckpointError(
            f"{args.adapter_path} can't be used: {count} thing{'s' * (count > 1)} wrong with it, listed above."
        )
    if not args.json:
        assert verdict.facts is not None
        facts, mask = verdict.facts, verdict.facts.get("mask")
        kept = "" if mask is None else f"keeps {mask['kept_share']:.1%} of the feed-forwards"
        if facts["format"] == "mask":
            print(f"{args.adapter_path} is a whole task mask that {kept}.")
        else:
            with_mask = f" with a task mask that {kept}" if kept else ""
            print(f"{args.adapter_path} is a whole adapter of rank {facts['rank']}{with_mask}.")


def _compose(args: argparse.Namespace) -> None:
    _require(args, "compose", output="what to write")
    options, package = _output_options(args)
    names, weights = [], []
    for text in args.adapters:
        name, _, weight = text.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not name or not math.isfinite(value):
            raise UsageError(
                f"{shown(text)} is not an adapter with a weight; give PATH=WEIGHT, such as poet=0.7."
            )
        names.append(name)
        weights.append(value)
    if not names:
        raise UsageError("no adapter was named; give one or more as PATH=WEIGHT.")
    from afm_mlx.adapters.compose import compose
    from afm_mlx.adapters.formats import write_adapter
    from afm_mlx.converters.adapter_conversion import package_metadata, read_for

    paths, base = _locate(args, names)
    adapters = [read_for(path, base, force=args.force) for path in paths]
    tensors, config = compose(adapters, weights, force=args.force)
    write_adapter(
        args.output,
        tensors,
        config,
        args.to,
        model_config=base.config if base else None,
        package=package_metadata(Path(args.output), args.to, None, package),
        **options,
    )
    _print_written(args.output, config)


# fmt: off
ACTIONS = {
    "info": Action(
        "show what an adapter is",
        "Show what an adapter is, without reading its numbers.",
        {"options": [
            *_SOURCE,
            _model_argument("packages of other models than Apple's 3B can't be read without it"),
            JSON,
        ]},
        _info),
    "convert": Action(
        "write an adapter in another format",
        "Write an adapter in another format. Numbers keep every bit where the format can hold them.",
        {"options": [
            *_SOURCE,
            *_output(None, [*_FORMATS, _CORE_AI]),
            _model_argument(
                "the adapter must fit it, and formats with a place for every layer need it for other models "
                "than Apple's 3B; by default the one that the adapter's config names, if it is here. For --to "
                "coreai, the bundle that runs the adapter"),
            _FORCE,
        ], **_PACKAGE},
        _convert),
    "verify": Action(
        "look for all that keeps an adapter from being used",
        "Look for all that keeps an adapter from being used. Exit status 2 when something does.",
        {"options": [
            *_SOURCE,
            _model_argument("names, shapes and fingerprint are compared with it"),
            Argument("--base-signature", None, "40 hex digits that an .fmadapter package must name"),
            JSON,
        ]},
        _verify),
    "compose": Action(
        "add up adapters, each with a weight",
        "Add up adapters of one base model, each with a weight. The sum's rank is the sum of their ranks.",
        {"options": [
            Argument("adapters", None,
                     "an adapter of any format, or the name of one that comes with the model, and its weight, "
                     "such as poet=0.7",
                     nargs="*", metavar="PATH=WEIGHT"),
            *_output(default="mlx-lm"),
            _model_argument("the adapters must fit it"),
            _FORCE,
        ], **_PACKAGE},
        _compose),
}
# fmt: on
