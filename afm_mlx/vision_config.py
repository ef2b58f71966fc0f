"""Sizes of an image encoder, its adaptor and its images; the tokens and parameters that follow from them.

An image becomes tiles, tiles become patches, and the adaptor pools patches to tokens of the language model:

| mode | tiles | tokens with the defaults |
| --- | --- | --- |
| high | `tile_grid`^2 of `image_size` pixels, then the whole image in `image_size` pixels | 5 x 144 = 720 |
| balanced | the whole image in `image_size` pixels | 144 |
| rapid | the whole image in `rapid_size` pixels | 9 |

Published are the encoder's family and size, three global layers, a register, the adaptor's ingredients, the
pixels and the tokens of the modes (arXiv 2507.13575). All other defaults are ours: Apple publishes neither
numbers nor weights for them.

| path | parameters |
| --- | --- |
| `vision.encoder` | `patch_embed`, `pos_embed`, `registers`, `blocks.N`, `norm` |
| `vision.adaptor` | `layer`, `proj`, `conv` (and `norm`); or `fc1`, `fc2` |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from afm_mlx.errors import ConfigError, named, shown

MODES = ("high", "balanced", "rapid")
"""Names of the modes, from the most tokens to the fewest."""
MODE_CHOICES = ("auto", *MODES)
"""What a user may ask for: a mode, or "auto" for the one that fits the picture's size."""
ADAPTORS = ("conv", "space_to_channel")
FITS = ("letterbox", "stretch", "cover")
TILE_ORDERS = ("tiles_then_overview", "overview_then_tiles")

# Ten times the largest existing encoders: more is a damaged file, and would take minutes to build.
_MOST = {
    "image_size": 1 << 14,
    "rapid_size": 1 << 14,
    "position_size": 1 << 14,
    "tile_grid": 16,
    "patch_size": 256,
    "hidden_dim": 1 << 16,
    "num_layers": 1 << 10,
    "num_heads": 1 << 12,
    "mlp_dim": 1 << 19,
    "window_size": 1 << 10,
    "num_registers": 1 << 10,
    "conv_kernel": 15,
    "conv_padding": 7,
    "pool_grid": 1 << 10,
    "rapid_pool_grid": 1 << 10,
    "block_size": 32,
    "image_token_id": (1 << 24) - 1,
}
_MAY_BE_ZERO = ("num_registers", "conv_padding", "image_token_id")


class _Part:
    """Base of the dataclasses: checks types, and reads and writes JSON objects."""

    @classmethod
    def from_dict(cls, values: Any, source: str = "vision_config") -> Any:
        """Parse a JSON object; raise `ConfigError`, which names `source`, for unknown and missing keys."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source} is {shown(values)}; an object is needed.")
        fields = {each.name: each for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(map(str, set(values) - set(fields))):
            known = ", ".join(sorted(fields))
            raise ConfigError(
                f"{source}: unknown keys {named(', '.join(unknown))}. Known are {known}."
            )
        for name, each in fields.items():
            is_required = each.default is each.default_factory is dataclasses.MISSING
            if is_required and name not in values:
                raise ConfigError(f"{source}: {name} is missing.")
        found = dict(values)
        for name, part in _PARTS.items():
            if name in fields and name in found:
                found[name] = part.from_dict(found[name], f"{source}.{name}")
        try:
            return cls(**found)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return the content for `config.json`."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    def _check_types(self) -> None:
        kinds: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str}
        for each in dataclasses.fields(self):  # type: ignore[arg-type]
            value, kind = getattr(self, each.name), str(each.type)
            if kind.startswith("tuple"):
                kind = kind.removeprefix("tuple[").partition(",")[0]
                if not isinstance(value, list | tuple):
                    _require(False, each.name, value, "a list of numbers")
                object.__setattr__(self, each.name, tuple(value))
                values = value
            elif kind in kinds:
                values = [value]
            else:  # another dataclass
                _require(isinstance(value, _PARTS[each.name]), each.name, value, "an object")
                continue
            for one in values:
                is_right = isinstance(one, kinds[kind]) and (kind == "bool") == isinstance(
                    one, bool
                )
                _require(is_right, each.name, value, f"of type {kind}")
            if each.name in _MOST:
                least, most = int(each.name not in _MAY_BE_ZERO), _MOST[each.name]
                _require(least <= value <= most, each.name, value, f"{least} to {most:,}")


def _require(holds: bool, name: str, got: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {shown(got)}; allowed is {allowed}.")


@dataclass(frozen=True)
class AdaptorConfig(_Part):
    """From the encoder's patches to tokens of the language model.

    `kind` "conv" is a transformer layer, a linear layer to the model's width, a convolution and an average
    pool, in this order. "space_to_channel" joins the channels of neighbouring patches, then has two linear
    layers with a GELU between them (Manzano, arXiv 2509.16197).

    Args:
        num_heads, mlp_dim: heads and feed-forward width of the transformer layer; for "space_to_channel",
            `mlp_dim` is the width between the linear layers.
        conv_kernel, conv_padding: of the convolution, whose stride is 1.
        conv_norm: RMSNorm and ReLU behind the convolution, as in tamm's `AdaptiveConvPooler`.
        pool_grid, rapid_pool_grid: tokens on a side of a tile, of `image_size` and of `rapid_size` pixels.
        block_size: neighbouring patches on a side that "space_to_channel" joins; a grid is padded with zeros.
    """

    kind: str = "conv"
    num_heads: int = 16
    mlp_dim: int = 4096
    conv_kernel: int = 3
    conv_padding: int = 1
    conv_norm: bool = False
    pool_grid: int = 12
    rapid_pool_grid: int = 3
    block_size: int = 3

    def __post_init__(self) -> None:
        self._check_types()
        _require(self.kind in ADAPTORS, "kind", self.kind, " or ".join(ADAPTORS))
        _require(
            self.conv_padding < self.conv_kernel,
            "conv_padding",
            self.conv_padding,
            f"below conv_kernel, {self.conv_kernel}",
        )


@dataclass(frozen=True)
class ImageConfig(_Part):
    """From a picture to the encoder's pixels.

    Args:
        fit: "letterbox" keeps the picture's aspect and fills a square with the mean colour, "stretch" fills it
            with the picture, "cover" cuts the longer side off on both ends.
        tile_order: whether a picture's overview comes behind or before its tiles, which are row by row.
        mean, std: of red, green and blue of 0 to 1; the encoder sees (colour - mean) / std.
    """

    fit: str = "letterbox"
    tile_order: str = "tiles_then_overview"
    # CLIP's (openai/CLIP, clip/clip.py)
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    def __post_init__(self) -> None:
        self._check_types()
        _require(self.fit in FITS, "fit", self.fit, ", ".join(FITS))
        allowed = " or ".join(TILE_ORDERS)
        _require(self.tile_order in TILE_ORDERS, "tile_order", self.tile_order, allowed)
        for name, least in (("mean", 0.0), ("std", 1e-3)):
            values = getattr(self, name)
            is_right = len(values) == 3 and all(least <= value <= 1 for value in values)
            _require(is_right, name, values, f"three numbers of {least:g} to 1")
            object.__setattr__(self, name, tuple(map(float, values)))


_PARTS: dict[str, Any] = {"adaptor": AdaptorConfig, "images": ImageConfig}


@dataclass(frozen=True)
class VisionConfig(_Part):
    """An image encoder (ViTDet with registers), its adaptor, and its images.

    Args:
        image_token_id: token id that stands for an image's tokens in a prompt; no text gives it.
        image_size, rapid_size: pixels on a side of a tile, in the modes high and balanced, and in rapid.
        tile_grid: tiles on a side of a picture in the mode high.
        position_size: pixels on a side for which the table of positions is trained; others are resized.
        hidden_dim, num_layers, num_heads, mlp_dim: of the encoder's blocks.
        window_size: patches on a side of a window, within which a block attends.
        global_layers: indices of the blocks that attend to all patches of a tile.
        num_registers: learned tokens that take part in every window, and carry what windows have in common.
        layer_norm_eps: added to the variance in every LayerNorm.
        qkv_bias: whether queries, keys and values have a bias.

    Raises:
        ConfigError: for contradictory values, and for values that no encoder has.
    """

    image_token_id: int
    image_size: int = 672
    rapid_size: int = 224
    tile_grid: int = 2
    position_size: int = 448
    patch_size: int = 16
    hidden_dim: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    mlp_dim: int = 4096
    window_size: int = 14
    global_layers: tuple[int, ...] = (7, 15, 23)
    num_registers: int = 1
    layer_norm_eps: float = 1e-6
    qkv_bias: bool = True
    adaptor: AdaptorConfig = field(default_factory=AdaptorConfig)
    images: ImageConfig = field(default_factory=ImageConfig)

    def __post_init__(self) -> None:
        self._check_types()
        for name in ("image_size", "rapid_size", "position_size"):
            size, multiple = getattr(self, name), f"a multiple of patch_size, {self.patch_size}"
            _require(size % self.patch_size == 0, name, size, multiple)
        _require(
            self.rapid_size < self.image_size,
            "rapid_size",
            self.rapid_size,
            f"below image_size, {self.image_size}",
        )
        for name, heads in (("num_heads", self.num_heads), ("adaptor.num_heads", self._heads)):
            divisor = f"a divisor of hidden_dim, {self.hidden_dim}"
            _require(self.hidden_dim % heads == 0, name, heads, divisor)
        layers = self.global_layers
        _require(
            all(0 <= i < self.num_layers for i in layers) and len(set(layers)) == len(layers),
            "global_layers",
            layers,
            f"different numbers of 0 to {self.num_layers - 1}",
        )
        eps = self.layer_norm_eps
        _require(1e-30 <= eps <= 1, "layer_norm_eps", eps, "1e-30 to 1")
        object.__setattr__(self, "layer_norm_eps", float(eps))
        if self.adaptor.kind == "conv":
            for name, mode in (("pool_grid", "balanced"), ("rapid_pool_grid", "rapid")):
                grid, most = getattr(self.adaptor, name), self.conv_grid(mode)
                allowed = f"1 to {most}, which the convolution leaves of {self.grid(mode)} patches"
                _require(1 <= grid <= most, f"adaptor.{name}", grid, allowed)

    @property
    def _heads(self) -> int:
        return self.adaptor.num_heads if self.adaptor.kind == "conv" else 1

    def mode_of(self, width: int, height: int) -> str:
        """Return the mode that "auto" chooses by a picture's longer side in pixels."""
        longer = max(width, height)
        if longer > self.image_size:
            return "high"
        return "balanced" if longer > self.rapid_size else "rapid"

    def tile_size(self, mode: str) -> int:
        """Return the pixels on a side of each tile of a mode."""
        check_mode(mode)
        return self.rapid_size if mode == "rapid" else self.image_size

    def num_tiles(self, mode: str) -> int:
        """Return the number of tiles of a picture, its overview included."""
        check_mode(mode)
        return self.tile_grid**2 + 1 if mode == "high" else 1

    def grid(self, mode: str) -> int:
        """Return the number of patches on a side of a tile."""
        return self.tile_size(mode) // self.patch_size

    def conv_grid(self, mode: str) -> int:
        """Return the number of places on a side of a tile behind the adaptor's convolution."""
        return self.grid(mode) + 2 * self.adaptor.conv_padding - self.adaptor.conv_kernel + 1

    def token_grid(self, mode: str) -> int:
        """Return the number of tokens on a side of a tile."""
        adaptor = self.adaptor
        if adaptor.kind == "space_to_channel":
            return math.ceil(self.grid(mode) / adaptor.block_size)
        return adaptor.rapid_pool_grid if mode == "rapid" else adaptor.pool_grid

    def tokens(self, mode: str) -> int:
        """Return the number of tokens that a picture has in a prompt."""
        return self.num_tiles(mode) * self.token_grid(mode) ** 2

    def encoder_flops(self, mode: str) -> int:
        """Return the floating-point operations of the encoder's products and attention for one picture."""
        width, mlp, registers = self.hidden_dim, self.mlp_dim, self.num_registers
        patches, window = self.grid(mode) ** 2, self.window_size**2
        windows = math.ceil(self.grid(mode) / self.window_size) ** 2
        rows = patches + registers
        linear = 2 * rows * (4 * width * width + 2 * width * mlp)
        local = 4 * windows * (window + registers) ** 2 * width
        whole = 4 * rows**2 * width
        blocks, few = self.num_layers, len(self.global_layers)
        tile = blocks * linear + (blocks - few) * local + few * whole
        tile += 2 * patches * 3 * self.patch_size**2 * width
        return self.num_tiles(mode) * tile

    def parameter_shapes(self, text_dim: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of all float parameters, for a language model of width `text_dim`."""
        return dict(self._shapes(text_dim))

    def _shapes(self, text_dim: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, adaptor = self.hidden_dim, self.adaptor
        encoder, path = "vision.encoder", "vision.adaptor"
        yield from _linear(f"{encoder}.patch_embed", 3 * self.patch_size**2, width)
        positions = self.position_size // self.patch_size
        yield f"{encoder}.pos_embed", (positions, positions, width)
        if self.num_registers:
            yield f"{encoder}.registers", (self.num_registers, width)
        for index in range(self.num_layers):
            yield from _block(f"{encoder}.blocks.{index}", width, self.mlp_dim, self.qkv_bias)
        yield from _norm(f"{encoder}.norm", width)
        if adaptor.kind == "space_to_channel":
            yield from _linear(f"{path}.fc1", adaptor.block_size**2 * width, adaptor.mlp_dim)
            yield from _linear(f"{path}.fc2", adaptor.mlp_dim, text_dim)
            return
        yield from _block(f"{path}.layer", width, adaptor.mlp_dim, self.qkv_bias)
        yield from _linear(f"{path}.proj", width, text_dim)
        yield f"{path}.conv.weight", (text_dim, adaptor.conv_kernel**2 * text_dim)
        if adaptor.conv_norm:
            yield f"{path}.norm.weight", (text_dim,)

    def num_parameters(self, text_dim: int) -> int:
        """Return the number of weights of encoder and adaptor, for a language model of width `text_dim`."""
        return sum(map(math.prod, self.parameter_shapes(text_dim).values()))


def check_mode(mode: str) -> None:
    """Raise `ValueError` if a mode is unknown."""
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; allowed are {', '.join(MODES)}.")


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _linear(path: str, inputs: int, outputs: int, bias: bool = True) -> Shapes:
    yield f"{path}.weight", (outputs, inputs)
    if bias:
        yield f"{path}.bias", (outputs,)


def _norm(path: str, width: int) -> Shapes:
    yield f"{path}.weight", (width,)
    yield f"{path}.bias", (width,)


def _block(path: str, width: int, mlp: int, qkv_bias: bool) -> Shapes:
    yield from _norm(f"{path}.norm1", width)
    yield from _linear(f"{path}.attn.qkv", width, 3 * width, qkv_bias)
    yield from _linear(f"{path}.attn.proj", width, width)
    yield from _norm(f"{path}.norm2", width)
    yield from _linear(f"{path}.mlp.fc1", width, mlp)
    yield from _linear(f"{path}.mlp.fc2", mlp, width)
