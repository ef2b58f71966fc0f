"""The loop, the same for all methods: losses, a step as one graph, the optimizer, the folder of a run."""
