"""Low-rank adapters as the Metal kernels take them: buffers of numbers, and a table of where to look."""

from __future__ import annotations

import functools
import math

import mlx.core as mx

from afm_mlx.kernels.formats import MAX_ADAPTERS, LowRank, Part
from afm_mlx.kernels.metal import runtime
from afm_mlx.kernels.metal.runtime import Kernel, floats

INPUTS = (*(f"adapter{i}" for i in range(MAX_ADAPTERS)), "parts", "adapter_scales", "slots")
_SHRINK = Kernel(
    "low_rank_shrink",
    ("x", "norm", "eps", *INPUTS),
    ("hidden",),
    ("common", "packed_codes", "low_rank"),
)
# Tables that are kept: those of every matrix of a model, with a few sets of adapters.
_TABLES = 4096


def is_pair(adapters: tuple[LowRank, ...]) -> bool:
    """True if one kernel can add the adapters of gate and up: it takes one set, on plain matrices only."""
    if not adapters:
        return True
    gate, up = adapters
    arrays = (gate.scales, gate.slots, *gate.numbers), (up.scales, up.slots, *up.numbers)
    return (
        len(gate.sections) == len(up.sections) == 1
        and len(gate.numbers) == len(up.numbers)
        and all(a is b for a, b in zip(*arrays, strict=True))
    )


def width(adapters: tuple[LowRank, ...], sections: int | None = None) -> int:
    """Most products with A of one vector, in `sections` of the first matrix (default all) and in the second."""
    return max(_widths(adapters, len(adapters[0].sections) if sections is None else sections))


def most_rows(adapters: tuple[LowRank, ...]) -> int:
    """Most rows of all A that a batch uses in one section: those of as many adapters as it has rows."""
    return sum(sorted(_widths(adapters, 1))[-adapters[0].slots.size :])


def _widths(adapters: tuple[LowRank, ...], sections: int) -> list[int]:
    """The sum of each adapter's ranks: for so many sections of the first matrix, and for the second one."""
    first, *second = ([part.rank for part in low_rank.parts] for low_rank in adapters)
    return [sections * rank + sum(others) for rank, *others in zip(first, *second, strict=True)]


def inputs(adapters: tuple[LowRank, ...]) -> dict[str, mx.array | str]:
    """The arrays that `INPUTS` names, or what stands for them.

    One adapter takes one buffer of numbers, and more take eight, so that not every count makes its own kernel.

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
    # Adapters without a part here, which may be of any size, are never read: one that is stands for them.
    used = _widths(adapters, 1)
    stand_in = next(n for n, rows in zip(first.numbers, used, strict=True) if rows)
    numbers = [n if rows else stand_in for n, rows in zip(first.numbers, used, strict=True)]
    rest: list[mx.array | str] = ["adapter0" if len(numbers) == 1 else stand_in]
    rest *= MAX_ADAPTERS - len(numbers)
    parts = tuple(low_rank.parts for low_rank in adapters)
    table = _table(first.sections, width(adapters), parts)
    return dict(zip(INPUTS, [*numbers, *rest, table, first.scales, first.slots], strict=True))


@functools.lru_cache(_TABLES)
def _table(
    sections: tuple[int, ...], columns: int, parts: tuple[tuple[Part, ...], ...]
) -> mx.array:
    """The table `parts` of low_rank.metal; `parts` has those of every adapter, for one matrix or two."""
    of_matrices = [number for of_matrix in parts for part in of_matrix for number in part]
    table = [len(parts[0]), len(sections), columns, *sections, *of_matrices]
    return mx.array(table, dtype=mx.int32)


def shrink(
    x: mx.array, norm: mx.array | None, eps: float, adapters: tuple[LowRank, ...]
) -> mx.array:
    """`scale * A (rms_norm(x) * norm)` of each row's adapter: (rows, `width`) float32 for x (rows, K).

    Rows without an adapter get zeros, and so do the ends of rows whose adapter has a lower rank.
    """
    rows, columns = x.shape[0], width(adapters)
    own = {"x": x, "norm": "x" if norm is None else norm, "eps": floats(eps)}
    kernel, arrays = runtime.reduced(_SHRINK, {**own, **inputs(adapters)})
    (hidden,) = runtime.launch(
        kernel,
        arrays,
        template=(("PAIR", len(adapters) == 2), ("NORM", norm is not None)),
        grid=(32, columns, rows),
        threadgroup=(32, math.gcd(columns, 8), 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[mx.float32],
    )
    return hidden
