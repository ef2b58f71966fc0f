"""A model and a recipe for whole runs."""

import dataclasses

import pytest

from afm_mlx.config import PRESETS
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.tokenizer.zoo_tokenizer import ZooTokenizer
from afm_mlx.training.methods.method import save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe
from tests.tools.cli import write_folder
from tests.tools.tokenizers import docstrings
from tests.tools.training_data import TRAINABLE, write_data
from tests.tools.training_runs import OPTIONS


@pytest.fixture
def model(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng, TRAINABLE)


@pytest.fixture
def recipe(model, tmp_path, rng):
    return Recipe(
        write_data(tmp_path / "data", rng), OPTIONS, model, batch_size=2, max_seq_length=96
    )


@pytest.fixture
def packed(model, tmp_path):
    """The model in 2 bits, as a folder."""
    source = ModelSource.open(model)
    quantized, values = quantize_model(source.load(), source.values)
    return save_model_folder(
        tmp_path / "packed", quantized, values, source, what="Rounded.", facts={}
    )


DRAFT = dataclasses.replace(TRAINABLE, num_layers=1, num_kv_reuse_layers=0, kv_bits=None)


@pytest.fixture
def draft(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "draft", spm_bpe, rng, DRAFT)


@pytest.fixture
def draft_preset(monkeypatch):
    """The sizes "tiny-draft", of a vocabulary and with scales that no draft model takes over."""
    monkeypatch.setitem(PRESETS, "tiny-draft", dataclasses.replace(DRAFT, vocab_size=8, kv_bits=8))


@pytest.fixture(scope="session")
def zoo_tokenizer():
    """A function (chat template) -> a tokenizer of a model of mlx-lm's: byte-level BPE."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([docstrings()[:20_000], "a\n\n\n\n" * 500], trainer)

    def make(template):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
        tokenizer.chat_template = template
        return ZooTokenizer.of(TokenizerWrapper(tokenizer))

    return make
