"""Training of mlx-lm's architectures: on a grid, recovery and task adapters, and adapters for stock mlx-lm."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.tuner.utils import load_adapters

from afm_mlx.converters.convert import convert
from afm_mlx.loading.load import load
from afm_mlx.quantization.quantize_model import dequantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.method import QATTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.train import train_lora, train_qat
from tests.tools.compare import assert_close, error
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

VOCAB = 64
RULES = {"rule": QuantizationRule(2), "embedding_rule": QuantizationRule(4)}


@pytest.fixture
def float_folder(request, rng, tmp_path):
    kind = request.param
    model = zoo_model(kind, VOCAB, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "float", kind, model, word_tokenizer_json(VOCAB))
    return tmp_path / "float"


@pytest.fixture
def recipe(rng, tmp_path):
    """A function (model folder, options) -> a recipe of two steps on a few lines of text."""
    lines = [" ".join(f"w{i}" for i in rng.integers(2, VOCAB, 20)) for _ in range(4)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    loop = TrainingOptions(iters=2, learning_rate=0.05, warmup_iters=0)
    return lambda model, **options: Recipe(data, loop, model=model, packing=False, **options)


@pytest.fixture
def tokens(rng):
    return mx.array(rng.integers(2, VOCAB, (2, 12)))


@pytest.mark.parametrize(
    "float_folder", ["gemma3_text", "phi3", "lfm2", "falcon_h1"], indirect=True
)
def test_grids_and_adapters_of_packed_models(float_folder, recipe, tokens, tmp_path):
    packed = tmp_path / "packed"
    train_qat(recipe(float_folder, teacher="self"), packed, QATTraining(**RULES))
    train_lora(recipe(packed, teacher=float_folder), tmp_path / "recovery", LoRATraining(rank=2))
    task = LoRATraining(initial_adapter=tmp_path / "recovery")
    train_lora(recipe(packed), tmp_path / "task", task)
    base = dequantize_model(load(packed)[0])
    plain = base(tokens)
    for name in ("recovery", "task"):
        adapted = load(packed, adapter_path=str(tmp_path / name))[0](tokens)
        assert error(adapted, plain) > 0.01
        base = load_adapters(dequantize_model(load(packed)[0]), str(tmp_path / name)).eval()
        assert_close(adapted, base(tokens), what=name)


@pytest.mark.parametrize("float_folder", ["qwen3", "gpt_oss", "qwen3_moe"], indirect=True)
def test_stock_mlx_lm_runs_adapters_of_its_own_folders(float_folder, recipe, tokens, tmp_path):
    folders = [float_folder]
    if "gpt_oss" not in (float_folder / "config.json").read_text():  # too narrow for its format
        folders.append(tmp_path / "quantized")
        convert(float_folder, folders[1], quantize=True, q_mode="affine", q_bits=4, q_group_size=32)
    for folder in folders:
        adapter = tmp_path / f"adapter-of-{folder.name}"
        train_lora(recipe(folder), adapter, LoRATraining(rank=2))
        stock, _ = mlx_lm.load(str(folder), adapter_path=str(adapter))
        assert_close(load(folder, adapter_path=str(adapter))[0](tokens), stock(tokens), 1e-5)
        assert error(stock(tokens), load(folder)[0](tokens)) > 0.01
