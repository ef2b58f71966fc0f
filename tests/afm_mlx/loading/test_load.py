"""The embedded model: golden tokens, and what its card says."""

import copy
import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_stock_model

import afm_mlx
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import PRESETS
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import generate
from afm_mlx.engine.request import Request
from afm_mlx.kernels import dispatch
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure.evaluation import evaluate, load_examples
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import dequantize_model

FOLDER = resolve_model("afm-nano")
GOLDEN = json.loads((FOLDER / "golden.json").read_text())

on_cpu = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu),
    reason="golden tokens are those of float32; a GPU runs in bfloat16",
)


@pytest.fixture(scope="module")
def nano():
    return afm_mlx.load()


def test_it_is_what_the_preset_says_and_small(nano):
    model, tokenizer = nano
    assert model.args == PRESETS["afm-nano"]
    assert tokenizer.vocab_size == model.args.vocab_size
    assert sum(file.stat().st_size for file in Path(FOLDER).iterdir()) < 8e6


def test_its_weights_are_packed(nano):
    model, _ = nano
    packed = {path: m for path, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert len(packed) == 5 * len(model.layers)  # queries (keys, values), out, gate, up, down
    assert {(layer.bits, layer.mode) for layer in packed.values()} == {(2, "balanced")}
    assert isinstance(model.model.embedding, PackedEmbedding)
    assert model.model.embedding.bits == 4


@on_cpu
def test_a_folder_that_mlx_quantized_loads(nano, tmp_path):
    """(b) mlx-lm can't load an AFM folder in its own quantized format."""
    model, tokenizer = nano
    stock = dequantize_model(copy.deepcopy(model))
    nn.quantize(stock, group_size=64, bits=4)
    folder = tmp_path / "stock"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("model.safetensors*"))
    save_weights(folder, dict(tree_flatten(stock.parameters())))
    config = json.loads((FOLDER / "config.json").read_text())
    quantization = {"group_size": 64, "bits": 4, "mode": "affine"}
    config |= {"quantization": quantization, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))

    loaded, _ = afm_mlx.load(folder)
    assert loaded.model.layers[0].self_attn.qkv_proj.bits == 4
    tokens = mx.array([tokenizer.encode("first second third")])
    with dispatch.force("reference"):
        error = mx.abs(loaded(tokens) - stock(tokens)).max()
    assert error.item() < 1e-3 * mx.abs(stock(tokens)).max().item()
    with pytest.raises(TypeError, match="to_quantized"):
        load_stock_model(folder)


@on_cpu
@pytest.mark.parametrize("index", range(len(GOLDEN)))
def test_golden_tokens(nano, index):
    """The tokens that tamm gives with the same, dequantized weights."""
    model, tokenizer = nano
    golden = GOLDEN[index]
    responses = afm_mlx.stream_generate(
        model, tokenizer, golden["prompt"], max_tokens=len(golden["tokens"])
    )
    tokens = [response.token for response in responses]
    assert tokens == golden["tokens"][: len(tokens)]
    assert len(tokens) > 5


@on_cpu
def test_golden_tokens_in_one_batch(nano):
    model, tokenizer = nano
    engine = Engine(model, tokenizer)
    rows = {engine.submit(Request(golden["prompt"], max_tokens=32)): golden for golden in GOLDEN}
    tokens = {row: [] for row in rows}
    for response in engine.run():
        tokens[response.row].append(response.token)
    for row, golden in rows.items():
        assert tokens[row] == golden["tokens"][: len(tokens[row])]


def test_streamed_text_has_newlines_and_no_markers(nano):
    """(k) mlx-lm streams `<n>` where the text has a newline."""
    model, tokenizer = nano
    ids = tokenizer.encode("first\nsecond")
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == "first\nsecond"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True
    )
    text = generate(model, tokenizer, prompt, max_tokens=40)
    assert text
    assert "<" not in text


def test_a_sample_of_every_task(nano):
    """A handful per task, so that a broken model or tokenizer can't pass; the card has the whole."""
    model, tokenizer = nano
    result = evaluate(model, tokenizer, load_examples(FOLDER / "evaluation.jsonl", limit=4))
    assert len(result.tasks) == 7
    assert result.overall.accuracy > 0.75


@pytest.mark.slow
def test_the_whole_evaluation_is_what_the_card_says(nano):
    model, tokenizer = nano
    card = (FOLDER / "README.md").read_text().splitlines()
    headings = next(line for line in card if line.startswith("| | float32")).split("|")
    result = evaluate(model, tokenizer, load_examples(FOLDER / "evaluation.jsonl"))
    for task, score in result.tasks.items():
        claimed = next(line for line in card if line.startswith(f"| `{task}`"))
        percent = float(claimed.split("|")[headings.index(" 2-bit ")].strip().rstrip("%"))
        assert score.accuracy * 100 == pytest.approx(percent, abs=4.1)  # two answers of fifty
