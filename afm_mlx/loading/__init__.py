"""Loading models and tokenizers from paths, hub ids and names.

| file | what it holds |
| --- | --- |
| `resolve.py` | the folder that a path, a hub id or a name means |
| `load.py` | models of the AFM architecture, `load` for all, and draft models |
| `mlx_lm_models.py` | models of other architectures, which mlx-lm defines |
| `missing_kernels.py` | which operations run without this package's kernels, and why |
"""
