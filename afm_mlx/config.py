"""The architecture of a model: its sizes, the parameters that follow from them, and presets.

A model has `num_layers` transformer blocks. The first `num_layers - num_kv_reuse_layers` write keys and
values; the others have no key and value projections and read the last writing block's.
The keys of `config.json` are mlx-lm's for `afm7`, and two of ours that stock mlx-lm ignores.

| path | parameters |
| --- | --- |
| `model.embedding` | (vocab_size, D), which is also the head |
| `model.layers.N` | a block that writes keys and values |
| `model.kv_reuse_layers.N` | a block that reads the last writing block's keys and values |
| `model.output_norm` | (D) |
| `vision` | the image encoder and its adaptor, if the model takes images (`vision_config.py`) |

`block_kinds` is the one table of these parameters. Counts, the shapes that files are checked against, adapters'
target modules, the order of LoRA pairs in checkpoints, and estimates of memory follow from it. A test compares
it with the layers that `afm_mlx.model.model` builds.

Source: `tamm` 0.2.0, `tamm/models/afm_text/afm_text_v7.py` and state dicts of `AFMTextV7`; mlx-lm 0.32.2,
`mlx_lm/models/afm7.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from afm_mlx.errors import ConfigError, named, shown
from afm_mlx.files import read_file
from afm_mlx.vision_config import VisionConfig

MODEL_TYPE = "afm7"
KV_SCALES = ("quant_key_scale", "quant_value_scale")
"""Names of the static int8 scales in the attention of every writing block."""

# Ten times the largest existing models: more is a damaged file, and would take minutes to build.
_SIZES = {
    "vocab_size": 1 << 24,
    "hidden_dim": 1 << 17,
    "num_layers": 1 << 10,
    "num_heads": 1 << 16,
    "num_kv_heads": 1 << 16,
    "context_length": (1 << 31) - 1,  # positions are int32
}
_MAX_FFN_DIM = 1 << 20
# Below 1, later dimensions of a head turn faster than once per token; float32 has to hold the slowest turn.
_ROPE_THETA = (1.0, 1e30)
# Float32 has to hold its inverse; above 1, normalized vectors would vanish.
_RMS_NORM_EPS = (1e-30, 1.0)

OTHER_KEYS = set(
    """
    model_type quantization quantization_config eos_token_id bos_token_id pad_token_id architectures
    torch_dtype dtype tie_word_embeddings transformers_version
    """.split()
)
"""Keys of a model's `config.json` that are not part of the architecture."""


def refuse_unknown(values: Mapping[str, Any], names: set[str], source: str) -> None:
    """Raise `ConfigError` if a `config.json` has keys besides `names` of an architecture and `OTHER_KEYS`."""
    if unknown := sorted(map(str, set(values) - names - OTHER_KEYS)):
        raise ConfigError(
            f"{source}: unknown keys {named(', '.join(unknown))}. Known are {', '.join(sorted(names))}."
        )


def is_afm_config(values: Mapping[str, Any]) -> bool:
    """True if a `config.json` with this content is an AFM model's."""
    return values.get("model_type") == MODEL_TYPE


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of an AFM text v7 model.

    Args:
        vocab_size: rows of the embedding, which is also the output head.
        hidden_dim: width of the residual stream.
        num_layers: transformer blocks, both kinds together.
        num_kv_reuse_layers: number of blocks, the last ones, that reuse keys and values; 0 is allowed.
        num_heads: query heads; `head_dim = hidden_dim / num_heads`.
        num_kv_heads: key and value heads; divides `num_heads`.
        rope_theta: base of the rotary frequencies, 1 or more. Required: mlx-lm's default (50000) is not the
            value that Apple's models use (500000).
        hidden_dim_scale_factor: feed-forward width over `hidden_dim`.
        rms_norm_eps: added to the mean square in every RMSNorm.
        kv_bits: 8 if blocks have static scales that quantize K and V to int8; None if the model was trained
            without such scales.
        context_length: maximum number of tokens that the model was trained on; generation ends there.
        vision_config: the image encoder and its adaptor; None if the model takes no images.

    Raises:
        ConfigError: for contradictory values, and for values that no model has, such as a million layers.
    """

    vocab_size: int
    hidden_dim: int
    num_layers: int
    num_kv_reuse_layers: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    hidden_dim_scale_factor: float = 3.25
    rms_norm_eps: float = 1e-5
    kv_bits: int | None = 8
    context_length: int = 4096
    vision_config: VisionConfig | None = None

    def __post_init__(self) -> None:
        kinds = {
            "int": (int,),
            "float": (int, float),
            "int | None": (int, type(None)),
            "VisionConfig | None": (VisionConfig, type(None)),
        }
        for field in dataclasses.fields(self):
            value, annotation = getattr(self, field.name), str(field.type)
            # bool is an int to Python, and never a size.
            if not isinstance(value, kinds[annotation]) or isinstance(value, bool):
                wanted = annotation.replace("None", "null")
                raise ConfigError(
                    f"config: {field.name} is {shown(value)}, and must be of type {wanted}"
                )
        for name, largest in _SIZES.items():
            self._require_within(name, 1, largest)
        self._require_within("rope_theta", *_ROPE_THETA)
        self._require_within("rms_norm_eps", *_RMS_NORM_EPS)
        factor, most = self.hidden_dim_scale_factor, _MAX_FFN_DIM / self.hidden_dim
        self._require(
            0 < factor <= most and self.ffn_dim >= 1,
            f"hidden_dim_scale_factor is {shown(factor)} with hidden_dim {self.hidden_dim}",
            f"above 0 and up to {most:g}: the feed-forward width, their product, is 1 to {_MAX_FFN_DIM:,}",
        )
        self._require(
            0 <= self.num_kv_reuse_layers < self.num_layers,
            f"num_kv_reuse_layers is {shown(self.num_kv_reuse_layers)}",
            f"0 to {self.num_layers - 1} with {self.num_layers} layers: one block at least writes K and V",
        )
        self._require(
            self.hidden_dim % self.num_heads == 0 and self.head_dim % 2 == 0,
            f"hidden_dim is {self.hidden_dim} with {self.num_heads} heads",
            "a multiple of twice num_heads, because RoPE rotates pairs in each head",
        )
        self._require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads is {self.num_kv_heads}",
            f"a divisor of num_heads, which is {self.num_heads}",
        )
        self._require(self.kv_bits in (8, None), f"kv_bits is {shown(self.kv_bits)}", "8 or null")
        if (vision := self.vision_config) is not None:
            self._require(
                vision.image_token_id < self.vocab_size,
                f"vision_config.image_token_id is {vision.image_token_id}",
                f"below vocab_size, which is {self.vocab_size}",
            )
        for name in ("rope_theta", "hidden_dim_scale_factor", "rms_norm_eps"):
            object.__setattr__(self, name, float(getattr(self, name)))

    def _require_within(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        allowed = " to ".join(f"{x:,}" if type(x) is int else f"{x:g}" for x in (least, most))
        self._require(least <= value <= most, f"{name} is {shown(value)}", allowed)

    @staticmethod
    def _require(holds: bool, got: str, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"config: {got}; allowed is {allowed}.")

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.num_heads

    @property
    def ffn_dim(self) -> int:
        """Feed-forward width, rounded as tamm rounds it."""
        return round(self.hidden_dim * self.hidden_dim_scale_factor)

    @property
    def num_kv_layers(self) -> int:
        """Number of blocks that write keys and values."""
        return self.num_layers - self.num_kv_reuse_layers

    @property
    def kv_dim(self) -> int:
        """Width of a token's keys in one block; its values are as wide."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_values_per_token(self) -> int:
        """Numbers in the KV cache per token: keys and values of every writing block."""
        return 2 * self.num_kv_layers * self.kv_dim

    @property
    def num_parameters(self) -> int:
        """Number of all weights, the image encoder's too, without static KV scales."""
        shapes = parameter_shapes(self)
        return sum(math.prod(shapes[name]) for name in shapes if not name.endswith(KV_SCALES))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "config") -> ModelConfig:
        """Parse the content of an afm7 `config.json`; keys of quantization and of tokenizers are ignored.

        Raises:
            ConfigError: names every unknown or missing key, and `source`.
        """
        if "model_type" in values and not is_afm_config(values):
            raise ConfigError(
                f"{source}: model_type is {shown(values['model_type'])}; an AFM model has {MODEL_TYPE!r}."
            )
        names = {field.name for field in dataclasses.fields(cls)}
        refuse_unknown(values, names, source)
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        missing = sorted(required - set(values))
        if missing:
            raise ConfigError(
                f"{source}: missing keys {', '.join(missing)}. They have no default worth trusting: "
                "take them from the checkpoint that the folder was made of."
            )
        if values.get("tie_word_embeddings", True) is not True:
            raise ConfigError(
                f"{source}: tie_word_embeddings is not true; AFM has one tied matrix."
            )
        found = {name: values[name] for name in names if name in values}
        if found.get("vision_config") is not None:
            where = f"{source}: vision_config"
            found["vision_config"] = VisionConfig.from_dict(found["vision_config"], where)
        try:
            return cls(**found)
        except ConfigError as error:
            raise ConfigError(f"{source}: {str(error).removeprefix('config: ')}") from None

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        return cls.from_dict(read_config_json(path), source=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the content for `config.json`, with `model_type`; without `vision_config` if it is None."""
        values = {"model_type": MODEL_TYPE, **dataclasses.asdict(self)}
        if self.vision_config is None:
            del values["vision_config"]
        return values


# -- parameters


class Projection(NamedTuple):
    """Rows of a matrix that compute one thing, such as queries; `rotary_heads` of them are rotated by RoPE."""

    outputs: int
    rotary_heads: int = 0


class Matrix(NamedTuple):
    """The weight of a linear layer.

    Args:
        name: path of the layer within its block, such as `mlp.up_proj`.
        projections: the projections that its rows compute, in order: three in a fused layer, else one.
    """

    name: str
    inputs: int
    projections: tuple[Projection, ...]

    @property
    def outputs(self) -> int:
        return sum(projection.outputs for projection in self.projections)


class BlockKind(NamedTuple):
    """The parameters of one kind of block, and the path of these blocks.

    Args:
        path: path of the list that holds the blocks, such as `model.layers`.
        matrices: linear layers of a block, in the order of tamm's state dicts.
        norms: number of weights of each norm, by its path within the block.
        scales: paths of the scalar parameters within the block.
    """

    path: str
    num_blocks: int
    matrices: tuple[Matrix, ...]
    norms: Mapping[str, int]
    scales: tuple[str, ...]


@functools.lru_cache(maxsize=16)
def block_kinds(config: ModelConfig) -> tuple[BlockKind, BlockKind]:
    """Return the two kinds of block: the one that writes keys and values, and the one that reuses them."""
    width, ffn = config.hidden_dim, config.ffn_dim
    queries = Projection(width, config.num_heads)
    keys, values = Projection(config.kv_dim, config.num_kv_heads), Projection(config.kv_dim)
    matrices = (
        Matrix("self_attn.out_proj", width, (Projection(width),)),
        Matrix("mlp.gate_proj", width, (Projection(ffn),)),
        Matrix("mlp.up_proj", width, (Projection(ffn),)),
        Matrix("mlp.down_proj", ffn, (Projection(width),)),
    )
    norms = {
        "self_attn.q_norm": config.head_dim,
        "input_layernorm": width,
        "post_attention_layernorm": width,
    }
    scales = KV_SCALES if config.kv_bits is not None else ()
    return (
        BlockKind(
            "model.layers",
            config.num_kv_layers,
            (Matrix("self_attn.qkv_proj", width, (queries, keys, values)), *matrices),
            {**norms, "self_attn.k_norm": config.head_dim},
            tuple(f"self_attn.{scale}" for scale in scales),
        ),
        BlockKind(
            "model.kv_reuse_layers",
            config.num_kv_reuse_layers,
            (Matrix("self_attn.q_proj", width, (queries,)), *matrices),
            norms,
            (),
        ),
    )


def blocks(config: ModelConfig) -> Iterator[tuple[str, BlockKind]]:
    """Yield the path and the kind of every block, from the first to the last."""
    for kind in block_kinds(config):
        for index in range(kind.num_blocks):
            yield f"{kind.path}.{index}", kind


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the parameters of an unquantized model."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embedding.weight": (config.vocab_size, config.hidden_dim)
    }
    for path, kind in blocks(config):
        for matrix in kind.matrices:
            shapes[f"{path}.{matrix.name}.weight"] = (matrix.outputs, matrix.inputs)
        for norm, size in kind.norms.items():
            shapes[f"{path}.{norm}.weight"] = (size,)
        for scale in kind.scales:
            shapes[f"{path}.{scale}"] = ()
    shapes["model.output_norm.weight"] = (config.hidden_dim,)
    if config.vision_config is not None:
        shapes |= config.vision_config.parameter_shapes(config.hidden_dim)
    return shapes


# -- files and presets

_MAX_JSON_BYTES = 64 << 20


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Parse a JSON file that must hold one object; raise `ConfigError` if it is missing or damaged."""
    path = Path(path)
    try:
        values = json.loads(read_file(path, _MAX_JSON_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: a model folder holds config.json, *.safetensors and tokenizer files."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read: {error.strerror}. It is damaged, or no config."
        ) from None
    except (ValueError, RecursionError) as error:
        # Python's for bad text, for numbers of thousands of digits, and for deep nesting.
        raise ConfigError(f"{path} is not valid JSON: {shown(str(error))}.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a JSON {type(values).__name__}; an object is needed.")
    return values


# tamm's defaults, whose parameter count equals the shipped model's: 3,111,368,064.
_AFM_3B = ModelConfig(
    vocab_size=153600,
    hidden_dim=2048,
    num_layers=56,
    num_kv_reuse_layers=21,
    num_heads=16,
    num_kv_heads=2,
    rope_theta=500000.0,
)

PRESETS: dict[str, ModelConfig] = {
    "afm-3b": _AFM_3B,
    # With an image encoder of the published kind and size; the id of its tokens is ours.
    "afm-3b-vision": dataclasses.replace(
        _AFM_3B, vision_config=VisionConfig(image_token_id=_AFM_3B.vocab_size - 1)
    ),
    # The toolkit's draft model for speculative decoding: 48,765,952 parameters.
    "afm-3b-draft": ModelConfig(
        vocab_size=153600,
        hidden_dim=256,
        num_layers=12,
        num_kv_reuse_layers=0,
        num_heads=8,
        num_kv_heads=4,
        hidden_dim_scale_factor=3.0,
        rope_theta=500000.0,
        kv_bits=None,
    ),
    # The first generation, on devices since 2024 (arXiv 2407.21075, table 1): 2.58 B parameters and 0.15 B of
    # embedding. The feed-forward width is not published; 8,032 gives that count. Neither is a KV quantizer.
    "afm-2024": ModelConfig(
        vocab_size=49152,
        hidden_dim=3072,
        num_layers=26,
        num_kv_reuse_layers=0,
        num_heads=24,
        num_kv_heads=8,
        hidden_dim_scale_factor=8032 / 3072,
        rope_theta=500000.0,
        kv_bits=None,
    ),
    # The model that this package carries; trained by examples/nano.
    "afm-nano": ModelConfig(
        vocab_size=4096,
        hidden_dim=256,
        num_layers=8,
        num_kv_reuse_layers=3,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=10000.0,
        context_length=1024,
    ),
}
