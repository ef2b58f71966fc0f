"""Make a model folder of a toolkit checkpoint, of another model folder, or of a model on the hub."""

from __future__ import annotations

import argparse

from afm_mlx.cli import options
from afm_mlx.cli.output import progress_bar
from afm_mlx.cli.parser import UsageError

_QUANTIZE = "quantizing is not available in this version"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        "--hf-path",
        help="what to convert: a folder with base-model.pt, a .pt file, a model folder, or a hub id",
    )
    parser.add_argument("--mlx-path", default="mlx_model", help="folder to make; it must not exist")
    parser.add_argument(
        "--dtype",
        choices=["float16", "bfloat16", "float32"],
        help="type of the weights; that of the source by default",
    )
    parser.add_argument(
        "--to",
        choices=["afm-mlx", "mlx-lm"],
        default="afm-mlx",
        help="mlx-lm leaves out what stock mlx-lm does not read",
    )
    options.add_unavailable(parser, _QUANTIZE, "-q", "--quantize", nargs=0)
    for name in ("--q-group-size", "--q-bits", "--q-mode", "--quant-predicate"):
        options.add_unavailable(parser, _QUANTIZE, name)
    options.add_unavailable(parser, "not available in this version", "-d", "--dequantize", nargs=0)
    options.add_unavailable(parser, "nothing is uploaded; `hf upload` does that", "--upload-repo")
    options.add_unavailable(
        parser, "no code of the source is run here", "--trust-remote-code", nargs=0
    )


def run(args: argparse.Namespace) -> None:
    if args.model is None:
        raise UsageError(
            "--model is missing; it says what to convert. afm-mlx convert --help explains."
        )
    from afm_mlx.converters import convert

    with progress_bar("converting", "B") as progress:
        folder = convert(args.model, args.mlx_path, dtype=args.dtype, to=args.to, progress=progress)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:,.1f} MB")
