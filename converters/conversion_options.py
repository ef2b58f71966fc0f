"""What `convert` is asked for, and the rules that layers are packed by then."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from afm_mlx.config import ModelConfig
from afm_mlx.converters.quantize import RECIPES, layer_rules, recipe
from afm_mlx.errors import AFMError, ConfigError, shown
from afm_mlx.quantization.quantize import Predicate
from afm_mlx.quantization.rule import QuantizationRule

DTYPES: dict[str, mx.Dtype] = {
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
}
TARGETS = ("afm-mlx", "mlx-lm")


@dataclass(frozen=True)
class Wishes:
    """How a checkpoint is to be converted. Names are those of the flags, and mlx-lm's.

    Args:
        dtype: "float16", "bfloat16" or "float32" for weights and adapters; None keeps the source's.
        to: "afm-mlx", or "mlx-lm" for a folder that stock mlx-lm reads and that holds nothing else.
        quantize: pack linear layers and embeddings. The options below say how, and are refused without it.
        q_bits: 2, 4 or 8; 2 for balanced weights by default, else 4.
        q_mode: "balanced", "affine" or "palette"; balanced for AFM models by default, affine for others,
            which take mlx-lm's own modes too.
        q_group_size: inputs that share a scale, or rows that share a palette's table.
        q_granularity: "tensor", "row" or "group"; see `QuantizationRule`.
        q_embedding_bits: of embeddings and heads; `q_bits`, and 4 at least, by default.
        q_embedding_mode, q_embedding_granularity: of embeddings and heads; those of the other layers by
            default.
        quant_predicate: a recipe's name (`converters.quantize.RECIPES`; mlx-lm's for other
            architectures), or a function of path and module, see `quantize_model`.
        target_bpw: bits that a weight of the folder takes on average, at most, scales and tables included.
            Layers get 2 or 4 bits, or what the recipe's name says, by what they suffer on text; see
            `sensitivity`. The model is read into memory for that, and the folder gets a `sensitivity.json`.
        data: the text: a `.jsonl` or `.txt` file, or a folder with `train.jsonl`; the model folder's
            `heldout.jsonl` by default.
        dequantize: write packed layers as the numbers that they stand for.
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
    quant_predicate: str | Predicate | None = None
    target_bpw: float | None = None
    data: str | Path | None = None
    dequantize: bool = False

    def check(self) -> None:
        """Raise `AFMError` on options that contradict each other or would do nothing."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise AFMError(f"dtype is {shown(self.dtype)}; allowed are {', '.join(DTYPES)}.")
        if self.to not in TARGETS:
            raise AFMError(
                f"The target format is {shown(self.to)}; allowed are {', '.join(TARGETS)}."
            )
        self._check_quantization()

    def _check_quantization(self) -> None:
        if self.quantize and self.dequantize:
            raise AFMError("Quantizing and dequantizing are both asked for; choose one.")
        given = [name for name in _OF_QUANTIZATION if getattr(self, name) is not None]
        if given and not self.quantize:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise AFMError(
                f"{names} without -q (quantize) would do nothing. Add -q, or leave it out."
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

    @property
    def mlx_dtype(self) -> mx.Dtype | None:
        """`dtype` as MLX has it."""
        return None if self.dtype is None else DTYPES[self.dtype]

    @property
    def stock(self) -> bool:
        """Whether the folder is for stock mlx-lm."""
        return self.to == "mlx-lm"

    @property
    def bits_to_mix(self) -> tuple[int, int]:
        """Fewer and more bits, between which `target_bpw` chooses.

        Raises:
            ConfigError: for a recipe of mlx-lm's own, which has other bits.
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
        """The rule of most layers, with a mode for when none was asked for; of the better ones in a mix."""
        mode = self.q_mode or mode
        bits = self.q_bits or (2 if mode == "balanced" else 4)
        if self.target_bpw is not None:
            bits = self.bits_to_mix[1]
        return QuantizationRule(bits, mode, self.q_granularity, self.q_group_size)

    def embedding_rule(self, rule: QuantizationRule) -> QuantizationRule:
        """That of embeddings and heads: `rule` but for what was asked for."""
        bits = self.q_embedding_bits or max(rule.bits, 4)
        if self.q_embedding_mode is None and self.q_embedding_granularity is None:
            return dataclasses.replace(rule, bits=bits)
        mode = self.q_embedding_mode or rule.mode
        return QuantizationRule(bits, mode, self.q_embedding_granularity)

    def afm_rules(self, config: ModelConfig) -> dict[str, QuantizationRule]:
        """The rules of an AFM model's layers, by their paths."""
        rule = self.rule("balanced")
        predicate = self.quant_predicate
        if isinstance(predicate, str):
            predicate = recipe(predicate, config, rule)
        return layer_rules(config, rule, self.embedding_rule(rule), predicate)


_OF_QUANTIZATION = (
    *(field.name for field in dataclasses.fields(Wishes) if field.name.startswith("q_")),
    *("quant_predicate", "target_bpw", "data"),
)
