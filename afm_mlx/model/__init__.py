"""The architecture.

| file | what it holds |
| --- | --- |
| `model.py` | the blocks that write keys and values, the blocks that reuse them, and the model |
| `attention.py` | attention of new tokens, by the operation that fits the call; positions and masks |
| `fused_layers.py` | linear layers with the norm before and the addition after them, and with adapters |
| `kv_cache.py` | keys and values of the tokens so far |
| `decode_step.py` | a decode step that is traced once and replayed |
| `exported_model.py` | a model that another framework runs: prompts in calls of fixed lengths, then steps |
| `pooling.py` | hidden states to vectors of texts |
| `zoo_blocks.py` | mlx-lm's Llama and Qwen3 blocks by our operations, on a CPU |
| `zoo_kv_cache.py` | keys and values of these blocks |
| `parallel_tracks.py` | the parallel-track mixture of experts, in mlx-lm's protocol |
| `wired_memory.py` | memory that macOS keeps resident while a model runs |
"""
