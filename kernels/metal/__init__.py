"""The operations as Metal kernels."""

from afm_mlx.kernels.dispatch import Variant

VARIANTS: tuple[Variant, ...] = ()
