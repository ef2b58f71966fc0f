"""Every variant of every operation, held to an oracle in float64 on the user's own machine."""
