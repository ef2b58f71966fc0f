"""Measure how well a model predicts a text; lower is better."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from afm_mlx.cli import model_options
from afm_mlx.cli.arguments import MAX_ROWS, Argument, UsageError, count_or_all, integer
from afm_mlx.cli.output import print_json, progress_bar

HELD_OUT = "heldout.jsonl"


# fmt: off
ARGUMENTS = {
    "options": [
        *model_options.LOADING,
        Argument("--data-path", None,
                 "a .jsonl file, a .txt file, or a folder with test, valid or train.jsonl; by default the "
                 f"model folder's {HELD_OUT}, which the embedded model has",
                 metavar="PATH"),
        Argument("--num-samples", count_or_all, "pieces of documents; -1 for all", 256),
        Argument("--sequence-length", integer(2), "maximum tokens of a piece", 512),
        Argument("--batch-size", integer(1, MAX_ROWS), "pieces in a batch", 8),
        Argument("--seed", integer(0, model_options.MAX_SEED), "seed of the random choice of pieces", 123),
        model_options.JSON,
    ],
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    from afm_mlx.loading.resolve import resolve_model
    from afm_mlx.measure.perplexity import cut, load_documents, measure_perplexity
    from afm_mlx.ranks import join_ranks

    data = Path(args.data_path or resolve_model(args.model) / HELD_OUT)
    if args.data_path is None and not data.is_file():
        raise UsageError(f"--data-path is missing, and {args.model} has no {HELD_OUT}.")
    if not data.exists():
        raise UsageError(
            f"there is no file or folder {data}; data sets of the hub are not fetched."
        )
    ranks = join_ranks()
    model, tokenizer = model_options.load_model(args)
    documents = load_documents(data, tokenizer)
    pieces = cut(documents, args.sequence_length, args.num_samples, args.seed)
    model_options.check_ranks(args, ranks, model, pieces)
    with progress_bar("perplexity", "sample", ranks.is_first) as progress:
        result = measure_perplexity(model, tokenizer, pieces, args.batch_size, progress, ranks)
    if not ranks.is_first:
        return
    if args.json:
        facts = {"model": args.model, "data": str(data), **dataclasses.asdict(result)}
        print_json(facts | {"tokens_per_second": result.tokens_per_second})
        return
    print(f"Model: {args.model}")
    print(f"Data: {data} ({result.samples} samples, {result.tokens} tokens)")
    print(f"Perplexity: {result.perplexity:.3f} ± {result.standard_error:.3f}")
    print(f"Evaluation time: {result.seconds:.2f} seconds")
    print(f"Tokens per second: {result.tokens_per_second:.0f}")
