"""The operations that decide speed, each under one name.

Every operation is defined in plain MLX (`kernels.reference`), and has variants in faster backends: `metal/`,
`cpu/` and `mlx.py`. `kernels.dispatch` chooses between them. This package imports MLX and NumPy, and of the
rest of `afm_mlx` only `installation`.
"""

from afm_mlx.kernels.operands import (
    BITS,
    BLOCK,
    MAX_ADAPTERS,
    MODES,
    AttentionPartials,
    HeadOptions,
    KeyValues,
    LowRank,
    NewToken,
    PackedWeight,
    Part,
    ProductOptions,
    QueryRope,
    dequantize,
    pack_codes,
    unpack_codes,
)
from afm_mlx.kernels.ops import (
    causal_attention,
    decode_attention,
    norm_rope,
    norm_rope_attend,
    packed_argmax,
    packed_embedding,
    packed_gather,
    packed_matmul,
    packed_matmul_each,
    packed_swiglu,
    reads_tails,
    rope_norm_quantize,
    write_and_attend,
    write_tokens,
)
from afm_mlx.kernels.reference import (
    attention,
    dequantize_int8,
    fake_int8,
    quantize_int8,
    rms_norm,
    rope_norm,
)
from afm_mlx.kernels.replay import keep_compiler_out

keep_compiler_out()

__all__ = [
    "BITS",
    "BLOCK",
    "MAX_ADAPTERS",
    "MODES",
    "AttentionPartials",
    "HeadOptions",
    "KeyValues",
    "LowRank",
    "NewToken",
    "PackedWeight",
    "Part",
    "ProductOptions",
    "QueryRope",
    "attention",
    "causal_attention",
    "decode_attention",
    "dequantize",
    "dequantize_int8",
    "fake_int8",
    "norm_rope",
    "norm_rope_attend",
    "pack_codes",
    "packed_argmax",
    "packed_embedding",
    "packed_gather",
    "packed_matmul",
    "packed_matmul_each",
    "packed_swiglu",
    "quantize_int8",
    "reads_tails",
    "rms_norm",
    "rope_norm",
    "rope_norm_quantize",
    "unpack_codes",
    "write_and_attend",
    "write_tokens",
]
