"""Adapters for embeddings: they learn, resume and are measured again, for AFM models and mlx-lm's."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import EmbeddingUse, load_adapter
from afm_mlx.errors import AFMError, ConfigError, DataError
from afm_mlx.loading.load import load
from afm_mlx.model.pooling import hidden_states, normalize, pool
from afm_mlx.tokenizer.embedding_text import embedding_tokens, query_text
from afm_mlx.training.loop.trainer import CheckpointSaved, Resumed, Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.contrastive_training import ContrastiveTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.train import measure_adapter, train_contrastive
from tests.tools.cases import each
from tests.tools.cli import lines
from tests.tools.compare import assert_same_tensors
from tests.tools.tokenizers import docstrings
from tests.tools.training_runs import Break, Watcher, break_at
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

OPTIONS = TrainingOptions(iters=12, learning_rate=0.02, steps_per_eval=6, save_every=4, seed=3)
WORDS = sorted({word for word in docstrings().split() if word.isalpha()})[:60]


def write_pairs(folder, rng, words):
    """Queries that name a word, and texts that hold it; every second one has a negative."""
    folder.mkdir()

    def record(word, index):
        other = str(rng.choice([each for each in words if each != word]))
        texts = {"query": f"find {word}", "positive": f"here {word} is"}
        return texts | ({"negative": [f"here {other} is"]} if index % 2 else {})

    # Random weights know no words, so that only what was trained on is sure to be learned.
    records = list(map(record, map(str, rng.choice(words, 24, replace=False)), range(24)))
    for split, chosen in (("train", records), ("valid", records[:8]), ("test", records[8:16])):
        lines(folder / f"{split}.jsonl", *chosen)
    return folder


@pytest.fixture
def pairs(tmp_path, rng):
    return write_pairs(tmp_path / "pairs", rng, WORDS)


@pytest.fixture
def recipe(packed, pairs):
    return Recipe(pairs, OPTIONS, packed, batch_size=8, test=True)


METHOD = ContrastiveTraining(rank=4, scale=2.0, temperature=0.1)


def vector(model, tokenizer, text, pooling):
    tokens = mx.array([embedding_tokens(tokenizer, text, pooling)])
    return normalize(pool(hidden_states(model, tokens), mx.array([tokens.shape[1]]), pooling))[0]


@pytest.mark.parametrize(("pooling", "chunk"), [("last", None), ("mean", 5)])
def test_of_a_packed_model(recipe, tmp_path, pooling, chunk):
    method = dataclasses.replace(
        METHOD, pooling=pooling, chunk_rows=chunk, instruction="Find the text"
    )
    watcher = Watcher()
    result = train_contrastive(recipe, tmp_path / "adapter", method, **watcher.hooks())
    losses, metrics = (watcher.losses(Validation, name) for name in ("valid_loss", "metrics"))
    recalls = [each["recall_at_1"] for each in metrics]
    assert losses[-1] < losses[0]
    assert result.outcome.tokens == 12 * 8
    written = [json.loads(line) for line in (result.run_path / "metrics.jsonl").open()]
    assert [line["valid_recall_at_1"] for line in written if "valid_loss" in line] == recalls
    _, config = load_adapter(result.path)
    assert config.embedding == EmbeddingUse(pooling, "Find the text")
    # The folder is measured again by the kernels that run adapters, and by the vectors one by one.
    trained, untrained = result.test.trained, result.test.untrained
    assert trained.loss < untrained.loss
    assert trained.count == 8
    again = measure_adapter(recipe, result.path, method)
    assert again.untrained.loss == pytest.approx(untrained.loss, rel=1e-3)
    assert again.trained.loss == pytest.approx(trained.loss, rel=2e-2)
    model, tokenizer = load(recipe.model, adapter_path=str(result.path))
    records = [json.loads(line) for line in (recipe.data / "test.jsonl").open()]
    texts = [each["positive"] for each in records]
    texts += [text for each in records for text in each.get("negative", [])]
    documents = mx.stack([vector(model, tokenizer, text, pooling) for text in texts])
    hits = []
    for each_record in records:
        query = query_text(each_record["query"], "Find the text")
        scores = documents @ vector(model, tokenizer, query, pooling)
        hits.append(texts[int(mx.argmax(scores))] == each_record["positive"])
    assert again.trained.metrics["recall_at_1"] == pytest.approx(np.mean(hits))
    assert trained.to_dict() == {
        "loss": trained.loss,
        "recall_at_1": trained.metrics["recall_at_1"],
        "pairs": 8,
    }


def test_a_resumed_run_ends_as_an_unbroken_one(recipe, tmp_path):
    method = dataclasses.replace(METHOD, chunk_rows=6, both_directions=True)
    whole = train_contrastive(recipe, tmp_path / "whole", method)
    with pytest.raises(Break):
        train_contrastive(recipe, tmp_path / "broken", method, on_event=break_at(7))
    other = dataclasses.replace(method, temperature=0.2)
    with pytest.raises(AFMError, match="temperature"):
        train_contrastive(recipe, tmp_path / "broken", other, resume=True)
    watcher = Watcher()
    broken = train_contrastive(recipe, tmp_path / "broken", method, resume=True, **watcher.hooks())
    assert [event.step for event in watcher.events if isinstance(event, Resumed)] == [4]
    assert any(isinstance(event, CheckpointSaved) for event in watcher.events)
    assert broken.outcome.best_loss == whole.outcome.best_loss
    assert_same_tensors(load_adapter(whole.path)[0], load_adapter(broken.path)[0])


def test_training_goes_on_from_an_adapter_and_its_use(recipe, tmp_path):
    short = dataclasses.replace(recipe, options=dataclasses.replace(OPTIONS, iters=2), test=False)
    method = dataclasses.replace(METHOD, pooling="mean", instruction="Find the text")
    first = train_contrastive(short, tmp_path / "first", method).path
    later = train_contrastive(short, tmp_path / "later", ContrastiveTraining(initial_adapter=first))
    assert load_adapter(later.path)[1].embedding == EmbeddingUse("mean", "Find the text")
    changed = ContrastiveTraining(initial_adapter=first, pooling="last")
    assert changed.use() == EmbeddingUse("last", "Find the text")


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2"])
def test_of_models_of_mlx_lm(kind, rng, tmp_path):
    model = zoo_model(kind, 64, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "model", kind, model, word_tokenizer_json(64))
    data = write_pairs(tmp_path / "pairs", rng, [f"w{i}" for i in range(2, 60)])
    recipe = Recipe(data, OPTIONS, tmp_path / "model", batch_size=8)
    method, watcher = dataclasses.replace(METHOD, chunk_rows=5), Watcher()
    result = train_contrastive(recipe, tmp_path / "adapter", method, **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < losses[0]
    assert load_adapter(result.path)[1].embedding == EmbeddingUse()


@each(
    "changes, fault",
    [
        ({"teacher": "self"}, "teacher would do nothing"),
        ({"packing": True}, "packing would do nothing"),
        ({"prompt_weight": 0.5}, "prompt_weight would do nothing"),
        ({"features": {"text": "body"}}, "features would do nothing"),
    ],
)
def test_what_a_recipe_of_pairs_has_no_use_for(recipe, tmp_path, changes, fault):
    with pytest.raises(ConfigError, match=fault):
        train_contrastive(dataclasses.replace(recipe, **changes), tmp_path / "adapter", METHOD)


@each(
    "arguments, fault",
    [
        ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"chunk_rows": 4, "dropout": 0.1}, "chunk_rows computes texts twice"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"pooling": "first"}, "pooling is 'first'"),
        ({"rank": 0}, "rank is 0"),
    ],
)
def test_arguments_out_of_range(arguments, fault):
    with pytest.raises(ConfigError, match=fault):
        ContrastiveTraining(**arguments)


def test_chats_are_no_pairs(recipe, tmp_path):
    lines(tmp_path / "train.jsonl", {"prompt": "a", "completion": "b"})
    other = dataclasses.replace(recipe, data=tmp_path / "train.jsonl", test=False)
    with pytest.raises(DataError, match=r"train.jsonl:1: a pair is .*keys prompt, completion"):
        train_contrastive(other, tmp_path / "adapter", METHOD)
