"""The servers that are compared: what each is given, how it is started, and how it is asked for an answer.

All have random weights of one model's shapes (`peer_afm` says what llama.cpp runs in its place), and one
vocabulary. Prompts are texts for afm-mlx and mlx-lm, and the ids of their tokens for llama.cpp, whose own
tokenizer may cut a text otherwise. Answers are greedy. llama.cpp is set to ignore the end of an answer; with
random weights it is one token of 153,600 for the others, and an answer that ended early is counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from afm_mlx.tokenizer.tokenizer import AFMTokenizer, load_tokenizer, save_tokenizer
from bench.peer_gguf import write_gguf
from bench.peer_models import EXACT, INT8, MLX_LM, LlamaFormat, PeerModel
from bench.vocabulary import large_vocabulary

_WORDS = 2000  # different ones in prompts


@dataclass(frozen=True)
class Job:
    """An answer that is asked for.

    Args:
        prompt: ids of the prompt's tokens.
        text: the prompt as text.
        tokens: number of tokens of the answer.
    """

    prompt: tuple[int, ...]
    text: str
    tokens: int


@dataclass(frozen=True)
class Part:
    """The information in an event of a stream.

    Args:
        has_text: True if the event has a part of the answer.
        prompt, tokens: tokens of the prompt and of the answer, once the program counts them.
        error: error that the server reported; None if there is none.
    """

    has_text: bool = False
    prompt: int | None = None
    tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Program:
    """A program that serves a model.

    Args:
        name: name for tables.
        command: makes the command line for a port.
        path: URL path that requests are posted to.
        body: makes a request's body from a job.
        read: converts the data of an event; returns None if it has no information.
    """

    name: str
    command: Callable[[int], Sequence[str]]
    path: str
    body: Callable[[Job], dict[str, Any]]
    read: Callable[[str], Part | None]
    ready_path: str = "/health"


# -- OpenAI's way, and llama.cpp's


def openai_body(model: str, job: Job) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": job.text,
        "max_tokens": job.tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def read_openai(data: str) -> Part | None:
    """Convert the data of an event of /v1/completions."""
    if data == "[DONE]":
        return None
    event = json.loads(data)
    if error := event.get("error"):
        return Part(error=error["message"] if isinstance(error, dict) else str(error))
    usage = event.get("usage") or {}
    return Part(
        any(choice.get("text") for choice in event.get("choices", ())),
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
    )


def llama_body(job: Job) -> dict[str, Any]:
    return {
        "prompt": list(job.prompt),
        "n_predict": job.tokens,
        # The most likely token, and no sampler that sorts the vocabulary.
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "stream": True,
    }


def read_llama(data: str) -> Part | None:
    """Convert the data of an event of /completion, llama.cpp's route."""
    event = json.loads(data)
    if error := event.get("error"):
        return Part(error=str(error))
    if event["stop"]:
        return Part(False, event["tokens_evaluated"], event["tokens_predicted"])
    return Part(bool(event["tokens"]))


# -- the programs


def programs(
    model: PeerModel,
    folder: Path,
    threads: int,
    clients: int,
    longest: int,
    llama: str | None,
    options: Sequence[str] = (),
) -> dict[str, Program]:
    """Return all programs by name; write the models that are missing.

    Args:
        model: the model that the programs serve.
        folder: folder of the model's files.
        threads: number of threads of each program.
        clients: maximum number of simultaneous requests.
        longest: tokens of the longest prompt with its answer.
        llama: path of llama.cpp's `llama-server`; None leaves it out.
        options: further options of our server.
    """
    ours = folder / "afm-mlx"
    if not ours.exists():
        model.write_folder(ours)
    if not (ours / "tokenizer.model").exists():
        _write_tokenizer(ours, model.shapes.vocab_size)
    more = ["--decode-concurrency", str(clients), *options]
    found = {name: _ours(name, ours, bits, more) for name, bits in ((EXACT, 16), (INT8, 8))}
    if llama is not None:
        vocabulary = (ours / "tokenizer.model").read_bytes()
        for format in model.formats:
            path = folder / f"{format.body}-with-vocabulary.gguf"
            if not path.exists():
                shapes = model.shapes
                write_gguf(path, shapes, format.body, format.embedding, vocabulary=vocabulary)
            found[format.peer] = _llama(format, path, llama, threads, clients, longest)
    sizes = model.mlx_lm_arguments(ours)
    found[MLX_LM] = _mlx_lm(ours, sizes)
    return found


def _write_tokenizer(folder: Path, size: int) -> None:
    source = folder / "made-up.model"
    source.write_bytes(large_vocabulary(size))
    save_tokenizer(source, folder)
    source.unlink()


def _ours(name: str, folder: Path, activation_bits: int, options: Sequence[str]) -> Program:
    def command(port: int) -> list[str]:
        start = [sys.executable, "-m", "afm_mlx", "server", "--model", str(folder)]
        start += ["--port", str(port), "--activation-bits", str(activation_bits)]
        return [*start, *options]

    return Program(
        name, command, "/v1/completions", partial(openai_body, folder.name), read_openai, "/ready"
    )


def _llama(
    format: LlamaFormat, path: Path, server: str, threads: int, clients: int, longest: int
) -> Program:
    def command(port: int) -> list[str]:
        start = [server, "--model", str(path), "--port", str(port), "--no-ui", "--offline"]
        # Not mapped: the system drops mapped pages between its turns. One prompt never fits another.
        start += ["--load-mode", "none", "--cache-ram", "0"]
        start += ["--threads", str(threads), "--threads-batch", str(threads)]
        start += ["--parallel", str(clients), "--ctx-size", str(clients * longest)]
        return start if format.repack else [*start, "--no-repack"]

    return Program(format.peer, command, "/completion", llama_body, read_llama)


def _mlx_lm(folder: Path, arguments: list[str]) -> Program:
    def command(port: int) -> list[str]:
        start = [sys.executable, "-m", "bench.server_mlx_lm", *arguments]
        return [*start, "--model", str(folder), "--port", str(port)]

    return Program(
        MLX_LM, command, "/v1/completions", partial(openai_body, "default_model"), read_openai
    )


# -- prompts


class Jobs:
    """Prompts of random words, whose texts have as many tokens as they have ids.

    Args:
        folder: folder of the tokenizer.
        prompts, answers: minimum and maximum tokens; lengths are spread evenly on a logarithmic scale.
    """

    def __init__(self, folder: Path, prompts: tuple[int, int], answers: tuple[int, int]):
        self._words = _single_token_words(load_tokenizer(folder))
        self._prompts, self._answers = prompts, answers

    def stream(self, *seed: int) -> Iterator[Job]:
        """Yield jobs without end, the same ones for the same seed."""
        rng = np.random.default_rng(seed)
        while True:
            chosen = rng.integers(len(self._words), size=_length(rng, self._prompts))
            pairs = [self._words[i] for i in chosen]
            text = " ".join(word for word, _ in pairs)
            yield Job(tuple(token for _, token in pairs), text, _length(rng, self._answers))


def _length(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    low, high = np.log(bounds[0]), np.log(bounds[1] + 1)
    return min(int(np.exp(rng.uniform(low, high))), bounds[1])


def _single_token_words(tokenizer: AFMTokenizer) -> list[tuple[str, int]]:
    """Return (word, token id) of the words that are one token each between spaces, in any sentence."""
    found = []
    for piece, token in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        word = piece[1:]
        if piece[:1] == "▁" and word.isalpha() and word.isascii():
            if tokenizer.encode(word) == [token]:
                found.append((word, token))
            if len(found) == _WORDS:
                break
    return found
