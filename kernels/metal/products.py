"""Launches of the kernels that multiply with packed matrices, unpack them, or merge attention's partials.

A product of up to 32 vectors streams over the codes, for up to 6 vectors at a time (`vector`), or uses 8x8
matrices, and unpacks each code once for up to 16 vectors (`matrix`): `takes_vectors` says which. Both compute
an RMSNorm, a residual, low-rank adapters and the SwiGLU of a pair of matrices in the same dispatch. The product
with the adapters' A is a dispatch before.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from afm_mlx.kernels.dispatch import Case
from afm_mlx.kernels.metal import runtime
from afm_mlx.kernels.metal.runtime import Kernel, Template, floats, ints
from afm_mlx.kernels.operands import (
    MAX_ADAPTERS,
    AttentionPartials,
    LowRank,
    PackedWeight,
    Part,
    ProductOptions,
)

MAX_ROWS = 32  # vectors of a product
PASS_ROWS = 6  # vectors whose sums with eight rows of codes fit into a lane's registers
VALUES = 16  # inputs of a lane's step, as in packed_codes.metal
STEP = 32 * VALUES  # inputs of a simdgroup's step
TILE_STEP = 8 * VALUES  # inputs of a simdgroup's step of 8x8 matrices
CODE_ROWS = 8  # rows of codes of a simdgroup, which share the work of preparing inputs
TILE_ROWS = 32  # the same in the matrix kernel
SIMDGROUPS = 2  # simdgroups of a threadgroup
MAX_SPLIT = 8  # simdgroups of a threadgroup that share the inputs of the same rows
MERGE_SIMDGROUPS = (
    8  # simdgroups of a threadgroup that merges its inputs: fewer threadgroups repeat that
)
MAX_MERGED = 16 << 10  # bytes of a threadgroup's memory for inputs that it merges
MAX_PARTIALS = 8  # that a product merges: each of its threadgroups reads all of them
MANY_SIMDGROUPS = 1024  # keep the largest chips busy, and hide how long memory takes to answer
BUSY_SIMDGROUPS = 12  # of a core, that start an operation in every cycle
FEW_SIMDGROUPS = 256  # below, each simdgroup gets fewer rows, though each one prepares its inputs

_MODES = {"balanced": 0, "affine": 1, "palette": 2}
_GRANULARITIES = {"tensor": 0, "row": 1, "group": 2, "table": 0}

HEADERS = ("common", "vectors", "packed_codes")
MATRIX_INPUTS = ("codes", "scales", "biases")
VECTOR_INPUTS = ("norm", "eps")
_INPUTS = ("x", *MATRIX_INPUTS, *(f"{n}2" for n in MATRIX_INPUTS), *VECTOR_INPUTS, "residual")
ADAPTER_INPUTS = (*(f"adapter{i}" for i in range(MAX_ADAPTERS)), "parts", "adapter_scales", "slots")
# Inputs that only some calls have, by the macro that the kernel's text tests.
_OPTIONAL = {"PARTIALS": ("value_scale",), "LOW_RANK": ("hidden", *ADAPTER_INPUTS)}

_UNPACK = Kernel("dequantize", (*MATRIX_INPUTS, "start"), ("out",), HEADERS)
_MERGE = Kernel("attention_merge", ("partial", "value_scale"), ("out",))
_SHRINK = Kernel(
    "low_rank_shrink",
    ("x", "value_scale", *VECTOR_INPUTS, *ADAPTER_INPUTS),
    ("hidden",),
    ("common", "vectors", "low_rank"),
)
_SHRINK_PARTIALS = replace(_SHRINK, headers=(*_SHRINK.headers, "partials"))


@functools.cache
def _kernel(name: str, *macros: str) -> Kernel:
    """Return the kernel `name` with these macros defined, and with the further inputs that they need."""
    inputs = [*_INPUTS, *itertools.chain.from_iterable(_OPTIONAL[macro] for macro in macros)]
    headers = [*HEADERS, "packed_tiles" if name == "packed_matrix" else "packed_products"]
    headers += ["low_rank"] if "LOW_RANK" in macros else []
    headers += ["partials"] if "PARTIALS" in macros else []
    return Kernel(
        name, tuple(inputs), ("out",), tuple(headers), tuple((macro, "1") for macro in macros)
    )


class Product(NamedTuple):
    """A product, or the SwiGLU of a pair of matrices, that a kernel computes in one dispatch.

    Args:
        x: (..., K) activations, or attention's partials.
        matrices: one matrix, or gate and up of the same format: `silu(x' G^T) * (x' U^T)`.
        options: see `ProductOptions`; for a pair, `have_one_table` holds of the adapters.
    """

    x: mx.array | AttentionPartials
    matrices: tuple[PackedWeight, ...]
    options: ProductOptions

    @property
    def adapters(self) -> tuple[LowRank, ...]:
        """The adapters of every matrix; () if all their ranks are 0."""
        adapters = self.options.adapters
        return adapters if any(each.rank for each in adapters) else ()

    @property
    def rows(self) -> int:
        """Number of vectors."""
        return math.prod(self.x.shape[:-1])

    @property
    def code_rows(self) -> int:
        """Number of rows of codes, summed over the matrices."""
        return self.matrices[0].out_dims * len(self.matrices)


def vector(product: Product, dtype: mx.Dtype) -> mx.array:
    """Compute a product of 1 to `MAX_ROWS` vectors, `PASS_ROWS` at a time: (..., N) of `dtype`."""
    if isinstance(product.x, AttentionPartials):
        shape = Threadgroups(MERGE_SIMDGROUPS, 4, False)
    else:
        sizes = (product.rows, product.code_rows, product.x.shape[-1])
        shape = vector_threadgroups(*sizes, most_code_rows(product.rows, product.matrices[0]))
    template = (
        ("ROWS", rows_of_pass(product.rows)),
        ("CODE_ROWS", shape.code_rows),
        ("SPLIT", shape.split),
    )
    passes = -(-product.rows // rows_of_pass(product.rows))
    return _launch("packed_vector", product, dtype, template, shape, passes)


def matrix(product: Product, dtype: mx.Dtype) -> mx.array:
    """Compute a product of 1 to `MAX_ROWS` vectors, 8 or 16 at a time: (..., N) of `dtype`."""
    in_dims = product.x.shape[-1]
    first = product.matrices[0]
    is_wide = first.mode == "affine" or first.granularity == "group"
    shape = matrix_threadgroups(product.code_rows, in_dims, TILE_ROWS // (2 if is_wide else 1))
    template = (
        ("CODE_ROWS", shape.code_rows),
        ("SPLIT", shape.split),
        ("WHOLE", in_dims % TILE_STEP == 0),
    )
    _, passes = _blocks(product.rows)
    return _launch("packed_matrix", product, dtype, template, shape, passes)


def _blocks(rows: int) -> tuple[int, int]:
    """Return how many blocks of 8 vectors the matrix kernel takes at a time, and how often."""
    blocks = -(-rows // 8)
    return (1, blocks) if blocks % 2 else (2, blocks // 2)


def rows_of_pass(rows: int) -> int:
    """Return ROWS, the most vectors of a pass: one of two values, so that few texts are compiled."""
    return 1 if rows == 1 else PASS_ROWS


class Prices(NamedTuple):
    """What passes over a matrix cost in arithmetic, in units of what one more vector costs the vector kernel.

    Args:
        vectors: a pass of the vector kernel, besides its vectors: mostly unpacking codes.
        eight, sixteen: a pass of the matrix kernel over up to 8 and up to 16 vectors.
    """

    vectors: float
    eight: float
    sixteen: float


# Counted, for gate and up of the 3B, by `python -m tests.metal.rows`. M1 and M2 do integer operations in turn
# with others, and so lose more by unpacking codes again.
OLD_PRICES, NEW_PRICES = Prices(1.7, 7.9, 14.1), Prices(1.5, 8.5, 16.0)


def takes_vectors(rows: int) -> bool:
    """True if the vector kernel is the faster one for this many vectors on this machine's GPU."""
    prices = OLD_PRICES if runtime.gpu_generation() in (13, 14) else NEW_PRICES
    blocks, passes = _blocks(rows)
    of_matrices = passes * (prices.eight if blocks == 1 else prices.sixteen)
    return -(-rows // PASS_ROWS) * prices.vectors + rows <= of_matrices


class Threadgroups(NamedTuple):
    """Sizes of a launch: simdgroups of each threadgroup, and rows of codes of each simdgroup.

    With `split`, the simdgroups of a threadgroup have the same rows, and each a part of the inputs.
    """

    simdgroups: int
    code_rows: int
    split: bool


def most_code_rows(rows: int, weight: PackedWeight) -> int:
    """Return how many rows of codes a simdgroup has registers for, if it multiplies `rows` vectors."""
    is_wide = weight.bits == 8 or weight.mode == "affine" or weight.granularity == "group"
    return CODE_ROWS // (2 if rows > 1 and is_wide else 1)


def vector_threadgroups(
    rows: int, code_rows: int, in_dims: int, most: int = CODE_ROWS
) -> Threadgroups:
    """Return sizes of threadgroups that stream `code_rows` rows of `in_dims` codes for `rows` vectors.

    The inputs of a small matrix are split among the simdgroups of a threadgroup, with at least one step each,
    so that the whole chip is busy. If that isn't enough, simdgroups have fewer rows than `most`.
    """
    # Several vectors are bound by arithmetic, to which each simdgroup adds.
    many = MANY_SIMDGROUPS if rows == 1 else BUSY_SIMDGROUPS * runtime.gpu_cores()
    split = _split(code_rows // most, -(-in_dims // STEP), many)
    of_each = most if code_rows // most * split >= FEW_SIMDGROUPS else CODE_ROWS // 2
    return Threadgroups(split if split > 1 else SIMDGROUPS, of_each, split > 1)


def matrix_threadgroups(code_rows: int, in_dims: int, of_each: int = TILE_ROWS) -> Threadgroups:
    """Return sizes of threadgroups that multiply with `code_rows` rows of `in_dims` codes as 8x8 matrices."""
    many = BUSY_SIMDGROUPS * runtime.gpu_cores()
    split = _split(code_rows // of_each, -(-in_dims // TILE_STEP), many)
    return Threadgroups(split if split > 1 else SIMDGROUPS, of_each, split > 1)


def _split(simdgroups: int, steps: int, many: int) -> int:
    """Return among how many simdgroups to split `steps`, where there are `simdgroups` and should be `many`."""
    split = 1
    while 2 * split <= min(MAX_SPLIT, steps) and simdgroups * split < many:
        split *= 2
    return split


def _launch(
    name: str,
    product: Product,
    dtype: mx.Dtype,
    template: Template,
    shape: Threadgroups,
    passes: int = 1,
) -> mx.array:
    """Run the kernel of this name that computes a product, and before it the one that multiplies with A.

    `template` has the arguments that only this kernel takes.
    """
    x, matrices, options = product
    adapters, macros = product.adapters, []
    # Arrays, or, for what the product lacks, the name of the input that its macro aliases.
    inputs: dict[str, mx.array | str] = {}
    if isinstance(x, AttentionPartials):
        macros.append("PARTIALS")
        inputs |= {"x": x.numbers, "value_scale": x.value_scale}
        template = (*template, *_sizes(x))
    else:
        inputs["x"] = x.reshape(product.rows, -1)
    for number, weight in zip(("", "2"), matrices, strict=False):
        codes, scales, biases = matrix_arrays(weight)
        inputs |= {f"codes{number}": codes, f"scales{number}": scales}
        inputs[f"biases{number}"] = f"scales{number}" if biases is scales else biases
    if len(matrices) == 1:
        inputs |= {f"{array}2": array for array in MATRIX_INPUTS}
    inputs["norm"] = "x" if options.norm is None else options.norm
    inputs["eps"] = floats(options.eps)
    inputs["residual"] = "x" if options.residual is None else options.residual
    if adapters:
        macros.append("LOW_RANK")
        inputs["hidden"] = _shrink(product)
        inputs |= adapter_inputs(adapters)
    kernel, arrays = runtime.reduced(_kernel(name, *macros), inputs)
    groups = -(-product.code_rows // (shape.code_rows * (1 if shape.split else shape.simdgroups)))
    (out,) = runtime.launch(
        kernel,
        arrays,
        template=(
            ("T", dtype),
            *format_template(matrices[0]),
            ("PAIR", len(matrices) == 2),
            ("NORM", options.norm is not None),
            ("RESIDUAL", options.residual is not None),
            ("SIMDGROUPS", shape.simdgroups),
            *template,
        ),
        grid=(32 * passes, shape.simdgroups * groups, 1),
        threadgroup=(32, shape.simdgroups, 1),
        output_shapes=[(*x.shape[:-1], matrices[0].out_dims)],
        output_dtypes=[dtype],
    )
    return out


def has_whole_groups(format_: PackedWeight | Case) -> bool:
    """True if the inputs that a lane reads in one step share a scale."""
    return format_.granularity != "group" or format_.group_size % VALUES == 0


def matrix_arrays(weight: PackedWeight) -> list[mx.array]:
    """Return the arrays of a matrix, in the order of the kernel inputs in `MATRIX_INPUTS`.

    A palette's tables are the input "scales"; without biases, the last array is the scales again.
    """
    scales = weight.table if weight.scales is None else weight.scales
    assert scales is not None
    # MLX passes a 0-d array by reference, others by pointer.
    scales = scales.reshape(1) if scales.ndim == 0 else scales
    biases = scales if weight.biases is None else weight.biases
    return [weight.codes, scales, biases.reshape(1) if biases.ndim == 0 else biases]


def format_template(weight: PackedWeight) -> Template:
    """Return the template arguments of `Format` in packed_codes.metal."""
    return (
        ("BITS", weight.bits),
        ("MODE", _MODES[weight.mode]),
        ("GRANULARITY", _GRANULARITIES[weight.granularity]),
        ("GROUP", weight.group_size if weight.granularity == "group" else 0),
        ("ALIGNED", weight.in_dims % VALUES == 0),
    )


def unpack(weight: PackedWeight, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
    """Dequantize rows `start` to `stop` of a packed matrix in one dispatch: (stop - start, K) of `dtype`."""
    words = weight.codes.shape[1]
    threads = min(256, -(-words // 32) * 32)
    (out,) = runtime.launch(
        _UNPACK,
        [*matrix_arrays(weight), ints(start)],
        template=(("T", dtype), *format_template(weight)),
        grid=(-(-words // threads) * threads, stop - start, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(stop - start, weight.in_dims)],
        output_dtypes=[dtype],
    )
    return out


def merge_partials(partials: AttentionPartials) -> mx.array:
    """See `reference.merge_partials`. One dispatch."""
    batch, n_heads, _, width = partials.numbers.shape
    threads = -(-(width - 2) // 32) * 32
    (out,) = runtime.launch(
        _MERGE,
        [partials.numbers, partials.value_scale],
        template=(("O", partials.dtype), ("HEAD_DIM", width - 2)),
        grid=(threads, n_heads, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[partials.shape],
        output_dtypes=[partials.dtype],
    )
    return out


# -- low-rank adapters


def have_one_table(adapters: tuple[LowRank, ...]) -> bool:
    """True if one kernel can add the adapters of gate and up: the same arrays, on plain matrices."""
    if not adapters:
        return True
    gate, up = adapters
    arrays = (gate.scales, gate.slots, *gate.numbers), (up.scales, up.slots, *up.numbers)
    return (
        len(gate.sections) == len(up.sections) == 1
        and len(gate.numbers) == len(up.numbers)
        and all(a is b for a, b in zip(*arrays, strict=True))
    )


def _widths(adapters: tuple[LowRank, ...], sections: int) -> list[int]:
    """Return each adapter's size of `A x`: `sections` times its rank in the first matrix, plus the second's."""
    first, *second = ([part.rank for part in low_rank.parts] for low_rank in adapters)
    return [sections * rank + sum(others) for rank, *others in zip(first, *second, strict=True)]


def adapter_inputs(adapters: tuple[LowRank, ...]) -> dict[str, mx.array | str]:
    """Return the inputs that `ADAPTER_INPUTS` names: arrays, or names of inputs that replace them.

    One adapter takes one buffer of numbers, and several take eight, so that not every count compiles a kernel.

    Raises:
        ValueError: for more adapters than `MAX_ADAPTERS`, or numbers of different types.
    """
    first = adapters[0]
    dtypes = {numbers.dtype for numbers in first.numbers}
    if len(first.numbers) > MAX_ADAPTERS or len(dtypes) > 1:
        raise ValueError(
            f"Metal adds up to {MAX_ADAPTERS} adapters of one type at a time; got {len(first.numbers)} of "
            f"{', '.join(sorted(map(str, dtypes)))}."
        )
    # Adapters without this matrix are never read, and can be of any size: one that is read replaces them.
    used = _widths(adapters, 1)
    stand_in = next(n for n, rows in zip(first.numbers, used, strict=True) if rows)
    numbers = [n if rows else stand_in for n, rows in zip(first.numbers, used, strict=True)]
    rest: list[mx.array | str] = ["adapter0" if len(numbers) == 1 else stand_in]
    rest *= MAX_ADAPTERS - len(numbers)
    parts = tuple(low_rank.parts for low_rank in adapters)
    table = _table(first.sections, max(_widths(adapters, len(first.sections))), parts)
    return dict(
        zip(ADAPTER_INPUTS, [*numbers, *rest, table, first.scales, first.slots], strict=True)
    )


@functools.lru_cache(4096)  # one for every matrix of a model, with a few sets of adapters
def _table(
    sections: tuple[int, ...], columns: int, parts: tuple[tuple[Part, ...], ...]
) -> mx.array:
    """Return low_rank.metal's table of `parts`, by matrix and adapter; `columns` is the size of `A x`."""
    of_matrices = [number for of_matrix in parts for part in of_matrix for number in part]
    table = [len(parts[0]), len(sections), columns, *sections, *of_matrices]
    return mx.array(table, dtype=mx.int32)


def _sizes(x: AttentionPartials) -> Template:
    """Return the template arguments of partials.metal."""
    width = x.numbers.shape[-1]
    return ("MAX_PARTIALS", MAX_PARTIALS), ("HEAD_DIM", width - 2), ("K", x.shape[2])


def _shrink(product: Product) -> mx.array:
    """Compute `scale * A (rms_norm(x) * norm)`, each vector with the A of its own adapter.

    Returns:
        (rows, the largest adapter's size of `A x`) float32, zeros where an adapter has a lower rank, and in
        rows without an adapter.
    """
    x, adapters, norm = product.x, product.adapters, product.options.norm
    columns = max(_widths(adapters, len(adapters[0].sections)))
    own: dict[str, mx.array | str] = {"norm": "x" if norm is None else norm}
    own["eps"] = floats(product.options.eps)
    kernel = _SHRINK
    sizes: Template = ()
    if isinstance(x, AttentionPartials):
        kernel, sizes = _SHRINK_PARTIALS, _sizes(x)
        own |= {"x": x.numbers, "value_scale": x.value_scale}
    else:
        own |= {"x": x.reshape(product.rows, -1), "value_scale": "x"}
    kernel, arrays = runtime.reduced(kernel, {**own, **adapter_inputs(adapters)})
    # Simdgroups that share a number's inputs; several vectors keep the chip busy with fewer.
    simdgroups = 8 if product.rows == 1 else 2
    (hidden,) = runtime.launch(
        kernel,
        arrays,
        template=(
            ("PAIR", len(adapters) == 2),
            ("NORM", norm is not None),
            ("SIMDGROUPS", simdgroups),
            ("PARTIALS", bool(sizes)),
            *sizes,
        ),
        grid=(32, simdgroups * columns, product.rows),
        threadgroup=(32, simdgroups, 1),
        output_shapes=[(product.rows, columns)],
        output_dtypes=[mx.float32],
    )
    return hidden
