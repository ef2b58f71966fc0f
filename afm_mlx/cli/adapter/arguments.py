"""Arguments that the actions on adapters share."""

from __future__ import annotations

import argparse
from typing import Any

from afm_mlx.cli.parser import UsageError, number

# As in afm_mlx.converters.adapter_formats, which would import MLX.
FORMATS = ["mlx-lm", "peft", "toolkit", "fmadapter"]
DTYPES = ["float16", "bfloat16", "float32"]


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter-path",
        help="a folder of mlx-lm or PEFT, a .pt file of Apple's toolkit, or an .fmadapter package",
    )
    parser.add_argument(
        "--alpha",
        type=number(0),
        help="of a .pt file without a config beside it; 16 is known for rank 32",
    )


def add_model(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--model", help=f"folder, hub id or name of the base model: {what}")


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--force",
        action="store_true",
        help="take an adapter that was made for another base model, if its shapes fit",
    )


def add_output(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument("--to", choices=FORMATS, default=default, help="format of what is written")
    parser.add_argument(
        "--output",
        help="what to write, which must not exist: a folder, NAME.pt or NAME.fmadapter",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of the numbers; that of the source by default. .pt files are float32, and packages float16",
    )


def require(args: argparse.Namespace, action: str, **missing: str) -> None:
    """Raise `UsageError` for the first argument that was not given; `missing` says what each is for."""
    for name, purpose in missing.items():
        if getattr(args, name) in (None, []):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} is missing; it says {purpose}. afm-mlx adapter {action} --help explains."
            )


def base_of(args: argparse.Namespace) -> Any:
    """What `--model` names, None without it."""
    if args.model is None:
        return None
    from afm_mlx.converters.adapter_formats.conversion import Base
    from afm_mlx.loading import resolve_model

    return Base.of_folder(resolve_model(args.model))


def dtype_of(args: argparse.Namespace) -> Any:
    import mlx.core as mx

    return None if args.dtype is None else getattr(mx, args.dtype)


def print_written(output: str, config: Any) -> None:
    from afm_mlx.converters.adapter_formats.conversion import stored_bytes

    size = stored_bytes(output)
    print(f"{output}: {size / 1e6:,.1f} MB, rank {config.rank}, scale {config.scale:g}")
