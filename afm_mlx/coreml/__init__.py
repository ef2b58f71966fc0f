"""Core ML packages of AFM models: what they hold, and running them on a Mac.

| file | what it holds |
| --- | --- |
| `availability.py` | whether Core ML can run here, and coremltools |
| `package.py` | what a package says of itself: functions, lengths, context |
| `coreml_model.py` | a package that is loaded: prompts to logits, and which device runs what |
"""

from afm_mlx.coreml.coreml_model import CoreMLModel, planned_devices

__all__ = ["CoreMLModel", "planned_devices"]
