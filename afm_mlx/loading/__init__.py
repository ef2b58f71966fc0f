"""From a path, a hub id or a name to a model that is ready to run.

| file | what it holds |
| --- | --- |
| `resolve.py` | the folder that a path, a hub id or a name means |
| `load.py` | models of the AFM architecture, and `load` for all |
| `draft_models.py` | models that propose tokens to another |
| `mlx_lm_models.py` | models of other architectures, which mlx-lm defines |
"""
