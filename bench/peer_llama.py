"""A worker that measures llama.cpp, through llama-cpp-python; runs in that package's environment.

It calls the C functions as llama-bench does: random tokens, logits of a prompt's last token, no sampling.
Of several rows only the last gets logits, which is less than generating needs: with more, version 0.3.36
crashes on processors with AMX, where it repacks the 4-bit embedding.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from typing import Any

import llama_cpp
from peer_protocol import Answer, peak_resident, serve

ROWS = 8  # sequences that a context may hold


class Llama:
    """A model that llama.cpp has loaded, and a context to run it.

    Args:
        path: path of the GGUF file.
        threads: number of threads, for prompts and for single tokens.
        capacity: maximum number of tokens in the context.
        repack: let llama.cpp rearrange weights for this processor, its default. One row is faster so,
            and for some formats prompts are slower.
    """

    def __init__(self, path: str, threads: int, capacity: int, repack: bool):
        llama_cpp.llama_backend_init()
        start = time.perf_counter()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        options.use_extra_bufts = repack
        # Read, not mapped: the system may drop mapped pages while the other peers have their turn.
        options.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp can't load {path}")
        self.load_seconds = time.perf_counter() - start
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = capacity
        context.n_batch = context.n_ubatch = 512
        context.n_threads = context.n_threads_batch = threads
        context.n_seq_max = ROWS
        context.kv_unified = True
        context.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp can't make a context")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        self.depth = (0, 0)  # rows and tokens that the memory holds

    def feed(self, entries: list[tuple[int, int, bool]]) -> None:
        """Run tokens, given as (sequence, position, whether logits are wanted), 512 at a time."""
        for start in range(0, len(entries), 512):
            part = entries[start : start + 512]
            self.batch.n_tokens = len(part)
            for i, (row, position, wanted) in enumerate(part):
                self.batch.token[i] = random.randrange(self.vocab_size)
                self.batch.pos[i] = position
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = row
                self.batch.logits[i] = wanted
            status = llama_cpp.llama_decode(self.context, self.batch)
            if status:
                raise RuntimeError(f"llama_decode gave {status}")
        llama_cpp.llama_synchronize(self.context)
        llama_cpp.llama_get_logits(self.context)[0]

    def embed(self, lengths: list[int]) -> None:
        """Compute the vector of each text's last token, `ROWS` texts of at most 512 tokens together."""
        llama_cpp.llama_set_embeddings(self.context, True)
        for start in range(0, len(lengths), ROWS):
            part = lengths[start : start + ROWS]
            self.clear()
            self.batch.n_tokens = 0
            for row, length in enumerate(part):
                for position in range(length):
                    i = self.batch.n_tokens
                    self.batch.token[i] = random.randrange(self.vocab_size)
                    self.batch.pos[i] = position
                    self.batch.n_seq_id[i] = 1
                    self.batch.seq_id[i][0] = row
                    self.batch.logits[i] = position == length - 1
                    self.batch.n_tokens += 1
            status = llama_cpp.llama_decode(self.context, self.batch)
            if status:
                raise RuntimeError(f"llama_decode gave {status}")
            llama_cpp.llama_get_embeddings_ith(self.context, -1)[0]
        llama_cpp.llama_set_embeddings(self.context, False)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)
        self.depth = (0, 0)

    def fill(self, rows: int, depth: int) -> None:
        """Fill the KV cache so that each of `rows` sequences has `depth` tokens."""
        if self.depth == (rows, depth):
            for row in range(rows):
                llama_cpp.llama_memory_seq_rm(self.memory, row, depth, -1)
            return
        self.clear()
        if depth:
            self.feed([(0, i, i == depth - 1) for i in range(depth)])
        for row in range(1, rows):
            llama_cpp.llama_memory_seq_cp(self.memory, 0, row, -1, -1)
        self.depth = (rows, depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--no-repack", action="store_true")
    options = parser.parse_args()
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama = Llama(options.model, options.threads, options.capacity, not options.no_repack)

    def warm_up() -> Answer:
        llama.clear()
        llama.feed([(0, i, i == 7) for i in range(8)])
        return {}

    def prefill(tokens: int) -> Answer:
        llama.clear()
        start = time.perf_counter()
        llama.feed([(0, i, i == tokens - 1) for i in range(tokens)])
        return {"tokens_per_second": tokens / (time.perf_counter() - start)}

    def decode(tokens: int, rows: int, depth: int) -> Answer:
        llama.fill(rows, depth)
        start = time.perf_counter()
        for i in range(tokens):
            llama.feed([(row, depth + i, row == rows - 1) for row in range(rows)])
        return {"tokens_per_second": rows * tokens / (time.perf_counter() - start)}

    def embed(lengths: list[int], together: bool) -> Answer:
        start = time.perf_counter()
        for part in [lengths] if together else [[length] for length in lengths]:
            llama.embed(part)
        return {"texts_per_second": len(lengths) / (time.perf_counter() - start)}

    def memory() -> Answer:
        return {"peak_resident_bytes": peak_resident()}

    hello: dict[str, Any] = {
        "version": llama_cpp.__version__,
        "system": llama_cpp.llama_print_system_info().decode(),
        "load_seconds": llama.load_seconds,
        "weight_bytes": llama_cpp.llama_model_size(llama.model),
    }
    measurements = {"warm_up": warm_up, "prefill": prefill, "decode": decode, "memory": memory}
    measurements["embed"] = embed
    serve(hello, measurements)


if __name__ == "__main__":
    main()
