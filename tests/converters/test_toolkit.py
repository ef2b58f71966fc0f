"""Toolkit checkpoints become folders that compute what tamm computes, in stock mlx-lm and here."""

import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.utils import load_model as stock_load_model
from tamm.adapters import LoRAModelAdapter, unset_active_adapter
from tamm.ao.arch_optimizers import KVQuantArchOptimizer
from tamm.models.afm_text import AFMTextV7

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.attach import attach_adapter, detach_adapter
from afm_mlx.adapters.lora import add_lora, start_lora
from afm_mlx.architecture import parameter_shapes
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.toolkit_config import read_toolkit_config
from afm_mlx.checkpoint.toolkit_keys import map_keys
from afm_mlx.checkpoint.weights import load_weights, stored_tensors
from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.loading.load import load_model
from tests.converters.conftest import DRAFT, SMALL
from tests.tools.compare import assert_parity, assert_same, error
from tests.tools.models import tamm_logits

ADAPTER = "base_adapter"


def check_parity(model, checkpoint, rng):
    """Compare logits with tamm's over several prompts, up to float32 sums in another order."""
    assert_parity(
        lambda tokens: model(mx.array(tokens)),
        lambda tokens: tamm_logits(checkpoint.model, tokens),
        rng.integers(1, checkpoint.shape["vocab_size"], (8, 1, 7)),
        ties=0.05 if checkpoint.config.arch_optimizers else None,
    )


def apply_lora(model, folder):
    """Turn a stock model's layers into mlx-lm's LoRA layers, since its own loader rejects fused ones."""
    tensors, config = load_adapter(folder)
    for name in {name[: name.rindex(".lora_")] for name in tensors}:
        parent, leaf = name.rsplit(".", 1)
        owner = model
        for part in parent.split("."):
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        linear = getattr(owner, leaf)
        if hasattr(linear, "to_lora"):
            layer = linear.to_lora(r=config.rank, scale=config.scale)
        else:
            from mlx_lm.tuner.lora import LoRALinear

            layer = LoRALinear.from_base(linear, r=config.rank, scale=config.scale)
        setattr(owner, leaf, layer)
    model.load_weights(list(tensors.items()), strict=False)
    return model


@pytest.mark.parametrize("reuse", [0, 1, 4])
def test_stock_mlx_lm_computes_what_tamm_computes(make_checkpoint, rng, tmp_path, reuse):
    checkpoint = make_checkpoint(shape=SMALL | {"num_kv_reuse_layers": reuse})
    folder = convert(checkpoint.folder, tmp_path / "out")
    model, _ = stock_load_model(folder)
    check_parity(model, checkpoint, rng)


@pytest.mark.parametrize(("shape", "kv_quant"), [(SMALL, True), (SMALL, False), (DRAFT, False)])
def test_this_package_computes_what_tamm_computes(make_checkpoint, rng, tmp_path, shape, kv_quant):
    checkpoint = make_checkpoint(shape=shape, kv_quant=kv_quant, name="draft-model")
    folder = convert(checkpoint.weights, tmp_path / "out")
    assert ModelConfig.from_file(folder / "config.json").kv_bits == (8 if kv_quant else None)
    check_parity(load_model(folder), checkpoint, rng)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 3), (7, None), (32, 16)])
def test_adapter_computes_what_tamm_computes(make_checkpoint, rng, tmp_path, rank, alpha):
    checkpoint = make_checkpoint(
        adapters={ADAPTER: {"rank": rank, "alpha": alpha, "dropout_p": 0.25}}
    )
    folder = convert(checkpoint.folder, tmp_path / "out")
    adapter = folder / "adapters" / ADAPTER
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert config["num_layers"] == SMALL["num_layers"]
    assert config["lora_parameters"] == {
        "rank": rank,
        "scale": 1.0 if alpha is None else alpha / rank,
        "dropout": 0.25,
        "keys": sorted(
            [f"mlp.{part}_proj" for part in ("down", "gate", "up")]
            + [f"self_attn.{part}_proj" for part in ("out", "q", "qkv")]
        ),
    }
    model_config = ModelConfig.from_file(folder / "config.json")
    assert config["base_model_fingerprint"] == folder_fingerprint(model_config, folder)

    adapted, _ = stock_load_model(folder)
    check_parity(apply_lora(adapted, adapter), checkpoint, rng)
    attached = attach_adapter(load_model(folder), adapter, base_folder=folder)
    check_parity(attached, checkpoint, rng)
    layers = add_lora(load_model(folder), rank, config["lora_parameters"]["scale"])
    start_lora(layers, *load_adapter(adapter), adapter)
    check_parity(layers, checkpoint, rng)
    unset_active_adapter(checkpoint.model, ADAPTER)
    check_parity(detach_adapter(attached), checkpoint, rng)
    plain, _ = stock_load_model(folder)
    check_parity(plain, checkpoint, rng)


def test_adapter_moves_the_logits(make_checkpoint, rng, tmp_path):
    """Else the parity of adapters would show nothing."""
    checkpoint = make_checkpoint(adapters={ADAPTER: {"rank": 8, "alpha": 8}})
    tokens = rng.integers(1, SMALL["vocab_size"], (1, 7))
    adapted = tamm_logits(checkpoint.model, tokens)
    unset_active_adapter(checkpoint.model, ADAPTER)
    assert error(adapted, tamm_logits(checkpoint.model, tokens)) > 0.1


def test_several_adapters_and_parts_left_out(make_checkpoint, rng, tmp_path):
    checkpoint = make_checkpoint(
        adapters={
            "first": {"rank": 4, "alpha": 4, "adapt_attention_keys": False},
            "second": {"rank": 8, "adapt_feed_forward_outputs": False},
        }
    )
    folder = convert(checkpoint.folder, tmp_path / "out")
    assert sorted(p.name for p in (folder / "adapters").iterdir()) == ["first", "second"]
    model, _ = stock_load_model(folder)
    check_parity(apply_lora(model, folder / "adapters" / "first"), checkpoint, rng)
    tensors, config = load_adapter(folder / "adapters" / "first")
    assert not mx.any(tensors["model.layers.0.self_attn.qkv_proj.lora_b.1"]).item()
    tensors, config = load_adapter(folder / "adapters" / "second")
    assert config.rank == 8
    assert "mlp.down_proj" not in config.keys
    assert not any("down_proj" in name for name in tensors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype(make_checkpoint, tmp_path, dtype):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    folder = convert(checkpoint.folder, tmp_path / "out", dtype=dtype)
    state = checkpoint.model.state_dict()
    weights = load_weights(folder)
    for name, array in weights.items():
        scale = name.endswith("_scale")
        assert array.dtype == (mx.float32 if scale else getattr(mx, dtype)), name
    wanted = state["embedding.weight"].to(getattr(torch, dtype)).float().numpy()
    found = np.array(weights["model.embedding.weight"].astype(mx.float32))
    assert_same(found, wanted)
    tensors, _ = load_adapter(folder / "adapters" / "a")
    assert {array.dtype for array in tensors.values()} == {getattr(mx, dtype)}


def test_scales_are_those_of_the_observers(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint()
    weights = load_weights(convert(checkpoint.folder, tmp_path / "out", dtype="float16"))
    for i, layer in enumerate(checkpoint.model.layers.segment_0):
        quantizer = layer.attention.kv_quantizer
        for kind in ("key", "value"):
            observer = getattr(quantizer, f"{kind}_quantizer").activation_post_process
            found = weights[f"model.layers.{i}.self_attn.quant_{kind}_scale"]
            assert found.shape == ()
            assert found.item() == observer.calculate_qparams()[0].item()


def test_every_key_of_the_3b_model_is_used_once():
    config = AFMTextV7.Config(
        adapters={"base_adapter": LoRAModelAdapter(rank=32, alpha=16)},
        arch_optimizers={"kv_quant": KVQuantArchOptimizer()},
        device="meta",
    )
    state = config.create_model().state_dict()
    assert len(state) == 1326
    keys = map_keys(state, "the 3B model")
    ranges = [key for pair in keys.kv_ranges.values() for key in pair.values()]
    adapter = list(keys.adapters["base_adapter"].values())
    used = [*keys.weights.values(), *ranges, *adapter, keys.tied_head]
    assert sorted(used) == sorted(state)
    assert len(adapter) == 700

    shapes = parameter_shapes(PRESETS["afm-3b"])
    assert sorted([*keys.weights, *keys.kv_ranges]) == sorted(shapes)
    for name, key in keys.weights.items():
        assert tuple(state[key].shape) == shapes[name]
    total = sum(np.prod(s, dtype=int) for n, s in shapes.items() if not n.endswith("_scale"))
    assert total == PRESETS["afm-3b"].num_parameters == 3_111_368_064


def test_a_prefix_and_plain_layers_are_understood(make_checkpoint, edit_state, rng, tmp_path):
    """The toolkit's export code accepts keys that start with `model.`."""
    checkpoint = make_checkpoint(kv_quant=False)
    edit_state(checkpoint, lambda state: {f"model.{k}": v for k, v in state.items()})
    check_parity(load_model(convert(checkpoint.folder, tmp_path / "out")), checkpoint, rng)


def test_a_head_is_not_needed_and_a_copy_of_the_embedding_is_accepted(
    make_checkpoint, edit_state, tmp_path
):
    checkpoint = make_checkpoint()
    edit_state(
        checkpoint,
        lambda s: s | {"output_transform.weight": s["output_transform.weight"].clone()},
    )
    with_head = convert(checkpoint.folder, tmp_path / "one")
    edit_state(checkpoint, lambda s: s.pop("output_transform.weight") is None)
    without = convert(checkpoint.folder, tmp_path / "two")
    assert (with_head / "model.safetensors").read_bytes() == (
        without / "model.safetensors"
    ).read_bytes()


def test_odd_storage_is_read_right(make_checkpoint, edit_state, rng, tmp_path):
    """Transposed and half-precision tensors, as other trainers save them."""
    checkpoint = make_checkpoint(kv_quant=False)

    def change(state):
        state["embedding.weight"] = state.pop("output_transform.weight").T.contiguous().T
        name = "layers.segment_0.layer_0.feed_forward.output_transform.weight"
        state[name] = state[name].to(torch.float64)
        state["output_norm.weight"] = state["output_norm.weight"].to(torch.bfloat16)

    edit_state(checkpoint, change)
    folder = convert(checkpoint.folder, tmp_path / "out")
    tensors = stored_tensors(folder)
    assert tensors["model.output_norm.weight"].dtype == mx.bfloat16
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == mx.float32
    found = np.array(load_weights(folder)["model.embedding.weight"])
    assert_same(found, checkpoint.model.embedding.weight)


def test_config_defaults_are_tamms(tmp_path):
    path = tmp_path / "base-model-config.json"
    values = {
        "arch_optimizers": {"kv": {"__tamm_type__": "ao:KVQuantArchOptimizer"}},
        "adapters": {"a": {"__tamm_type__": "adapters:LoRAModelAdapter", "alpha": 16}},
    }
    for start in ("models", "module_configs", "tamm:models"):
        path.write_text(json.dumps({"__tamm_type__": f"{start}:AFMTextV7Config", **values}))
        config = read_toolkit_config(path)
        assert config.model == PRESETS["afm-3b"]
        assert config.adapters["a"].rank == LoRAModelAdapter().rank
        assert config.adapters["a"].scale == 2.0
    defaults = AFMTextV7.Config()
    for field in ("vocab_size", "hidden_dim", "num_layers", "num_heads", "rope_theta"):
        assert getattr(config.model, field) == getattr(defaults, field)


def test_null_kv_heads_means_as_many_as_heads(make_checkpoint, rng, tmp_path):
    checkpoint = make_checkpoint(shape=SMALL | {"num_kv_heads": None})
    folder = convert(checkpoint.folder, tmp_path / "out")
    assert ModelConfig.from_file(folder / "config.json").num_kv_heads == SMALL["num_heads"]
    check_parity(stock_load_model(folder)[0], checkpoint, rng)
