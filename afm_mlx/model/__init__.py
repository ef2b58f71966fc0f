"""The architecture.

| file | what it holds |
| --- | --- |
| `model.py` | the blocks that write keys and values, those that reuse them, and the model |
| `kv_cache.py` | keys and values of the tokens seen so far |
| `fused_layers.py` | a layer with what stands before and after it, as one operation |
| `adapted_layers.py` | how layers ask for adapters and add them |
| `decode_step.py` | a step that is traced once, and replayed |
| `wired_memory.py` | memory that macOS keeps resident while a model runs |
"""
