"""Draft models: where they lie, whose tokenizer they have, and those that belong to another model."""

import json
import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.folder_texts import copy_tokenizer_files, write_config
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.loading.load import load_draft
from afm_mlx.loading.resolve import adapter_draft, model_draft
from afm_mlx.measure.describe import describe_folder
from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from tests.tools.models import random_config, random_model
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

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
