"""The options of `convert`, and the packing rules that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.config import ModelConfig
from afm_mlx.errors import AFMError, ConfigError, shown
from afm_mlx.json_values import MAX_RANK
from afm_mlx.model.model import Model
from afm_mlx.quantization.quantize_model import Predicate, is_vision, layer_rules
from afm_mlx.quantization.rule import VISION_RULE, QuantizationRule

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
SVD_OF = ("error", "weights")
TARGETS = ("afm-mlx", "mlx-lm", "coreml", "coreai", "tamm")
PROMPT_LENGTHS = (64, 512)
NEURAL_ENGINE_PROMPT_LENGTHS = (32,)
"""One fixed length: others report that the Neural Engine runs no longer write to a state (Anemll#27)."""
_OF_EXPORTS = {
    "ane": {"coreml": "Core ML packages"},
    "prompt_lengths": {"coreml": "Core ML packages", "coreai": "Core AI bundles"},
    "context": {"coreai": "Core AI bundles"},
    "adapter_rank": {"coreai": "Core AI bundles"},
    "adapter_functions": {"coreai": "Core AI bundles"},
    "minimum_os": {"coreai": "Core AI bundles"},
}
"""Options that some targets alone have, and what these targets make."""
RECIPES = {"mixed_2_4": (2, 4), "mixed_2_8": (2, 8), "mixed_4_8": (4, 8)}
"""Bits of most layers, and of the layers that suffer most; see `recipe`."""


@dataclass(frozen=True)
class ConversionOptions:
    """How a checkpoint is converted. Names are the flags' and mlx-lm's.

    Args:
        dtype: "float16", "bfloat16" or "float32" for weights and adapters; pass None to keep the source's. For
            a Core ML package or a Core AI bundle the type that it computes in: float16 by default, or float32.
        to: "afm-mlx"; "mlx-lm" for a folder that mlx-lm itself reads, without our additions; "coreml" for a
            Core ML package, or "coreai" for a Core AI bundle, of a model folder; "tamm" for a checkpoint of a
            parallel-track model's folder, as tamm loads it.
        quantize: pack linear layers and embeddings. The options `q_...`, `quant_predicate`, `target_bpw` and
            `data` say how, and are refused without it.
        q_bits: 2, 4 or 8; 2 for balanced weights by default, else 4.
        q_mode: "balanced", "affine" or "palette"; by default balanced for AFM models and affine for others,
            which take mlx-lm's own modes too.
        q_group_size: inputs that share a scale, or rows that share a palette's table.
        q_granularity: "tensor", "row" or "group"; see `QuantizationRule`.
        q_embedding_bits: bits of embeddings and heads; by default `q_bits`, and at least 4.
        q_embedding_mode, q_embedding_granularity: mode and granularity of embeddings and heads; by default as
            in other layers.
        q_vision_bits: bits of an image encoder and its adaptor, 8 by default; balanced, a scale for each row.
        quant_predicate: a recipe's name (`RECIPES`; mlx-lm's for other architectures), or a function of path
            and module, see `quantize_model`.
        target_bpw: maximum average number of bits per weight of the folder, scales and tables included.
            Layers get 2 or 4 bits, or the bits in the recipe's name, by their sensitivity on text; see
            `mixed_bits`. The model is read into memory for that, and the folder gets a `sensitivity.json`.
        data: the text for `target_bpw`: a `.jsonl` or `.txt` file, or a folder with `train.jsonl`; by default
            the model folder's `heldout.jsonl`.
        svd_adapter: rank of an adapter of singular vectors, which is written to the folder `adapters/svd` of
            the packed model; see `svd_adapter`.
        svd_of: "error", by default, for singular vectors of the packed layers' errors; "weights" for the
            vectors of the weights, of which only the rest is packed.
        dequantize: write packed layers as floats.
        ane: arrange the operators of a Core ML package for the Neural Engine.
        prompt_lengths: numbers of tokens that the prompts of a Core ML package or a Core AI bundle have; by
            default 64 and 512, with `ane` 32.
        context: number of tokens that the states of a Core AI bundle hold; by default the model's context, of
            mlx-lm's models at most 4,096.
        adapter_rank: largest rank of the adapters that functions of a Core AI bundle take as inputs; pass None
            for no such functions.
        adapter_functions: adapters, by path or by name in the model's folder, that get functions in a Core AI
            bundle.
        minimum_os: the oldest macOS and iOS of a Core AI bundle; 27 by default.
    """

    dtype: str | None = None
    to: str = "afm-mlx"
    quantize: bool = False
    q_bits: int | None = None
    q_mode: str | None = None
    q_group_size: int | None = None
    q_granularity: str | None = None
    q_embedding_bits: int | None = None
    q_embedding_mode: str | None = None
    q_embedding_granularity: str | None = None
    q_vision_bits: int | None = None
    quant_predicate: str | Predicate | None = None
    target_bpw: float | None = None
    data: str | Path | None = None
    svd_adapter: int | None = None
    svd_of: str | None = None
    dequantize: bool = False
    ane: bool = False
    prompt_lengths: Sequence[int] | None = None
    context: int | None = None
    adapter_rank: int | None = None
    adapter_functions: Sequence[str | Path] | None = None
    minimum_os: str | None = None

    def check(self) -> None:
        """Raise `AFMError` if options contradict each other or have no effect."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise AFMError(f"dtype is {shown(self.dtype)}; allowed are {', '.join(DTYPES)}.")
        if self.to not in TARGETS:
            raise AFMError(
                f"The target format is {shown(self.to)}; allowed are {', '.join(TARGETS)}."
            )
        for name, targets in _OF_EXPORTS.items():
            if getattr(self, name) and self.to not in targets:
                raise AFMError(
                    f"--{name.replace('_', '-')} is for {' and '.join(targets.values())}. Add --to "
                    f"{' or '.join(targets)}, or leave it out."
                )
        if self.is_export:
            self._check_export()
        if self.quantize and self.dequantize:
            raise AFMError("quantize and dequantize (-q and -d) exclude each other; choose one.")
        names = [name for name in vars(self) if name.startswith("q_")]
        names += ["quant_predicate", "target_bpw", "data", "svd_adapter"]
        given = [name for name in names if getattr(self, name) is not None]
        if given and not self.quantize:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise AFMError(
                f"{flags} without -q (quantize) would do nothing. Add -q, or leave it out."
            )
        if self.svd_of is not None and self.svd_adapter is None:
            raise AFMError(
                "--svd-of without --svd-adapter RANK would do nothing. Add it, or leave it out."
            )
        for name, value, allowed in (
            ("svd-of", self.svd_of, (None, *SVD_OF)),
            ("svd-adapter", self.svd_adapter, (None, *range(1, MAX_RANK + 1))),
        ):
            if value not in allowed:
                raise AFMError(
                    f"--{name} is {shown(value)}; allowed are "
                    f"{'error and weights' if name == 'svd-of' else f'ranks of 1 to {MAX_RANK}'}."
                )
        if self.q_bits is not None and isinstance(self.quant_predicate, str):
            raise AFMError("--q-bits and --quant-predicate both say how many bits; choose one.")
        if self.q_bits is not None and self.target_bpw is not None:
            raise AFMError(
                "--q-bits and --target-bpw both say how many bits; choose one. A mix of other bits than 2 "
                "and 4 is asked for by name, as in --quant-predicate mixed_4_8."
            )
        if self.data is not None and self.target_bpw is None:
            raise AFMError(
                "--data without --target-bpw would do nothing: only a choice of bits is measured on text."
            )

    def _check_export(self) -> None:
        framework, lengths = ("Core ML" if self.for_core_ml else "Core AI"), self.prompt_lengths
        if self.quantize or self.dequantize:
            raise AFMError(
                f"--to {self.to} writes weights as the folder has them, packed or not. Convert to a folder "
                f"with -q or -d first, and that one to {framework}."
            )
        if self.dtype == "bfloat16":
            lacks = "Core ML has no" if self.for_core_ml else "Core AI bundles don't compute in"
            raise AFMError(f"{lacks} bfloat16; --dtype float16 and float32 are allowed.")
        if lengths is not None and (not lengths or min(lengths) < 1):
            raise AFMError(
                f"--prompt-lengths is {shown(list(lengths))}; it takes one number of tokens or more, each 1 or "
                "more."
            )
        for name in ("context", "adapter_rank"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise AFMError(f"--{name.replace('_', '-')} is {shown(value)}; it is 1 or more.")

    @property
    def mlx_dtype(self) -> mx.Dtype | None:
        return None if self.dtype is None else DTYPES[self.dtype]

    def check_source(self, source: Path, quantized: bool) -> None:
        """Raise `AFMError` unless a folder, `quantized` if it holds packed layers, can be converted."""
        if quantized and self.quantize:
            raise AFMError(
                f"{source} is quantized already; rounding it again would add one error to the other. "
                f"Convert the checkpoint that the folder was made from, or turn it into float weights first "
                f"(convert -d)."
            )
        if quantized and self.dtype is not None and not self.dequantize:
            raise AFMError(
                f"{source} is quantized; its weights have no other dtype. Leave --dtype out, or convert the "
                "checkpoint that the folder was made of."
            )
        if self.dequantize and not quantized:
            raise AFMError(
                f"{source} is not quantized: there is nothing to dequantize. Leave -d out."
            )

    @property
    def for_mlx_lm(self) -> bool:
        return self.to == "mlx-lm"

    @property
    def for_core_ml(self) -> bool:
        return self.to == "coreml"

    @property
    def for_core_ai(self) -> bool:
        return self.to == "coreai"

    @property
    def is_export(self) -> bool:
        """True if the target is another framework's, which holds weights as the folder has them."""
        return self.for_core_ml or self.for_core_ai

    @property
    def bits_to_mix(self) -> tuple[int, int]:
        """The two numbers of bits, the smaller first, of which each layer gets one under `target_bpw`.

        Raises:
            ConfigError: if `quant_predicate` names a recipe of mlx-lm, which has other bits.
        """
        if not isinstance(self.quant_predicate, str):
            return 2, 4
        if self.quant_predicate not in RECIPES:
            raise ConfigError(
                f"The recipe {shown(self.quant_predicate)} does not go with --target-bpw, which takes "
                f"{', '.join(RECIPES)}."
            )
        return RECIPES[self.quant_predicate]

    def rule(self, mode: str) -> QuantizationRule:
        """Return the rule of most layers, or under `target_bpw` the one with more bits.

        `mode` is the mode of the rule if there is no `q_mode`.
        """
        mode = self.q_mode or mode
        bits = self.q_bits or (2 if mode == "balanced" else 4)
        if self.target_bpw is not None:
            bits = self.bits_to_mix[1]
        return QuantizationRule(bits, mode, self.q_granularity, self.q_group_size)

    def embedding_rule(self, rule: QuantizationRule) -> QuantizationRule:
        """Return the rule of embeddings and heads: `rule` with the changes that the options name."""
        bits = self.q_embedding_bits or max(rule.bits, 4)
        if self.q_embedding_mode is None and self.q_embedding_granularity is None:
            return dataclasses.replace(rule, bits=bits)
        mode = self.q_embedding_mode or rule.mode
        return QuantizationRule(bits, mode, self.q_embedding_granularity)

    def afm_rules(self, config: ModelConfig) -> dict[str, QuantizationRule]:
        """Return the rule of every packed layer of an AFM model, by its path."""
        rule = self.rule("balanced")
        predicate = self.quant_predicate
        if isinstance(predicate, str):
            predicate = recipe(predicate, config, rule)
        # The model's arrays are lazy, and are never computed.
        rules = rule, self.embedding_rule(rule), predicate, self.vision_rule(config)
        return layer_rules(Model(config), *rules)

    def vision_rule(self, config: ModelConfig | None) -> QuantizationRule:
        """Return the rule of the linear layers of an image encoder and its adaptor.

        `config` is None for a model of mlx-lm.

        Raises:
            AFMError: if `q_vision_bits` is given and the model takes no images.
        """
        if self.q_vision_bits is None:
            return VISION_RULE
        if config is None or config.vision_config is None:
            raise AFMError(
                "--q-vision-bits is for models that take images, and this one reads text only."
            )
        return dataclasses.replace(VISION_RULE, bits=self.q_vision_bits)


def prompt_lengths(
    wanted: Sequence[int] | None, context: int, neural_engine: bool
) -> tuple[int, ...]:
    """Return the numbers of tokens that prompts of a package or a bundle have, ascending.

    Without `wanted`, these are the default ones that fit into a context of `context` tokens.

    Raises:
        AFMError: for a number above the context.
    """
    if wanted is None:
        usual = NEURAL_ENGINE_PROMPT_LENGTHS if neural_engine else PROMPT_LENGTHS
        return tuple(length for length in usual if length <= context) or (context,)
    if max(wanted) > context:
        raise AFMError(
            f"--prompt-lengths has {max(wanted)}; the model's context is {context} tokens, which is the most."
        )
    return tuple(sorted(set(wanted)))


def recipe(name: str, config: ModelConfig, rule: QuantizationRule) -> Predicate:
    """Return the predicate of the recipe `name`, which gives some layers more bits than `rule`.

    Such layers are the values (here the whole fused QKV) and the down projection in the first and the last
    eighth of the blocks, and in every third block between.

    Source: mlx-lm 0.32.2, `mixed_quant_predicate_builder` of `mlx_lm/convert.py`, after llama.cpp.

    Raises:
        ConfigError: for recipes of mlx-lm, which have 3 and 6 bits.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"The recipe {shown(name)} has layers of 3 or 6 bits, or is none; an AFM model takes 2, 4 and 8: "
            f"{', '.join(RECIPES)}."
        )
    low, high = RECIPES[name]
    eighth = config.num_layers // 8

    def choose(path: str, module: nn.Module) -> QuantizationRule | bool:
        if isinstance(module, nn.Embedding) or is_vision(path):
            return True
        _, kind, number, *_ = path.split(".")
        block = int(number) + (config.num_kv_layers if kind == "kv_reuse_layers" else 0)
        outer = block < eighth or block >= 7 * config.num_layers // 8
        more = outer or (block - eighth) % 3 == 2
        suffers = path.endswith((".qkv_proj", ".down_proj"))
        return dataclasses.replace(rule, bits=high if more and suffers else low)

    return choose
