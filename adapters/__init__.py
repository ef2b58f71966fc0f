"""LoRA adapters: their files, layers and training."""
