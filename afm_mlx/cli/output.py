"""Print JSON, tables, facts and progress bars."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

# Control characters except tab and line break: a terminal takes them for commands.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def input_bytes() -> BinaryIO:
    """Return standard input as bytes, even if a caller has replaced `sys.stdin` by a stream of text."""
    buffer: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    return io.BytesIO(sys.stdin.read().encode()) if buffer is None else buffer


def print_answer(text: str) -> None:
    """Print a segment of an answer; on a terminal, with control characters escaped."""
    print(harmless(text) if sys.stdout.isatty() else text, end="", flush=True)


def note(text: str) -> None:
    """Print a line on stderr."""
    print(harmless(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def harmless(text: str) -> str:
    """Escape control characters, except tab and line break: `\\x1b` for ESC."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def one_line(text: str) -> str:
    """Replace each run of white space, line breaks included, by one space."""
    return " ".join(text.split())


def print_json(values: Any) -> None:
    # JSON has no NaN and infinity.
    print(json.dumps(finite(values), ensure_ascii=False, indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """Replace NaN and infinities in a value by None, for JSON."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in columns: the first left-aligned, the others right-aligned."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for first, *others in texts:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip())


def print_facts(facts: dict[str, Any]) -> None:
    """Print facts as `name  value` lines; dicts follow as groups under their names."""
    groups = {"": {key: value for key, value in facts.items() if not isinstance(value, dict)}}
    groups |= {key: value for key, value in facts.items() if isinstance(value, dict)}
    for name, group in groups.items():
        if name:
            print(f"\n{name.replace('_', ' ')}")
        width = max(map(len, group), default=0)
        for key, value in group.items():
            print(f"{'  ' * bool(name)}{key.replace('_', ' '):<{width}}  {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def progress_bar(
    description: str, unit: str, is_shown: bool = True
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a function of (done, total) that draws a bar on stderr.

    Yield None if stderr is not a terminal, or the bar is not shown, as on other ranks than the first.
    """
    if not is_shown or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(
        desc=description, unit=unit, unit_scale=unit == "B", leave=False, file=sys.stderr
    ) as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
