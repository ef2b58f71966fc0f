"""Core AI bundles, of AFM models and mlx-lm's: reading them, and running them by Apple's runtime, on Linux too.

| file | content |
| --- | --- |
| `availability.py` | the requirement: coreai-core |
| `bundle.py` | a bundle's description: context, lengths, adapters |
| `adapter_file.py` | an adapter of a bundle: arrays that functions take |
| `coreai_model.py` | a bundle that is loaded: prompts to logits |
"""

from afm_mlx.coreai.coreai_model import CoreAIModel

__all__ = ["CoreAIModel"]
