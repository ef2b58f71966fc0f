"""The example that gives the embedded model eyes: its pictures, its PyTorch twins, its stages."""

import importlib.util
import json
import sys

import mlx.core as mx
import numpy as np
import pytest
import torch

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.loading.load import load
from afm_mlx.measure.evaluation import evaluate, load_examples
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.vision.message_images import with_images
from afm_mlx.vision.vision import Vision
from tests.examples.conftest import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "vision"))

import pictures
import torch_vision


def script(name):
    spec = importlib.util.spec_from_file_location(
        f"vision_{name}", EXAMPLES / "vision" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train():
    return script("train")


@pytest.mark.parametrize("test", [False, True])
def test_a_picture_follows_from_its_seed(test):
    for scene in pictures.SCENES:
        first, again, other = (pictures.draw(scene, seed, 84, test) for seed in ("1", "1", "2"))
        assert first.image.tobytes() == again.image.tobytes() != other.image.tobytes()
        assert first.questions == again.questions
        assert max(first.image.size) == 84
        assert pictures.draw(scene, "1", 84, not test).image.tobytes() != first.image.tobytes()


def test_bent_text_is_other_ink_of_the_same_text():
    for scene in ("digit", "number", "word", "fine"):
        for seed in "123456":
            straight, bent, again = (
                pictures.draw(scene, seed, 84, bent=b) for b in (False, True, True)
            )
            assert bent.image.tobytes() == again.image.tobytes() != straight.image.tobytes()
            assert bent.questions[0] == straight.questions[0]
            pixels = np.asarray(bent.image).astype(int)
            ink = np.abs(pixels - np.median(pixels, axis=(0, 1))).sum(-1) > 100
            assert 0.001 < ink.mean() < 0.5, (scene, seed)


def test_what_is_tested_is_not_trained(monkeypatch):
    used = {False: [set(), set(), set()], True: [set(), set(), set()]}
    font, colour, place = (
        pictures._font,
        pictures._Canvas._colour,
        pictures._Canvas._place,
    )
    now = [False]

    def seen_font(name, size):
        used[now[0]][0].add(name)
        return font(name, size)

    def seen_colour(self, others=()):
        name, rgb = colour(self, others)
        used[now[0]][1].add(rgb)
        return name, rgb

    def seen_place(self, width, height):
        x, y = place(self, width, height)
        if min(self.size[0] - width, self.size[1] - height) > 60:  # room to choose from
            middle = (x + width / 2) / self.size[0], (y + height / 2) / self.size[1]
            used[now[0]][2].add(tuple(int(5 * each) for each in middle))
        return x, y

    monkeypatch.setattr(pictures, "_font", seen_font)
    monkeypatch.setattr(pictures._Canvas, "_colour", seen_colour)
    monkeypatch.setattr(pictures._Canvas, "_place", seen_place)
    pictures._box.cache_clear()
    for now[0] in (False, True):
        for scene in ("digit", "shape", "fine"):
            for seed in range(60):
                pictures.draw(scene, str(seed), 84, now[0])
    for trained, tested in zip(*used.values(), strict=True):
        assert len(trained) > 3
        assert len(tested) > 3
        assert not trained & tested


def test_glyphs_have_the_heights_that_are_told():
    for scene, side, low, high in (
        ("small", 168, 8, 10),
        ("fine", 84, 8, 14),
        ("digit", 84, 21, 55),
    ):
        for seed in range(20):
            picture = pictures.draw(scene, str(seed), side)
            pixels = np.asarray(picture.image).astype(int)
            ink = np.abs(pixels - np.median(pixels, axis=(0, 1))).sum(-1) > 60
            rows = np.flatnonzero(ink.any(1))
            assert low - 2 <= rows[-1] - rows[0] + 1 <= high + 2, (scene, seed)


def test_chats_are_written_for_the_commands(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        pictures.write_chats(tmp_path, split, 8, seed=3)
    chats = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    examples = [
        json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()
    ]
    assert len(chats) == 8
    assert {example["task"] for example in examples} >= {"digit", "word", "count", "small digit"}
    for record in (*chats, *examples):
        found = with_images(record["messages"], torch_vision.CONFIG, tmp_path)
        assert found[0]["content"][0]["image"].tokens in (36, 180)


def test_the_shipped_model_sees_what_it_was_not_trained_on(rng, tmp_path):
    """Digits in held-out fonts, and the colours and places of shapes; without its adapter it sees nothing."""
    records, first = [], int(rng.integers(1 << 30))
    for index in range(first, first + 24):
        for scene in ("digit", "shape"):
            picture, name = pictures.draw(scene, f"{index}", 84, test=True), f"{scene}{index}.png"
            picture.image.save(tmp_path / name)
            for task, question, answer in picture.questions:
                content = [{"type": "image", "path": name}, {"type": "text", "text": question}]
                message = {"role": "user", "content": content}
                records.append({"task": task, "messages": [message], "answer": answer})
    (tmp_path / "test.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    examples = load_examples(tmp_path / "test.jsonl")
    model, tokenizer = load("afm-nano-vision", adapter_path="see")
    tasks = evaluate(model, tokenizer, examples).tasks
    assert len(tasks) == 6
    for task, score in tasks.items():
        assert score.correct >= 19, (task, score)  # of 24, with 95 % or more on average
    plain, _ = load("afm-nano-vision")
    assert evaluate(plain, tokenizer, examples[:12]).overall.correct == 0


@pytest.mark.parametrize("size", [84, 28])
def test_the_encoder_equals_the_packages(size):
    config, generator = torch_vision.CONFIG, torch.Generator().manual_seed(0)
    encoder, adaptor = torch_vision.Encoder(config), torch_vision.Adaptor(config, 256)
    with torch.no_grad():
        for parameter in (*encoder.parameters(), *adaptor.parameters()):
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    twin = Vision(config, 256)
    for part, module in (("encoder", encoder), ("adaptor", adaptor)):
        twin.load_weights(
            [(f"{part}.{n}", mx.array(t.numpy())) for n, t in module.state_dict().items()],
            strict=False,
        )
    pixels = torch.randn((2, size, size, 3), generator=generator)
    mode = "rapid" if size == config.rapid_size else "balanced"
    with torch.no_grad():
        got = adaptor(encoder(pixels), config.token_grid(mode)).numpy()
    np.testing.assert_allclose(got, np.array(twin(mx.array(pixels.numpy()))), atol=1e-4)


def test_stages_resume_and_are_exported(train, tmp_path):
    stages = tuple(
        train.Stage(stage.name, 1, 2, stage.side)
        for stage in train.STAGES
        if stage.name != "joint84"
    )

    def run(folder, stages):
        folder.mkdir(exist_ok=True)
        trainer = train.Trainer(folder, 0, stages)
        trainer.test = lambda *args: {}
        trainer.run()
        return trainer

    whole = run(tmp_path / "whole", stages)
    # All parts have moved from where they began.
    for name, tensor in whole.text.adapter().items():
        assert ".lora_a" in name or tensor.abs().max() > 0
    (tmp_path / "half").mkdir()
    half = train.Trainer(tmp_path / "half", 0, stages)
    loss = half.loss

    def interrupted(stage, step):
        if stage.name == "joint":
            raise KeyboardInterrupt
        return loss(stage, step)

    half.loss = interrupted
    with pytest.raises(KeyboardInterrupt):
        half.run()
    resumed = run(tmp_path / "half", stages)
    for one, other in ((whole.eyes, resumed.eyes), (whole.text, resumed.text)):
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name

    export = script("export")
    state = torch.load(tmp_path / "whole" / "state.pt", weights_only=True)
    folder = tmp_path / "eyes"
    export.write_model(state, folder)
    export.write_adapter(state, folder / "adapters" / "see", folder)
    model, tokenizer = load(folder)
    plain, _ = load("afm-nano")
    ids = mx.array([tokenizer.encode("The text model stays as it was.")])
    assert mx.array_equal(model(ids), plain(ids))

    # The exported model with its adapter says what the PyTorch one says.
    attach_adapter(model, folder / "adapters" / "see")
    picture = pictures.draw("digit", "a", 84)
    task, question, answer = picture.questions[0]
    tiles = train.tiles_of(picture, "balanced")
    with torch.no_grad():
        logits, _, _, _ = whole.answers([(tiles, picture.caption, [(task, question, answer)])])
    picture.image.save(tmp_path / "a.png")
    part = {"type": "image", "path": "a.png", "mode": "balanced"}
    images = ChatImages()
    messages = [
        {"role": "user", "content": [part, {"type": "text", "text": question}]},
        {"role": "assistant", "content": answer},
    ]
    messages = with_images(messages, tokenizer.vision_config, tmp_path)
    tokens = tokenizer.apply_chat_template(messages, images=images)
    h = model.embed(mx.array([tokens]))
    places = np.flatnonzero(np.array(tokens) == tokenizer.vision_config.image_token_id)
    h[0, mx.array(places)] = model.vision.features(images.placed[0])
    found = np.array(model(h))[0, -len(logits[0]) - 1 : -1]
    export.write_model(state, tmp_path / "packed", bits=8)
    packed, _ = load(tmp_path / "packed")
    features, rounded = (m.vision.features(images.placed[0]) for m in (model, packed))
    assert "scales" in packed.vision.adaptor.conv
    assert mx.abs(features - rounded).max() < 0.05 * mx.abs(features).max()

    # Packed products round activations, and files have 16 bits.
    assert np.abs(found - logits[0].numpy()).max() < 0.05 * np.abs(found).max()
    assert (found.argmax(-1) == logits[0].numpy().argmax(-1)).all()
