"""How a layer's matrix is packed: bits, mode, and granularity; and the rules of published models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from afm_mlx.errors import ConfigError, named, shown
from afm_mlx.kernels import BITS, MODES, PackedWeight
from afm_mlx.quantization.packed_layers import check_width

GRANULARITIES = ("tensor", "row", "group")
RULE_KEYS = ("bits", "mode", "granularity", "group_size")
_DEFAULT_GRANULARITY = {"balanced": "row", "affine": "group", "palette": "group"}
_MOST_IN_GROUP = 1 << 24
_DEFAULT_GROUP = {"balanced": 64, "affine": 64, "palette": 16}


@dataclass(frozen=True)
class QuantizationRule:
    """How one matrix is packed.

    Args:
        bits: 2, 4 or 8.
        mode: "balanced", "affine" or "palette"; see `kernels.operands`.
        granularity: "tensor", "row" or "group": all weights of one share a scale. In a palette they share a
            table, and a group is a number of rows. By default "row" for balanced, else "group".
        group_size: inputs that share a scale, by default 64, or rows that share a table, by default 16.

    Raises:
        ConfigError: names the field, what it is and what is allowed.
    """

    bits: int = 2
    mode: str = "balanced"
    granularity: str | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        _one_of("bits", self.bits, BITS)
        _one_of("mode", self.mode, MODES)
        if self.granularity is None:
            implied = "group" if self.group_size else _DEFAULT_GRANULARITY[self.mode]
            object.__setattr__(self, "granularity", implied)
        _one_of("granularity", self.granularity, GRANULARITIES)
        if self.granularity != "group":
            if self.group_size is not None:
                raise ConfigError(
                    f"group_size is {shown(self.group_size)} with granularity {self.granularity!r}; only "
                    'groups have a size. Leave it out, or set granularity to "group".'
                )
        elif self.group_size is None:
            object.__setattr__(self, "group_size", _DEFAULT_GROUP[self.mode])
        elif type(self.group_size) is not int or not 1 <= self.group_size <= _MOST_IN_GROUP:
            raise ConfigError(
                f"group_size is {shown(self.group_size)}; allowed is a positive integer of a matrix's size."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizationRule:
        """Parse a layer's entry of `config.json`; `ConfigError` names every unknown key."""
        unknown = sorted(map(str, set(values) - set(RULE_KEYS)))
        if unknown:
            raise ConfigError(
                f"unknown keys {named(', '.join(unknown))}; known are {', '.join(RULE_KEYS)}."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the layer's entry for `config.json`; for MLX's own format, the entry that mlx-lm writes."""
        values = {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}
        return values if self.is_mlx_format else values | {"granularity": self.granularity}

    @property
    def is_mlx_format(self) -> bool:
        """True if MLX's own quantized layers have this format."""
        return (
            self.mode == "affine"
            and self.granularity == "group"
            and self.group_size in (32, 64, 128)
        )

    def check(self, shape: tuple[int, ...], name: str) -> None:
        """Raise unless a matrix (N, K), or the stack (experts, N, K) of a mixture, can be packed by this rule.

        Raises:
            CheckpointError: if a row does not fill whole words.
            ConfigError: if groups do not divide the matrix, or experts have no products in this format.
        """
        *experts, rows, inputs = shape
        check_width(inputs, self.bits, name)
        if experts and (self.mode == "palette" or (self.group_size or inputs) % 32):
            shares = f"scales that {self.group_size or inputs} inputs share"
            raise ConfigError(
                f"{name} holds experts, for which there are no products with "
                f"{'palettes' if self.mode == 'palette' else shares}. Take balanced or affine weights and a "
                "multiple of 32 inputs, or leave the experts out by a predicate."
            )
        if self.granularity != "group":
            return
        assert self.group_size is not None
        size, what = (rows, "rows") if self.mode == "palette" else (inputs, "inputs")
        if size % self.group_size:
            raise ConfigError(
                f"{name} has {size} {what}, which groups of {self.group_size} do not divide. Take a group size "
                f'that divides {size}, or granularity "row" or "tensor".'
            )

    def part_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parts of a packed matrix (N, K), or stack (experts, N, K), by their names.

        These are `weight` (the codes), and `table` for a palette, else `scales`, with `biases` if affine.
        """
        *experts, rows, inputs = shape
        parts: dict[str, tuple[int, ...]] = {"weight": (*experts, rows, inputs * self.bits // 32)}
        if self.mode == "palette":
            tables = {"tensor": 1, "row": rows}.get(
                self.granularity or "", rows // (self.group_size or 1)
            )
            return parts | {"table": (tables, 2**self.bits)}
        groups = inputs // (self.group_size or inputs)
        all_rows = (*experts, rows)
        per = {"tensor": (), "row": all_rows, "group": (*all_rows, groups)}[self.granularity or ""]
        parts["scales"] = per
        return parts | {"biases": per} if self.mode == "affine" else parts

    def nbytes(self, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> int:
        """Return the bytes of a packed matrix (N, K), or stack, in a folder, scales and tables included.

        Args:
            dtype: type of the folder's floats, and of scales in MLX's own format. Other scales are float32.
        """
        width = dtype.size if self.is_mlx_format else 4
        return sum(
            math.prod(part) * (4 if name == "weight" else width)
            for name, part in self.part_shapes(shape).items()
        )


def rule_of(packed: PackedWeight) -> QuantizationRule:
    """Return the rule that a packed matrix was made by."""
    if packed.table is not None:
        tables = packed.table.shape[0]
        if tables in (1, packed.out_dims):
            return QuantizationRule(packed.bits, packed.mode, "tensor" if tables == 1 else "row")
        return QuantizationRule(packed.bits, packed.mode, "group", packed.out_dims // tables)
    group = packed.group_size if packed.granularity == "group" else None
    return QuantizationRule(packed.bits, packed.mode, packed.granularity, group)


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed or isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}; allowed are {', '.join(map(str, allowed))}.")


AFM_RULE = QuantizationRule()
"""The rule of the 3B's linear layers: two bits, balanced, one scale per row."""

AFM_EMBEDDING_RULE = QuantizationRule(bits=4)

VISION_RULE = QuantizationRule(bits=8)
"""The rule of linear layers of an image encoder and its adaptor, which were trained on no grid."""

PRESET_RULES = {"afm-2024": (QuantizationRule(4, "palette"), QuantizationRule(8))}
"""Rules of linear layers and of the embedding, for presets that differ from the 3B.

Source: arXiv 2407.21075, its part on compression: every 16 rows share a table of 16 entries, and the
embedding is int8 per row. The mix with 2-bit layers that brings the average to 3.7 bits is not published.
"""
