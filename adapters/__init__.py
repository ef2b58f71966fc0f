"""LoRA adapters. Today their files; layers, the pool that swaps them, and training have their place here."""
