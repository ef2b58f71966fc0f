"""Core ML packages of AFM models: reading them, and running them on a Mac.

| file | content |
| --- | --- |
| `availability.py` | requirements: coremltools, and macOS |
| `package.py` | a package's description: functions, lengths, context |
| `coreml_model.py` | a package that is loaded: prompts to logits, and which device runs what |
"""

from afm_mlx.coreml.coreml_model import CoreMLModel, planned_devices

__all__ = ["CoreMLModel", "planned_devices"]
