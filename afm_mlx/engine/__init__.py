"""The one decode loop, and `generate` on top of it.

| file | what it holds |
| --- | --- |
| `request.py` | what a caller submits, and what comes back |
| `row.py` | a row and its life: adapter lease, tokens, text, responses |
| `batch.py` | rows that run together, and their KV caches |
| `scheduler.py` | which rows wait, prefill and join; the memory budget |
| `prompt_scores.py` | log-probabilities of prompts |
| `decoding.py` | a decode step: inputs, submit, read back, draw, verify draft tokens |
| `engine.py` | the loop: requests in, responses out |
| `lockstep.py`, `follow.py` | the engines of a split model's ranks: what rank 0 sends, what others do |
| `generation.py` | `generate`, `stream_generate`, `batch_generate`, and the typed and async variants |
| `embedding.py` | `embed`, vectors of many texts |
| `async_engine.py` | one engine for all tasks of asyncio |
| `warm_up.py` | compiling Metal's kernels before requests need them |
| `sampling.py`, `samplers.py` | from logits to the next token; the samplers and logits processors |
| `draft_length.py` | how many draft tokens pay: what steps cost, how many tokens are accepted |
| `speculation/` | draft tokens, several of which the model verifies in one step |
| `prefix_cache.py`, `prefix_cache_folder.py` | pages that rows share if their prompts begin alike |
| `zoo_caches.py` | mlx-lm's caches: what a prefix cache keeps of them, how rejected draft tokens leave them |
| `prompt_cache.py` | a caller's KV cache: in a file, and from one prompt to the next |
"""

from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import (
    Embedding,
    PromptLogprobs,
    PromptScores,
    Request,
    TokenResponse,
)

__all__ = [
    "AsyncEngine",
    "Embedding",
    "Engine",
    "PromptLogprobs",
    "PromptScores",
    "Request",
    "TokenResponse",
]
