"""JSON schemas: what llguidance takes is compiled, what it lacks is rewritten, and the rest is refused."""

from afm_mlx.guidance.schema.grammar import schema_grammar

__all__ = ["schema_grammar"]
