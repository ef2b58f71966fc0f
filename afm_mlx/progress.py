"""How long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with what is done so far and what there is in all, of bytes, rows, answers or the like."""
