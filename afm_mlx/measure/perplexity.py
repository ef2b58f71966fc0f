"""Measure how well a model predicts documents.

    perplexity = exp(mean over scored tokens of -log p(token | the tokens before it))

A document is a text between two separators, or a chat as its template renders it. Documents longer than
`sequence_length` are cut into pieces, each of which starts with the last token of the previous one. A piece is
computed without context, and all its tokens except the first are scored, so each token of a document except
its first is scored once. Documents don't see each other. A chat with images is one piece, whose image tokens
are not scored.

mlx-lm's perplexity differs in one point: it joins all documents and cuts them where a sequence is full.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from afm_mlx.errors import DataError, ImageError, TokenizerError
from afm_mlx.jsonl import (
    KINDS,
    TextRecord,
    data_file,
    data_files,
    document_of,
    encode_text,
    is_data_file,
    read_jsonl,
    read_text,
)
from afm_mlx.measure.continuations import score_continuations
from afm_mlx.progress import Progress
from afm_mlx.ranks import ALONE, Ranks
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.vision.message_images import folder_of_line, with_images
from afm_mlx.vision.prompt_image import PromptImage

SEQUENCE_LENGTH = 512  # tokens of a piece, mlx-lm's default
SPLITS = ("test", "valid", "train")


@dataclass(frozen=True)
class Perplexity:
    """A perplexity, and what it was measured on."""

    perplexity: float
    standard_error: float  # of the perplexity, as if tokens were independent
    tokens: int  # that were scored
    samples: int  # pieces of documents
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


# -- documents


class ImageDocument(list[int]):
    """The token ids of a chat with images; `scored` (N - 1,) is False for images' tokens."""

    def __init__(self, ids: Sequence[int], images: Sequence[PromptImage], image_token_id: int):
        super().__init__(ids)
        self.images = images
        self.scored = np.array(ids[1:]) != image_token_id


def load_documents(path: str | Path, tokenizer: Tokenizer) -> list[list[int]]:
    """Read and tokenize documents.

    `path` is a `.txt` file, which is one document; a file with a document in each record, see `jsonl`; or a
    folder with such files (`test.jsonl`, else `valid.jsonl`, else `train.jsonl`, or another format).

    Raises:
        DataError: names the file and the line.
    """
    path = Path(path)
    if path.is_dir():
        path = _split_of(path)
    if path.suffix == ".txt":
        return [encode_text(read_text(path), tokenizer)]
    if not (is_data_file(path) or path.is_fifo()):
        raise DataError(
            f"{path} is neither a .jsonl (.json, .csv) nor a .txt file, nor a folder with .jsonl files."
        )
    documents = []
    for where, record in read_jsonl(path):
        try:
            documents.append(_encode_record(record, tokenizer, folder_of_line(where)))
        except (TokenizerError, DataError, ImageError) as error:
            raise DataError(f"{where}: {error}") from None
    if not documents:
        raise DataError(f"{path} holds no documents; each line must be one of {KINDS}.")
    return documents


def _split_of(folder: Path) -> Path:
    for split in SPLITS:
        if (file := data_file(folder, split)) is not None:
            return file
    raise DataError(
        f"{folder} holds no {', '.join(SPLITS)} (.jsonl, .json or .csv); its data files: {data_files(folder)}."
    )


def _encode_record(record: Any, tokenizer: Tokenizer, folder: Path) -> list[int]:
    document = document_of(record)
    if isinstance(document, TextRecord):
        return encode_text(document.text, tokenizer)
    if not tokenizer.has_chat_template:
        raise DataError("a chat, and the model's folder has no chat template.")
    config = getattr(tokenizer, "vision_config", None)
    if config is None:
        return tokenizer.apply_chat_template(document.messages, tools=document.tools)
    images = ChatImages()
    messages = with_images(document.messages, config, folder)
    ids = tokenizer.apply_chat_template(messages, tools=document.tools, images=images)
    return ImageDocument(ids, images.placed, config.image_token_id) if images.placed else ids


# -- scoring


def cut(
    documents: Sequence[Sequence[int]],
    sequence_length: int = SEQUENCE_LENGTH,
    num_samples: int = -1,
    seed: int = 0,
) -> list[list[int]]:
    """Cut documents of token ids into pieces of 2 to `sequence_length` tokens.

    `num_samples` pieces are drawn at random; -1 keeps all. Raises `DataError` for a longer document with
    images.
    """
    step = sequence_length - 1
    pieces: list[list[int]] = []
    for document in documents:
        if isinstance(document, ImageDocument):
            if len(document) > sequence_length:
                raise DataError(
                    f"A chat with images has {len(document)} tokens, and is not cut; sequence_length is "
                    f"{sequence_length}. Raise it (--sequence-length)."
                )
            pieces.append(document)
            continue
        starts = range(0, len(document) - 1, step)
        pieces += [list(document[start : start + sequence_length]) for start in starts]
    if not 0 <= num_samples < len(pieces):
        return pieces
    chosen = np.random.default_rng(seed).permutation(len(pieces))[:num_samples]
    return [pieces[i] for i in sorted(chosen)]


def _scored_tokens(piece: Sequence[int]) -> int:
    return int(piece.scored.sum()) if isinstance(piece, ImageDocument) else len(piece) - 1


def token_losses(
    model: nn.Module,
    tokenizer: Tokenizer,
    pieces: Sequence[Sequence[int]],
    batch_size: int = 8,
    progress: Progress | None = None,
) -> np.ndarray:
    """Return the negative log-likelihood of every scored token: (tokens,) float32, piece by piece.

    Each piece has two token ids or more. `progress` is called with the numbers of pieces done and in all.
    """
    losses: list[np.ndarray] = [np.empty(0, np.float32)] * len(pieces)
    pairs = [(piece[:1], piece[1:]) for piece in pieces]
    seen = {i: each.images for i, each in enumerate(pieces) if isinstance(each, ImageDocument)}
    scored = score_continuations(
        model, tokenizer, pairs, batch_size=batch_size, prefix_memory=0, images=seen
    )
    for done, (index, scores) in enumerate(scored, start=1):
        piece = pieces[index]
        losses[index] = -scores.logprobs
        if isinstance(piece, ImageDocument):
            losses[index] = losses[index][piece.scored]
        if progress is not None:
            progress(done, len(pieces))
    return np.concatenate(losses)


def measure_perplexity(
    model: nn.Module,
    tokenizer: Tokenizer,
    pieces: Sequence[Sequence[int]],
    batch_size: int = 8,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Perplexity:
    """Measure the perplexity of pieces of documents from `cut`, which ranks split.

    Raises:
        DataError: if there are fewer than two tokens to score.
    """
    scored = sum(map(_scored_tokens, pieces))
    if scored < 2:
        raise DataError(f"The documents have {scored} tokens to predict; at least 2 are needed.")
    start = time.perf_counter()

    def measured(own: list[Sequence[int]]) -> list[list[float]]:
        found = token_losses(model, tokenizer, own, batch_size, progress)
        ends = np.cumsum([*map(_scored_tokens, own)])[:-1]
        return [part.tolist() for part in np.split(found, ends)]

    losses = np.concatenate(ranks.each(pieces, measured)).astype(np.float64)
    seconds = time.perf_counter() - start
    perplexity = math.exp(losses.mean())
    # By the delta method: the error of exp(x) is exp(x) times the error of x.
    standard_error = perplexity * float(losses.std(ddof=1)) / math.sqrt(scored)
    return Perplexity(perplexity, standard_error, scored, len(pieces), seconds)
