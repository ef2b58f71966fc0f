"""The embedded model: golden tokens, and what its card says."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as load_stock_model

import afm_mlx
from afm_mlx.config import PRESETS
from afm_mlx.engine import Engine
from afm_mlx.evaluation import evaluate, load_examples
from afm_mlx.generation import generate
from afm_mlx.loading import resolve_model
from afm_mlx.request import Request

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


def test_a_quantized_folder_loads(nano):
    """(b) mlx-lm can't load an AFM folder in its own quantized format."""
    model, _ = nano
    assert model.model.layers[0].self_attn.qkv_proj.bits == 4
    assert model.model.embedding.bits == 4
    with pytest.raises(TypeError, match="to_quantized"):
        load_stock_model(FOLDER)


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
    card = (FOLDER / "README.md").read_text()
    result = evaluate(model, tokenizer, load_examples(FOLDER / "evaluation.jsonl"))
    for task, score in result.tasks.items():
        claimed = next(line for line in card.splitlines() if line.startswith(f"| `{task}`"))
        percent = float(claimed.split("|")[-2].strip().rstrip("%"))
        assert score.accuracy * 100 == pytest.approx(percent, abs=4.1)  # two answers of fifty
