"""Loading: the embedded model with its golden tokens, and what is refused before a model is built."""

import json
import time

import mlx.core as mx
import pytest

import afm_mlx
from afm_mlx.config import PRESETS
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.loading.load import load_model
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure.evaluation import evaluate, load_examples
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from tests.tools.cases import each

FOLDER = resolve_model("afm-nano")
GOLDEN = json.loads((FOLDER / "golden.json").read_text())
VALUES = json.loads((FOLDER / "config.json").read_text())

on_cpu = pytest.mark.skipif(
    mx.default_device() != mx.Device(mx.cpu),
    reason="golden tokens are from float32; a GPU runs in bfloat16",
)


@pytest.fixture(scope="module")
def nano():
    return afm_mlx.load()


def test_the_embedded_model_is_what_the_preset_says_small_and_packed(nano):
    model, tokenizer = nano
    assert model.args == PRESETS["afm-nano"]
    assert tokenizer.vocab_size == model.args.vocab_size
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8e6
    packed = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    assert len(packed) == 5 * len(model.layers)  # queries (keys, values), out, gate, up, down
    assert {(layer.bits, layer.mode) for layer in packed} == {(2, "balanced")}
    assert isinstance(model.model.embedding, PackedEmbedding)
    assert model.model.embedding.bits == 4


@on_cpu
def test_golden_tokens_alone_and_in_one_batch(nano):
    """The tokens that tamm gives with the same, dequantized weights."""
    model, tokenizer = nano
    engine = Engine(model, tokenizer)
    rows = {engine.submit(Request(golden["prompt"], max_tokens=32)): golden for golden in GOLDEN}
    tokens = {row: [] for row in rows}
    for response in engine.run():
        tokens[response.row].append(response.token)
    for row, golden in rows.items():
        wanted, count = golden["tokens"], len(golden["tokens"])
        alone = afm_mlx.stream_generate(model, tokenizer, golden["prompt"], max_tokens=count)
        for found in (tokens[row], [response.token for response in alone]):
            assert len(found) > 5
            assert found == wanted[: len(found)]


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


def test_a_config_of_other_sizes_than_the_weights_builds_nothing(monkeypatch):
    monkeypatch.setattr(afm_mlx.loading.load, "Model", lambda config: pytest.fail("was built"))
    for change in ({"num_layers": 1000}, {"vocab_size": 1 << 24}, {"hidden_dim": 1 << 16}):
        start = time.perf_counter()
        with pytest.raises(CheckpointError, match=r"must be|missing"):
            load_model(FOLDER, VALUES | change)
        assert time.perf_counter() - start < 5
    with pytest.raises(ConfigError, match="num_layers is 20000"):
        load_model(FOLDER, VALUES | {"num_layers": 20_000})


@each(
    ("options", "words"),
    [
        ({"model_config": [1]}, r"a mapping of config\.json's keys"),
        ({"model_config": {1: 2}}, r"a mapping of config\.json's keys"),
        ({"model_config": {"model_type": None}}, "model_type is None; it names the architecture"),
        ({"tokenizer_config": {"a": 1}}, "an AFM folder's tokenizer has no options"),
        ({"adapter_path": "tood"}, r"no adapter 'tood' \(did you mean todo\?\)"),
    ],
)
def test_options_that_are_refused(options, words):
    with pytest.raises(AFMError, match=words):
        afm_mlx.load(**options)


def test_options_that_are_taken(nano):
    changes = {"context_length": 99}
    model, _, values = afm_mlx.load(model_config=changes, return_config=True, activation_bits=8)
    assert values == VALUES | changes
    assert model.args.context_length == 99
    assert model.layers[0].mlp.up_proj.activation_bits == 8
