"""Tiny models for tests: random architectures, the same weights in tamm, in mlx-lm and in ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.config import ModelConfig
from afm_mlx.model.model import Model


def random_config(rng: np.random.Generator, **fixed: Any) -> ModelConfig:
    """An architecture with odd sizes: any split, zero reuse blocks included."""
    kv_heads = int(rng.choice([1, 2, 3]))
    heads = kv_heads * int(rng.choice([1, 2, 4]))
    layers = int(rng.integers(1, 7))
    values = {
        "vocab_size": int(rng.integers(17, 200)),
        "hidden_dim": heads * 2 * int(rng.integers(2, 7)),
        "num_layers": layers,
        "num_kv_reuse_layers": int(rng.integers(0, layers)),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "rope_theta": float(rng.choice([100.0, 10000.0, 500000.0])),
        "hidden_dim_scale_factor": float(rng.choice([2.0, 3.0, 3.25])),
        "context_length": 512,
    }
    return ModelConfig(**(values | fixed))


def tamm_model(config: ModelConfig, rng: np.random.Generator) -> Any:
    """A `tamm` model (Apple's PyTorch implementation) with random weights, fp32, in eval mode.

    Weights are large enough for peaked attention; norms are random; int8 ranges fit its keys and values.
    """
    import torch
    from tamm.ao.arch_optimizers import KVQuantArchOptimizer
    from tamm.models.afm_text.afm_text_v7 import AFMTextV7

    sizes = dataclasses.asdict(config)
    for ours in ("rms_norm_eps", "kv_bits", "context_length", "vision_config"):
        del sizes[ours]
    optimizers = {"kv": KVQuantArchOptimizer()} if config.kv_bits else {}
    model = AFMTextV7.Config(**sizes, arch_optimizers=optimizers).create_model()
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * noise)
            else:
                scale = 1.0 if name == "embedding.weight" else 1.5
                parameter.copy_(scale * noise / parameter.shape[-1] ** 0.5)
        model.train()  # observers follow keys and values in training only
        tokens = torch.randint(1, config.vocab_size, (4, 32), generator=generator)
        model(tokens)
    return model.eval()


def tamm_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """(B, L) tokens to (B, L, vocab_size) float32."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(tokens, dtype=np.int64))).logits.numpy()


def tamm_3b_state() -> dict[str, Any]:
    """The state dict of tamm's 3B model with its adapter: keys and shapes, without memory for the numbers."""
    from tamm.adapters import LoRAModelAdapter
    from tamm.ao.arch_optimizers import KVQuantArchOptimizer
    from tamm.models.afm_text import AFMTextV7

    config = AFMTextV7.Config(
        adapters={"base_adapter": LoRAModelAdapter(rank=32, alpha=16)},
        arch_optimizers={"kv_quant": KVQuantArchOptimizer()},
        device="meta",
    )
    return config.create_model().state_dict()


def twin_of_tamm(model: Any, config: ModelConfig) -> Model:
    """Our model with the weights of a tamm model, renamed by hand and not by the converter."""
    state = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    weights = {"model.embedding.weight": state["embedding.weight"]}
    weights["model.output_norm.weight"] = state["output_norm.weight"]
    for i in range(config.num_layers):
        j = i - config.num_kv_layers
        ours = f"model.layers.{i}" if j < 0 else f"model.kv_reuse_layers.{j}"
        theirs = f"layers.segment_0.layer_{i}" if j < 0 else f"layers.segment_1.layer_{j}"
        if config.num_kv_reuse_layers == 0:
            theirs = f"layers.layer_{i}"
        names = {
            "input_layernorm": "attention.norm",
            "self_attn.out_proj": "attention.output_transform",
            "post_attention_layernorm": "feed_forward.norm",
            "mlp.gate_proj": "feed_forward.hidden_transform.linear_0",
            "mlp.up_proj": "feed_forward.hidden_transform.linear_1",
            "mlp.down_proj": "feed_forward.output_transform",
        }
        if j < 0:
            names["self_attn.qkv_proj"] = "attention.qkv_transform.fused_linear"
            names["self_attn.q_norm"] = "attention.qk_norm.query_norm"
            names["self_attn.k_norm"] = "attention.qk_norm.key_norm"
        else:
            names["self_attn.q_proj"] = "attention.q_transform"
            names["self_attn.q_norm"] = "attention.q_norm.query_norm"
        for to, source in names.items():
            weights[f"{ours}.{to}.weight"] = state[f"{theirs}.{source}.weight"]
        if j < 0 and config.kv_bits:
            for part in ("key", "value"):
                quantizer = f"{theirs}.attention.kv_quantizer.{part}_quantizer"
                low, high = state[f"{quantizer}.activation_post_process.range"]
                scale = np.float32(max(low / -128, high / 127))
                weights[f"{ours}.self_attn.quant_{part}_scale"] = scale
    twin = Model(config)
    twin.load_weights([(name, mx.array(array)) for name, array in weights.items()])
    mx.eval(twin.parameters())
    return twin.eval()


def random_model(config: ModelConfig, rng: np.random.Generator) -> Model:
    """Our model with random weights that need no other library."""
    mx.random.seed(int(rng.integers(2**31)))
    model = Model(config)
    weights = []
    for name, array in tree_flatten(model.parameters()):
        if "quant_" in name:
            array = mx.array(0.03 if "key" in name else 0.02)
        elif array.ndim == 1:
            array = 1 + 0.3 * mx.random.normal(array.shape)
        else:
            array = 1.5 * mx.random.normal(array.shape) / array.shape[-1] ** 0.5
        weights.append((name, array))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model.eval()


def mlx_lm_twin(model: Model) -> Any:
    """mlx-lm's `afm7` with the weights of ours."""
    from mlx_lm.models import afm7

    sizes = {
        k: v for k, v in model.args.to_dict().items() if k not in ("kv_bits", "context_length")
    }
    twin = afm7.Model(afm7.ModelArgs(**sizes))
    twin.load_weights(tree_flatten(model.parameters()))
    return twin.eval()


class WordTokenizer:
    """A tokenizer without files: token i is the word `wi`; the last id ends a text, or the ids of `ends`."""

    bos_token = None

    def __init__(self, vocab_size: int, ends: Iterable[int] | None = None):
        self.vocab_size = vocab_size
        self.eos_token_ids = {vocab_size - 1} if ends is None else set(ends)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"w{token} " for token in tokens)

    @property
    def detokenizer(self) -> Any:
        return _WordDetokenizer(self)


class _WordDetokenizer:
    def __init__(self, tokenizer: WordTokenizer):
        self._tokenizer = tokenizer
        self._segment = ""

    def add_token(self, token: int) -> None:
        self._segment += self._tokenizer.decode([token])

    def finalize(self) -> None: ...

    @property
    def last_segment(self) -> str:
        segment, self._segment = self._segment, ""
        return segment
