"""`convert -q` and `-d`: what is written, what loads here, and what stock mlx-lm makes of it."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as stock_load_model
from mlx_lm.utils import quantize_model as stock_quantize_model

from afm_mlx.checkpoint.fingerprint import folder_fingerprint, model_fingerprint
from afm_mlx.checkpoint.weights import load_weights, stored_tensors
from afm_mlx.config import ModelConfig
from afm_mlx.converters.conversion_options import recipe
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, ConfigError
from afm_mlx.kernels import dispatch, unpack_codes
from afm_mlx.loading.load import load_model
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import layer_rules
from afm_mlx.quantization.rule import QuantizationRule
from tests.converters.conftest import SMALL, assert_same_weights
from tests.tools.compare import assert_close, assert_parity, assert_same, exact

# Inputs that every width and group size divides.
SHAPE = SMALL | {"hidden_dim_scale_factor": 3.0, "num_layers": 4}
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def float_folder(make_checkpoint, tmp_path):
    """A float model folder; without int8 keys and values, whose rounding could fall to either side."""

    def make(**options):
        checkpoint = make_checkpoint(**({"shape": SHAPE, "kv_quant": False} | options))
        return convert(checkpoint.folder, tmp_path / "float"), checkpoint

    return make


def tokens_of(rng):
    return mx.array(rng.integers(1, SHAPE["vocab_size"], (2, 9)))


MODES = [
    {"q_mode": "balanced"},
    {"q_mode": "balanced", "q_bits": 4, "q_granularity": "tensor"},
    {"q_mode": "balanced", "q_bits": 8, "q_group_size": 32, "q_embedding_bits": 8},
    {"q_mode": "affine", "q_bits": 4, "q_group_size": 32},
    {"q_mode": "affine", "q_bits": 2, "q_granularity": "row", "q_embedding_bits": 2},
    {"q_mode": "palette", "q_bits": 2, "q_embedding_bits": 4},
    {"q_mode": "palette", "q_bits": 4, "q_granularity": "tensor"},
]


@pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(map(str, o.values())))
def test_a_packed_model_is_its_dequantized_twin(float_folder, rng, tmp_path, options):
    source, checkpoint = float_folder()
    packed = convert(source, tmp_path / "packed", quantize=True, **options)
    direct = convert(checkpoint.folder, tmp_path / "direct", quantize=True, **options)
    assert_same_weights(packed, direct)
    whole = convert(packed, tmp_path / "whole", dequantize=True, dtype="float32")
    assert "quantization" not in json.loads((whole / "config.json").read_text())
    model, twin = load_model(packed), load_model(whole)
    assert isinstance(model.model.embedding, PackedEmbedding)
    assert isinstance(model.model.layers[1].mlp.up_proj, PackedLinear)
    matrix = twin.model.layers[1].mlp.up_proj.weight
    assert_same(model.model.layers[1].mlp.up_proj.dequantize(), matrix)
    tokens = tokens_of(rng)
    with dispatch.force("reference"):
        assert_close(model(tokens), twin(tokens), 1e-4)
    # Kernels may round activations to 16 bits in every layer.
    assert_close(model(tokens), twin(tokens), 2e-3)
    config = ModelConfig.from_file(packed / "config.json")
    assert folder_fingerprint(config, packed) == folder_fingerprint(config, direct)
    assert folder_fingerprint(config, packed) != folder_fingerprint(config, whole)
    arrays = load_weights(packed)
    assert model_fingerprint(config, arrays) == folder_fingerprint(config, packed)


def test_a_checkpoint_on_its_grid_keeps_every_code(make_checkpoint, edit_state, rng, tmp_path):
    import torch

    checkpoint = make_checkpoint(shape=SHAPE, kv_quant=False)
    wanted = {}

    def snap(state):
        for name, tensor in state.items():
            if tensor.dim() == 2:
                bits = 4 if "embedding" in name or name.startswith("output") else 2
                codes = rng.integers(0, 2**bits, tensor.shape)
                scale = rng.uniform(0.01, 0.05, (len(tensor), 1)).astype(np.float32)
                wanted[name] = codes
                state[name] = torch.from_numpy(
                    (codes - (2**bits - 1) / 2).astype(np.float32) * scale
                )
        if "output_transform.weight" in state:
            state["output_transform.weight"] = state["embedding.weight"]
            wanted.pop("output_transform.weight")

    edit_state(checkpoint, snap)
    whole = convert(checkpoint.folder, tmp_path / "whole")
    packed = convert(checkpoint.folder, tmp_path / "packed", quantize=True)
    weights = load_weights(packed)
    found = unpack_codes(weights["model.embedding.weight"], 4)
    assert_same(exact(found), wanted["embedding.weight"])
    found = {
        codes.tobytes()
        for name, array in weights.items()
        if array.dtype == mx.uint32 and "embedding" not in name
        for codes in [np.array(unpack_codes(array, 2)).astype(np.int64)]
    }
    body = {codes.tobytes() for name, codes in wanted.items() if name != "embedding.weight"}
    assert found == body
    again = convert(packed, tmp_path / "again", dequantize=True)
    assert_same_weights(whole, again)
    assert stored_bits(packed) == {"bits": 2, "mode": "balanced", "granularity": "row"}
    count = len(body) + 1
    assert f"Of {count} packed layers, {count} lay on a grid" in (packed / "README.md").read_text()


def stored_bits(folder):
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    return {
        key: quantization[key] for key in ("bits", "mode", "granularity") if key in quantization
    }


def test_affine_folders_are_mlx_lms_and_load_there(float_folder, rng, tmp_path, capsys):
    """Stock mlx-lm can't quantize its afm7, and loads such a folder when its fused layers have an entry."""
    source, _ = float_folder(kv_quant=True)
    options = {"quantize": True, "q_mode": "affine", "q_bits": 4, "q_group_size": 32}
    ours = convert(source, tmp_path / "ours", **options)
    stock = convert(source, tmp_path / "stock", to="mlx-lm", **options)
    assert_same_weights(ours, stock)
    model = load_model(source)
    stock_quantize_model(model, {}, 32, 4, mode="affine")
    wanted = model.model.layers[1].self_attn.qkv_proj
    stored = load_weights(ours)
    for part in ("weight", "scales", "biases"):
        got = stored[f"model.layers.1.self_attn.qkv_proj.{part}"]
        assert_same(got, wanted[part])
    for folder in (ours, stock):
        theirs, _ = stock_load_model(folder)
        check_parity(load_model(ours), theirs, rng)
    # What makes the difference:
    values = json.loads((ours / "config.json").read_text())
    assert values["quantization"]["model.layers.0.self_attn.qkv_proj"] == {
        "bits": 4,
        "group_size": 32,
    }
    for name in list(values["quantization"]):
        if name.endswith("qkv_proj"):
            del values["quantization"][name]
    (ours / "config.json").write_text(json.dumps(values))
    with pytest.raises(TypeError, match="to_quantized"):
        stock_load_model(ours)
    load_model(ours)


def check_parity(ours, theirs, rng):
    prompts = [mx.array(rng.integers(1, SHAPE["vocab_size"], (1, 7))) for _ in range(8)]
    with dispatch.force("reference"):
        assert_parity(ours, theirs, prompts, 1e-3, ties=0.05)


@pytest.mark.parametrize("options", MODES[:3], ids=lambda o: "-".join(map(str, o.values())))
def test_balanced_folders_become_mlxs_own(float_folder, rng, tmp_path, options):
    source, checkpoint = float_folder(kv_quant=True)
    packed = convert(source, tmp_path / "packed", quantize=True, **options)
    stock = convert(packed, tmp_path / "stock", to="mlx-lm")
    assert_same_weights(
        stock,
        convert(checkpoint.folder, tmp_path / "s2", to="mlx-lm", quantize=True, **options),
    )
    one, other = load_weights(packed), load_weights(stock)
    assert_same(one[f"{LAYER}.weight"], other[f"{LAYER}.weight"])
    theirs, _ = stock_load_model(stock)
    check_parity(load_model(packed), theirs, rng)
    check_parity(load_model(stock), theirs, rng)


def test_what_stock_mlx_lm_has_no_format_for(float_folder, tmp_path):
    source, _ = float_folder(kv_quant=True)
    palette = convert(source, tmp_path / "palette", quantize=True, q_mode="palette")
    with pytest.raises(AFMError, match="whose layers have no palettes"):
        convert(palette, tmp_path / "out", to="mlx-lm")
    convert(palette, tmp_path / "whole", to="mlx-lm", dequantize=True)
    stock_load_model(tmp_path / "whole")
    with pytest.raises(AFMError, match="scales that 16 inputs share"):
        convert(source, tmp_path / "out", to="mlx-lm", quantize=True, q_group_size=16)
    assert not (tmp_path / "out").exists()


def test_dtypes(float_folder, tmp_path):
    """Scales of balanced codes stay float32; MLX's own format has the folder's type throughout."""
    source, _ = float_folder()
    balanced = convert(source, tmp_path / "one", quantize=True, dtype="bfloat16")
    affine = convert(source, tmp_path / "two", quantize=True, q_mode="affine", dtype="bfloat16")
    for folder, scales in ((balanced, mx.float32), (affine, mx.bfloat16)):
        stored = stored_tensors(folder)
        assert stored[f"{LAYER}.scales"].dtype == scales
        assert stored["model.output_norm.weight"].dtype == mx.bfloat16
    wanted = mx.quantize(load_weights(source)[f"{LAYER}.weight"].astype(mx.bfloat16), 64, 4)
    for part, array in zip(("weight", "scales", "biases"), wanted, strict=True):
        assert_same(load_weights(affine)[f"{LAYER}.{part}"], array)
    card = (balanced / "README.md").read_text()
    assert "packed layers, 0 lay on a grid" in card
    assert "2-bit codes (balanced), what is not packed in bfloat16" in card


@pytest.mark.parametrize("options", MODES, ids=lambda o: "-".join(map(str, o.values())))
def test_floats_of_a_packed_folder_are_packed_without_loss(float_folder, tmp_path, options):
    source, _ = float_folder()
    # 255 levels do not all fit bfloat16's 8 digits.
    for dtype in ["float32"] if 8 in options.values() else ["float32", "bfloat16"]:
        out = tmp_path / dtype
        packed = convert(source, out / "packed", quantize=True, dtype=dtype, **options)
        whole = convert(packed, out / "whole", dequantize=True)
        again = convert(whole, out / "again", quantize=True, **options)
        before, after = load_weights(packed), load_weights(again)
        layers = [name for name, array in before.items() if array.dtype == mx.uint32]
        if dtype == "bfloat16":  # where two affine grids may hold the same numbers
            before = load_weights(whole)
            after = load_weights(convert(again, out / "numbers", dequantize=True))
        for name in layers:
            assert_same(after[name], before[name], name)
        card = (again / "README.md").read_text()
        assert f"Of {len(layers)} packed layers, {len(layers)} lay on a grid already" in card


def test_adapters_follow_a_quantized_base(make_checkpoint, tmp_path):
    from afm_mlx.adapters.adapter_folder import load_adapter

    checkpoint = make_checkpoint(shape=SHAPE, adapters={"a": {"rank": 4}})
    for source in (checkpoint.folder, convert(checkpoint.folder, tmp_path / "float")):
        out = convert(source, tmp_path / f"out-{source.name}", quantize=True)
        plan = load_adapter(out / "adapters" / "a")[1]
        config = ModelConfig.from_file(out / "config.json")
        assert plan.base_model_fingerprint == folder_fingerprint(config, out)


def test_recipes():
    config = ModelConfig(
        vocab_size=64,
        hidden_dim=64,
        num_layers=16,
        num_kv_reuse_layers=6,
        num_heads=4,
        num_kv_heads=2,
        rope_theta=10000.0,
        hidden_dim_scale_factor=3.0,
    )
    rule = QuantizationRule(2)
    rules = layer_rules(Model(config), rule, predicate=recipe("mixed_2_8", config, rule))
    assert rules["model.embedding"].bits == 4
    more = {path for path, rule in rules.items() if rule.bits == 8}
    blocks = {f"model.layers.{i}" for i in (0, 1, 4, 7)}
    blocks |= {f"model.kv_reuse_layers.{i}" for i in (0, 3, 4, 5)}  # blocks 10, 13, 14 and 15
    assert more == {f"{b}.mlp.down_proj" for b in blocks} | {
        f"{b}.self_attn.qkv_proj" for b in blocks if ".layers." in b
    }
    with pytest.raises(ConfigError, match="mixed_2_4, mixed_2_8, mixed_4_8"):
        recipe("mixed_2_6", config, rule)


def test_a_predicate_decides(float_folder, tmp_path):
    source, _ = float_folder()

    def only_mlps(path, module):
        return {"bits": 4, "mode": "affine", "group_size": 32} if ".mlp." in path else False

    folder = convert(source, tmp_path / "out", quantize=True, quant_predicate=only_mlps)
    stored = stored_tensors(folder)
    assert stored[f"{LAYER}.weight"].dtype == mx.uint32
    assert stored["model.embedding.weight"].dtype == mx.float32
    load_model(folder)


WISHES = [
    ({"q_bits": 4}, "--q-bits without -q"),
    ({"quantize": True, "dequantize": True}, "choose one"),
    ({"quantize": True, "q_bits": 3}, "bits is 3; allowed are 2, 4, 8"),
    ({"quantize": True, "q_mode": "mxfp4"}, "mode is 'mxfp4'"),
    ({"quantize": True, "q_embedding_bits": 6}, "bits is 6"),
    ({"quantize": True, "q_granularity": "row", "q_group_size": 64}, "only groups have a size"),
    ({"quantize": True, "q_group_size": 48}, r"model\..* has 64 inputs, which groups of 48"),
    ({"quantize": True, "quant_predicate": "mixed_2_6"}, "layers of 3 or 6 bits"),
    ({"quantize": True, "q_bits": 4, "quant_predicate": "mixed_2_4"}, "choose one"),
    ({"quantize": True, "quant_predicate": lambda path, module: False}, "No layer was chosen"),
    ({"quantize": True, "quant_predicate": lambda path, module: 3}, "the predicate returned 3"),
    (
        {"quantize": True, "quant_predicate": lambda p, m: {"bit": 3}},
        r"model\..*: unknown keys bit",
    ),
    ({"dequantize": True}, "nothing to dequantize"),
]


def test_wishes_that_cannot_be_met(float_folder, tmp_path):
    source, checkpoint = float_folder()
    for folder in (source, checkpoint.folder):
        for options, words in WISHES:
            with pytest.raises(AFMError, match=words):
                convert(folder, tmp_path / "out", **options)
            assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_packed(make_checkpoint, edit_state, tmp_path):
    checkpoint = make_checkpoint(shape=SHAPE, kv_quant=False)

    def spoil(state):
        state[next(name for name in state if "output_transform" in name)][3, 5] = float("nan")

    edit_state(checkpoint, spoil)
    with pytest.raises(AFMError, match=r"output_transform.*holds NaN or infinity"):
        convert(checkpoint.folder, tmp_path / "out", quantize=True)
    narrow = make_checkpoint(
        shape=SMALL | {"hidden_dim_scale_factor": 3.1}, kv_quant=False, folder="n"
    )
    with pytest.raises(
        AFMError, match=r"down_proj has 198 inputs, which can't be packed in 2 bits"
    ):
        convert(narrow.folder, tmp_path / "out", quantize=True)
    assert not (tmp_path / "out").exists()


def test_a_quantized_folder_is_not_quantized_again(float_folder, tmp_path):
    packed = convert(float_folder()[0], tmp_path / "packed", quantize=True)
    with pytest.raises(AFMError, match="quantized already"):
        convert(packed, tmp_path / "out", quantize=True)
    with pytest.raises(AFMError, match="no other dtype"):
        convert(packed, tmp_path / "out", dtype="float16")
    assert_same_weights(packed, convert(packed, tmp_path / "copy"))
    assert stored_bits(tmp_path / "copy") == stored_bits(packed)


def test_the_embedded_model_as_floats_is_packed_to_itself(tmp_path):
    whole = convert("afm-nano", tmp_path / "whole", dequantize=True)
    assert_same_weights(
        resolve_model("afm-nano"), convert(whole, tmp_path / "again", quantize=True)
    )
