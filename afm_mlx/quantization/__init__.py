"""Weights in 2, 4 and 8 bits: rules, layers, and codes from numbers.

| file | what it holds |
| --- | --- |
| `rule.py` | how one matrix is packed, and the rules of published models |
| `packed_layers.py` | layers that compute with packed matrices |
| `quantize_model.py` | whole models, packed and unpacked; `quantization` in `config.json` |
| `float_to_codes.py`, `grids.py` | float matrices to codes |
"""

from afm_mlx.quantization.quantize_model import dequantize_model, quantize_model
from afm_mlx.quantization.rule import QuantizationRule

__all__ = ["QuantizationRule", "dequantize_model", "quantize_model"]
