"""Evaluation and perplexity of chats with images."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import DataError
from afm_mlx.loading.load import load
from afm_mlx.measure.evaluation import evaluate, load_examples
from afm_mlx.measure.perplexity import cut, load_documents, measure_perplexity, token_losses
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.vision.message_images import with_images
from tests.tools.cli import CONFIG, lines, write_folder
from tests.tools.vision_data import SEEING, question, write_pictures


@pytest.fixture
def seeing(tmp_path, spm_bpe, rng):
    return load(write_folder(tmp_path / "model", spm_bpe, rng, SEEING))


@pytest.fixture
def names(tmp_path, rng):
    return write_pictures(tmp_path, rng)


def test_answers_about_images_are_graded(seeing, names, tmp_path):
    model, tokenizer = seeing
    said = []
    for name in names:  # the library's own answers are the expected ones
        images = ChatImages()
        messages = with_images([question(name)], tokenizer.vision_config, tmp_path)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, images=images)
        engine = Engine(model, tokenizer)
        engine.submit(Request(ids, 3, images=images.placed))
        said.append("".join(response.text for response in engine.run()))
    assert all(said)
    assert len(set(said)) > 1  # the pictures make a difference
    records = [
        {"task": f"{i}", "messages": [question(name)], "answer": said[i]}
        for i, name in enumerate(names)
    ]
    path = lines(tmp_path / "evaluation.jsonl", *records)
    found = evaluate(model, tokenizer, load_examples(path))
    for answer, expected in zip(found.answers, said, strict=True):
        assert answer.answer.startswith(expected)


def test_perplexity_leaves_images_tokens_out(seeing, names, tmp_path):
    model, tokenizer = seeing
    chats = [
        {"messages": [question(*names[:2]), {"role": "assistant", "content": "red"}]},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]},
    ]
    path = lines(tmp_path / "test.jsonl", *chats)
    documents = load_documents(path, tokenizer)
    pieces = cut(documents, 512)
    losses = token_losses(model, tokenizer, pieces)
    expected = []
    for document in pieces:
        h, done = model.embed(mx.array([document])), 0
        for image in getattr(document, "images", ()):
            places = np.flatnonzero(np.array(document) == tokenizer.vision_config.image_token_id)
            h[0, mx.array(places[done : done + image.tokens])] = model.vision.features(image)
            done += image.tokens
        logits = model.head(model.hidden(h))[0, :-1]
        of_all = nn.losses.cross_entropy(logits, mx.array(document[1:]), reduction="none")
        is_text = np.array(document[1:]) != tokenizer.vision_config.image_token_id
        expected.append(np.array(of_all)[is_text])
    expected = np.concatenate(expected)
    assert losses.shape == expected.shape
    np.testing.assert_allclose(losses, expected, atol=2e-2)
    found = measure_perplexity(model, tokenizer, pieces)
    assert found.tokens == expected.size
    assert found.perplexity == pytest.approx(np.exp(losses.astype(np.float64).mean()))
    with pytest.raises(DataError, match="is not cut; sequence_length is 20"):
        cut(documents, 20)


def test_a_missing_picture_is_named(seeing, tmp_path):
    chat = {"messages": [question("no.png"), {"role": "assistant", "content": "red"}]}
    path = lines(tmp_path / "test.jsonl", chat)
    with pytest.raises(DataError, match=r"test.jsonl:1: messages\[0\].*no.png"):
        load_documents(path, seeing[1])
    record = {"task": "a", "messages": [question("no.png")], "answer": "red"}
    examples = load_examples(lines(tmp_path / "evaluation.jsonl", record))
    with pytest.raises(DataError, match=r"evaluation.jsonl:1: messages\[0\].*no.png"):
        evaluate(*seeing, examples)


def test_a_text_model_refuses_images(names, tmp_path, spm_bpe, rng):
    model, tokenizer = load(write_folder(tmp_path / "text", spm_bpe, rng, CONFIG))
    record = {"task": "a", "messages": [question(names[0])], "answer": "red"}
    examples = load_examples(lines(tmp_path / "evaluation.jsonl", record))
    with pytest.raises(DataError, match="reads text only"):
        evaluate(model, tokenizer, examples)
