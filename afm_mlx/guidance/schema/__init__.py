"""JSON schemas: what llguidance takes is compiled, what it lacks is rewritten, and the rest is refused."""
