"""Operations as pure functions of arrays, one file per family, and the table of them by name.

Floats come in the type in which they are computed; the caller puts results into the types that the program
says. Parameters have the names of the opset. Where Apple leaves a result undefined, such as for an index out of
bounds, the operation raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tools.mil.ops import compression, elementwise, indexing, layout, products, reduction

OPS: dict[str, Callable[..., Any]] = {
    **compression.OPS,
    **elementwise.OPS,
    **indexing.OPS,
    **layout.OPS,
    **products.OPS,
    **reduction.OPS,
}
