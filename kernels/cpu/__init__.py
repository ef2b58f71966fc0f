"""The operations as C++ primitives for MLX's CPU backend."""

from afm_mlx.kernels.dispatch import Variant

VARIANTS: tuple[Variant, ...] = ()
