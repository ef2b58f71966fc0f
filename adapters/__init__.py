"""LoRA adapters: their files, layers to train, and how they run.

| | file |
| --- | --- |
| folders as mlx-lm has them, and weighted sums | `adapter_folder.py`, `compose.py` |
| other formats, in and out | `formats/` |
| layers to train | `lora.py` |
| the linear layers of a model's blocks | `layer_places.py` |
| from files to one array in memory | `opening.py`, `resident.py` |
| which adapters a model adds to which rows | `active.py`; one for all rows: `attach.py` |
| adapters by name, under a byte budget | `pool.py`, `lease.py`, `registry.py`; `scheduler.py`, `eviction.py` |
"""
