"""Self-test: every variant of every operation against a float64 oracle, on the user's machine."""
