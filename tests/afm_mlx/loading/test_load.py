"""Loading AFM folders, with the embedded model's golden tokens; and draft models."""

import json
import shutil
import time

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx.checkpoint.folder_texts import copy_tokenizer_files, write_config
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import PRESETS
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.loading.load import load_draft, load_model
from afm_mlx.loading.resolve import adapter_draft, model_draft, resolve_model
from afm_mlx.measure.describe import describe_folder
from afm_mlx.measure.evaluation import evaluate, load_examples
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from tests.tools.cases import each
from tests.tools.models import random_config, random_model
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

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


# -- draft models

VOCAB = 1000


def write_folder(folder, model):
    folder.mkdir(parents=True)
    save_weights(folder, dict(tree_flatten(model.parameters())))
    write_config(folder, model.args.to_dict())
    return folder


@pytest.fixture
def target(tmp_path, rng, spm_bpe):
    """A model with its folder, in which a draft without tokenizer lies."""
    model = random_model(random_config(rng, vocab_size=VOCAB), rng)
    folder = write_folder(tmp_path / "target", model)
    save_tokenizer(spm_bpe, folder)
    draft = random_model(
        random_config(rng, vocab_size=VOCAB, num_layers=1, num_kv_reuse_layers=0), rng
    )
    write_folder(folder / "draft", draft)
    return model, folder, draft


def test_a_draft_in_the_folder_of_its_target_or_of_an_adapter(target, tmp_path):
    model, folder, draft = target
    assert model_draft(folder) == folder / "draft"
    assert model_draft(folder / "draft") is None
    adapter = tmp_path / "adapter"
    shutil.copytree(folder / "draft", adapter / "draft")
    (adapter / "adapters.safetensors").touch()
    for path in (adapter, str(adapter), adapter / "adapters.safetensors"):
        assert adapter_draft(path) == adapter / "draft"
    (adapter / "draft" / "config.json").unlink()
    assert adapter_draft(adapter) is None

    loaded = load_draft(folder / "draft", model, load_tokenizer(folder))
    tokens = mx.array([[5, 6, 7]])
    assert mx.array_equal(loaded(tokens), draft(tokens))


def test_a_draft_has_the_tokenizer_of_its_target_wherever_one_is_needed(target, tmp_path):
    _, folder, _ = target
    assert load_tokenizer(folder / "draft").get_vocab() == load_tokenizer(folder).get_vocab()
    assert describe_folder(folder / "draft")["tokenizer"] == describe_folder(folder)["tokenizer"]
    (tmp_path / "copy").mkdir()
    assert "tokenizer.model" in copy_tokenizer_files(folder / "draft", tmp_path / "copy")
    facts = describe_folder(folder)["draft_model"]
    assert facts["folder"] == str(folder / "draft")
    assert facts["parameters"] == describe_folder(folder / "draft")["weights"]["parameters"]
    assert "draft_model" not in describe_folder(folder / "draft")


def test_a_draft_of_another_vocabulary_is_refused(target, rng, spm_unigram):
    model, folder, _ = target
    tokenizer = load_tokenizer(folder)
    draft = folder / "draft"
    save_tokenizer(spm_unigram, draft)
    with pytest.raises(ConfigError, match=r"of its tokenizer's 1,000 pieces are others.*--teacher"):
        load_draft(draft, model, tokenizer)
    load_draft(draft, model, None)
    shutil.copy(folder / "tokenizer.model", draft)
    load_draft(draft, model, tokenizer)

    other = random_model(
        random_config(rng, vocab_size=VOCAB - 1, num_layers=1, num_kv_reuse_layers=0), rng
    )
    with pytest.raises(ConfigError, match="its embedding has 999 rows, and the model's 1,000"):
        load_draft(write_folder(folder / "other", other), model, tokenizer)
    (draft / "config.json").write_text(json.dumps({"model_type": "afm7"}))
    with pytest.raises(ConfigError, match=r"^The draft model: .*missing keys"):
        load_draft(draft, model, tokenizer)
    shutil.rmtree(draft)
    write_folder(draft, other)
    (draft / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"^The draft model: "):
        load_draft(draft, model, tokenizer)


def test_models_of_the_zoo(rng, tmp_path):
    models = [zoo_model("llama", size, int(rng.integers(2**31))) for size in (64, 64, 65)]
    for i, model in enumerate(models):
        words = word_tokenizer_json(model.args.vocab_size)
        write_zoo_folder(tmp_path / str(i), "llama", model, words)
    from mlx_lm.utils import load_tokenizer as load_with_mlx_lm

    tokenizer = load_with_mlx_lm(tmp_path / "0")
    tokens = mx.array([[5, 6, 7]])
    draft = load_draft(tmp_path / "1", models[0], tokenizer)
    assert mx.allclose(draft(tokens), models[1](tokens), atol=1e-5)
    with pytest.raises(ConfigError, match="65 rows, and the model's 64"):
        load_draft(tmp_path / "2", models[0], tokenizer)
