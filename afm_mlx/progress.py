"""The type of callbacks that report progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the amount done so far and the total, in bytes, rows, answers or the like."""
