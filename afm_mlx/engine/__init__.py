"""The one decode loop, and `generate` on top of it.

| file | what it holds |
| --- | --- |
| `engine.py` | the loop: requests in, responses out |
| `decoding.py`, `batch.py` | the rows that decode together, and a step of them |
| `request.py`, `row.py` | what the engine is asked for and what it answers; the state of a row |
| `row_responses.py` | what a row tells when tokens of it are known |
| `waiting_rows.py`, `prefills.py` | rows that wait for room and for their adapters; prompts under way |
| `prefix_cache.py`, `row_prefixes.py` | what is kept of prompts for later ones; what rows find and leave |
| `healing.py` | prompts that end within a word |
| `row_adapters.py`, `row_caches.py` | each row's adapter and cache |
| `kv_memory.py` | what rows may come to take of a budget |
| `speculation/` | tokens that are guessed, for the model to check several in one step |
| `sampling.py`, `samplers.py`, `logits_processors.py` | from logits to the next token |
| `prompt_cache.py`, `prompt_reuse.py` | caches of prompts: in files, and from one prompt to the next |
| `generation.py`, `async_generation.py` | `generate`, `stream_generate`, `batch_generate` |
| `async_engine.py` | one engine for all tasks of asyncio |
| `typed_generation.py` | answers that are instances of Python types |
"""

from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request, Response

__all__ = ["AsyncEngine", "Engine", "Request", "Response"]
