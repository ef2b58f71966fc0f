"""What is trained: all weights, LoRA adapters, a draft model, or weights on a grid; and their calls."""
