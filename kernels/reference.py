"""Plain-MLX definitions of the operations: what every other backend has to match."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

INT8_MIN, INT8_MAX = -128, 127


class KeyValues(NamedTuple):
    """Keys and values that a block attends to.

    Args:
        keys: (B, n_kv_heads, S, head_dim), float, or int8 codes.
        values: the same shape and dtype.
        key_scale: 0-d float32 that a code is multiplied by, or None for float keys.
        value_scale: likewise for the values.
    """

    keys: mx.array
    values: mx.array
    key_scale: mx.array | None = None
    value_scale: mx.array | None = None

    def astype(self, dtype: mx.Dtype) -> KeyValues:
        """Numbers of `dtype` under the same scales, converted once for blocks that read them often."""
        return self._replace(keys=self.keys.astype(dtype), values=self.values.astype(dtype))


def quantize_int8(x: mx.array, scale: mx.array) -> mx.array:
    """Static symmetric quantization: `clamp(round(x / scale), -128, 127)`.

    Rounds half to even, in float32 whatever the dtype of `x`.

    Args:
        x: any shape, float.
        scale: 0-d, float, positive.

    Returns:
        int8 codes of the shape of `x`.

    Source: tamm 0.2.0, `tamm/ao/layers/functional.py`, `fake_quantize`.
    """
    codes = mx.round(x.astype(mx.float32) / scale)
    return mx.clip(codes, INT8_MIN, INT8_MAX).astype(mx.int8)


def dequantize_int8(codes: mx.array, scale: mx.array, dtype: mx.Dtype) -> mx.array:
    """`codes * scale`, multiplied in float32 and returned as `dtype`."""
    return (codes.astype(mx.float32) * scale).astype(dtype)


def rope_norm(
    x: mx.array, weight: mx.array, offset: int | mx.array, theta: float, eps: float
) -> mx.array:
    """Rotary embedding on adjacent pairs, then RMSNorm over the head's dimensions.

    Args:
        x: queries or keys, (B, n_heads, L, head_dim).
        weight: of the norm, (head_dim,).
        offset: position of the first of the L tokens: one for all rows, or (B,) int32.
        theta: base of the frequencies, `theta ** (-2i / head_dim)`.
        eps: added to the mean square.

    Returns:
        The shape and dtype of `x`.
    """
    x = mx.fast.rope(x, x.shape[-1], traditional=True, base=theta, scale=1.0, offset=offset)
    return mx.fast.rms_norm(x, weight, eps)


def attention(queries: mx.array, kv: KeyValues, mask: mx.array | str | None) -> mx.array:
    """Scaled dot-product attention with grouped heads over float or int8 keys and values.

    A static scale leaves the sums: `softmax(s_k (q . k) / sqrt(d)) v s_v`, so codes are never
    multiplied out.

    Args:
        queries: (B, n_heads, L, head_dim), float.
        kv: keys and values of S >= L tokens; `n_heads` is a multiple of their heads.
        mask: None, "causal" (the L queries are the last of the S tokens), or a boolean array that
            broadcasts to (B, n_heads, L, S), true where a query may look.

    Returns:
        (B, n_heads, L, head_dim) in the dtype of `queries`.
    """
    dtype = queries.dtype
    if kv.key_scale is not None:
        queries = (queries * kv.key_scale).astype(dtype)
    output = mx.fast.scaled_dot_product_attention(
        queries,
        kv.keys.astype(dtype),
        kv.values.astype(dtype),
        scale=queries.shape[-1] ** -0.5,
        mask=mask,
    )
    if kv.value_scale is not None:
        output = (output * kv.value_scale).astype(dtype)
    return output
