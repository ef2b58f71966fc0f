"""The operations as Metal kernels."""

from afm_mlx.kernels.dispatch import Variant
from afm_mlx.kernels.metal import attention, matmul, prompts

VARIANTS: tuple[Variant, ...] = matmul.VARIANTS + attention.VARIANTS + prompts.VARIANTS
