"""The architecture.

| file | what it holds |
| --- | --- |
| `model.py` | the blocks that write keys and values, those that reuse them, and the model |
| `positions_and_masks.py` | where new tokens stand, and what they may look at |
| `kv_cache.py` | keys and values of the tokens seen so far |
| `kv_cache_state.py` | checks on a cache that is restored from a file |
| `kv_cache_placeholder.py` | the cache entry of a block that stores nothing |
| `fused_layers.py` | a layer with what stands before and after it, as one operation |
| `adapted_layers.py` | how layers ask for adapters and add them |
| `decode_step.py` | a step that is traced once, and replayed |
| `zoo_blocks.py` | blocks of mlx-lm's Llama and Qwen3 in our operations, on the CPU |
| `zoo_kv_cache.py` | what these blocks attend to while their rows run in a batch |
| `wired_memory.py` | memory that macOS keeps resident while a model runs |
"""
