"""Random problems for every operation, with the answer and how far from it a result may lie.

A `Spec` says what a problem looks like, `make` draws one, and `Problem.error` compares what a variant returned
with float64 NumPy (`oracle.py`). The self-test runs them, and so can tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.kernels.dispatch import Case, device
from afm_mlx.kernels.formats import (
    BLOCK,
    HeadOptions,
    KeyValues,
    LowRank,
    PackedWeight,
    Part,
    ProductOptions,
    QueryRope,
)
from afm_mlx.kernels.ops import case_of
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.specs import Spec

# Relative distance of neighbouring numbers, halved: what rounding to a type can cost.
UNIT_ROUNDOFF = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
_TF32 = 2.0**-11
_THETA, _EPS = 500000.0, 1e-5
_ADAPTERS = 3


@dataclass(frozen=True)
class Problem:
    """An operation's arguments, and the answer in float64.

    Args:
        spec: sizes and format of the problem.
        args: arguments of the call.
        wanted: the oracle's answer.
        bound: the largest error that rounding explains; see `error`.
    """

    spec: Spec
    args: tuple[Any, ...]
    wanted: tuple[np.ndarray, ...]
    bound: float

    @property
    def case(self) -> Case:
        """What the choice of a variant depends on."""
        return case_of(self.spec.op, *self.args)

    @property
    def nbytes(self) -> int:
        """Bytes that one call has to read and write: each array once, of a cache the columns in use."""
        if self.spec.op == "decode_attention":
            queries, kv, lengths = self.args[:3]
            column = kv.buffer.nbytes // (kv.buffer.shape[0] * kv.buffer.shape[2])
            return 2 * queries.nbytes + int(lengths.sum().item()) * column
        if self.spec.op == "write_tokens":
            return 2 * self.args[1].nbytes
        if self.spec.op == "causal_attention":
            queries, kv = self.args
            return 2 * queries.nbytes + kv.buffer.nbytes
        if self.spec.op == "packed_embedding":
            tokens, weight, dtype = self.args
            return tokens.size * (weight.nbytes // weight.out_dims + weight.in_dims * dtype.size)
        written = self.wanted[0].size * self.spec.dtype.size
        if self.spec.op == "packed_argmax":
            written = 0  # next to nothing; `wanted` has all products
        return sum(array.nbytes for array in _arrays(self.args)) + written

    def error(self, results: Any) -> float:
        """How far results lie from the answer, relative to its root mean square.

        The larger one of the root mean square of the n differences, over `1 + 3 / sqrt(n)`, and an eighth of
        the largest. A few random errors may all be large ones, and the largest of many is some four times
        their root mean square; defects are much more.

        Raises:
            ValueError: when a result has another shape or dtype than the operation's, or can't be right.
        """
        results = results if isinstance(results, (tuple, list)) else (results,)
        return _CHECKS.get(self.spec.op, _check_floats)(self, results)

    def fresh(self, count: int) -> list[tuple[Any, ...]]:
        """The arguments with other codes, keys and values, `count` times: the same work on other bytes."""
        first = [tuple(_with_codes(arg, i) for arg in self.args) for i in range(1, count)]
        mx.eval([_arrays(args) for args in first])
        return [self.args, *first]


def _arrays(values: Sequence[Any]) -> list[mx.array]:
    """Every array in nested tuples."""
    found: list[mx.array] = []
    for value in values:
        if isinstance(value, mx.array):
            found.append(value)
        elif isinstance(value, tuple):
            found += _arrays(_used(value) if isinstance(value, LowRank) else value)
    return found


def _used(low_rank: LowRank) -> LowRank:
    """The adapters that some row uses."""
    slots = {slot for slot in np.array(low_rank.slots).tolist() if slot >= 0}
    return low_rank._replace(numbers=tuple(low_rank.numbers[slot] for slot in sorted(slots)))


def _with_codes(arg: Any, salt: int) -> Any:
    if isinstance(arg, PackedWeight):
        return arg._replace(codes=arg.codes ^ mx.array(salt, mx.uint32))
    if isinstance(arg, KeyValues):
        return arg._replace(buffer=arg.buffer ^ mx.array(salt % 128, arg.buffer.dtype))
    return arg


# -- drawing


def make(spec: Spec, rng: np.random.Generator) -> Problem:
    """A problem with random numbers of the sizes that occur in a model."""
    args = _DRAWS[spec.op](spec, rng)
    wanted = getattr(oracle, spec.op)(*args)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    return Problem(spec, args, wanted, _bound(spec, args))


def packed_weight(spec: Spec, rng: np.random.Generator) -> PackedWeight:
    """A random matrix whose products with random vectors have about their size."""
    n, k, bits = spec.out_dims, spec.in_dims, spec.bits
    codes = mx.array(rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32))
    if spec.mode == "palette":
        tables = next(t for t in (4, 3, 2, 1) if n % t == 0)
        table = _draw(rng.normal(0, k**-0.5, (tables, 2**bits)))
        return PackedWeight(codes, bits, "palette", table=table)
    shape = {"tensor": (), "row": (n,), "group": (n, k // max(1, spec.group_size))}
    size = shape[spec.granularity]
    # Uniform codes have variance (4**bits - 1) / 12.
    scales = ((4**bits - 1) / 12 * k) ** -0.5 * np.exp(rng.normal(0, 0.3, size))
    if spec.mode == "balanced":
        return PackedWeight(codes, bits, "balanced", _draw(scales))
    scales = scales * rng.choice([-1, 1], size)  # `mx.quantize` makes scales of either sign
    biases = -(2**bits - 1) / 2 * scales * (1 + rng.normal(0, 0.1, size))
    # MLX's own folders store both in the activations' type.
    return PackedWeight(codes, bits, "affine", _draw(scales, spec.dtype), _draw(biases, spec.dtype))


def _draw(values: Any, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.asarray(values, np.float32)).astype(dtype)


def _activations(spec: Spec, rng: np.random.Generator, *last: int) -> mx.array:
    return _draw(rng.standard_normal((spec.batch, spec.tokens, *last)), spec.dtype)


def _low_rank(spec: Spec, rng: np.random.Generator, shared: LowRank | None = None) -> LowRank:
    """Adapters of different ranks; `shared` ones lie in the same arrays, as those of gate and up do."""
    ends = [spec.out_dims * (i + 1) // spec.sections for i in range(spec.sections)]
    ranks = [max(1, spec.rank - 3 * i) for i in range(_ADAPTERS)]
    if spec.batch > _ADAPTERS:
        ranks[0] = 0  # an adapter that leaves this matrix alone
    k, blocks = spec.in_dims, -(-spec.out_dims // BLOCK)
    numbers, parts = [], []
    for slot, rank in enumerate(ranks):
        a = rng.normal(0, k**-0.5, spec.sections * rank * k)
        b = rng.normal(0, max(1, rank) ** -0.5, (blocks * BLOCK, rank))
        b[spec.out_dims :] = 0
        b = b.reshape(blocks, BLOCK, rank).swapaxes(1, 2)
        before = [np.array(shared.numbers[slot].astype(mx.float32))] if shared else []
        pieces = [
            *before,
            rng.normal(size=BLOCK),
            a,
            rng.normal(size=-a.size % BLOCK),
            b.reshape(-1),
        ]
        starts = np.cumsum([0, *(piece.size for piece in pieces)]).tolist()
        parts.append(Part(starts[-4], starts[-2], rank))
        numbers.append(_draw(np.concatenate(pieces), spec.adapter_dtype or spec.dtype))
    slots = rng.integers(-1, _ADAPTERS, spec.batch)
    slots[0] = _ADAPTERS - 1  # one row at least has an adapter
    scales, slots = (
        mx.array(rng.uniform(0.5, 2, _ADAPTERS).astype(np.float32)),
        mx.array(slots.astype(np.int32)),
    )
    if shared:
        scales, slots = shared.scales, shared.slots
    return LowRank(tuple(numbers), tuple(parts), scales, slots, tuple(ends))


def _product_options(spec: Spec, rng: np.random.Generator) -> ProductOptions:
    return ProductOptions(
        norm=_draw(rng.uniform(0.5, 1.5, spec.in_dims), spec.dtype) if spec.norm else None,
        eps=_EPS,
        residual=_activations(spec, rng, spec.out_dims) if spec.residual else None,
        adapters=(_low_rank(spec, rng),) if spec.rank else (),
        activation_bits=spec.activation_bits,
    )


def _draw_product(spec: Spec, rng: np.random.Generator) -> tuple:
    x = _activations(spec, rng, spec.in_dims)
    return x, packed_weight(spec, rng), _product_options(spec, rng)


def _draw_swiglu(spec: Spec, rng: np.random.Generator) -> tuple:
    x, gate, options = _draw_product(spec, rng)
    if spec.rank:
        (of_gate,) = options.adapters
        of_up = _low_rank(spec, rng, shared=of_gate)
        # One array per adapter holds both.
        options = options._replace(adapters=(of_gate._replace(numbers=of_up.numbers), of_up))
    return x, gate, packed_weight(spec, rng), options


def _draw_embedding(spec: Spec, rng: np.random.Generator) -> tuple:
    tokens = rng.integers(0, spec.out_dims, (spec.batch, spec.tokens)).astype(np.int32)
    tokens[0, 0] = spec.out_dims - 1
    return mx.array(tokens), packed_weight(spec, rng), spec.dtype


def _head_norm(spec: Spec, rng: np.random.Generator) -> mx.array:
    return _draw(rng.uniform(0.5, 1.5, spec.head_dim), spec.dtype)


def _draw_rope(spec: Spec, rng: np.random.Generator) -> tuple:
    qkv = _activations(spec, rng, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    offset = mx.array(rng.integers(0, 2048, spec.batch).astype(np.int32))
    # The largest numbers are clamped.
    key_scale, value_scale = (_draw(s) for s in rng.uniform(0.015, 0.03, 2))
    q_weight, k_weight = _head_norm(spec, rng), _head_norm(spec, rng)
    return (
        qkv,
        offset,
        HeadOptions(q_weight, k_weight, key_scale, value_scale, spec.kv_heads, _THETA, _EPS),
    )


def _draw_key_values(spec: Spec, rng: np.random.Generator) -> KeyValues:
    shape = (spec.batch, 2 * spec.kv_heads, spec.capacity, spec.head_dim)
    codes = rng.integers(-128, 128, shape, dtype=np.int8)
    # Uniform codes have a root mean square of 74: keys and values of about 1.
    scales = (_draw(s) for s in rng.uniform(0.8, 1.2, 2) / 74)
    return KeyValues(mx.array(codes), *scales)


def _draw_queries(spec: Spec, rng: np.random.Generator) -> mx.array:
    shape = (spec.batch, spec.heads, spec.tokens, spec.head_dim)
    return _draw(rng.standard_normal(shape), spec.dtype)


def _draw_causal(spec: Spec, rng: np.random.Generator) -> tuple:
    return _draw_queries(spec, rng), _draw_key_values(spec, rng)


def _draw_attention(spec: Spec, rng: np.random.Generator) -> tuple:
    lengths = rng.integers(1, spec.capacity + 1, spec.batch)
    lengths[0] = max(1, spec.capacity - 3)
    rope = QueryRope(_head_norm(spec, rng), _THETA, _EPS) if spec.rope else None
    queries, kv = _draw_queries(spec, rng), _draw_key_values(spec, rng)
    return queries, kv, mx.array(lengths.astype(np.int32)), rope


def _draw_write(spec: Spec, rng: np.random.Generator) -> tuple:
    heads = (spec.batch, 2 * spec.kv_heads)
    buffer, tokens = (
        mx.array(rng.integers(-128, 128, (*heads, n, spec.head_dim), dtype=np.int8))
        for n in (spec.capacity, spec.tokens)
    )
    lengths = rng.integers(spec.tokens, spec.capacity + 1, spec.batch)
    return buffer, tokens, mx.array(lengths.astype(np.int32))


_DRAWS = {
    "packed_matmul": _draw_product,
    "packed_swiglu": _draw_swiglu,
    "packed_argmax": _draw_product,
    "packed_embedding": _draw_embedding,
    "rope_norm_quantize": _draw_rope,
    "decode_attention": _draw_attention,
    "causal_attention": _draw_causal,
    "write_tokens": _draw_write,
}


# -- bounds


def _bound(spec: Spec, args: tuple) -> float:
    """The largest error that rounding explains, in the units of `Problem.error`."""
    if spec.op == "write_tokens":
        return 2.0**-24  # codes are moved, not rounded
    u = UNIT_ROUNDOFF[spec.dtype]
    if spec.op == "packed_embedding":
        return 2 * u + 2.0**-23
    if spec.op == "rope_norm_quantize":
        # Two operations round in turn; a float32 angle at position p is off by some p units.
        return 3 * u + 4 * (int(args[1].max().item()) + spec.tokens) * 2.0**-24
    if spec.op == "decode_attention":
        queries, kv, lengths, rope = args
        return _attention_bound(queries, kv, int(lengths.max().item()), rope, u)
    if spec.op == "causal_attention":
        queries, kv = args
        return _attention_bound(queries, kv, spec.capacity, None, u)
    bound = _product_bound(spec, args[0], args[-1])
    # Both factors are off, and the slope of silu is up to 1.1.
    return 3 * bound if spec.op == "packed_swiglu" else bound


def _product_bound(spec: Spec, x: mx.array, options: ProductOptions) -> float:
    """Operands, partial sums and the result rounded to the dtype, float32 sums, activations as integers.

    An integer activation of b bits is off by up to half of `max|x| / (2**(b-1) - 1)`, evenly spread, which
    makes an error of `crest / sqrt(12) / (2**(b-1) - 1)` of a product's size, where `crest` is the ratio
    of the vector's largest element to its root mean square. Codes that are multiplied without their offset
    (`sum(x c) s + sum(x) b`) double both kinds of error, and a factor of 2 is left for chance.
    """
    u = UNIT_ROUNDOFF[spec.dtype]
    if spec.dtype == mx.float32 and device() == "gpu" and spec.batch * spec.tokens > 1:
        u = _TF32  # MLX lets matrix units round float32 operands
    vectors = oracle.float64(x)
    if options.norm is not None:
        vectors = oracle.rms_norm(vectors, oracle.float64(options.norm), options.eps)
    crest = (np.abs(vectors).max(-1) / np.sqrt((vectors**2).mean(-1))).max()
    levels = 2 ** (spec.activation_bits - 1) - 1
    integers = 2 * crest / (12**0.5 * levels)
    sums = (4 + spec.in_dims**0.5) * 2.0**-24
    return float((5 if spec.rank else 4) * u + 2 * sums + 2 * integers)


def _attention_bound(
    queries: mx.array, kv: KeyValues, length: int, rope: QueryRope | None, u: float
) -> float:
    """Softmax turns an error of a score into a relative one, and scores may be rounded to the dtype.

    Queries and weights may be rounded to 16-bit integers, as activations are. S weights that are off by half a
    step, `1 / 65534` of the largest one, make an error of up to `sqrt(S / 12) / 32767` of the output's size.
    """
    # Queries that went through a norm are as large as its weight, all others as they were drawn.
    size = oracle.float64(rope.weight if rope else queries)
    norm = float(np.abs(size).max() if rope else np.sqrt((size**2).mean(-1)).max())
    score = norm * float(oracle.float64(kv.key_scale)) * 74 * (2 * np.log(length + 1)) ** 0.5
    angle = 4 * length * 2.0**-24 if rope else 0.0
    integers = 2 * (score + length**0.5) / (12**0.5 * 32767)
    return float((2 + score) * (u + 2.0**-22 + angle) + length**0.5 * 2.0**-24 + integers)


# -- comparing


def _relative(got: np.ndarray, wanted: np.ndarray, scale: float) -> float:
    difference = got - wanted
    if not np.isfinite(difference).all():
        return float("inf")
    by_chance = 1 + 3 / difference.size**0.5
    return float(max(_rms(difference) / by_chance, np.abs(difference).max() / 8) / scale)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


def _float64(result: mx.array, shape: tuple[int, ...], *dtypes: mx.Dtype) -> np.ndarray:
    if tuple(result.shape) != shape or result.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"returned {result.dtype} {tuple(result.shape)}; {allowed} {shape} is needed"
        )
    return oracle.float64(result)


def _check_floats(problem: Problem, results: Sequence[mx.array]) -> float:
    wanted = problem.wanted[0]
    return _relative(_float64(results[0], wanted.shape, problem.spec.dtype), wanted, _rms(wanted))


def _check_rope(problem: Problem, results: Sequence[mx.array]) -> float:
    """Codes may be off by half a code, and by what the error of the number before rounding adds."""
    wanted = problem.wanted[1]
    wanted_k, wanted_v = np.split(wanted, 2, axis=1)
    k, v = np.split(_float64(results[1], wanted.shape, mx.int8), 2, axis=1)
    # Values are not computed but divided, in float32.
    if (off := np.abs(v - wanted_v).max()) > 0.5 + 2.0**-14:
        raise ValueError(f"a value's code is off by {off:.3f}; rounding explains 0.5")
    excess = np.maximum(np.abs(k - wanted_k) - 0.5, 0)
    return max(
        _check_floats(problem, results[:1]),
        _relative(excess, np.zeros_like(excess), _rms(wanted_k)),
    )


def _check_argmax(problem: Problem, results: Sequence[mx.array]) -> float:
    """Products must be the largest ones, and those of the rows that were named; ties are free."""
    products = problem.wanted[0]
    index = _float64(results[0], products.shape[:-1], mx.uint32).astype(np.int64)
    values = _float64(results[1], products.shape[:-1], mx.float32)
    if index.max() >= products.shape[-1]:
        raise ValueError(f"named row {index.max()} of a matrix of {products.shape[-1]}")
    best = products.max(-1)
    named = np.take_along_axis(products, index[..., None], axis=-1)[..., 0]
    scale = _rms(products)
    return max(_relative(values, best, scale), _relative(named, best, scale))


_CHECKS = {
    "rope_norm_quantize": _check_rope,
    "packed_argmax": _check_argmax,
}
