"""Quantization-aware training: layers on a grid, and int8 scales of keys and values."""
