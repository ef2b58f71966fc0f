"""LoRA adapters: their files, layers to train, and how they run.

| | file |
| --- | --- |
| mlx-lm's folders, and weighted sums of them | `adapter_folder.py`, `compose.py` |
| other formats, in and out | `formats/` |
| layers to train | `lora.py` |
| the linear layers of a model's blocks, which adapters change | `target_modules.py` |
| masks: the channels of feed-forwards that a task needs | `task_mask.py` |
| from files to one array in memory | `resident.py` |
| which adapters a model adds to which rows, or to all | `active.py` |
| adapters by name, under a byte budget | `pool.py`, `registry.py` |
| the reward head of an adapter that scores answers | `reward_head.py` |
"""
