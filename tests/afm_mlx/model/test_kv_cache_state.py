"""States of a cache that no cache can have been in."""

import mlx.core as mx
import pytest

from afm_mlx.errors import CacheFileError
from afm_mlx.model.kv_cache import KVCache
from tests.tools.cases import each

CODES = mx.zeros((1, 2, 9, 4), mx.int8)
WINDOW = {"max_size": 8, "sliding_window": True}


def restore(rows, options, **parts):
    state = {"keys": CODES, "values": CODES, "rows": mx.array(rows)} | parts
    KVCache(**options).state = list(state.values())


@pytest.mark.parametrize(
    ("rows", "options"), [([[9], [0]], {}), ([[9], [0]], {"max_size": 9}), ([[99], [90]], WINDOW)]
)
def test_states_that_are_sound(rows, options):
    restore(rows, options)


@each(
    ("rows", "options", "words"),
    [
        ([[100], [0]], {}, "seen 100 tokens and forgotten 0, which does not go with 9 columns"),
        ([[9], [0]], {"max_size": 8}, "seen 9 tokens and forgotten 0"),
        ([[-1], [0]], {}, "seen -1 tokens"),
        ([[12], [3]], {}, "seen 12 tokens and forgotten 3"),
        ([[9], [3]], WINDOW, "seen 9 tokens and forgotten 3"),
        ([[2**30 + 1], [2**30 - 8]], WINDOW, "seen 1073741825 tokens"),
        ([[8], [0]], {}, "no row has tokens for all of the 9 columns"),
        ([[9, 9], [0, 0]], {}, r"rows are mlx.core.int32 \[2, 2\]; int32 \[2, 1\] is needed"),
        ([9, 0], {}, r"rows are mlx.core.int32 \[2\]"),
        ([[9.0], [0.0]], {}, "rows are mlx.core.float32"),
    ],
)
def test_rows_that_do_not_go_with_the_columns(rows, options, words):
    with pytest.raises(CacheFileError, match=words):
        restore(rows, options)


@each(
    ("parts", "words"),
    [
        ({"keys": CODES.astype(mx.float16)}, r"keys are mlx.core.float16 .*; int8 .* are needed"),
        ({"values": CODES[0]}, r"values are mlx.core.int8 \[2, 9, 4\]"),
        ({"keys": CODES[:0]}, r"keys are mlx.core.int8 \[0, 2, 9, 4\]"),
        ({"values": CODES[:, :, :8]}, "both must be the same"),
    ],
)
def test_keys_and_values_of_another_kind(parts, words):
    with pytest.raises(CacheFileError, match=words):
        restore([[9], [0]], {}, **parts)
