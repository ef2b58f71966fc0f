"""Make a model folder of a toolkit checkpoint, of another model folder, or of a model on the hub."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import fields

from afm_mlx.cli import options
from afm_mlx.cli.output import progress_bar
from afm_mlx.cli.parser import UsageError, integer, number


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
        help="mlx-lm leaves out what stock mlx-lm does not read; balanced layers become MLX's own",
    )
    group = parser.add_argument_group("quantization")
    _add_layers(group)
    _add_embedding(group)
    _add_choice_of_bits(group)
    group.add_argument(
        "-d", "--dequantize", action="store_true", help="write packed layers as float weights"
    )
    options.add_unavailable(parser, "nothing is uploaded; `hf upload` does that", "--upload-repo")
    options.add_unavailable(
        parser, "no code of the source is run here", "--trust-remote-code", nargs=0
    )


def _add_layers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-q", "--quantize", action="store_true", help="pack linear layers and embeddings"
    )
    group.add_argument(
        "--q-bits",
        type=integer(1, 8),
        help="bits per weight: 2, 4 or 8; 2 by default for balanced weights, else 4",
    )
    group.add_argument(
        "--q-mode",
        choices=["balanced", "affine", "palette", "mxfp4", "mxfp8", "nvfp4"],
        help="balanced (scale only), affine (MLX's own format) or palette (a table); balanced by default "
        "for AFM models, affine for others, and the rest for others only",
    )
    group.add_argument(
        "--q-group-size",
        type=integer(1),
        help="inputs that share a scale, or rows that share a palette's table; 64, and 16 rows",
    )
    group.add_argument(
        "--q-granularity",
        choices=["tensor", "row", "group"],
        help="what has a scale of its own; row by default for balanced weights, else group",
    )


def _add_embedding(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--q-embedding-bits",
        type=integer(1, 8),
        help="of the embedding, which is the head too; --q-bits by default, and 4 at least",
    )
    group.add_argument(
        "--q-embedding-mode",
        choices=["balanced", "affine", "palette"],
        help="of the embedding; --q-mode by default",
    )
    group.add_argument(
        "--q-embedding-granularity",
        choices=["tensor", "row", "group"],
        help="of the embedding; that of its mode by default",
    )


def _add_choice_of_bits(group: argparse._ArgumentGroup) -> None:
    """By layer, not one for all."""
    group.add_argument(
        "--quant-predicate",
        metavar="RECIPE",
        help="more bits for the layers that mlx-lm's recipes choose: mixed_2_4, mixed_2_8 or mixed_4_8, and "
        "mlx-lm's own for other architectures; with --target-bpw, the bits to choose from",
    )
    group.add_argument(
        "--target-bpw",
        type=number(0),
        metavar="BITS",
        help="bits that a weight takes on average, scales and tables included: layers get 2 or 4 bits by what "
        "they suffer on text, which needs the model in memory and takes minutes",
    )
    group.add_argument(
        "--data",
        metavar="PATH",
        help="that text: a .jsonl or .txt file, or a folder with train.jsonl; the model folder's heldout.jsonl "
        "by default",
    )


def run(args: argparse.Namespace) -> None:
    if args.model is None:
        raise UsageError(
            "--model is missing; it says what to convert. afm-mlx convert --help explains."
        )
    from afm_mlx.converters.convert import ConversionOptions, convert
    from afm_mlx.measure.describe import describe_stored_weights

    options = {field.name: getattr(args, field.name) for field in fields(ConversionOptions)}
    measuring_bar = (
        contextlib.nullcontext() if args.target_bpw is None else progress_bar("measuring", "pass")
    )
    with measuring_bar as measuring, progress_bar("converting", "B") as progress:
        folder = convert(
            args.model, args.mlx_path, progress=progress, measuring=measuring, **options
        )
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    weights = describe_stored_weights(folder)
    print(f"{folder}: {size / 1e6:,.1f} MB, {weights['bits_per_weight']:.3f} bits per weight")
