"""Arguments that the actions on adapters share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afm_mlx.cli.argument_table import FLAG, Argument, flag_of
from afm_mlx.cli.parser import UsageError, number
from afm_mlx.errors import named
from afm_mlx.loading.resolve import EMBEDDED_MODEL

# As in afm_mlx.adapters.formats, which would import MLX.
FORMATS = ["mlx-lm", "peft", "toolkit", "fmadapter"]
DTYPES = ["float16", "bfloat16", "float32"]

# fmt: off
SOURCE = [
    Argument("adapter", None,
             "a folder of mlx-lm or PEFT, a .pt file of Apple's toolkit, an .fmadapter package, or the name of "
             "an adapter that comes with the model",
             nargs="?", metavar="ADAPTER"),
    Argument("--adapter-path", None, "ADAPTER, as a flag", metavar="ADAPTER"),
    Argument("--alpha", number(0),
             "alpha of a .pt file; that of the config beside it by default, without one 16 for rank 32"),
]

FORCE = Argument(
    "--force", FLAG, "take an adapter that was made for another base model, if its shapes fit")

_PACKAGE_FIELDS = [
    Argument("--name", None, "name of the package: letters, digits and '_'; that of the output by default"),
    Argument("--author", None, "who made the adapter"),
    Argument("--description", None, "what the adapter does"),
    Argument("--license", None, "license of the adapter"),
    Argument("--base-signature", None, "40 hex digits that name the base model to Apple's runtime"),
    Argument("--draft", None,
             "draft model of another package: a folder with draft.mil and draft_weights.bin, which are copied; "
             "by default that of a source package, which `none` leaves out"),
]
_ANY_RANK = Argument("--any-rank", FLAG, "write ranks above 32, which Apple's runtime does not load")
PACKAGE = {".fmadapter packages": [*_PACKAGE_FIELDS, _ANY_RANK]}


def model_argument(what: str) -> Argument:
    """The argument that names the base model; `what` says what the command needs it for."""
    return Argument("--model", None, f"folder, hub id or name of the base model: {what}")


def output(default: str | None) -> list[Argument]:
    """The arguments that say what is written; `default` is the format, None for one that must be given."""
    return [
        Argument("--to", FORMATS, "format of what is written", default),
        Argument("--output", None,
                 "what to write, which must not exist: a folder, NAME.pt or NAME.fmadapter"),
        Argument("--dtype", DTYPES,
                 "type of the numbers; that of the source by default. .pt files are float32, and packages "
                 "float16"),
        Argument("--qkv", ["fused", "split"],
                 "what a PEFT folder calls queries, keys and values: qkv_proj, or q_proj, k_proj and v_proj",
                 "fused"),
    ]
# fmt: on


def output_options(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of what is written, as functions that write adapters take them, and a package's fields.

    Raises:
        UsageError: for arguments of one format with another.
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
    if args.dtype is not None and args.to in ("toolkit", "fmadapter"):
        raise UsageError(
            f"--dtype is {args.dtype}, and {args.to} has a type of its own. Leave it out."
        )
    if "draft" in given:
        given["draft"] = None if given["draft"] == "none" else Path(given["draft"])
    import mlx.core as mx

    dtype = None if args.dtype is None else getattr(mx, args.dtype)
    return {"dtype": dtype, "any_rank": args.any_rank, "qkv": args.qkv}, given


def require(args: argparse.Namespace, action: str, **missing: str) -> None:
    """Make a positional ADAPTER `adapter_path`, and raise for what was not given.

    Args:
        args: the parsed arguments.
        action: name of the action, for advice.
        missing: arguments that are needed, and what each one says.

    Raises:
        UsageError: for the first argument that is missing, and for two adapters.
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


def located(args: argparse.Namespace, names: Sequence[str]) -> tuple[list[Path], Any]:
    """Find adapters and their base model.

    Args:
        args: arguments, `--model` among them.
        names: paths, or names of adapters that come with the model, the embedded one by default.

    Returns:
        The paths, and the `BaseFolder` of the model that was named or whose adapters were; None without one.

    Raises:
        AFMError: for a name that is neither.
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


def print_written(output: str, config: Any) -> None:
    from afm_mlx.converters.adapter_conversion import stored_bytes

    size = stored_bytes(output)
    print(f"{output}: {size / 1e6:,.1f} MB, rank {config.rank}, scale {config.scale:g}")
