"""The kinds of training: what is trainable, and what is saved at the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.adapter_folder import save_adapter
from afm_mlx.adapters.lora import add_lora, lora_config, lora_layers, lora_tensors, start_lora
from afm_mlx.adapters.opening import Base, check_fingerprint
from afm_mlx.adapters.places import places
from afm_mlx.architecture import KV_SCALES
from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.checkpoint.finite import check_finite
from afm_mlx.errors import ConfigError, TrainingError
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize import Predicate
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.initial_adapter import read_initial
from afm_mlx.training.methods.model_folder import save_model_folder
from afm_mlx.training.methods.recipe import Data
from afm_mlx.training.methods.scores import WITHOUT
from afm_mlx.training.methods.source import Source
from afm_mlx.training.qat.kv_scales import calibrate_kv_scales
from afm_mlx.training.qat.qat_layers import QATEmbedding, QATLinear, pack_qat, prepare_qat
from afm_mlx.values import FLOAT16_MAX, FLOAT32_MAX, MAX_RANK, is_rank

QAT_RULE = QuantizationRule(bits=2, mode="balanced", granularity="tensor")
"""As Apple describes it: balanced levels, and one factor to learn for each matrix (arXiv 2507.13575)."""

QAT_EMBEDDING_RULE = QuantizationRule(bits=4, mode="balanced", granularity="row")
"""Four bits; rows, whose norms differ by the frequency of their tokens, have scales of their own."""

RANK, SCALE = 16, 0.5
"""Of a new LoRA adapter."""

SAVE_DTYPES = {"float16": mx.float16, "float32": mx.float32}


class Method(Protocol):
    """What is trained."""

    @property
    def kind(self) -> str:
        """Its name."""

    def check(self, source: Source) -> None:
        """Raise `AFMError` on a model that can't be trained so, before anything is loaded."""

    def settled(self, options: TrainingOptions) -> TrainingOptions:
        """The loop's options, with this method's own defaults."""

    @property
    def untrained(self) -> str:
        """What the test split is measured with besides, in words that go behind "loss"."""

    def prepare(self, model: nn.Module, source: Source, data: Data, seed: int) -> nn.Module:
        """Make trainable what is to be trained, in place."""

    def as_untrained(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within it, a prepared model that was not trained yet computes what `untrained` says."""

    def finish(self, model: nn.Module) -> None:
        """Give a model that has its best weights the very numbers that are saved."""

    def manifest(self, model: nn.Module) -> dict[str, Any]:
        """What a prepared model's run must keep when it resumes."""

    def save(self, path: Path, model: nn.Module, source: Source, facts: Mapping[str, str]) -> None:
        """Write the folder of the trained model, which holds the best weights."""


@dataclass(frozen=True)
class FullTraining:
    """Float weights of the last `num_layers` blocks; of the whole model when -1.

    The scales of int8 keys and values stay as they are.
    """

    num_layers: int = -1
    kind: str = "full"
    untrained: str = "before training"

    def check(self, source: Source) -> None:
        source.refuse_quantized("training of all weights")

    def settled(self, options: TrainingOptions) -> TrainingOptions:
        return options

    def prepare(self, model: nn.Module, source: Source, data: Data, seed: int) -> nn.Module:
        blocks = model.layers
        if self.num_layers == -1:
            model.unfreeze()
        elif 1 <= self.num_layers <= len(blocks):
            model.freeze()
            for block in blocks[-self.num_layers :]:
                block.unfreeze()
        else:
            raise ConfigError(
                f"num_layers is {self.num_layers}; allowed are 1 to {len(blocks)}, and -1 for the whole model."
            )
        return model.freeze(keys=list(KV_SCALES), strict=False)

    def as_untrained(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, model: nn.Module) -> None:
        pass

    def manifest(self, model: nn.Module) -> dict[str, Any]:
        return {"num_layers": self.num_layers}

    def save(self, path: Path, model: nn.Module, source: Source, facts: Mapping[str, str]) -> None:
        save_model_folder(path, model, source.values, source, what=self._what(), facts=facts)

    def _what(self) -> str:
        """A sentence for the card."""
        if self.num_layers == -1:
            return "Float weights, all of them trained further."
        return f"Float weights; those of the last {self.num_layers} blocks were trained further."


@dataclass(frozen=True)
class DraftTraining(FullTraining):
    """Float weights of a draft model, which proposes tokens that a larger model takes or leaves."""

    kind: str = "draft"

    def check(self, source: Source) -> None:
        source.refuse_quantized("training of a draft model")

    def _what(self) -> str:
        return "A draft model for speculative decoding, trained to say what its teacher would."


@dataclass(frozen=True)
class LoRATraining:
    """LoRA pairs on a frozen model, see `adapters.lora.add_lora`.

    What is None comes from `initial_adapter`, or is `RANK` and `SCALE`.

    Args:
        rank: of every pair.
        scale: alpha / rank.
        keys: layers by their names within a block; None for all linear ones.
        num_layers: blocks, counted from the last; -1 for all.
        dropout: of the adapter's input.
        initial_adapter: adapter to start from, such as a recovery adapter; see `initial_adapter.read_initial`.
        force: start from one that was made for another model too, if its shapes fit.
        save_dtype: of the saved numbers, "float16" or "float32". Training is float32 either way, and what is
            tested is what is saved.

    Raises:
        ConfigError: for another `save_dtype`, a rank that no file may have, or a scale that is not finite (in
            float32) and over 0.
    """

    rank: int | None = None
    scale: float | None = None
    keys: tuple[str, ...] | None = None
    num_layers: int = -1
    dropout: float = 0.0
    initial_adapter: str | Path | None = None
    save_dtype: str = "float16"
    force: bool = False
    kind: str = "lora"
    untrained: str = WITHOUT

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

    def check(self, source: Source) -> None:
        if self.initial_adapter is None:
            return
        config = read_initial(self.initial_adapter, self.scale)[1]
        for name, wanted, found in (
            ("rank", self.rank, config.rank),
            ("scale", self.scale, config.scale),
        ):
            if wanted is not None and wanted != found:
                raise ConfigError(
                    f"{name} is {wanted}, and that of the initial adapter {self.initial_adapter} is {found}. "
                    "Leave it out, or give the same."
                )

    def settled(self, options: TrainingOptions) -> TrainingOptions:
        return options

    def prepare(self, model: nn.Module, source: Source, data: Data, seed: int) -> nn.Module:
        rank, scale, keys, blocks = self.rank, self.scale, self.keys, self.num_layers
        if self.initial_adapter is not None:
            tensors, config = read_initial(self.initial_adapter, self.scale)
            known = Base.of(model, source.folder, self.force).fingerprints
            check_fingerprint(config, known, self.initial_adapter)
            check_finite(tensors, self.initial_adapter)
            rank, scale, keys = config.rank, config.scale, keys or config.keys or None
            blocks = _adapted_blocks(model, tensors) if blocks == -1 else blocks
        rank = RANK if rank is None else rank
        scale = SCALE if scale is None else scale
        add_lora(model, rank, scale, keys, self.dropout, seed, blocks)
        if self.initial_adapter is not None:
            start_lora(model, tensors, config, self.initial_adapter)
        return model

    @contextmanager
    def as_untrained(self, model: nn.Module) -> Iterator[None]:
        layers = lora_layers(model).values()
        scales = [layer.scale for layer in layers]
        try:
            for layer in layers:
                layer.scale = 0.0
            yield
        finally:
            for layer, scale in zip(layers, scales, strict=True):
                layer.scale = scale

    def finish(self, model: nn.Module) -> None:
        if self.save_dtype == "float32":
            return
        for name, tensor in lora_tensors(model).items():
            largest = mx.abs(tensor).max().item()
            if largest > FLOAT16_MAX:
                raise TrainingError(
                    f"{name} has a number of {largest:g}, and float16 ends at {FLOAT16_MAX:g}. Save the "
                    "adapter as float32 (--save-dtype float32); the run is kept, and --resume goes on with it."
                )
        rounded = [
            (name, tensor.astype(mx.float16).astype(tensor.dtype))
            for name, tensor in lora_tensors(model).items()
        ]
        model.load_weights(rounded, strict=False)

    def manifest(self, model: nn.Module) -> dict[str, Any]:
        config = lora_config(model)
        values: dict[str, Any] = {
            "rank": config.rank,
            "scale": config.scale,
            "keys": config.keys,
            "num_layers": self.num_layers,
            "dropout": self.dropout,
        }
        if self.initial_adapter is not None:
            values["initial_adapter"] = arrays_fingerprint(None, lora_tensors(model))
        return values

    def save(self, path: Path, model: nn.Module, source: Source, facts: Mapping[str, str]) -> None:
        dtype = SAVE_DTYPES[self.save_dtype]
        tensors = {name: array.astype(dtype) for name, array in lora_tensors(model).items()}
        save_adapter(path, tensors, lora_config(model, source.folder))


def _adapted_blocks(model: nn.Module, tensors: Mapping[str, Any]) -> int:
    """How many blocks, counted from the last, reach back to the first that has tensors; -1 for all."""
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    has_adapter: dict[str, bool] = {}  # by the paths of blocks, in their order
    for place in places(model):
        block = place.path.removesuffix(f".{place.key}")
        has_adapter[block] = has_adapter.get(block, False) or place.path in layers
    flags = list(has_adapter.values())
    return len(flags) - flags.index(True) if any(flags) else -1


@dataclass(frozen=True)
class QATTraining:
    """Weights that are seen through their grid, packed at the end; see `training.qat`.

    Args:
        rule, embedding_rule, predicate: see `quantization.quantize_model`.
        calibrate_kv: batches that the int8 scales of keys and values are set by before training; 0 keeps
            the model's own.
        learn_kv_scales: train these scales.
        average: of weights, where the loop's options name no decay: 0.999, less in runs under 10,000 steps.
    """

    rule: QuantizationRule = QAT_RULE
    embedding_rule: QuantizationRule | None = QAT_EMBEDDING_RULE
    predicate: Predicate | None = None
    calibrate_kv: int = 0
    learn_kv_scales: bool = False
    average: bool = True
    kind: str = "qat"
    untrained: str = "on the same grid, before training"

    def check(self, source: Source) -> None:
        source.refuse_quantized("quantization-aware training")
        if not source.is_afm:
            wanted = [name for name in ("calibrate_kv", "learn_kv_scales") if getattr(self, name)]
            if wanted:
                raise ConfigError(
                    f"{wanted[0]}: {source.folder} has no int8 scales of keys and values; AFM models do."
                )
        elif self.learn_kv_scales and not (self.calibrate_kv or source.values.get("kv_bits")):
            raise ConfigError(
                f"learn_kv_scales: {source.folder} stores keys and values as floats. Let calibrate_kv give it "
                "scales to start from."
            )

    def settled(self, options: TrainingOptions) -> TrainingOptions:
        if options.ema_decay is not None or not self.average:
            return options
        # The average then covers the last tenth of the run or so.
        decay = min(0.999, 1 - 10 / options.iters)
        return dataclasses.replace(options, ema_decay=decay) if decay > 0 else options

    def prepare(self, model: nn.Module, source: Source, data: Data, seed: int) -> nn.Module:
        model.unfreeze()
        if self.calibrate_kv:
            calibrate_kv_scales(model, (data.train.batches(i) for i in range(self.calibrate_kv)))
        return prepare_qat(
            model,
            self.rule,
            self.embedding_rule,
            self.predicate,
            learn_kv_scales=self.learn_kv_scales,
        )

    def as_untrained(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self, model: nn.Module) -> None:
        pass

    def manifest(self, model: nn.Module) -> dict[str, Any]:
        layers = {p: m for p, m in model.named_modules() if isinstance(m, QATLinear | QATEmbedding)}
        rules = {path: layer.rule.to_dict() for path, layer in sorted(layers.items())}
        return {
            "q_rule": self.rule.to_dict(),
            "q_layers": sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest(),
            "calibrate_kv": self.calibrate_kv,
            "learn_kv_scales": self.learn_kv_scales,
        }

    def save(self, path: Path, model: nn.Module, source: Source, facts: Mapping[str, str]) -> None:
        packed, values = pack_qat(model, source.values)
        if source.is_afm:
            # Calibration may have given the model its scales.
            values["kv_bits"] = model.args.kv_bits
        layers = (m for m in packed.modules() if isinstance(m, PackedLinear | PackedEmbedding))
        bits = sorted({layer.bits for layer in layers})
        kind = f"{' and '.join(map(str, bits))} bits, {self.rule.mode}"
        what = f"Packed weights ({kind}), trained as such (quantization-aware)."
        save_model_folder(path, packed, values, source, what=what, facts=facts)
