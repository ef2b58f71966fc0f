"""Core ML packages of AFM models: what they hold, and running them on a Mac.

| file | what it holds |
| --- | --- |
| `availability.py` | whether Core ML can run here, and coremltools |
| `package.py` | what a package says of itself: functions, lengths, context |
| `functions.py` | functions that are loaded |
| `devices.py` | which device is to run what |
| `prompt_chunks.py` | a prompt in calls of the lengths that a package takes |
| `model.py` | a package that reads prompts and gives logits |
"""

from afm_mlx.coreml.devices import planned_devices
from afm_mlx.coreml.model import CoreMLModel

__all__ = ["CoreMLModel", "planned_devices"]
