"""`convert -q` and `-d`: what is written, what loads here, and what stock mlx-lm makes of it."""

import mlx.core as mx
import pytest
import torch
from mlx_lm.utils import load_model as stock_load_model

from afm_mlx.checkpoint.weights import load_weights, stored_tensors
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError
from afm_mlx.kernels import dispatch
from afm_mlx.loading.load import load_model
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from tests.converters.conftest import SMALL, assert_same_weights, config_of
from tests.tools.compare import assert_close, assert_parity, assert_same

# Inputs that every width and group size divides.
SHAPE = SMALL | {"hidden_dim_scale_factor": 3.0, "num_layers": 4}
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def float_folder(make_checkpoint, tmp_path):
    def make(kv_quant=False):
        checkpoint = make_checkpoint(shape=SHAPE, kv_quant=kv_quant)
        return convert(checkpoint.folder, tmp_path / "float"), checkpoint

    return make


MODES = [
    {"q_mode": "balanced"},
    {"q_mode": "balanced", "q_bits": 4, "q_granularity": "tensor"},
    {"q_mode": "balanced", "q_bits": 8, "q_group_size": 32, "q_embedding_bits": 8},
    {"q_mode": "affine", "q_bits": 4, "q_group_size": 32},
    {"q_mode": "affine", "q_bits": 2, "q_granularity": "row", "q_embedding_bits": 2},
    {"q_mode": "palette", "q_bits": 2, "q_embedding_bits": 4},
    {"q_mode": "palette", "q_bits": 4, "q_granularity": "tensor"},
]


def in_words(options):
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("options", MODES, ids=in_words)
def test_a_packed_model_is_its_dequantized_twin(float_folder, rng, tmp_path, options):
    # Without int8 keys and values, whose rounding could fall to either side.
    source, checkpoint = float_folder()
    packed = convert(source, tmp_path / "packed", quantize=True, **options)
    assert_same_weights(
        packed, convert(checkpoint.folder, tmp_path / "direct", quantize=True, **options)
    )
    copy = convert(packed, tmp_path / "copy")
    assert_same_weights(packed, copy)
    assert config_of(copy)["quantization"] == config_of(packed)["quantization"]
    whole = convert(packed, tmp_path / "whole", dequantize=True, dtype="float32")
    assert "quantization" not in config_of(whole)
    model, twin = load_model(packed), load_model(whole)
    assert isinstance(model.model.embedding, PackedEmbedding)
    layer = model.model.layers[1].mlp.up_proj
    assert isinstance(layer, PackedLinear)
    assert_same(layer.dequantize(), twin.model.layers[1].mlp.up_proj.weight)
    tokens = mx.array(rng.integers(1, SHAPE["vocab_size"], (2, 9)))
    with dispatch.force("reference"):
        assert_close(model(tokens), twin(tokens), 1e-4)
    again = convert(whole, tmp_path / "again", quantize=True, **options)
    before, after = load_weights(packed), load_weights(again)
    layers = [name for name, array in before.items() if array.dtype == mx.uint32]
    for name in layers:
        assert_same(after[name], before[name], name)
    card = (again / "README.md").read_text()
    assert f"Of {len(layers)} packed layers, {len(layers)} lay on a grid already" in card


# 255 levels do not all fit bfloat16's 8 digits.
@pytest.mark.parametrize("options", [m for m in MODES if m.get("q_bits") != 8], ids=in_words)
def test_bfloat16_of_a_packed_folder_is_packed_without_loss(float_folder, tmp_path, options):
    source, _ = float_folder()
    packed = convert(source, tmp_path / "packed", quantize=True, dtype="bfloat16", **options)
    whole = convert(packed, tmp_path / "whole", dequantize=True)
    again = convert(whole, tmp_path / "again", quantize=True, **options)
    assert " lay on a grid already and stay on it" in (again / "README.md").read_text()
    # The numbers, for two affine grids may hold the same ones.
    assert_same_weights(whole, convert(again, tmp_path / "numbers", dequantize=True))


def test_the_embedded_model_as_floats_is_packed_to_itself(tmp_path):
    whole = convert("afm-nano", tmp_path / "whole", dequantize=True)
    again = convert(whole, tmp_path / "again", quantize=True)
    assert_same_weights(resolve_model("afm-nano"), again)
    quantization = config_of(again)["quantization"]
    assert quantization["model.embedding"]["bits"] == 4
    common = {key: quantization[key] for key in ("bits", "mode", "granularity")}
    assert common == {"bits": 2, "mode": "balanced", "granularity": "row"}


def check_parity(ours, theirs, rng):
    prompts = [mx.array(rng.integers(1, SHAPE["vocab_size"], (1, 7))) for _ in range(8)]
    with dispatch.force("reference"):
        assert_parity(ours, theirs, prompts, 1e-3, ties=0.05)


@pytest.mark.parametrize("options", MODES[:4], ids=in_words)
def test_folders_for_stock_mlx_lm(float_folder, rng, tmp_path, options):
    """The same codes under MLX's own scales and biases, whatever the source."""
    source, checkpoint = float_folder(kv_quant=True)
    packed = convert(source, tmp_path / "packed", quantize=True, **options)
    stock = convert(packed, tmp_path / "stock", to="mlx-lm")
    direct = convert(checkpoint.folder, tmp_path / "s2", to="mlx-lm", quantize=True, **options)
    assert_same_weights(stock, direct)
    codes = load_weights(stock)[f"{LAYER}.weight"]
    assert_same(load_weights(packed)[f"{LAYER}.weight"], codes)
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


def test_numbers_that_cannot_be_packed_are_refused_by_name(make_checkpoint, edit_state, tmp_path):
    checkpoint = make_checkpoint(shape=SHAPE, kv_quant=False)
    edit_state(checkpoint, lambda s: s["embedding.weight"][3, 5].fill_(torch.nan))
    with pytest.raises(AFMError, match=r"embedding\.weight holds NaN or infinity"):
        convert(checkpoint.folder, tmp_path / "out", quantize=True)
    assert not (tmp_path / "out").exists()
