"""The description of a Core AI bundle, read and checked on any system, without coreai-core."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from afm_mlx.config import ModelConfig, block_kinds
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, named, reason_of, shown
from afm_mlx.files import read_file
from afm_mlx.vision_config import VisionConfig

SUFFIX = ".aimodel"
FACTS = "afm_mlx"
"""Key of our own facts, JSON as text, in the metadata of a bundle and of its asset."""
PROGRAM = "afm_mlx_program"
"""Key of the program's size and checksum, JSON as text, in the metadata of a bundle."""
ZOO = "mlx-lm"
"""Stands for a `model_type` in the facts of a bundle that was made of a model of mlx-lm."""
INPUTS = "adapter"
"""Stands for an adapter's name in the names of functions that take one as inputs."""
IMAGE = "image_"
"""Begins the names of functions whose prompts have images."""
ENCODERS = {"balanced": "encode_image", "rapid": "encode_image_rapid"}
"""Names of the functions that encode a tile, by the mode; a tile of the mode "high" is one of "balanced"."""
METADATA_VERSION = "0.2"

_METADATA_BYTES = 1 << 20
_HASH_BYTES = 1 << 10
_CHUNK = 16 << 20
_PROGRAM = "main.mlirb"
_DTYPES = ("float16", "float32")
_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}"
_KEYS = {
    "config",
    "base_model_fingerprint",
    "dtype",
    "prompt_lengths",
    "adapter_rank",
    "adapters",
}


@dataclass(frozen=True)
class ZooConfig:
    """Sizes of a model of mlx-lm's Llama or Qwen3; `context_length` is the number of columns of the states.

    Raises:
        ConfigError: if a size is no whole number above 0, or the heads can't share keys.
    """

    vocab_size: int
    context_length: int
    hidden_dim: int
    num_kv_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float

    num_kv_reuse_layers: ClassVar[int] = 0
    kv_bits: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "rms_norm_eps" and not _is_size(value, 1 << 31):
                raise ConfigError(
                    f"config: {name} is {shown(value)}; a size of 1 or more is needed."
                )
        if not isinstance(self.rms_norm_eps, float) or not 0 < self.rms_norm_eps < 1:
            raise ConfigError(
                f"config: rms_norm_eps is {shown(self.rms_norm_eps)}; 0 to 1 is needed."
            )
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ConfigError("config: heads can't share keys evenly, or have an odd width.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ZooConfig:
        names = {field.name for field in dataclasses.fields(cls)} | {"model_type"}
        if set(values) != names:
            raise ConfigError(
                f"config: the keys {', '.join(sorted(names))} are needed, and no others."
            )
        return cls(**{name: value for name, value in values.items() if name != "model_type"})

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": ZOO, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class CoreAIBundle:
    """Description of a bundle.

    Args:
        path: the bundle's folder.
        asset: the `.aimodel` folder in it.
        config: the architecture; its context is the number of columns of the states.
        fingerprint: the fingerprint of the model that the bundle was made of.
        dtype: "float16" or "float32", the type of logits and adapters.
        prompt_lengths: numbers of tokens that prompts have, ascending.
        adapter_rank: rank of the adapters that functions take as inputs; None if they take none.
        adapters: names of the adapters that have functions of their own.
    """

    path: Path
    asset: Path
    config: ModelConfig | ZooConfig
    fingerprint: str
    dtype: str
    prompt_lengths: tuple[int, ...]
    adapter_rank: int | None
    adapters: tuple[str, ...]

    @classmethod
    def read(cls, path: str | Path) -> CoreAIBundle:
        """Read a bundle's description, and compare the asset with its checksum.

        Raises:
            AFMError: if the folder is no bundle, damaged, edited, or not made by `afm-mlx convert --to coreai`.
        """
        path = Path(path)
        if path.suffix == SUFFIX:
            raise CheckpointError(
                f"{path} is an asset; name the bundle, the folder that holds it and the tokenizer."
            )
        metadata = _read_json(path, path / "metadata.json")
        if metadata.get("metadata_version") != METADATA_VERSION or metadata.get("kind") != "llm":
            _fail(
                path,
                f"its metadata.json is of the kind {shown(metadata.get('kind'))} and of version "
                f"{shown(metadata.get('metadata_version'))}; 'llm' of {METADATA_VERSION!r} is needed",
            )
        assets = metadata.get("assets")
        name = assets.get("main") if isinstance(assets, dict) else None
        if isinstance(name, str) and re.fullmatch(r"\.\./\.\./[^/]+", name):
            raise CheckpointError(
                f"{path} is the part of a bundle that Apple's Swift code opens. Name the bundle itself, and "
                f"give {path.name!r} as the adapter."
            )
        if not isinstance(name, str) or "/" in name or Path(name).suffix != SUFFIX:
            _fail(path, f"its metadata.json names the asset {shown(name)}")
        asset = path / name
        facts = _facts(path, metadata.get("user_data"))
        _check_program(path, asset, metadata["user_data"].get(PROGRAM))
        described = _read_json(path, asset / "metadata.json").get("creatorDefinedMetadata")
        if facts != _facts(path, described):
            _fail(path, f"its metadata.json and {name} are of different models")
        config = _config(path, facts["config"])
        language = metadata.get("language")
        sizes = [config.vocab_size, config.context_length]
        found = language if isinstance(language, dict) else {}
        if [found.get("vocab_size"), found.get("max_context_length")] != sizes:
            _fail(path, "its metadata.json has other sizes than its config")
        lengths, rank, dtype = facts["prompt_lengths"], facts["adapter_rank"], facts["dtype"]
        if not isinstance(lengths, list) or not all(
            _is_size(length, config.context_length) for length in lengths
        ):
            _fail(path, f"its prompt lengths are {shown(lengths)}")
        if rank is not None and not _is_size(rank, 1 << 16):
            _fail(path, f"its adapter rank is {shown(rank)}")
        adapters = facts["adapters"]
        if not isinstance(adapters, list) or not all(map(is_function_suffix, adapters)):
            _fail(path, f"its adapters are {shown(adapters)}")
        if dtype not in _DTYPES or not isinstance(facts["base_model_fingerprint"], str):
            _fail(path, f"its type is {shown(dtype)}; {_DTYPES} are known")
        fingerprint = facts["base_model_fingerprint"]
        return cls(path, asset, config, fingerprint, dtype, tuple(lengths), rank, tuple(adapters))

    def check_takes_adapters(self) -> tuple[ModelConfig, int]:
        """Return architecture and rank of adapters as inputs; raise `AFMError` if no function takes any."""
        if isinstance(self.config, ZooConfig):
            raise AFMError(
                f"{self.path} takes no adapters: it was made of a model of mlx-lm. Merge the adapter into the "
                "model before it is converted."
            )
        if self.adapter_rank is None:
            own = f", and has functions of {', '.join(self.adapters)}" if self.adapters else ""
            raise AFMError(
                f"{self.path} takes no adapters as inputs{own}. Make it again with afm-mlx convert --to coreai "
                "--adapter-rank, the largest rank of the adapters."
            )
        return self.config, self.adapter_rank

    @property
    def vision_config(self) -> VisionConfig | None:
        """The sizes of the image encoder; None if the bundle has no functions for images."""
        return self.config.vision_config if isinstance(self.config, ModelConfig) else None

    def function_names(self, adapter: str | None = None) -> dict[int, str]:
        """Return the names of functions by the number of tokens of a prompt, and of the step by 0.

        The names of those whose prompts have images begin with `IMAGE`. `adapter` is one of `adapters`, or
        `INPUTS` for functions that take an adapter as inputs.
        """
        suffix = "" if adapter is None else f"_{adapter}"
        names = {length: f"prompt_{length}{suffix}" for length in self.prompt_lengths}
        return {0: f"step{suffix}", **names}

    def adapter_file(self, adapter: str | Path) -> Path:
        """Return the bundle's file for an adapter, by the adapter's name or path; it need not exist."""
        return self.path / "adapters" / f"{Path(adapter).stem}.safetensors"

    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of keys, and of values: (writing blocks, 1, num_kv_heads, columns, head_dim)."""
        config = self.config
        return (
            config.num_kv_layers,
            1,
            config.num_kv_heads,
            config.context_length,
            config.head_dim,
        )


def adapter_inputs(config: ModelConfig, rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield names and shapes of a function's adapter inputs.

    `PATH.lora_a` is (K, projections * rank), the A of all projections of a matrix next to each other, and
    `PATH.lora_b.I` is (rank, N_I) of projection I, times the adapter's scale.
    """
    for kind in block_kinds(config):
        for block in range(kind.num_blocks):
            for matrix in kind.matrices:
                path = f"{kind.path}.{block}.{matrix.name}"
                yield f"{path}.lora_a", (matrix.inputs, len(matrix.projections) * rank)
                for i, projection in enumerate(matrix.projections):
                    yield f"{path}.lora_b.{i}", (rank, projection.outputs)


def is_function_suffix(name: Any) -> bool:
    """True if an adapter's functions can have this name at their end."""
    return isinstance(name, str) and name != INPUTS and re.fullmatch(_NAME, name) is not None


def _fail(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{path}: {what}. Make it again with afm-mlx convert --to coreai.")


def _is_size(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _read_json(path: Path, file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(read_file(file, _METADATA_BYTES))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is no bundle: {named(str(file.relative_to(path)))} is missing. A Core AI bundle is a "
            "folder that afm-mlx convert --to coreai makes."
        ) from None
    except OSError as error:
        _fail(path, f"{file.name} can't be read: {reason_of(error)}")
    except (ValueError, RecursionError):
        _fail(path, f"{named(str(file.relative_to(path)))} is no JSON")
    if not isinstance(values, dict):
        _fail(path, f"{named(str(file.relative_to(path)))} holds no JSON object")
    return values


def _facts(path: Path, holder: Any) -> dict[str, Any]:
    """Return our facts in the metadata of a bundle or an asset."""
    try:
        facts = json.loads(holder[FACTS])
    except (ValueError, RecursionError, KeyError, TypeError):
        facts = None
    if not isinstance(facts, dict) or set(facts) != _KEYS or not isinstance(facts["config"], dict):
        _fail(path, "its metadata don't say which model it was made of")
    return facts


def program_facts(asset: Path) -> str:
    """Return what a bundle's metadata say about an asset's program: its size, and Apple's SHA-256 of it."""
    digest = read_file(asset / "main.hash", _HASH_BYTES)
    return json.dumps({"bytes": (asset / _PROGRAM).stat().st_size, "sha256": digest.hex()})


def _config(path: Path, values: Mapping[str, Any]) -> ModelConfig | ZooConfig:
    if values.get("model_type") != ZOO:
        return ModelConfig.from_dict(values, source=f"config in {path}")
    try:
        return ZooConfig.from_dict(values)
    except ConfigError as error:
        _fail(path, str(error).removesuffix("."))


def _check_program(path: Path, asset: Path, stated: Any) -> None:
    """Raise `CheckpointError` unless the asset's program is the one that the bundle was made with.

    Apple's runtime can end the process on a program that was changed.
    """
    program, digest = asset / _PROGRAM, hashlib.sha256()
    try:
        found = program_facts(asset)
        if not program.is_file():  # pipes and devices have the size 0, and never end
            _fail(path, f"{named(f'{asset.name}/{_PROGRAM}')} is no regular file")
        if found == stated:  # the size first: a file with holes can have any
            with program.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    except OSError as error:
        _fail(path, f"{asset.name} can't be read: {reason_of(error)}")
    if found != stated:
        _fail(
            path,
            f"{asset.name} is damaged, or of another bundle: metadata.json has another checksum",
        )
    if digest.hexdigest() != json.loads(found)["sha256"]:
        _fail(path, f"{asset.name} is damaged: its program has another checksum than its main.hash")
