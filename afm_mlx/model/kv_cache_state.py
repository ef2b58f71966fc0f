"""Checks on the state of a KV cache that is restored from a file, which may hold anything."""

from __future__ import annotations

import mlx.core as mx

from afm_mlx.errors import CacheFileError, shown

MOST_TOKENS = 1 << 30  # positions are int32


def check_state(
    keys: mx.array, values: mx.array, rows: mx.array, kind: tuple[str, int | None, bool]
) -> None:
    """Raise `CacheFileError` unless a cache of this kind can have this state.

    Args:
        keys, values, rows: the parts of `KVCache.state`.
        kind: the cache's kind, see `KVCache.kind`.
    """
    dtype, wanted = (mx.int8, "int8") if kind[0] == "int8" else (mx.floating, "floats")
    for name, array in (("keys", keys), ("values", values)):
        if array.ndim != 4 or 0 in array.shape[:2] or not mx.issubdtype(array.dtype, dtype):
            raise CacheFileError(
                f"{name} are {array.dtype} {shown(list(array.shape))}; "
                f"{wanted} [rows, heads, columns, head_dim] are needed."
            )
    if (keys.shape, keys.dtype) != (values.shape, values.dtype):
        raise CacheFileError(
            f"keys are {keys.dtype} {list(keys.shape)} and values {values.dtype} {list(values.shape)}; "
            "both must be the same."
        )
    count, columns = keys.shape[0], keys.shape[2]
    if rows.dtype != mx.int32 or rows.shape != (2, count):
        raise CacheFileError(
            f"rows are {rows.dtype} {shown(list(rows.shape))}; int32 [2, {count}] is needed, tokens seen "
            "and forgotten by each row."
        )
    _check_rows(rows, columns, kind)


def _check_rows(rows: mx.array, columns: int, kind: tuple[str, int | None, bool]) -> None:
    _, max_size, slides = kind
    window = max_size if slides and max_size else 0
    bound = columns if window or max_size is None else min(columns, max_size)
    for seen, forgotten in rows.T.tolist():
        held = seen - forgotten
        # A window forgets down to one column less than its width.
        sound = forgotten == 0 or (forgotten > 0 and 0 < window <= held + 1)
        if not (sound and 0 <= held <= bound and seen <= MOST_TOKENS):
            raise CacheFileError(
                f"a row has seen {seen} tokens and forgotten {forgotten}, which does not go with {columns} "
                f"columns in a cache of kind {shown(kind)}."
            )
    if columns != int((rows[0] - rows[1]).max().item()):
        raise CacheFileError(f"no row has tokens for all of the {columns} columns.")
