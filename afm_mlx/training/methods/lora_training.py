"""Training of a LoRA adapter on a frozen model, float or packed, from new pairs or from an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.adapter_folder import (
    CONFIG_NAME,
    TENSORS_NAME,
    AdapterConfig,
    load_adapter,
    save_adapter,
)
from afm_mlx.adapters.lora import add_lora, lora_config, lora_layers, lora_tensors, start_lora
from afm_mlx.adapters.resident import Base, check_fingerprint
from afm_mlx.adapters.target_modules import (
    TEXT,
    replace_layers,
    target_modules,
    unwrap_layers,
)
from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.checkpoint.finite import check_finite
from afm_mlx.checkpoint.safetensors_file import read_header
from afm_mlx.config import read_config_json
from afm_mlx.errors import CheckpointError, ConfigError, TrainingError
from afm_mlx.json_values import FLOAT16_MAX, FLOAT32_MAX, MAX_RANK, is_rank
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.methods.image_inputs import (
    check_parts,
    freeze_others,
    parts_manifest,
)
from afm_mlx.training.methods.method import WITHOUT_ADAPTER, Method
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe

RANK, SCALE = 16, 0.5
"""Defaults of a new LoRA adapter."""

SAVE_DTYPES = {"float16": mx.float16, "float32": mx.float32}


@dataclass(frozen=True)
class LoRATraining(Method):
    """Train LoRA pairs on a frozen model; see `adapters.lora.add_lora`.

    Args:
        rank: columns of A and rows of B; pass None for the initial adapter's rank, or 16 if there is no
            adapter.
        scale: alpha / rank; pass None for the initial adapter's scale, or 0.5 if there is no adapter.
        keys: names of adapted layers within a block; pass None for the initial adapter's keys, or all linear
            layers.
        num_layers: number of adapted blocks, counted from the last; -1 for the initial adapter's, or all.
        dropout: dropout rate of the adapter's inputs in training.
        initial_adapter: adapter to start from, such as a recovery adapter; see `read_initial`.
        force: accept an initial adapter that was made for another model, if its shapes fit.
        save_dtype: "float16" or "float32", the type of the saved numbers. Training is in float32, and the test
            measures the saved numbers.
        train_parts: parts that get LoRA pairs, of a model that takes images: some of `target_modules.PARTS`.

    Raises:
        ConfigError: for another `save_dtype`, a rank beyond adapter files' limit, or a scale that is not a
            positive float32 number.
    """

    rank: int | None = None
    scale: float | None = None
    keys: tuple[str, ...] | None = None
    num_layers: int = -1
    dropout: float = 0.0
    initial_adapter: str | Path | None = None
    save_dtype: str = "float16"
    force: bool = False
    train_parts: tuple[str, ...] = (TEXT,)
    kind = "lora"
    untrained_label = WITHOUT_ADAPTER

    def __post_init__(self) -> None:
        if self.save_dtype not in SAVE_DTYPES:
            raise ConfigError(
                f"save_dtype is {self.save_dtype!r}; allowed are {' and '.join(map(repr, SAVE_DTYPES))}."
            )
        if self.rank is not None and not is_rank(self.rank):
            raise ConfigError(f"rank is {self.rank!r}; allowed are 1 to {MAX_RANK}, 16 as a rule.")
        if self.scale is not None and not 0 < self.scale <= FLOAT32_MAX:
            raise ConfigError(
                f"scale is {self.scale}; allowed are finite numbers over 0. It is alpha / rank, and an adapter "
                f"of scale 0 learns nothing; leave it out for {SCALE}."
            )

    def default_run_path(self, path: Path) -> Path:
        return path / "run"

    def check_path(self, path: Path, run_path: Path, resume: bool) -> None:
        taken = [name for name in (TENSORS_NAME, CONFIG_NAME) if (path / name).exists()]
        if not taken or resume:
            return
        if CONFIG_NAME not in taken:  # its run was killed while it saved, and may be resumed
            RunFolder(run_path).check(resume=False)
        raise TrainingError(
            f"{path} holds an adapter already ({taken[0]}). Choose another folder, or move it away first."
        )

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        check_parts(self.train_parts, source)
        if self.initial_adapter is None:
            return
        config = read_initial(self.initial_adapter, self.scale)[1]
        for name in ("rank", "scale"):
            wanted, found = getattr(self, name), getattr(config, name)
            if wanted is not None and wanted != found:
                raise ConfigError(
                    f"{name} is {wanted}, and the initial adapter {self.initial_adapter} has {found}. "
                    "Leave it out, or give the same."
                )

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        if self.initial_adapter is None:
            rank = RANK if self.rank is None else self.rank
            scale = SCALE if self.scale is None else self.scale
            add_lora(
                model,
                rank,
                scale,
                self.keys,
                self.dropout,
                seed,
                self.num_layers,
                self.train_parts,
            )
        else:
            add_adapter(
                model,
                source,
                self.initial_adapter,
                scale=self.scale,
                keys=self.keys,
                dropout=self.dropout,
                num_layers=self.num_layers,
                force=self.force,
            )
            freeze_others(model, self.train_parts)

    def as_untrained(self, model: nn.Module) -> AbstractContextManager[None]:
        return without_adapter(model)

    def round_as_saved(self, model: nn.Module) -> None:
        if self.save_dtype == "float32":
            return
        rounded = []
        for name, tensor in lora_tensors(model).items():
            largest = mx.abs(tensor).max().item()
            if largest > FLOAT16_MAX:
                raise TrainingError(
                    f"{name} has a number of {largest:g}, and float16 ends at {FLOAT16_MAX:g}. Save the "
                    "adapter as float32 (--save-dtype float32); the run is kept, and --resume goes on with it."
                )
            rounded.append((name, tensor.astype(mx.float16).astype(tensor.dtype)))
        model.load_weights(rounded, strict=False)

    def manifest(self, model: nn.Module) -> dict[str, object]:
        config = lora_config(model)
        values: dict[str, object] = {
            "rank": config.rank,
            "scale": config.scale,
            "keys": config.keys,
            "num_layers": self.num_layers,
            "dropout": self.dropout,
            **parts_manifest(self.train_parts),
        }
        if self.initial_adapter is not None:
            values["initial_adapter"] = arrays_fingerprint(None, lora_tensors(model))
        return values

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        dtype = SAVE_DTYPES[self.save_dtype]
        tensors = {name: array.astype(dtype) for name, array in lora_tensors(model).items()}
        save_adapter(path, tensors, self.config(model, source))

    def config(self, model: nn.Module, source: ModelSource) -> AdapterConfig:
        """Return the config of the adapter's folder."""
        return lora_config(model, source.folder)


def add_adapter(
    model: nn.Module,
    source: ModelSource,
    path: str | Path,
    *,
    scale: float | None = None,
    keys: tuple[str, ...] | None = None,
    dropout: float = 0.0,
    num_layers: int = -1,
    force: bool = False,
) -> None:
    """Wrap the layers that an adapter changes in LoRA layers with its numbers, in place; see `add_lora`.

    `path` and `scale` are as in `read_initial`. `keys` and `num_layers` are the adapter's, unless given. With
    `force`, the adapter may have been made for another model.

    Raises `AFMError` when the adapter can't be read, or does not fit.
    """
    tensors, config = read_initial(path, scale)
    check_fingerprint(config, Base.of(model, source.folder, force).fingerprints, path)
    check_finite(tensors, path)
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    adapted = [t for t in target_modules(model) if t.path in layers]
    if num_layers == -1:  # blocks from the first adapted one
        blocks = [target.block for target in adapted if target.part == TEXT]
        num_layers = len(model.layers) - min(blocks) if blocks else -1
    # The numbers that `seed` draws are replaced.
    parts = {target.part for target in adapted}
    if keys is None and config.keys:  # an adapter's config also names layers outside blocks
        keys = tuple({target.key for target in adapted if target.part == TEXT}) or None
    add_lora(model, config.rank, config.scale, keys, dropout, 0, num_layers, parts)
    start_lora(model, tensors, config, path)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Make a model compute without its LoRA layers in the context."""
    layers = lora_layers(model).values()
    scales = [layer.scale for layer in layers]
    try:
        for layer in layers:
            layer.scale = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.scale = scale


@contextmanager
def as_reference(
    model: nn.Module, source: ModelSource, adapter: str | Path | None, *, force: bool = False
) -> Iterator[None]:
    """Make a model with LoRA layers compute as a reference in the context: with another adapter, or without.

    Raises `AFMError` when the adapter can't be read, or does not fit; with `force` only its shapes have to.
    """
    if adapter is None:
        with without_adapter(model):
            yield
        return
    layers = list(lora_layers(model).items())
    unwrap_layers(model)
    try:
        add_adapter(model, source, adapter, force=force)
        yield
    finally:
        unwrap_layers(model)
        replace_layers(model, layers)


def reference_fingerprint(adapter: str | Path | None) -> str | None:
    """Return the fingerprint of a reference adapter's numbers; None without one."""
    if adapter is None:
        return None
    tensors, config = read_initial(adapter)
    return arrays_fingerprint(config.scale, tensors)


def read_initial(
    path: str | Path, scale: float | None = None
) -> tuple[dict[str, mx.array], AdapterConfig]:
    """Read an adapter to start training from; the tensors are lazy.

    `path` is an adapter folder; or a `.safetensors` file of LoRA pairs, such as mlx-lm's
    `0000100_adapters.safetensors`, whose scale is in the `adapter_config.json` next to it, or else `scale`.

    Raises `CheckpointError` when the path is missing, damaged, or holds no LoRA pairs, and `ConfigError` when
    the config can't be used, or the scale is unknown.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        return load_adapter(path)
    ranks = {
        tensor.shape[1]
        for name, tensor in read_header(path).items()
        if ".lora_a" in name and len(tensor.shape) == 2
    }
    if not ranks:
        raise CheckpointError(
            f"{path} holds no LoRA pairs (tensors named lora_a and lora_b). Choose an adapter's file or folder."
        )
    if len(ranks) != 1:
        raise CheckpointError(
            f"{path} holds LoRA pairs of {len(ranks)} ranks {sorted(ranks)}; one rank for all is needed."
        )
    (rank,) = ranks
    tensors = mx.load(str(path))
    assert isinstance(tensors, dict)
    config_path = path.with_name(CONFIG_NAME)
    if config_path.is_file():
        config = AdapterConfig.from_dict(read_config_json(config_path), config_path)
        if config.rank != rank:
            raise CheckpointError(
                f"{path} has rank {rank}, and {config_path} says {config.rank}; they don't belong together."
            )
        return tensors, config
    if scale is None:
        raise ConfigError(
            f"There is no {CONFIG_NAME} next to {path} with the adapter's scale (alpha / rank). Give the "
            "scale: --scale, or --rank and --alpha."
        )
    return tensors, AdapterConfig(rank, scale, num_layers=-1)
