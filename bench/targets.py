"""Figures that were promised, tables of them as Markdown, and the end of a benchmark's report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """A figure that was promised.

    Args:
        name: what is compared.
        value: the measured figure; None where a part of it is missing.
        bound: minimum of the figure, or its maximum.
        at_most: True if `bound` is the maximum.
        unit: unit of value and bound.
    """

    name: str
    value: float | None
    bound: float
    at_most: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def target_rows(found: Sequence[Target]) -> list[list[str]]:
    """Return the rows of a table of targets, the header first."""
    words = {True: "met", False: "missed", None: "not measured"}
    rows = [["target", "measured", "wanted", ""]]
    for t in found:
        value = "-" if t.value is None else f"{t.value:.2f} {t.unit}"
        sign = "at most" if t.at_most else "at least"
        rows.append([t.name, value, f"{sign} {t.bound:g} {t.unit}", words[t.met]])
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Return a table as Markdown, with the first column left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])])
    return "\n".join([line(rows[0]), f"|{rule}|", *map(line, rows[1:])])


def report(
    found: Sequence[Target], others: float | None, path: Path | None, facts: Mapping[str, Any]
) -> None:
    """Print targets and how many processors `others` kept busy, and write all `facts` to a JSON file.

    Args:
        found: the targets.
        others: what `Bystanders.processors` returned; None if unknown.
        path: the file, whose folder is made; None to write nothing.
        facts: what the file holds, next to `processors_busy_with_others`.
    """
    print(markdown(target_rows(found)))
    if others is not None:
        print(f"\nother processes kept {others:.2f} processors busy meanwhile")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**facts, "processors_busy_with_others": others}, indent=2))
