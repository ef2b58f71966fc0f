"""Embeddings of training batches with images."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.errors import DataError
from afm_mlx.loading.load import load
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.data.embedded import embedded
from afm_mlx.training.data.mask_batches import MaskBatches
from afm_mlx.training.data.preferences import load_preferences
from afm_mlx.training.data.rollouts import load_prompts
from afm_mlx.training.data.samples import load_split
from afm_mlx.training.loop.losses import CrossEntropy
from afm_mlx.training.loop.trainer import ignore_event
from afm_mlx.training.methods.image_inputs import freeze_others, with_image_inputs
from afm_mlx.training.methods.recipe import DataSplits
from tests.tools.cli import lines, write_folder
from tests.tools.vision_data import SEEING, question, write_image_data, write_pictures


@pytest.fixture
def seeing(tmp_path, spm_bpe, rng):
    return load(write_folder(tmp_path / "model", spm_bpe, rng, SEEING))


@pytest.fixture
def samples(seeing, tmp_path, rng):
    data = write_image_data(tmp_path / "data", rng, "train")
    return load_split(data, "train", seeing[1], max_seq_length=256)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_images_tokens_are_not_predicted(seeing, tmp_path, rng, weight):
    data = write_image_data(tmp_path / "data", rng, "train")
    tokenizer = seeing[1]
    found = load_split(data, "train", tokenizer, max_seq_length=256, prompt_weight=weight)
    assert [len(sample.images) for sample in found] == [1, 1, 2, 1, 0]
    for sample in found:
        is_image = sample.tokens == tokenizer.vision_config.image_token_id
        assert is_image.sum() == sum(placed.image.tokens for placed in sample.images)
        assert not sample.weights[is_image].any()
        assert set(sample.weights[1:][~is_image[1:]]) == {weight, 1}


def test_answers_with_images_are_refused(seeing, tmp_path, rng):
    (name,) = write_pictures(tmp_path, rng, 1)
    asked, said = question(name), {**question(name), "role": "assistant"}
    lines(tmp_path / "train.jsonl", {"messages": [asked, said]})
    with pytest.raises(DataError, match=r"messages\[1\] is the assistant's and has an image"):
        load_split(tmp_path, "train", seeing[1], max_seq_length=256)
    lines(tmp_path / "valid.jsonl", {"prompt": [asked], "chosen": "red", "rejected": [said]})
    with pytest.raises(DataError, match=r"messages\[1\] is the assistant's and has an image"):
        load_preferences(tmp_path, "valid", seeing[1], 256)


def test_masks_and_sampled_answers_refuse_images(seeing, samples, tmp_path, rng):
    with pytest.raises(DataError, match=r"train.jsonl:1: a chat with images; masks"):
        MaskBatches(samples, "chunk", seeing[1], chunk=4, batch_size=1, length=256)
    (name,) = write_pictures(tmp_path, rng, 1)
    lines(tmp_path / "train.jsonl", {"prompt": [question(name)]})
    with pytest.raises(DataError, match=r"train.jsonl:1: messages\[0\].* has the type 'image'"):
        load_prompts(tmp_path, "train", seeing[1], most=256)


def batches_of(samples, packed):
    return Batches(samples, batch_size=3, length=256, packed=packed, seed=0)


def by_hand(model, sample):
    """A sample's loss, with images put in a token at a time."""
    tokens, h = list(map(int, sample.tokens)), []
    features = {}
    for placed in sample.images:
        image = placed.image
        rows = model.vision(model.vision.whiten(mx.array(image.tiles))).flatten(0, 1)
        features |= {int(place): rows[i] for i, place in enumerate(placed.places)}
    for index, token in enumerate(tokens[:-1]):
        h.append(features.get(index, model.embed(mx.array([[token]]))[0, 0]))
    logits = model.head(model.hidden(mx.stack(h)[None]))[0]
    losses = nn.losses.cross_entropy(logits, mx.array(tokens[1:]), reduction="none")
    return (losses * mx.array(sample.weights[1:])).sum()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("parts", [("text", "adaptor", "encoder"), ("adaptor",), ("text",)])
def test_losses_and_gradients_equal_those_made_by_hand(seeing, samples, packed, parts):
    model, _ = seeing
    model.unfreeze()
    freeze_others(model, parts)
    model.train()
    data = DataSplits(batches_of(samples, packed), None, None)
    batches = with_image_inputs(model, data, ignore_event).train
    assert model.training
    kinds = {name for step in range(batches.per_epoch) for name in batches(step).images}
    wanted = "tiles" if "encoder" in parts else "states" if "adaptor" in parts else None
    assert kinds == ({"features"} if wanted is None else {wanted, f"rapid_{wanted}"})

    def whole(parameters):
        model.update(parameters)
        losses = [CrossEntropy()(model, batches(step)) for step in range(batches.per_epoch)]
        return sum(losses[1:], losses[0])

    def oracle(parameters):
        model.update(parameters)
        return sum((by_hand(model, sample) for sample in samples), mx.array(0.0))

    parameters = model.trainable_parameters()
    loss, gradients = mx.value_and_grad(whole)(parameters)
    model.update(parameters)
    expected, by_oracle = mx.value_and_grad(oracle)(parameters)
    model.update(parameters)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    by_oracle = dict(tree_flatten(by_oracle))
    for name, gradient in tree_flatten(gradients):
        other = by_oracle[name]
        error = mx.abs(gradient - other).max().item()
        assert error <= 1e-3 * mx.abs(other).max().item() + 1e-4, name
    moved = {name.split(".")[1] for name, g in by_oracle.items() if mx.abs(g).max() > 1e-6}
    assert {"adaptor", "encoder"} & moved == {"adaptor", "encoder"} & set(parts)


def test_batches_without_images_give_ids(seeing, samples):
    plain = [sample for sample in samples if not sample.images]
    batch = batches_of(plain, packed=True)(0)
    assert batch.images is None
    assert embedded(seeing[0], batch) is batch.inputs


def test_features_are_computed_once_for_each_picture(seeing, samples):
    model, _ = seeing
    model.freeze()
    passes = []
    encoder = type(model.vision.encoder)

    class Counting(encoder):
        def __call__(self, pixels):
            passes.append(pixels.shape[0])
            return super().__call__(pixels)

    model.vision.encoder.__class__ = Counting
    data = DataSplits(batches_of(samples, True), batches_of(samples, False), None)
    found = with_image_inputs(model, data, ignore_event)
    for batches in (found.train, found.valid):
        for step in range(batches.per_epoch):
            mx.eval(CrossEntropy()(model, batches(step)))
    assert passes == [1, 1, 1, 1]  # four pictures in five places


def test_images_decide_the_fingerprint(seeing, samples):
    same, other = batches_of(samples, True), batches_of(samples, True)
    assert same.fingerprint == other.fingerprint
    swapped = list(samples)
    first, third = samples[0].images[0], samples[2].images[1]
    assert np.array_equal(first.image.tiles, third.image.tiles)
    images = [placed.image for placed in (samples[0].images[0], samples[2].images[0])]
    assert images[0].digest != images[1].digest
    changed = type(samples[0])(
        samples[0].tokens,
        samples[0].weights,
        "a:1",
        [type(first)(images[1], first.places)],
    )
    swapped[0] = changed
    assert batches_of(swapped, True).fingerprint != same.fingerprint
