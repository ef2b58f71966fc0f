"""Model folders and adapters from one format to another."""

from afm_mlx.converters.convert import convert, detect

__all__ = ["convert", "detect"]
