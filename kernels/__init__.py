"""The operations that decide speed, each under one name.

Every operation has a reference in plain MLX (`kernels.reference`), which is what runs today on every
device. Backends with kernels of their own join beside it, one folder each (`metal/`, `cpu/`), and the
choice between them is made here and nowhere else. This package imports MLX and NumPy, and nothing of
`afm_mlx`.
"""

from afm_mlx.kernels.reference import (
    KeyValues,
    attention,
    dequantize_int8,
    quantize_int8,
    rope_norm,
)

__all__ = ["KeyValues", "attention", "dequantize_int8", "quantize_int8", "rope_norm"]
