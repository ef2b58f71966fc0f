"""Layers that compute with the numbers that they will be packed to, while they train."""
