"""Tiny random models of mlx-lm's zoo, and their folders."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING

from afm_mlx.model.zoo_blocks import replace_blocks
from tests.tools.engines import SIZES, tiny

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
_OWN = {
    "baichuan_m1": {
        "sliding_window": 24,
        "sliding_window_layers": [0],
        "conv_window": 2,
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
    "falcon_h1": {
        "mamba_chunk_size": 16,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "lm_head_multiplier": 1.0,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 8,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 1,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 32,
        "global_head_dim": 16,
    },
    "gpt_oss": {
        "hidden_size": 64,  # mlx-lm packs routers in groups of 64
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 64,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "num_layers": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "routed_scaling_factor": 1.0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "attention_bias": False,
    },
    "mamba2": {
        "num_heads": 4,
        "expand": 1,
        "intermediate_size": 32,
        "state_size": 8,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 100.0],
        "time_step_rank": "auto",
    },
    "qwen3_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}
"""What architectures have besides or instead: windows that prompts of tests cross."""


def zoo_config(model_type: str, vocab_size: int) -> dict[str, Any]:
    if model_type == "gemma4":  # the text model of one that also sees
        text = {**zoo_config("gemma4_text", vocab_size), "vocab_size_per_layer_input": vocab_size}
        return {"model_type": model_type, "vocab_size": vocab_size, "text_config": text}
    sizes = {"model_type": model_type, "vocab_size": vocab_size, "head_dim": 8, **_SIZES}
    return sizes | _OWN.get(model_type, {})


def zoo_model(model_type: str, vocab_size: int, seed: int, **changes: Any) -> Any:
    """A tiny random Llama, Qwen3, ... of mlx-lm; `changes` are values of its config."""
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    values = zoo_config(model_type, vocab_size) | changes
    model = module.Model(module.ModelArgs.from_dict(values))
    weights = []
    for name, weight in tree_flatten(model.parameters()):
        if weight.ndim > 1:  # sharper than mlx-lm draws them, and none of them zero
            weight = weight * 4 if weight.any().item() else mx.random.normal(weight.shape)
        weights.append((name, weight))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model.eval()


def write_zoo_folder(
    folder: Path, model_type: str, model: Any, tokenizer_json: dict, **changes: Any
) -> None:
    folder.mkdir(parents=True)
    values = zoo_config(model_type, model.args.vocab_size) | changes
    (folder / "config.json").write_text(json.dumps(values))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    write_tokenizer_json(folder, tokenizer_json)


def write_tokenizer_json(folder: Path, tokenizer_json: dict) -> None:
    """Write a tokenizer whose end of text is `w1`."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"})
    )


def word_tokenizer_json(vocab_size: int) -> dict:
    """A `tokenizer.json` of words w0, w1, ... split at spaces."""
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {f"w{i}": i for i in range(vocab_size)},
            "unk_token": "w0",
        },
    }


def zoo_tokenizer(byte_level: bool) -> Any:
    """A small tokenizer of transformers in mlx-lm's wrapper: of bytes, or of pieces with a prefix and bytes."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(
        models.BPE(byte_fallback=not byte_level, unk_token=None if byte_level else "<unk>")
    )
    special = ["<unk>", "<end>"]
    if byte_level:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=special, initial_alphabet=["\n"]
        )
        special += names
    made.train_from_iterator(["some words, and some more words\n" * 9], trainer)
    if not byte_level:
        made.add_tokens(names)
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<unk>")
    )


def small_model(rng, kind):
    """A model of a kind: "float", "int8" (keys and values) and "2-bit" are AFM's, others mlx-lm's.

    " blocks" behind an architecture's name replaces its blocks by ours.
    """
    if kind in ("float", "int8", "2-bit"):
        return tiny(rng, kind.replace("int8", "float"), 8 if kind == "int8" else None)
    model = zoo_model(kind.removesuffix(" blocks"), SIZES["vocab_size"], int(rng.integers(2**31)))
    if kind.endswith("blocks"):
        replace_blocks(model)
    return model
