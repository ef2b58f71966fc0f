"""Random problems for every operation, with the answer and the error that rounding explains.

A `Spec` describes a problem, `make` draws one, and `Problem.error` compares a variant's results with float64
NumPy (`oracle.py`). The self-test and the tests run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.kernels.dispatch import Case, device
from afm_mlx.kernels.operands import (
    BLOCK,
    PLAIN,
    HeadOptions,
    KeyValues,
    LowRank,
    NewToken,
    PackedWeight,
    Part,
    ProductOptions,
    QueryRope,
    pack_codes,
    unpack_codes,
)
from afm_mlx.kernels.ops import case_of
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.specs import Spec

# Half the relative distance of neighbouring numbers: the largest relative error of rounding to a type.
UNIT_ROUNDOFF = {mx.float32: 2.0**-24, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
_TF32 = 2.0**-11
# Largest errors of Metal's functions of float, in ulps, of which one is up to 2**-23 of a number: Metal
# Shading Language Specification 4.1, section 8.4.
_ULP = 2.0**-23
_PRECISE = 4  # table 8.1, `metal::precise`: exp, exp2, sin and cos; rsqrt is correctly rounded
_FAST_EXP2 = (3, 2)  # table 8.2, `metal::fast`: exp2(x) by 3 + 2 |x|
Args = tuple[Any, ...]
"""Arguments of one call."""

_THETA, _EPS = 500000.0, 1e-5
_ADAPTERS = 3
_OUTLIER = 1000.0  # factor to the other elements
# The largest element of a vector whose outliers are multiplied separately, in units of the root mean square:
# at least 5/8 of the elements are 1/128 of it or more; with int8 activations, at least a quarter are 1/32.
_CREST = {16: 128 / (5 / 8) ** 0.5, 8: 32 / (1 / 4) ** 0.5}


@dataclass(frozen=True)
class Problem:
    """An operation's arguments, the answer in float64, and the largest error that rounding explains."""

    spec: Spec
    args: Args
    wanted: tuple[np.ndarray, ...]
    bound: float

    @property
    def case(self) -> Case:
        """The case that dispatch chooses a variant for."""
        return case_of(self.spec.op, *self.args)

    @property
    def nbytes(self) -> int:
        """Bytes that one call reads and writes: each array once; only a cache's columns in use."""
        match self.spec.op, *self.args:
            case "decode_attention" | "write_and_attend", x, kv, lengths, _:
                column = kv.buffer.nbytes // (kv.buffer.shape[0] * kv.buffer.shape[2])
                written = 2 * kv.tail.nbytes if self.spec.op == "write_and_attend" else 0
                seen = int(lengths.sum().item()) + len(lengths) * (self.spec.tokens - 1)
                return 2 * x.nbytes + seen * column + written
            case "norm_rope_attend", token, kv, lengths:
                column = kv.buffer.nbytes // (kv.buffer.shape[0] * kv.buffer.shape[2])
                written = 2 * kv.tail.nbytes + token.queries.nbytes
                read = sum(x.nbytes for x in token[:3]) + int(lengths.sum().item()) * column
                return read + written
            case "causal_attention", queries, kv:
                return 2 * queries.nbytes + kv.buffer.nbytes
            case "write_tokens", _, tokens, _:
                return 2 * tokens.nbytes
            case "packed_embedding", tokens, weight, dtype:
                return tokens.size * (
                    weight.nbytes // weight.out_dims + weight.in_dims * dtype.size
                )
            case "packed_gather", x, weight, indices, experts, *_:
                read = len(set(indices.tolist())) * weight.nbytes // experts
                return x.nbytes + read + self.wanted[0].size * self.spec.dtype.size
        # `packed_argmax` writes almost nothing.
        written = self.wanted[0].size * self.spec.dtype.size * (self.spec.op != "packed_argmax")
        return sum(array.nbytes for array in _arrays(self.args)) + written

    def error(self, results: mx.array | Sequence[mx.array]) -> float:
        """Return the error of results, relative to the answer's size.

        The answer's size is its root mean square, at least `_LEAST_SIZE`: a few products can all be near 0 by
        chance. The error is the larger of the root mean square of the n differences, over `1 + 3 / sqrt(n)`,
        and an eighth of the largest difference. A few random errors can all be large, and the largest of many
        is some four times their root mean square; a defect makes much more.

        Raises:
            ValueError: if a result has another shape or dtype than the operation's, or can't be right.
        """
        results = results if isinstance(results, (tuple, list)) else (results,)
        return _CHECKS.get(self.spec.op, _check_floats)(self, results)

    def fresh(self, count: int) -> list[Args]:
        """Return `count` sets of arguments with other codes, keys and values: the same work on other bytes."""
        first = [tuple(_with_codes(arg, i) for arg in self.args) for i in range(1, count)]
        mx.eval([_arrays(args) for args in first])
        return [self.args, *first]


def _arrays(values: Sequence[object]) -> list[mx.array]:
    """List all arrays in nested tuples; of adapters, only those that a batch row uses."""
    found: list[mx.array] = []
    for value in values:
        if isinstance(value, mx.array):
            found.append(value)
        elif isinstance(value, LowRank):
            used = {slot for slot in np.array(value.slots).tolist() if slot >= 0}
            numbers = tuple(value.numbers[slot] for slot in sorted(used))
            found += _arrays((*numbers, value.scales, value.slots))
        elif isinstance(value, tuple):
            found += _arrays(value)
    return found


def _with_codes(arg: object, salt: int) -> object:
    if isinstance(arg, PackedWeight):
        return arg._replace(codes=arg.codes ^ mx.array(salt, mx.uint32))
    if isinstance(arg, KeyValues):
        other = mx.array(salt % 128, arg.buffer.dtype)
        floats = arg.key_scale is None
        return arg._replace(buffer=arg.buffer + other if floats else arg.buffer ^ other)
    return arg


# -- drawing


def make(spec: Spec, rng: np.random.Generator) -> Problem:
    """Draw a problem, with numbers of the sizes that occur in a model."""
    args = _DRAWS[spec.op](spec, rng)
    wanted = getattr(oracle, spec.op)(*args)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    return Problem(spec, args, wanted, _bound(spec, args))


def packed_weight(spec: Spec, rng: np.random.Generator) -> PackedWeight:
    """Draw a matrix whose products with random vectors have about the vectors' size."""
    n, k, bits = spec.out_dims, spec.in_dims, spec.bits
    codes = mx.array(rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32))
    if spec.outliers:
        return _weight_without_outliers(spec, codes, rng)
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
    scales = scales * rng.choice([-1, 1], size)  # `mx.quantize` makes scales of both signs
    biases = -(2**bits - 1) / 2 * scales * (1 + rng.normal(0, 0.1, size))
    # MLX's own folders store both in the activations' type.
    return PackedWeight(codes, bits, "affine", _draw(scales, spec.dtype), _draw(biases, spec.dtype))


def _weight_without_outliers(spec: Spec, codes: mx.array, rng: np.random.Generator) -> PackedWeight:
    """Make an affine matrix of `codes` with random scales; its weights in `_outlier_columns(spec)` become 0."""
    if spec.mode != "affine":
        raise ValueError(
            f"outliers need a matrix with weights of 0, which is affine, not {spec.mode}"
        )
    zero = 2 ** (spec.bits - 1)
    numbers = np.array(unpack_codes(codes, spec.bits))
    numbers[:, _outlier_columns(spec)] = zero
    groups = (spec.in_dims // spec.group_size,) if spec.granularity == "group" else ()
    size = (spec.out_dims, *groups)
    scales = _draw(((4**spec.bits + 2) / 12 * spec.in_dims) ** -0.5 * rng.uniform(0.7, 1.4, size))
    packed = pack_codes(mx.array(numbers), spec.bits)
    return PackedWeight(packed, spec.bits, "affine", scales, -zero * scales)


def _outlier_columns(spec: Spec) -> np.ndarray:
    """Return the indices of outliers in a vector: spread over the whole vector, one of them last."""
    return np.arange(1, spec.outliers + 1) * spec.in_dims // spec.outliers - 1


def _draw(values: np.ndarray | float, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.asarray(values, np.float32)).astype(dtype)


def _int32(values: np.ndarray) -> mx.array:
    return mx.array(values.astype(np.int32))


def _activations(spec: Spec, rng: np.random.Generator, *last: int) -> mx.array:
    return _draw(rng.standard_normal((spec.batch, spec.tokens, *last)), spec.dtype)


def _low_rank(spec: Spec, rng: np.random.Generator, shared: LowRank | None = None) -> LowRank:
    """Draw adapters of different ranks; after gate's adapters `shared`, in the same arrays, up's."""
    ends = [spec.out_dims * (i + 1) // spec.sections for i in range(spec.sections)]
    ranks = [max(1, spec.rank - 3 * i) for i in range(_ADAPTERS)]
    if spec.batch > _ADAPTERS:
        ranks[0] = 0  # an adapter without this matrix
    k, blocks = spec.in_dims, -(-spec.out_dims // BLOCK)
    numbers, parts = [], []
    for slot, rank in enumerate(ranks):
        a = rng.normal(0, k**-0.5, spec.sections * rank * k)
        b = rng.normal(0, max(1, rank) ** -0.5, (blocks * BLOCK, rank))
        b[spec.out_dims :] = 0
        b = b.reshape(blocks, BLOCK, rank).swapaxes(1, 2)
        before = [np.array(shared.numbers[slot].astype(mx.float32))] if shared else []
        gap, rest = rng.normal(size=BLOCK), rng.normal(size=-a.size % BLOCK)
        pieces = [*before, gap, a, rest, b.reshape(-1)]
        starts = np.cumsum([0, *(piece.size for piece in pieces)]).tolist()
        parts.append(Part(starts[-4], starts[-2], rank))
        numbers.append(_draw(np.concatenate(pieces), spec.adapter_dtype or spec.dtype))
    if shared:
        scales, slots = shared.scales, shared.slots
    else:
        of_rows = rng.integers(-1, _ADAPTERS, spec.batch)
        of_rows[0] = _ADAPTERS - 1  # at least one row has an adapter
        scales, slots = _draw(rng.uniform(0.5, 2, _ADAPTERS)), _int32(of_rows)
    return LowRank(tuple(numbers), tuple(parts), scales, slots, tuple(ends))


def _draw_product(spec: Spec, rng: np.random.Generator) -> Args:
    x = _activations(spec, rng, spec.in_dims)
    if spec.outliers:
        columns = mx.array(_outlier_columns(spec))
        x[..., columns] = _OUTLIER * (x[..., columns] + mx.sign(x[..., columns]))
    weight = packed_weight(spec, rng)
    # Outliers increase the norm's divisor; a larger weight restores the other elements' size.
    size = (1 + spec.outliers * _OUTLIER**2 / max(1, spec.in_dims)) ** 0.5
    options = ProductOptions(
        norm=_draw(size * rng.uniform(0.5, 1.5, spec.in_dims), spec.dtype) if spec.norm else None,
        eps=_EPS,
        residual=_activations(spec, rng, spec.out_dims) if spec.residual else None,
        adapters=(_low_rank(spec, rng),) if spec.rank else (),
        activation_bits=spec.activation_bits,
    )
    return x, weight, options


def _draw_swiglu(spec: Spec, rng: np.random.Generator) -> Args:
    x, gate, options = _draw_product(spec, rng)
    if spec.rank:
        (of_gate,) = options.adapters
        of_up = _low_rank(spec, rng, shared=of_gate)
        # One array per adapter holds both.
        options = options._replace(adapters=(of_gate._replace(numbers=of_up.numbers), of_up))
    return x, gate, packed_weight(spec, rng), options


def _draw_embedding(spec: Spec, rng: np.random.Generator) -> Args:
    tokens = rng.integers(0, spec.out_dims, (spec.batch, spec.tokens))
    tokens[0, 0] = spec.out_dims - 1
    return _int32(tokens), packed_weight(spec, rng), spec.dtype


def _draw_gather(spec: Spec, rng: np.random.Generator) -> Args:
    x = _activations(spec, rng, spec.in_dims).reshape(-1, spec.in_dims)
    chosen = [
        rng.choice(spec.experts, spec.chosen, replace=False)
        for _ in range(spec.batch * spec.tokens)
    ]
    ascending = spec.chosen == 1
    indices = np.sort(np.ravel(chosen)) if ascending else np.ravel(chosen)
    weight = packed_weight(spec, rng)
    return x, weight, _int32(indices), spec.experts, ascending, spec.activation_bits


def _head_norm(spec: Spec, rng: np.random.Generator) -> mx.array:
    return _draw(rng.uniform(0.5, 1.5, spec.head_dim), spec.dtype)


def _draw_rope(spec: Spec, rng: np.random.Generator) -> Args:
    qkv = _activations(spec, rng, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    offset = _int32(rng.integers(0, 2048, spec.batch))
    q_weight, k_weight = (_head_norm(spec, rng) for _ in range(2))
    # The largest numbers are clamped.
    key_scale, value_scale = (
        _draw(scale) if spec.stored == mx.int8 else None for scale in rng.uniform(0.015, 0.03, 2)
    )
    scales = (key_scale, value_scale)
    return qkv, offset, HeadOptions(q_weight, k_weight, *scales, spec.kv_heads, _THETA, _EPS)


def _draw_norm_rope(spec: Spec, rng: np.random.Generator) -> Args:
    shape = (spec.batch, spec.heads, spec.tokens, spec.head_dim)
    offset = _int32(rng.integers(0, 2048, spec.batch))
    weight = _head_norm(spec, rng) if spec.norm else None
    return _draw(rng.standard_normal(shape), spec.dtype), _periods(spec, rng), offset, weight, _EPS


def _periods(spec: Spec, rng: np.random.Generator) -> mx.array:
    factors = rng.uniform(1, 8, spec.head_dim // 2)  # as Llama 3 stretches them
    return _draw(_THETA ** (np.arange(0, spec.head_dim, 2) / spec.head_dim) * factors)


def _draw_norm_rope_attend(spec: Spec, rng: np.random.Generator) -> Args:
    q, k, v = (
        _draw(rng.standard_normal((spec.batch, 1, n * spec.head_dim)), spec.dtype)
        for n in (spec.heads, spec.kv_heads, spec.kv_heads)
    )
    kv, lengths = _draw_lengths(spec, rng, KeyValues(_codes(spec, rng, spec.capacity)))
    norms = (_head_norm(spec, rng), _head_norm(spec, rng)) if spec.norm else None
    return NewToken(q, k, v, _periods(spec, rng), norms, _EPS), kv, lengths


def _codes(spec: Spec, rng: np.random.Generator, columns: int) -> mx.array:
    """Draw keys and values of `columns` tokens: codes, or floats of about 1."""
    shape = (spec.batch, 2 * spec.kv_heads, columns, spec.head_dim)
    if spec.stored != mx.int8:
        return _draw(rng.standard_normal(shape), spec.stored)
    return mx.array(rng.integers(-128, 128, shape, dtype=np.int8))


def _draw_causal(spec: Spec, rng: np.random.Generator) -> Args:
    shape = (spec.batch, spec.heads, spec.tokens, spec.head_dim)
    queries = _draw(rng.standard_normal(shape), spec.dtype)
    if spec.stored != mx.int8:
        return queries, KeyValues(_codes(spec, rng, spec.capacity))
    # Uniform codes have a root mean square of 74: keys and values of about 1.
    scales = (_draw(s) for s in rng.uniform(0.8, 1.2, 2) / 74)
    return queries, KeyValues(_codes(spec, rng, spec.capacity), *scales)


def _draw_decode(spec: Spec, rng: np.random.Generator) -> Args:
    rope = QueryRope(_head_norm(spec, rng), _THETA, _EPS) if spec.rope else None
    queries, kv = _draw_causal(spec, rng)
    return queries, *_draw_lengths(spec, rng, kv), rope


def _draw_lengths(
    spec: Spec, rng: np.random.Generator, kv: KeyValues
) -> tuple[KeyValues, mx.array]:
    """Add a tail to keys and values; also return the columns that the first token sees, per row."""
    more = spec.tokens - 1  # columns that the last token sees beyond the first one's
    most = spec.capacity if spec.tail else spec.capacity - more
    lengths = rng.integers(1, most + 1, spec.batch)
    lengths[:3] = [max(1, most - 3), 1, most][: spec.batch]
    if not spec.tail:
        return kv, _int32(lengths)
    # Rows begin their tails together: all have equal numbers of tokens there.
    starts, used = lengths - (lengths == 1), int(rng.integers(1, spec.tail + 1 - more))
    kv = kv._replace(tail=_codes(spec, rng, spec.tail), starts=_int32(starts))
    return kv, _int32(starts + used)


def _draw_writing(spec: Spec, rng: np.random.Generator) -> Args:
    qkv, _, options = _draw_rope(spec, rng)
    kv = KeyValues(_codes(spec, rng, spec.capacity), *options[2:4])
    return qkv, *_draw_lengths(spec, rng, kv), options


def _draw_write(spec: Spec, rng: np.random.Generator) -> Args:
    buffer, tokens = (_codes(spec, rng, columns) for columns in (spec.capacity, spec.tokens))
    return buffer, tokens, _int32(rng.integers(spec.tokens, spec.capacity + 1, spec.batch))


def _draw_gelu(spec: Spec, rng: np.random.Generator) -> Args:
    return (_activations(spec, rng, spec.in_dims),)


_DRAWS = {
    "packed_matmul": _draw_product,
    "packed_swiglu": _draw_swiglu,
    "packed_argmax": _draw_product,
    "packed_embedding": _draw_embedding,
    "packed_gather": _draw_gather,
    "rope_norm_quantize": _draw_rope,
    "norm_rope": _draw_norm_rope,
    "norm_rope_attend": _draw_norm_rope_attend,
    "decode_attention": _draw_decode,
    "write_and_attend": _draw_writing,
    "causal_attention": _draw_causal,
    "write_tokens": _draw_write,
    "gelu": _draw_gelu,
}


# -- bounds


def _bound(spec: Spec, args: Args) -> float:
    u = UNIT_ROUNDOFF.get(spec.dtype, 0.0)
    match spec.op, *args:
        case "write_tokens", *_:
            return 2.0**-24  # codes are moved, not rounded
        case "packed_embedding", *_:
            return 2 * u + 2.0**-23
        case "gelu", _:
            return 4 * u + 2.0**-22  # the reference rounds after each of its operations
        case ("rope_norm_quantize", _, offset, _) | ("norm_rope", _, _, offset, _, _):
            # Two operations round one after the other, and sine and cosine are off, in proportion to their
            # factors.
            position = int(offset.max().item()) + spec.tokens
            return 3 * u + 2 * _PRECISE * _ULP + _angle_error(position)
        case "decode_attention", queries, kv, lengths, rope:
            longest = int(lengths.max().item()) + spec.tokens - 1
            return _attention_bound(spec, queries, kv, longest, rope)
        case "causal_attention", queries, kv:
            return _attention_bound(spec, queries, kv, spec.capacity, None)
        case "write_and_attend", qkv, kv, lengths, options:
            rope = QueryRope(options.q_weight, options.theta, options.eps)
            longest = int(lengths.max().item()) + spec.tokens - 1
            return _attention_bound(spec, qkv, kv, longest, rope)
        case "norm_rope_attend", token, kv, lengths:
            # The error of the angles counts; without a norm, queries have their own size.
            size = token.queries if token.norms is None else token.norms[0]
            rope = QueryRope(size, _THETA, _EPS)
            return _attention_bound(spec, token.queries, kv, int(lengths.max().item()), rope)
        case "packed_gather", x, *_:
            return _product_bound(spec, x, PLAIN)
    bound = _product_bound(spec, args[0], args[-1])
    # Both factors are off, the slope of silu is up to 1.1, and its exponential is off, too.
    return 3 * bound + _PRECISE * _ULP if spec.op == "packed_swiglu" else bound


def _angle_error(position: int) -> float:
    """Return the largest error of an angle: a frequency and its product with the position are rounded."""
    return 2 * UNIT_ROUNDOFF[mx.float32] * position


def _weight_error(score: float, length: int) -> float:
    """Return the largest relative error of a weight of a softmax that is computed online.

    The weight is multiplied by `exp2` of its score's distance from the largest score so far; again whenever a
    larger score follows, which in a random order happens some `ln(length)` times; and in up to 7 merges: of
    lanes (5), simdgroups, ranges. The distances add up to the distance from the largest score of all, at most
    twice `score`, in base 2.
    """
    constant, slope = _FAST_EXP2
    exponentials = 1 + np.log(length + 1) + 7
    return float(constant * exponentials + slope * 2 * score * np.log2(np.e)) * _ULP


def _product_bound(spec: Spec, x: mx.array, options: ProductOptions) -> float:
    """Return a product's largest error from rounding: operands, partial sums, result; activations to integers.

    An integer activation of b bits is off by up to half of `max|x| / (2**(b-1) - 1)`, evenly distributed,
    which makes an error of `crest / sqrt(12) / (2**(b-1) - 1)` of a product's size, where `crest` is the
    ratio of the vector's largest element to its root mean square. Outliers must be multiplied separately, so
    `crest` has a limit, and an outlier adds only the error of float32 sums. Codes that are multiplied without
    their offset (`sum(x c) s + sum(x) b`) double both kinds of error, and a factor of 2 is left for chance.
    """
    u = UNIT_ROUNDOFF[spec.dtype]
    if spec.dtype == mx.float32 and device() == "gpu" and spec.batch * spec.tokens > 1:
        u = _TF32  # MLX lets matrix units round float32 operands
    vectors = oracle.float64(x)
    if options.norm is not None:
        vectors = oracle.rms_norm(vectors, oracle.float64(options.norm), options.eps)
    others = np.delete(vectors, _outlier_columns(spec), axis=-1) if spec.outliers else vectors
    size = np.sqrt((others**2).mean(-1))
    crest = min((np.abs(others).max(-1) / size).max(), _CREST.get(spec.activation_bits, np.inf))
    levels = 2 ** (spec.activation_bits - 1) - 1
    integers = 2 * crest / (12**0.5 * levels)
    largest = (np.abs(vectors).max(-1) / size).max() if spec.outliers else 0.0
    sums = (4 + spec.in_dims**0.5 + largest) * 2.0**-24
    return float((5 if spec.rank else 4) * u + 2 * sums + 2 * integers)


def _attention_bound(
    spec: Spec, queries: mx.array, kv: KeyValues, length: int, rope: QueryRope | None
) -> float:
    """Return attention's largest error from rounding: softmax makes a score's error a relative one.

    Scores can be rounded to the dtype, queries and weights to integers. S weights that are off by half a step,
    `1 / 65534` of the largest weight for 16 bits, make an error of up to `sqrt(S / 12) / 32767` of an output.
    """
    # Normalized queries have their norm's weight as size.
    size = oracle.float64(rope.weight if rope else queries)
    norm = float(np.abs(size).max() if rope else np.sqrt((size**2).mean(-1)).max())
    size_of_keys = 1.0 if kv.key_scale is None else float(oracle.float64(kv.key_scale)) * 74
    score = norm * size_of_keys * (2 * np.log(length + 1)) ** 0.5
    angle = _angle_error(length) if rope else 0.0
    levels = 2 ** (spec.activation_bits - 1) - 1
    integers = 2 * (score + length**0.5) / (12**0.5 * levels) if kv.key_scale is not None else 0.0
    u = UNIT_ROUNDOFF[spec.dtype]
    of_score = (2 + score) * (u + 2.0**-22 + angle)
    return of_score + _weight_error(score, length) + length**0.5 * 2.0**-24 + integers


# -- comparing

# The least size of an operation's results, about a third of the average with the numbers drawn here.
_LEAST_SIZE = {
    "packed_matmul": 0.3,
    "packed_gather": 0.3,
    "packed_argmax": 0.3,
    "packed_swiglu": 0.15,
}


def _relative(got: np.ndarray, wanted: np.ndarray, scale: float) -> float:
    difference = got - wanted
    if not np.isfinite(difference).all():
        return float("inf")
    by_chance = 1 + 3 / difference.size**0.5
    return float(max(_rms(difference) / by_chance, np.abs(difference).max() / 8) / scale)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values**2).mean()))


def _float64(result: mx.array, shape: tuple[int, ...], dtype: mx.Dtype) -> np.ndarray:
    if tuple(result.shape) != shape or result.dtype != dtype:
        raise ValueError(f"returned {result.dtype} {result.shape}; {dtype} {shape} is needed")
    return oracle.float64(result)


def _check_floats(problem: Problem, results: Sequence[mx.array]) -> float:
    wanted, least = problem.wanted[0], _LEAST_SIZE.get(problem.spec.op, 0.0)
    got = _float64(results[0], wanted.shape, problem.spec.dtype)
    return _relative(got, wanted, max(_rms(wanted), least))


def _check_rope(problem: Problem, results: Sequence[mx.array]) -> float:
    error, wanted = _check_floats(problem, results), problem.wanted[1]
    if problem.spec.stored == mx.int8:
        return max(error, _check_codes(wanted, results[1]))
    keys, values = np.split(_float64(results[1], wanted.shape, problem.spec.stored), 2, axis=1)
    wanted_keys, wanted_values = np.split(wanted, 2, axis=1)
    if (values != wanted_values).any():
        raise ValueError("float values differ from the given ones")
    return max(error, _relative(keys, wanted_keys, _rms(wanted_keys)))


def _check_norm_rope_attend(problem: Problem, results: Sequence[mx.array]) -> float:
    """Return the error of `norm_rope_attend`; values and earlier columns of the tail must be the given ones."""
    error = _check_floats(problem, results)
    (_, kv, lengths), heads = problem.args, problem.spec.kv_heads
    columns = (lengths - kv.starts - 1).tolist()
    wanted = problem.wanted[1][:, :, : max(columns) + 1]
    tail = _float64(results[1][:, :, : max(columns) + 1], wanted.shape, problem.spec.stored)
    new = np.zeros(wanted.shape, bool)
    for row, column in enumerate(columns):
        new[row, :heads, column] = True
    if (tail != wanted)[~new].any():
        raise ValueError("the tail differs from the given one beyond the new keys")
    return max(error, _relative(tail[new], wanted[new], _rms(wanted[new])))


def _check_writing(problem: Problem, results: Sequence[mx.array]) -> float:
    """Return the error of `write_and_attend`; its output must belong to the codes that it wrote."""
    (output, tail), (qkv, kv, lengths, options) = results, problem.args
    error = _check_codes(problem.wanted[1], tail)
    wanted, _ = oracle.write_and_attend(qkv, kv, lengths, options, tail)
    got = _float64(output, wanted.shape, problem.spec.dtype)
    return max(error, _relative(got, wanted, _rms(wanted)))


def _check_codes(wanted: np.ndarray, codes: mx.array) -> float:
    """Return the keys' error beyond half a code, relative to the size of `wanted`, the numbers before rounding.

    Keys and values are the halves of axis 1. Raises `ValueError` if rounding doesn't explain a value's code.
    """
    wanted_k, wanted_v = np.split(wanted, 2, axis=1)
    k, v = np.split(_float64(codes, wanted.shape, mx.int8), 2, axis=1)
    # Values are only divided, in float32.
    if (off := np.abs(v - wanted_v).max()) > 0.5 + 2.0**-14:
        raise ValueError(f"a value's code is off by {off:.3f}; rounding explains 0.5")
    excess = np.maximum(np.abs(k - wanted_k) - 0.5, 0)
    return _relative(excess, 0 * excess, _rms(wanted_k))


def _check_argmax(problem: Problem, results: Sequence[mx.array]) -> float:
    """Return the error of an argmax's products, against the largest and against the returned rows' products."""
    products = problem.wanted[0]
    index = _float64(results[0], products.shape[:-1], mx.uint32).astype(np.int64)
    values = _float64(results[1], products.shape[:-1], mx.float32)
    if index.max() >= products.shape[-1]:
        raise ValueError(f"named row {index.max()} of a matrix of {products.shape[-1]}")
    best = products.max(-1)
    named = np.take_along_axis(products, index[..., None], axis=-1)[..., 0]
    scale = max(_rms(products), _LEAST_SIZE["packed_argmax"])
    return max(_relative(values, best, scale), _relative(named, best, scale))


_CHECKS = {
    "rope_norm_quantize": _check_rope,
    "packed_argmax": _check_argmax,
    "write_and_attend": _check_writing,
    "norm_rope_attend": _check_norm_rope_attend,
}
