"""Compare vectors and scores with llama.cpp's programs: its server's `/v1/embeddings`, and `llama-perplexity`.

Both run a model of mlx-lm's zoo with random weights in 4 bits. Vectors: one client asks our server and
llama.cpp's for the vectors of short texts, in requests of many texts and of one, by turns. Scores: four
answers to each of some questions, which `llama-perplexity --multiple-choice` and `score_continuations` both
compute behind a context that the answers share. Each figure is by the clock and by the processor's seconds;
on a machine that others use, compare the second, with one thread: llama.cpp's threads wait in a loop.

    python -m bench.llama_tools --llama /path/to/llama.cpp/build/bin
    AFM_MLX_THREADS=1 OMP_NUM_THREADS=1 python -m bench.llama_tools --llama /path/to/llama.cpp/build/bin
    python -m bench.llama_tools --llama /path/to/llama.cpp/build/bin --layers 2 --texts 200 --questions 16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import afm_mlx  # noqa: F401  before mlx.core: it installs a BLAS

# isort: split
import numpy as np
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from afm_mlx.cli.arguments import integer
from afm_mlx.measure.continuations import score_continuations
from afm_mlx.measure.machine import threads_in_use
from afm_mlx.quantization.packed_layers import set_activation_bits
from bench import peer_ours
from bench.bystanders import Bystanders
from bench.peer_gguf import write_gguf
from bench.peer_models import EXACT, INT8, PeerModel
from bench.peer_zoo import CONFIGS, zoo_model
from bench.server_client import Address, Exchange
from bench.server_process import ServerProcess, processor_seconds, with_threads
from bench.targets import markdown

PART = 100  # texts of a request
SINGLES = 10  # texts for each text that is sent alone
CONTEXT, ANSWER, ANSWERS = 200, 6, 4  # tokens, tokens, answers to a question
TOGETHER = 8  # questions that are computed together
_FIRST, _CHARACTERS = 4, 20000  # ids of the tokens that texts consist of
_BITS = {EXACT: 16, INT8: 8}

Table = dict[str, dict[str, float]]
Command = tuple[Callable[[int], list[str]], str]


class Stopwatch:
    """Measures the clock's and the processor's seconds of a process, by default this one, from now on."""

    def __init__(self, pid: int | None = None):
        self._pid, self._start = pid, (time.perf_counter(), processor_seconds(pid))

    def rates(self, count: int, what: str) -> dict[str, float]:
        """Return `count` over the seconds until now, named for the table."""
        clock = time.perf_counter() - self._start[0]
        processor = max(processor_seconds(self._pid) - self._start[1], 0.01)  # the system's step
        return {f"{what}/s": count / clock, f"{what}/processor's s": count / processor}


def note(found: Table, name: str, figures: dict[str, float]) -> None:
    """Add figures to the table, and report them."""
    found.setdefault(name, {}).update(figures)
    print(f"{name}: {figures}", file=sys.stderr, flush=True)


# -- the model's files


def character(token: int) -> str:
    """Return the character that is a token; no two of them merge, so both programs cut a text alike."""
    return chr(0x4E00 + token - _FIRST)


def write_files(model: PeerModel, folder: Path, body: str) -> tuple[Path, Path]:
    """Write the missing files of a model; return our folder, and llama.cpp's file in format `body`."""
    folder.mkdir(parents=True, exist_ok=True)
    size = model.shapes.vocab_size
    texts = ["<pad>", "<unk>", "</s>", "▁"]  # "▁" is SentencePiece's space
    texts += [character(token) for token in range(_FIRST, _FIRST + _CHARACTERS)]
    texts += [f"unused{token}" for token in range(len(texts), size)]
    ours, theirs = folder / "afm-mlx", folder / f"{body}-characters.gguf"
    if not ours.exists():
        model.write_folder(ours)
    words = Tokenizer(WordLevel({text: i for i, text in enumerate(texts)}, unk_token="<unk>"))
    words.save(str(ours / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (ours / "tokenizer_config.json").write_text(json.dumps(named))
    if not theirs.exists():
        pieces = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        pieces.trainer_spec.unk_id, pieces.trainer_spec.eos_id = 1, 2
        for token, text in enumerate(texts):
            kind = {0: 3, 1: 2, 2: 3}.get(token, 1)  # control, unknown, normal
            pieces.pieces.add(piece=text, score=-math.log(token + 1), type=kind)
        shapes = model.shapes
        write_gguf(theirs, shapes, body, body, vocabulary=pieces.SerializeToString())
    return ours, theirs


# -- vectors


async def ask(address: Address, inputs: Sequence[list[list[int]]]) -> None:
    """Send requests one after the other, each with some texts' tokens."""
    for each in inputs:
        async with Exchange(address) as exchange:
            body = {"model": "afm-mlx", "input": each, "encoding_format": "base64"}
            status = await exchange.send("POST", "/v1/embeddings", body)
            found = await exchange.body()
            if status != 200 or len(json.loads(found)["data"]) != len(each):
                raise RuntimeError(f"{status}: {found[:200]!r}")


async def vectors(programs: dict[str, Command], count: int, log: Path) -> Table:
    """Measure texts a second of each server, in requests of many and of one.

    Args:
        programs: mapping from a server's name to its command for a port, and the path that says it is ready.
        count: number of texts.
        log: file of everything that the servers write.
    """
    rng = np.random.default_rng(0)
    texts = [
        rng.integers(_FIRST, _FIRST + _CHARACTERS, rng.integers(5, 16)).tolist()
        for _ in range(count)
    ]
    ways = {
        f"{PART} a request": [texts[i : i + PART] for i in range(0, count, PART)],
        "one a request": [[text] for text in texts[::SINGLES]],
    }
    found: Table = {}
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(
                ServerProcess(*program, log, with_threads(threads_in_use()))
            )
            for name, program in programs.items()
        }
        for server in servers.values():
            await ask(server.address, [texts[:8], texts[:1]])  # warms up
        for way, inputs in ways.items():
            for name, server in servers.items():
                watch = Stopwatch(server.pid)
                await ask(server.address, inputs)
                note(found, name, watch.rates(sum(map(len, inputs)), f"texts, {way}"))
    return found


def our_server(folder: Path, bits: int, port: int) -> list[str]:
    start = [sys.executable, "-m", "afm_mlx", "server", "--model", str(folder)]
    return [*start, "--port", str(port), "--activation-bits", str(bits)]


def llama_server(programs: Path, model: Path, port: int) -> list[str]:
    threads = str(threads_in_use())
    start = [str(programs / "llama-server"), "--model", str(model), "--port", str(port)]
    start += ["--embedding", "--pooling", "last", "--no-ui", "--offline", "--load-mode", "none"]
    # Texts that one pass takes: as many as our server's.
    start += ["--parallel", "32", "--ctx-size", "2048", "--threads", threads]
    return [*start, "--threads-batch", threads]


# -- scores


def questions(count: int) -> list[tuple[list[int], list[list[int]]]]:
    """Make `count` questions: the tokens of a context, and of each answer to it."""
    rng = np.random.default_rng(1)
    draw = partial(rng.integers, _FIRST, _FIRST + _CHARACTERS)
    return [(draw(CONTEXT).tolist(), draw((ANSWERS, ANSWER)).tolist()) for _ in range(count)]


def our_scores(
    folder: Path, bits: int, asked: list[tuple[list[int], list[list[int]]]]
) -> dict[str, float]:
    """Measure questions a second of `score_continuations`."""
    model, _ = peer_ours.load(folder)
    set_activation_bits(model, bits)
    # llama-perplexity puts a space, which is a token here, before and after the context.
    pairs = [([3, *context, 3], answer) for context, answers in asked for answer in answers]
    part = TOGETHER * ANSWERS
    list(score_continuations(model, peer_ours.NO_TOKENIZER, pairs[:part]))  # warms up
    watch = Stopwatch()
    for first in range(part, len(pairs), part):
        list(score_continuations(model, peer_ours.NO_TOKENIZER, pairs[first : first + part]))
    return watch.rates(len(asked) - TOGETHER, "questions")


def llama_scores(
    programs: Path, model: Path, asked: list[tuple[list[int], list[list[int]]]], folder: Path
) -> dict[str, float]:
    """Measure questions a second of llama-perplexity, from its first batch's end to its last's."""

    def packed(text: str) -> bytes:
        return struct.pack("<I", len(text.encode())) + text.encode()

    tasks = []
    for context, answers in asked:
        texts = ["".join(map(character, tokens)) for tokens in (context, *answers)]
        labels = struct.pack(f"<{ANSWERS}i", 1, *[0] * (ANSWERS - 1))
        choices = struct.pack("<I", ANSWERS) + b"".join(map(packed, texts[1:])) + labels
        tasks.append(packed(texts[0]) + choices + struct.pack("<I", 0))
    starts = np.cumsum([0, *map(len, tasks)])[:-1] + 4 * (len(tasks) + 1)
    path = folder / "questions.bin"
    path.write_bytes(struct.pack(f"<{len(tasks) + 1}I", len(tasks), *starts) + b"".join(tasks))
    threads = str(threads_in_use())
    command = [str(programs / "llama-perplexity"), "--model", str(model), "--offline"]
    command += ["--load-mode", "none", "--multiple-choice", "--binary-file", str(path)]
    # The context holds --parallel times --ctx-size tokens, for all sequences together.
    command += ["--parallel", str(TOGETHER * ANSWERS), "--ctx-size", "60", "--threads", threads]
    command += ["--threads-batch", threads]
    output: list[str] = []
    done, watch, found = 0, None, {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            number, _, rest = line.partition("\t")
            if number.isdigit() and rest:
                done += 1
                if done == TOGETHER:
                    watch = Stopwatch(process.pid)
                elif done == len(asked) and watch is not None:
                    found = watch.rates(len(asked) - TOGETHER, "questions")
    if not found:
        raise RuntimeError(f"llama-perplexity scored {done} questions: {''.join(output[-5:])}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp's programs")
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(CONFIGS))
    parser.add_argument("--format", nargs="+", default=["Q4_0", "Q4_K"], help="llama.cpp's")
    parser.add_argument("--layers", type=integer(1), help="fewer blocks, for a quick look")
    parser.add_argument("--texts", type=integer(PART), default=1000)
    parser.add_argument("--questions", type=integer(2 * TOGETHER), default=24)
    parser.add_argument("--skip", nargs="*", default=[], choices=["vectors", "scores"])
    parser.add_argument("--work", type=Path, help="keep the models there, and use those it has")
    options = parser.parse_args()
    model = zoo_model(options.model, options.layers)
    with tempfile.TemporaryDirectory() as made:
        folder = (options.work or Path(made)) / f"{model.name}-{model.shapes.num_layers}"
        files = {body: write_files(model, folder, body) for body in options.format}
        ours = folder / "afm-mlx"
        bystanders = Bystanders()
        found: Table = {}
        if "vectors" not in options.skip:
            programs: dict[str, Command] = {}
            for name, bits in _BITS.items():
                programs[name] = partial(our_server, ours, bits), "/ready"
            for body, (_, theirs) in files.items():
                started = partial(llama_server, options.llama, theirs)
                programs[f"llama.cpp {body}"] = started, "/health"
            log = Path(made) / "servers.log"
            found = asyncio.run(vectors(programs, options.texts, log))
        if "scores" not in options.skip:
            asked = questions(options.questions)
            for name, bits in _BITS.items():
                note(found, name, our_scores(ours, bits, asked))
            for body, (_, theirs) in files.items():
                figures = llama_scores(options.llama, theirs, asked, Path(made))
                note(found, f"llama.cpp {body}", figures)
        others = bystanders.processors()
    columns = list(next(iter(found.values())))
    print(f"{model.title}, {threads_in_use()} threads")
    rows = [[name, *(f"{figures[c]:.3g}" for c in columns)] for name, figures in found.items()]
    print(markdown([["", *columns], *rows]))
    if others is not None:
        print(f"other processes kept {others:.2f} processors busy meanwhile")


if __name__ == "__main__":
    main()
