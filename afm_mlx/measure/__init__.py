"""What a model, a folder and a machine are: speed, quality, facts, and whether the kernels work."""
