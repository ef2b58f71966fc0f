"""Make a model folder from a checkpoint, a folder or a hub model, or a package for Core ML or Core AI."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import fields

from afm_mlx.cli.arguments import FLAG, Argument, UsageError, integer, number, unavailable
from afm_mlx.cli.output import progress_bar

# fmt: off
ARGUMENTS = {
    "options": [
        Argument("--model --hf-path", None,
                 "what to convert: a folder with base-model.pt, a .pt file, a model folder, or a hub id"),
        Argument("--mlx-path", None, "folder to make; it must not exist", "mlx_model"),
        Argument("--dtype", ["float16", "bfloat16", "float32"],
                 "type of the weights; by default the source's"),
        Argument("--to", ["afm-mlx", "mlx-lm", "coreml", "coreai", "tamm"],
                 "mlx-lm: a folder that unmodified mlx-lm reads, with affine layers in place of balanced "
                 "ones. coreml and coreai make a Core ML package and a Core AI bundle of a model folder, tamm "
                 "a checkpoint of a parallel-track model's folder",
                 "afm-mlx"),
        unavailable("--upload-repo", "nothing is uploaded; `hf upload` does that"),
        unavailable("--trust-remote-code", "no code of the source is run here", nargs=0),
    ],
    "quantization": [
        Argument("-q --quantize", FLAG, "pack linear layers and embeddings"),
        Argument("--q-bits", integer(1, 8),
                 "bits per weight: 2, 4 or 8; 2 by default for balanced weights, else 4"),
        Argument("--q-mode", ["balanced", "affine", "palette", "mxfp4", "mxfp8", "nvfp4"],
                 "balanced (scale only), affine (MLX's own format) or palette (a table); balanced by default "
                 "for AFM models, affine for others; mxfp4, mxfp8 and nvfp4 are not for AFM models"),
        Argument("--q-group-size", integer(1),
                 "number of inputs that share a scale (default 64), or of rows that share a palette "
                 "(default 16)"),
        Argument("--q-granularity", ["tensor", "row", "group"],
                 "what shares a scale; row by default for balanced weights, else group"),
        Argument("--q-embedding-bits", integer(1, 8),
                 "bits per weight of the embedding, also the head; --q-bits by default, but at least 4"),
        Argument("--q-embedding-mode", ["balanced", "affine", "palette"],
                 "--q-mode of the embedding; by default as for the other layers"),
        Argument("--q-embedding-granularity", ["tensor", "row", "group"],
                 "--q-granularity of the embedding; by default its mode's"),
        Argument("--q-vision-bits", integer(1, 8),
                 "bits per weight of the image encoder and its adaptor, balanced by row; 8 by default"),
        Argument("--quant-predicate", None,
                 "more bits for the layers that mlx-lm's recipes choose: mixed_2_4, mixed_2_8 or mixed_4_8, "
                 "and mlx-lm's own for other architectures; with --target-bpw, the bits to choose from",
                 metavar="RECIPE"),
        Argument("--target-bpw", number(0),
                 "average bits per weight, including scales and tables: layers get 2 or 4 bits by their "
                 "sensitivity, measured on text with the model in memory, which takes minutes",
                 metavar="BITS"),
        Argument("--data", None,
                 "text that --target-bpw measures on: a .jsonl or .txt file, or a folder with train.jsonl; the "
                 "model folder's heldout.jsonl by default",
                 metavar="PATH"),
        Argument("--svd-adapter", integer(1),
                 "write an adapter of this rank to the folder adapters/svd of the packed model, which "
                 "approximates what packing changes: to run, or to train on",
                 metavar="RANK"),
        Argument("--svd-of", ["error", "weights"],
                 "what --svd-adapter is made of: error, by default, the packed layers' errors; weights, the "
                 "weights, of which only the rest is packed, so that the model needs the adapter"),
        Argument("-d --dequantize", FLAG, "write packed layers as float weights"),
    ],
    "Core ML packages": [
        Argument("--ane", FLAG,
                 "arrange operators for the Neural Engine: channels first, convolutions, split heads"),
        Argument("--prompt-lengths", integer(1),
                 "numbers of tokens that prompts have, for Core AI too; 64 and 512 by default, 32 with --ane. "
                 "One alone makes a fixed shape",
                 nargs="+", metavar="TOKENS"),
    ],
    "Core AI bundles": [
        Argument("--context", integer(1),
                 "number of tokens that keys and values are kept for; by default the model's context, of "
                 "mlx-lm's models at most 4096",
                 metavar="TOKENS"),
        Argument("--adapter-rank", integer(1),
                 "also make functions that take an adapter of up to this rank as inputs",
                 metavar="RANK"),
        Argument("--adapter-functions", None,
                 "also make functions with these adapters built in, which share the base's weights: names of "
                 "adapters in the model's folder, or paths",
                 nargs="+", metavar="ADAPTER"),
        Argument("--minimum-os", None, "the oldest macOS and iOS; 27 by default", metavar="VERSION"),
    ],
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    if args.model is None:
        raise UsageError(
            "--model is missing; it says what to convert. afm-mlx convert --help explains."
        )
    from afm_mlx.converters.convert import ConversionOptions, convert
    from afm_mlx.measure.describe import describe_stored_weights

    options = {field.name: getattr(args, field.name) for field in fields(ConversionOptions)}
    no_bar = contextlib.nullcontext()
    measuring_bar = no_bar if args.target_bpw is None else progress_bar("measuring", "pass")
    with measuring_bar as measuring, progress_bar("converting", "B") as progress:
        folder = convert(
            args.model, args.mlx_path, progress=progress, measuring=measuring, **options
        )
    if args.to == "coreml":
        from afm_mlx.converters.coreml.package_writer import package_size

        parts = package_size(folder)
        print(f"{folder}: {parts[0] / 1e6:,.1f} MB of weights, {parts[1] / 1e6:,.1f} MB of program")
        return
    if args.to == "coreai":
        sizes = [path.stat().st_size for path in folder.rglob("main.mlirb")]
        print(f"{folder}: {sum(sizes) / 1e6:,.1f} MB of functions and weights")
        return
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    weights = describe_stored_weights(folder)
    print(f"{folder}: {size / 1e6:,.1f} MB, {weights['bits_per_weight']:.3f} bits per weight")
    if args.svd_adapter is not None:
        print(f"Its adapter of rank {args.svd_adapter}: --adapter-path svd")
