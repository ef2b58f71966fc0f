"""What the rules of arrays and objects need of the grammar that they become part of."""

from __future__ import annotations

from typing import Protocol

from afm_mlx.guidance.schema.cases import Case
from afm_mlx.guidance.schema.expansion import Expansion
from afm_mlx.guidance.schema.formulas import Formula
from afm_mlx.guidance.schema.rules import Rule


class Builder(Protocol):
    """A grammar in the making.

    Attributes:
        expansion: what formulas mean.
    """

    expansion: Expansion

    def value(self, formula: Formula) -> Rule:
        """The rule of a formula, which is made later."""

    def case(self, case: Case, place: str) -> Rule:
        """The rule of one case."""

    def named(self, rule: Rule) -> Rule:
        """A rule that can be used many times, by its name."""

    def reserved(self) -> Rule:
        """The name of a rule that is defined later."""

    def define(self, name: Rule, rule: Rule) -> None:
        """Define a reserved rule."""

    def drop(self, place: str) -> None:
        """Note that something at a place is not allowed, though it would be valid."""

    def ask_for(self, formula: Formula, count: int, place: str) -> None:
        """Refuse the schema in the end, if a formula turns out to have fewer values than that."""
