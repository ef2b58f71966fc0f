"""Compute a vector for each text of a file; the dot product of two is their cosine similarity.

Vectors of a model that was not trained for embeddings are poor: see docs/embeddings.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from afm_mlx.cli import model_options
from afm_mlx.cli.arguments import FLAG, MAX_ROWS, Argument, UsageError, integer
from afm_mlx.cli.output import input_bytes, progress_bar
from afm_mlx.errors import DataError, shown
from afm_mlx.files import atomic_write, refuse_existing
from afm_mlx.jsonl import is_data_file, read_jsonl, read_text

if TYPE_CHECKING:
    import numpy as np

# fmt: off
ARGUMENTS = {
    "options": [
        Argument("file", None,
                 "texts: a line of a file each, or the text of each record of a .jsonl, .json or .csv file; - "
                 "reads lines from standard input",
                 metavar="FILE|-"),
        *model_options.LOADING,
        Argument("--pool", ["last", "mean"],
                 "state of the last token, or mean of all; by default what the adapter was trained with, or "
                 "else last"),
        Argument("--dimensions", integer(1), "numbers of each vector, from the first on; all by default"),
        Argument("--query", FLAG, "the texts are queries: put the adapter's instruction before them"),
        Argument("--instruction", None, "text to put before queries in place of the adapter's"),
        Argument("--center", FLAG, "subtract the mean of all vectors, which untrained models' have in common"),
        Argument("--batch-size", integer(1, MAX_ROWS), "texts that are computed at the same time", 32),
        Argument("--output -o", None,
                 "file to write, with a JSON object in each line or, as .npy, the matrix of all vectors; by "
                 "default standard output",
                 metavar="FILE.jsonl|FILE.npy"),
    ],
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    from afm_mlx.engine.embedding import embed
    from afm_mlx.ranks import join_ranks

    output = None if args.output is None else Path(args.output)
    if output is not None and output.suffix not in (".jsonl", ".npy"):
        raise UsageError(f"--output is {shown(args.output)}; a name in .jsonl or .npy is needed.")
    if output is not None:
        refuse_existing(output)
    ranks = join_ranks()
    if ranks.size > 1 and args.file == "-":
        raise UsageError(
            f"standard input can't be split over {ranks.size} ranks; name a file that all of them have."
        )
    texts = list(_texts(args.file))
    model, tokenizer = model_options.load_model(args)
    model_options.check_ranks(args, ranks, model, texts)
    with progress_bar("embed", "text", ranks.is_first) as progress:
        vectors = embed(
            model,
            tokenizer,
            texts,
            pooling=args.pool,
            dimensions=args.dimensions,
            queries=args.query,
            instruction=args.instruction,
            batch_size=args.batch_size,
            center=args.center,
            progress=progress,
            ranks=ranks,
        )
    if not ranks.is_first:
        return
    if output is None:
        for line in _lines(vectors):
            print(line)
        return
    with atomic_write(output) as temporary:
        if output.suffix == ".npy":
            import numpy as np

            np.save(temporary, vectors)
        else:
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in _lines(vectors))


def _lines(vectors: np.ndarray) -> Iterator[str]:
    for index, vector in enumerate(vectors):
        yield json.dumps({"index": index, "embedding": vector.tolist()})


def _texts(name: str) -> Iterator[str]:
    """Yield the texts of a file, or of standard input; an empty one would shift the indices of all others."""
    path = Path(name)
    if is_data_file(path):
        for where, record in read_jsonl(path):
            text = record.get("text") if isinstance(record, dict) else record
            if not isinstance(text, str) or not text:
                raise DataError(
                    f'{where}: {shown(record)} has no text; {{"text": ...}} or a JSON string is needed, '
                    "not empty."
                )
            yield text
        return
    try:
        whole = input_bytes().read().decode("utf-8-sig") if name == "-" else read_text(path)
    except UnicodeDecodeError:
        raise DataError("Standard input is not UTF-8 text.") from None
    # Not `splitlines`, which ends lines at characters that texts hold.
    whole = whole.rstrip("\r\n")
    for number, line in enumerate(whole.split("\n") if whole else [], start=1):
        if not line.strip():
            where = "Standard input" if name == "-" else name
            raise DataError(
                f"{where}:{number}: the line is empty, and an empty text has no vector."
            )
        yield line.removesuffix("\r")
