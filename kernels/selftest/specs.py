"""The self-test's problems: calls of the operations, without their numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from afm_mlx.kernels.dispatch import dtype_name

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
FORMATS = (
    ("balanced", "row"),
    ("affine", "group"),
    ("palette", "table"),
    ("balanced", "tensor"),
    ("balanced", "group"),
    ("affine", "row"),
)


_Fields = dict[str, Any]


class Spec(NamedTuple):
    """One call of an operation (a function of `kernels.reference`), without its numbers.

    Args:
        batch, tokens: the activations' leading axes.
        in_dims, out_dims: K and N of the matrix.
        bits, mode, granularity, group_size: the matrix's format; the last two as in `PackedWeight`.
        norm, residual: True for a product with a norm before it, and with a residual.
        rank: the largest rank of the adapters, 0 for no adapters.
        sections: projections that share the matrix, each with its own A in an adapter.
        adapter_dtype: type of the adapters' numbers; pass None for the activations' type.
        experts, chosen: experts whose matrices make up the matrix, and how many of them each vector is
            multiplied with; 0 without experts.
        outliers: columns of the activations that are 1,000 times the others, with weights of 0, so that errors
            of the other columns are seen; not with a balanced matrix, whose grid has no 0.
        capacity, tail: columns of the KV buffers, and of their tail; 0 for none.
        rope: True for raw queries, to which attention applies RoPE and norm.
        stored: type of the keys and values: int8 codes, or floats.
    """

    op: str
    dtype: mx.Dtype = mx.float32
    batch: int = 1
    tokens: int = 1
    in_dims: int = 0
    out_dims: int = 0
    bits: int = 0
    mode: str = ""
    granularity: str = ""
    group_size: int = 0
    norm: bool = False
    residual: bool = False
    rank: int = 0
    sections: int = 1
    adapter_dtype: mx.Dtype | None = None
    activation_bits: int = 16
    experts: int = 0
    chosen: int = 0
    outliers: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    capacity: int = 0
    tail: int = 0
    rope: bool = False
    stored: mx.Dtype = mx.int8

    @property
    def label(self) -> str:
        """The spec in words, without the operation."""
        rows, per = (
            self.batch * self.tokens,
            self.granularity.replace("group", f"g{self.group_size}"),
        )
        words = [
            f"{rows} row{'s' * (rows > 1)}",
            self.bits and f"{self.out_dims}x{self.in_dims}, {self.bits}-bit {self.mode} {per}",
            self.heads and f"{self.heads}/{self.kv_heads} heads x {self.head_dim}",
            self.capacity and f"{self.capacity} columns",
            self.tail and f"tail of {self.tail}",
            *(name for name in ("norm", "residual", "rope") if getattr(self, name)),
            self.stored != mx.int8 and f"{dtype_name(self.stored)} keys and values",
            self.rank and f"LoRA {self.rank}",
            self.experts and f"{self.chosen} of {self.experts} experts",
            self.outliers and f"{self.outliers} outliers",
            self.activation_bits != 16 and f"{self.activation_bits}-bit activations",
            dtype_name(self.dtype),
        ]
        return ", ".join(str(word) for word in words if word)


def full_specs() -> list[Spec]:
    """List problems of every operation, format and width, on aligned and ragged shapes, of one row to many.

    Dtypes and fusions are distributed over the problems, and don't multiply their number.
    """
    return [
        *_products(),
        *_prompts(),
        *_outliers(),
        *_swiglus(),
        *_heads(),
        *_lookups(),
        *_gathers(),
        *_attentions(),
    ]


def _matrices(
    shapes: Sequence[tuple[int, int, int]],
) -> Iterator[tuple[int, int, int, str, str, int]]:
    """Yield `Spec`'s fields `in_dims` to `group_size`: every format of matrices (N, K, group size)."""
    for (n, k, group), (mode, granularity), bits in itertools.product(shapes, FORMATS, (2, 4, 8)):
        yield k, n, bits, mode, granularity, group if granularity == "group" else 0


_ALIGNED, _RAGGED = (256, 512, 64), (37, 208, 16)


def _dtype(matrix: int, rows: int) -> mx.Dtype:
    """Return a problem's dtype, by a Latin square: each width, format and number of rows meets every dtype."""
    bits, format_, shape = matrix % 3, matrix // 3, matrix // 3 // len(FORMATS)
    return DTYPES[(bits + format_ + shape + rows) % 3]


def _products() -> Iterator[Spec]:
    draw = random.Random(0)
    for i, matrix in enumerate(_matrices((_ALIGNED, _RAGGED))):
        for j, (batch, tokens) in enumerate(((1, 1), (3, 1), (2, 4), (1, 40))):
            yield Spec(
                "packed_matmul",
                _dtype(i, j),
                batch,
                tokens,
                *matrix,
                norm=draw.random() < 0.5,
                residual=draw.random() < 0.5,
                rank=draw.choice((0, 0, 0, 8, 16)),
                sections=3 if matrix[1] == _ALIGNED[0] else 1,
                activation_bits=draw.choice((16, 16, 16, 8)),
            )


def _prompts() -> Iterator[Spec]:
    """Yield products of more vectors than those for which a GPU multiplies with a balanced matrix's codes."""
    formats = (format_ for format_ in FORMATS if format_[0] == "balanced")
    for i, ((mode, granularity), bits) in enumerate(itertools.product(formats, (2, 4, 8))):
        matrix = (512, 96, bits, mode, granularity, 64 if granularity == "group" else 0)
        fusions: _Fields = {"norm": i % 2 == 0, "residual": i % 3 == 0, "rank": 8 * (i % 2)}
        yield Spec("packed_matmul", DTYPES[(i + i // 3) % 3], 1, 300, *matrix, **fusions)


def _outliers() -> Iterator[Spec]:
    """Yield products with few outliers and with many, in float32, whose rounding hides no error of the rest."""
    formats, rows = (("row", 0), ("group", 64)), ((1, 1), (2, 4))
    cases = itertools.product(formats, (2, 4, 8), rows, (True, False), (16, 8))
    for (granularity, group), bits, (batch, tokens), few, activation_bits in cases:
        matrix = (512, 96, bits, "affine", granularity, group)
        fields: _Fields = {"norm": few, "outliers": 3 if few else 24}
        fields["activation_bits"] = activation_bits
        yield Spec("packed_matmul", mx.float32, batch, tokens, *matrix, **fields)


def _swiglus() -> Iterator[Spec]:
    draw = random.Random(0)
    for i, matrix in enumerate(_matrices((_ALIGNED, _RAGGED))):
        for j, (batch, tokens) in enumerate(((1, 1), (2, 3))):
            fusions: _Fields = {"norm": draw.random() < 0.7, "rank": draw.choice((0, 0, 8))}
            yield Spec("packed_swiglu", _dtype(i, j), batch, tokens, *matrix, **fusions)


def _heads() -> Iterator[Spec]:
    for i, matrix in enumerate(_matrices(((1000, 256, 64), (37, 208, 16)))):
        yield Spec("packed_argmax", _dtype(i, 0), 1, 1, *matrix, norm=True)
        yield Spec("packed_argmax", _dtype(i, 1), 3, 1, *matrix)


def _lookups() -> Iterator[Spec]:
    for i, matrix in enumerate(_matrices((_ALIGNED, _RAGGED))):
        yield Spec("packed_embedding", _dtype(i, 0), 2, 5, *matrix)


def _gathers() -> Iterator[Spec]:
    """Yield products with experts: one vector with several, and more vectors than experts; no palettes."""
    draw = random.Random(0)
    matrices = [m for m in _matrices(((4 * 72, 512, 64), (3 * 37, 208, 16))) if m[3] != "palette"]
    for i, matrix in enumerate(matrices):
        experts = 4 if matrix[1] % 4 == 0 else 3
        for j, (tokens, chosen) in enumerate(((1, 2), (5, 1), (40, 3))):
            bits = draw.choice((16, 16, 8))
            fields: _Fields = {"experts": experts, "chosen": chosen, "activation_bits": bits}
            yield Spec("packed_gather", _dtype(i, j), 1, tokens, *matrix, **fields)


def _attentions() -> Iterator[Spec]:
    for dtype, (heads, kv_heads, dim) in itertools.product(
        DTYPES, ((16, 2, 128), (4, 2, 64), (3, 3, 12))
    ):
        shape: _Fields = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}
        for batch, tokens in ((1, 1), (3, 1), (2, 7)):
            yield Spec("rope_norm_quantize", dtype, batch, tokens, **shape)
        for batch, capacity, rope in ((1, 256, False), (2, 1280, True), (3, 40, True)):
            tail = 64 * (batch > 1)
            decode: _Fields = {"capacity": capacity, "tail": tail, "rope": rope, **shape}
            yield Spec("decode_attention", dtype, batch, **decode)
            yield Spec("decode_attention", dtype, batch, 4, **decode)
            for count in (1, 4):
                yield Spec(
                    "write_and_attend", dtype, batch, count, capacity=capacity, tail=64, **shape
                )
        for batch, tokens, capacity in ((1, 5, 5), (2, 33, 40), (1, 17, 300)):
            yield Spec("causal_attention", dtype, batch, tokens, capacity=capacity, **shape)
        floats: _Fields = {"stored": dtype, **shape}
        yield Spec("rope_norm_quantize", dtype, 2, 3, **floats)
        for batch, tokens, norm in ((1, 1, True), (2, 7, False), (3, 2, True)):
            yield Spec("norm_rope", dtype, batch, tokens, norm=norm, **floats)
        for batch, capacity, norm in ((1, 256, True), (3, 1280, False)):
            sizes: _Fields = {"capacity": capacity, "tail": 64, "norm": norm, **floats}
            yield Spec("norm_rope_attend", dtype, batch, **sizes)
        yield Spec("decode_attention", dtype, 2, capacity=1280, tail=64, rope=True, **floats)
        yield Spec("decode_attention", dtype, 3, capacity=40, **floats)
        yield Spec("causal_attention", dtype, 2, 33, capacity=40, **floats)
    for dtype, (tokens, width) in itertools.product(DTYPES, ((1, 7), (3, 4096), (5, 1000))):
        yield Spec("gelu", dtype, 1, tokens, width)
    for batch, tokens, capacity in ((1, 1, 256), (3, 1, 40), (2, 7, 9)):
        yield Spec(
            "write_tokens", mx.int8, batch, tokens, kv_heads=2, head_dim=64, capacity=capacity
        )
    of_3b: _Fields = {"heads": 16, "kv_heads": 2, "head_dim": 128, "capacity": 4096, "tail": 64}
    yield Spec("decode_attention", **of_3b, rope=True)
    yield Spec("write_and_attend", **of_3b)
    # Speculation verifies up to 8 tokens at a time.
    yield Spec("decode_attention", tokens=8, **of_3b, rope=True)
    yield Spec("write_and_attend", tokens=5, **of_3b)


_HEADS: _Fields = {"heads": 16, "kv_heads": 2, "head_dim": 128}
_BODY: _Fields = {"bits": 2, "mode": "balanced", "granularity": "row"}
_EMBEDDING: _Fields = {**_BODY, "bits": 4}
_MLX: _Fields = {"bits": 4, "mode": "affine", "granularity": "group", "group_size": 64}


def model_specs(dtype: mx.Dtype) -> list[Spec]:
    """List the calls of the 3B model's decoding and prefill: the shapes that are worth timing."""
    up: _Fields = {"in_dims": 2048, "out_dims": 6656}
    down: _Fields = {"in_dims": 6656, "out_dims": 2048}

    # One layer of Qwen3-30B-A3B.
    experts: _Fields = {"in_dims": 2048, "out_dims": 128 * 768, "experts": 128, "chosen": 8}

    def body(op: str, **fields: Any) -> Spec:
        return Spec(op, dtype, **_BODY, **fields)

    qkv: _Fields = {"in_dims": 2048, "out_dims": 2560, "norm": True}
    adapters: _Fields = {"rank": 32, "adapter_dtype": mx.float16, "sections": 3}
    embedding: _Fields = {**_EMBEDDING, "in_dims": 2048, "out_dims": 153600}
    return [
        body("packed_matmul", **qkv),
        body("packed_matmul", **qkv, **adapters),
        body("packed_matmul", **qkv, **adapters, batch=8),
        body("packed_swiglu", **up, norm=True),
        body("packed_matmul", **down, residual=True),
        body("packed_matmul", **down, residual=True, activation_bits=8),
        body("packed_matmul", **down, batch=8),
        body("packed_matmul", **down, tokens=512),
        Spec("packed_matmul", dtype, **down, **_MLX),
        Spec("packed_argmax", dtype, **embedding, norm=True),
        Spec("packed_embedding", dtype, tokens=512, **embedding),
        body("packed_gather", **experts),
        Spec("packed_gather", dtype, **experts, **_MLX),
        Spec("rope_norm_quantize", dtype, **_HEADS),
        Spec("norm_rope", dtype, **_HEADS, norm=True, stored=dtype),
        Spec("norm_rope_attend", dtype, **_HEADS, norm=True, stored=dtype, capacity=512, tail=64),
        Spec("write_tokens", mx.int8, **_HEADS, capacity=64),
        Spec("write_and_attend", dtype, **_HEADS, capacity=512, tail=64),
        Spec("write_and_attend", dtype, **_HEADS, capacity=4096, tail=64),
        Spec("decode_attention", dtype, **_HEADS, capacity=512, tail=64, rope=True),
        Spec("decode_attention", dtype, **_HEADS, capacity=4096, tail=64, rope=True),
        Spec("causal_attention", dtype, tokens=512, **_HEADS, capacity=512),
        Spec("gelu", dtype, tokens=1765, in_dims=4096),
    ]


def quick_specs(dtype: mx.Dtype) -> list[Spec]:
    """List one small problem for each kind of call that a model makes: well under a second in all."""
    small: _Fields = {"in_dims": 512, "out_dims": 136}
    nano, embedding = {**_MLX, **small}, {**_EMBEDDING, **small}
    adapters: _Fields = {"rank": 16, "adapter_dtype": mx.float16}

    def body(op: str, **fields: Any) -> Spec:
        return Spec(op, dtype, **_BODY, **small, **fields)

    return [
        body("packed_matmul", norm=True),
        body("packed_matmul", batch=2, residual=True, **adapters),
        body("packed_matmul", batch=7, norm=True, sections=3, **adapters),
        body("packed_matmul", tokens=40, norm=True),
        body("packed_matmul", tokens=300, norm=True),
        body("packed_swiglu", norm=True),
        body("packed_swiglu", batch=12, norm=True, **adapters),
        body("packed_swiglu", tokens=40, norm=True),
        body("packed_swiglu", tokens=300, norm=True),
        Spec("packed_matmul", dtype, **nano, norm=True),
        Spec("packed_swiglu", dtype, **nano, norm=True),
        Spec("packed_matmul", dtype, **nano, tokens=40),
        Spec("packed_argmax", dtype, **embedding, norm=True),
        Spec("packed_embedding", dtype, tokens=4, **embedding),
        body("packed_gather", experts=4, chosen=2),
        Spec("packed_gather", dtype, **nano, tokens=20, experts=4, chosen=2),
        Spec("rope_norm_quantize", dtype, tokens=2, **_HEADS),
        Spec("norm_rope", dtype, tokens=2, norm=True, **_HEADS, stored=dtype),
        Spec("norm_rope_attend", dtype, norm=True, **_HEADS, stored=dtype, capacity=300, tail=64),
        Spec("decode_attention", dtype, **_HEADS, capacity=300, tail=64, rope=True),
        Spec("write_and_attend", dtype, **_HEADS, capacity=300, tail=64),
        Spec("causal_attention", dtype, tokens=9, **_HEADS, capacity=20),
        Spec("gelu", dtype, tokens=3, in_dims=512),
        Spec("write_tokens", mx.int8, batch=2, **_HEADS, capacity=20),
        Spec("decode_attention", dtype, batch=2, **_HEADS, capacity=100),
        Spec("rope_norm_quantize", dtype, **_HEADS, stored=dtype),
        Spec("decode_attention", dtype, **_HEADS, capacity=300, tail=64, stored=dtype),
        Spec("causal_attention", dtype, tokens=9, **_HEADS, capacity=20, stored=dtype),
    ]
