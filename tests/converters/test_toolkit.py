"""Toolkit checkpoints become folders that compute what tamm computes; damaged or foreign ones are refused."""

import json

import mlx.core as mx
import pytest
import torch
from mlx_lm.utils import load_model as stock_load_model
from tamm.adapters import unset_active_adapter

from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.weights import load_weights, stored_tensors
from afm_mlx.config import ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, CheckpointError, TokenizerError
from afm_mlx.loading.load import load_model
from tests.converters.conftest import DRAFT, SMALL, listing
from tests.tools.cases import each
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


@pytest.mark.parametrize(
    ("shape", "kv_quant"),
    [
        (SMALL | {"num_kv_reuse_layers": 0}, True),
        (SMALL | {"num_kv_reuse_layers": 1, "num_kv_heads": None}, True),
        (SMALL | {"num_kv_reuse_layers": 4}, True),
        (SMALL, False),
        (DRAFT, False),
    ],
)
def test_mlx_lm_and_this_package_compute_what_tamm_computes(
    make_checkpoint, rng, tmp_path, shape, kv_quant
):
    checkpoint = make_checkpoint(shape=shape, kv_quant=kv_quant, name="draft-model")
    folder = convert(checkpoint.weights, tmp_path / "out")
    model = load_model(folder)
    assert model.args.kv_bits == (8 if kv_quant else None)
    assert model.args.num_kv_heads == (shape["num_kv_heads"] or shape["num_heads"])
    check_parity(model, checkpoint, rng)
    if kv_quant:  # mlx-lm always rounds keys and values
        check_parity(stock_load_model(folder)[0], checkpoint, rng)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 3), (7, None), (32, 16)])
def test_an_adapter_computes_what_tamm_computes(make_checkpoint, rng, tmp_path, rank, alpha):
    adapters = {ADAPTER: {"rank": rank, "alpha": alpha, "dropout_p": 0.25}}
    checkpoint = make_checkpoint(adapters=adapters)
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

    attached = attach_adapter(load_model(folder), adapter, base_folder=folder)
    check_parity(attached, checkpoint, rng)
    tokens = rng.integers(1, SMALL["vocab_size"], (1, 7))
    adapted = tamm_logits(checkpoint.model, tokens)
    unset_active_adapter(checkpoint.model, ADAPTER)
    # Else the parity of adapters would show nothing.
    assert error(adapted, tamm_logits(checkpoint.model, tokens)) > 0.05
    check_parity(detach_adapter(attached), checkpoint, rng)


def test_several_adapters_and_parts_left_out(make_checkpoint, rng, tmp_path):
    checkpoint = make_checkpoint(
        adapters={
            "first": {"rank": 4, "alpha": 4, "adapt_attention_keys": False},
            "second": {"rank": 8, "adapt_feed_forward_outputs": False},
        }
    )
    folder = convert(checkpoint.folder, tmp_path / "out")
    assert sorted(p.name for p in (folder / "adapters").iterdir()) == ["first", "second"]
    model = attach_adapter(load_model(folder), folder / "adapters" / "first", base_folder=folder)
    check_parity(model, checkpoint, rng)
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
    weights = load_weights(folder)
    for name, array in weights.items():
        scale = name.endswith("_scale")
        assert array.dtype == (mx.float32 if scale else getattr(mx, dtype)), name
    wanted = checkpoint.model.state_dict()["embedding.weight"].to(getattr(torch, dtype)).float()
    assert_same(weights["model.embedding.weight"].astype(mx.float32), wanted)
    tensors, _ = load_adapter(folder / "adapters" / "a")
    assert {array.dtype for array in tensors.values()} == {getattr(mx, dtype)}


def test_other_ways_to_save_a_model_are_read_right(make_checkpoint, edit_state, rng, tmp_path):
    """Keys with the prefix that the toolkit's export code takes, transposed storage, other types, no head."""
    checkpoint = make_checkpoint(kv_quant=False)

    def change(state):
        state["embedding.weight"] = state.pop("output_transform.weight").T.contiguous().T
        name = "layers.segment_0.layer_0.feed_forward.output_transform.weight"
        state[name] = state[name].to(torch.float64)
        state["output_norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
        return {f"model.{name}": tensor for name, tensor in state.items()}

    edit_state(checkpoint, change)
    with torch.no_grad():
        checkpoint.model.output_norm.weight.fill_(1)
    folder = convert(checkpoint.folder, tmp_path / "out")
    tensors = stored_tensors(folder)
    assert tensors["model.output_norm.weight"].dtype == mx.bfloat16
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == mx.float32
    check_parity(load_model(folder), checkpoint, rng)


def test_a_head_that_is_a_copy_of_the_embedding_is_accepted(make_checkpoint, edit_state, tmp_path):
    checkpoint = make_checkpoint()
    head = "output_transform.weight"
    edit_state(checkpoint, lambda state: state | {head: state[head].clone()})
    folder = convert(checkpoint.folder, tmp_path / "out")
    assert not any("output_transform" in name for name in stored_tensors(folder))


# -- what is refused


@pytest.fixture
def refuses(tmp_path):
    """A function that converts and expects an error with all of `words`, and no trace on the disk."""

    def check(source, *words, kind=CheckpointError, **options):
        before = listing(tmp_path)
        with pytest.raises(kind) as caught:
            convert(source, tmp_path / "out", **options)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message
        assert listing(tmp_path) == before

    return check


def change_config(checkpoint, **values):
    content = json.loads(checkpoint.config_path.read_text()) | values
    checkpoint.config_path.write_text(json.dumps(content))


NORM, HEAD = "output_norm.weight", "output_transform.weight"
RANGE = "layers.segment_0.layer_1.attention.kv_quantizer.value_quantizer.activation_post_process"


def other_head(state):
    state[HEAD] = state[HEAD].clone()
    state[HEAD][-1, -1] += 1


def with_range(*values):
    return lambda state: state.update({f"{RANGE}.range": torch.tensor(values)})


@each(
    ("change", "words"),
    [
        (lambda s: s.update(bias=torch.zeros(2)), ["1 unknown", "bias"]),
        (lambda s: s.pop(NORM), ["missing", f"model.{NORM}"]),
        (lambda s: s.update({NORM: torch.zeros(3)}), [f"{NORM} is [3] and must be [64]"]),
        (lambda s: s.update({NORM: torch.ones(64, dtype=torch.int32)}), [NORM, "int32"]),
        (other_head, [HEAD, "own head"]),
        (lambda s: s.update({HEAD: torch.zeros(2, 2)}), [f"{HEAD} [2, 2]"]),
        (lambda s: s["embedding.weight"][-1, 3].fill_(torch.nan), ["embedding", "NaN or"]),
        *(
            (with_range(*pair), [f"{RANGE}.range", "no scale"])
            for pair in ([torch.inf, -torch.inf], [0, torch.nan], [1.0, -1.0], [0.0, 0.0])
        ),
        (with_range(0.0, 0.0, 0.0), [f"{RANGE}.range", "must be [2]"]),
        (lambda s: s.pop(f"{RANGE}.range"), [f"{RANGE}.num_samples stands alone"]),
        (lambda s: s[f"{RANGE}.num_samples"].fill_(0), ["has not observed any data"]),
    ],
)
def test_tensors_of_another_model(make_checkpoint, edit_state, refuses, change, words):
    checkpoint = make_checkpoint()
    edit_state(checkpoint, change)
    refuses(checkpoint.folder, "base-model.pt", *words)


def test_a_config_of_another_model(make_checkpoint, refuses):
    checkpoint = make_checkpoint()
    refuses(checkpoint.folder, "nothing to dequantize", kind=AFMError, dequantize=True)
    change_config(checkpoint, num_layers=4)
    refuses(checkpoint.folder, "unexpected", "model.layers.2.")
    change_config(checkpoint, num_layers=5, arch_optimizers=None)
    refuses(checkpoint.folder, "KVQuantArchOptimizer")
    floats = make_checkpoint(folder="floats", kv_quant=False)
    change_config(floats, arch_optimizers={"kv": {"__tamm_type__": "ao:KVQuantArchOptimizer"}})
    refuses(floats.folder, "missing", "quant_key_scale")


def test_adapters_that_do_not_fit(make_checkpoint, refuses, edit_state):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4, "alpha": 2}})
    lora = {"__tamm_type__": "adapters:LoRAModelAdapter"}
    for adapters, *words in (
        ({"a": lora | {"rank": 8}}, "wrong shape", "must be [64, 8]"),
        (None, "not in the model's config"),
        ({"a": {"__tamm_type__": "adapters:Other"}}, "adapters:Other"),
    ):
        change_config(checkpoint, adapters=adapters)
        refuses(checkpoint.folder, "adapter 'a'", *words)
    change_config(checkpoint, adapters={"a": lora | {"rank": 4}})
    half = "layers.segment_1.layer_0.attention.q_transform.adapters.a.b_transpose"
    edit_state(checkpoint, lambda s: s.pop(half))
    refuses(checkpoint.folder, "missing", "model.kv_reuse_layers.0.self_attn.q_proj.lora_b")
    state = torch.load(checkpoint.weights, weights_only=True)
    for name in ("x/../../../y", "/etc/y", "-rf", "a b"):  # an id names a folder
        renamed = {k.replace("adapters.a.", f"adapters.{name}."): v for k, v in state.items()}
        torch.save(renamed, checkpoint.weights)
        refuses(checkpoint.folder, "base-model.pt", name)
    edit_state(checkpoint, lambda s: {k: v for k, v in state.items() if "adapters" in k})
    refuses(checkpoint.folder, "no base model")


def test_a_tokenizer_that_does_not_fit_is_missing_or_none(make_checkpoint, refuses):
    checkpoint = make_checkpoint(shape=DRAFT | {"vocab_size": 200}, kv_quant=False)
    refuses(checkpoint.folder, "tokenizer.model", "200 rows")
    (checkpoint.folder / "tokenizer.model").write_bytes(b"not a model")
    refuses(checkpoint.folder, "tokenizer.model", kind=TokenizerError)
    (checkpoint.folder / "tokenizer.model").unlink()
    refuses(checkpoint.folder, "tokenizer.model is missing")
