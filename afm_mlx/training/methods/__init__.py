"""Methods of training: all weights, LoRA adapters, a draft model, weights on a grid; and their calls."""
