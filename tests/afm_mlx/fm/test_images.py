"""Images in sessions."""

import json

import numpy as np
import pytest

from afm_mlx import fm
from afm_mlx.loading.load import load
from afm_mlx.vision.prompt_image import read_image
from tests.afm_mlx.fm.conftest import entries
from tests.tools.vision import give_eyes, picture


@pytest.fixture(scope="module")
def seeing():
    """A model that sees, and its tokenizer."""
    model, tokenizer = load()
    give_eyes(model, tokenizer, np.random.default_rng(0))
    return model, tokenizer


@pytest.fixture
def model(seeing):
    return fm.SystemLanguageModel(model=seeing)


@pytest.fixture
def blind():
    return fm.SystemLanguageModel()


@pytest.fixture
def photo(tmp_path, rng):
    """Makes the file of a random picture."""

    def make(name="photo.png", side=60):
        path = tmp_path / name
        path.write_bytes(picture(rng, side, side))
        return path

    return make


FEW = fm.GenerationOptions(maximum_response_tokens=6)


def passes(model):
    return model._shared.engine.engine.image_features.passes


async def test_images_stand_where_the_prompt_has_them(model, seeing, photo, monkeypatch):
    requests = []
    session = fm.LanguageModelSession("Look.", model=model)
    await model._shared.load()
    stream = model._shared.engine.stream
    monkeypatch.setattr(
        model._shared.engine, "stream", lambda r: (requests.append(r), stream(r))[1]
    )
    one, two = photo("one.png"), photo("two.png", 20)
    prompt = ["First", fm.ImageAttachment(one), "and", "then", fm.ImageAttachment(two, "the dot")]
    await session.respond(prompt, options=FEW)
    (request,) = requests
    config = seeing[1].vision_config
    assert [image.digest for image in request.images] == [
        read_image(path, config).digest for path in (one, two)
    ]
    assert [image.mode for image in request.images] == ["balanced", "rapid"]
    ids = list(request.prompt)
    first = ids.index(config.image_token_id)
    assert ids[first : first + 16] == [config.image_token_id] * 16
    decode = seeing[1].decode
    assert decode(ids[:first]).endswith("user\nFirst")
    last = len(ids) - 1 - ids[::-1].index(config.image_token_id)
    assert decode(ids[first + 16 : last - 3]) == "and\nthen\nthe dot: "
    assert decode(ids[last + 1 :]).startswith("<turn_end>")


async def test_a_second_turn_computes_no_pass(model, photo):
    session = fm.LanguageModelSession(model=model)
    path = photo()
    await session.respond(["What is it?", fm.ImageAttachment(path)], options=FEW)
    before = passes(model)
    path.unlink()  # the session has it
    await session.respond("And now?", options=FEW)
    assert passes(model) == before
    assert session.last_answer.computed_tokens < session.last_answer.prompt_tokens - 16
    # Nor does the same image in another session, whatever comes before it.
    again = photo("again.png")
    other = fm.LanguageModelSession("Be short.", model=model)
    await other.respond([fm.ImageAttachment(again), "Well?"], options=FEW)
    assert passes(model) == before + 1
    third = fm.LanguageModelSession("Be long.", model=model)
    await third.respond([fm.ImageAttachment(again, "x"), "Well?"], options=FEW)
    assert passes(model) == before + 1


async def test_other_images_give_other_answers(model, photo):
    answers, (one, two) = [], (photo("one.png"), photo("two.png"))
    for path in (one, two, one):
        session = fm.LanguageModelSession(model=model)
        async for _ in session.stream_response(
            ["What?", fm.ImageAttachment(path, mode="high")], FEW, logprobs=1
        ):
            pass
        answers.append([each.logprob for each in session.last_answer.logprobs])
    assert answers[0] == pytest.approx(answers[2], abs=1e-3)
    assert answers[0] != pytest.approx(answers[1], abs=1e-2)


async def test_a_transcript_keeps_images(model, blind, photo):
    session = fm.LanguageModelSession("Look.", model=model)
    image = fm.ImageAttachment(photo("one.jpg", 20), "map", mode="high")
    await session.respond([image, "Where?"], options=FEW)
    prompt = entries(session)[1]
    assert [part["type"] for part in prompt["contents"]] == ["image", "text"]
    uri = prompt["contents"][0]["image"].pop("url")
    assert uri.startswith("data:image/jpeg;base64,")
    assert prompt["contents"][0]["image"] == {"label": "map", "mode": "high"}
    segment = session.transcript[1].segments[0]
    assert (segment.url, segment.label, segment.mode) == (uri, "map", "high")
    assert session.transcript[1].text == "map\nWhere?"
    image.path.unlink()
    saved = json.loads(json.dumps(await session.transcript.to_dict()))
    read = await fm.Transcript.from_dict(saved)
    assert await read.to_dict() == saved
    count = await model.token_count(read)
    assert count == await session.token_count()
    later = fm.LanguageModelSession.from_transcript(read, model)
    before = passes(model)
    await later.respond("And there?", options=FEW)
    assert passes(model) == before
    deaf = fm.LanguageModelSession.from_transcript(read.copy(), blind)
    with pytest.raises(fm.ImagePromptError, match="reads text only"):
        await deaf.respond("And there?", options=FEW)
    assert b"data:image/jpeg" in session.log_feedback_attachment()


async def test_a_model_that_reads_text_only_refuses_images(blind, photo):
    session = fm.LanguageModelSession(model=blind)
    image = fm.ImageAttachment(photo())
    for prompt in (image, ["Look:", image]):
        for call in (session.respond, session.token_count, session.prewarm, blind.token_count):
            with pytest.raises(fm.ImagePromptError, match="reads text only"):
                await call(prompt)
    assert len(session.transcript) == 0
    assert await session.respond("Hello", options=FEW)


async def test_files_that_are_no_pictures_are_refused(model, tmp_path):
    session = fm.LanguageModelSession(model=model)
    for content in (b"", b"no picture", b"\x89PNG\r\n\x1a\n" + b"\0" * 50):
        path = tmp_path / "bad.png"
        path.write_bytes(content)
        image = fm.ImageAttachment(path, "bad")
        with pytest.raises(
            fm.ImagePromptError, match=r"An image of the prompt \('bad'\): The image"
        ):
            await session.respond(["Look:", image])
    path.unlink()
    with pytest.raises(fm.ImagePromptError, match="can't be read"):
        await session.respond(image)
    assert len(session.transcript) == 0
    assert await session.respond("Hello", options=FEW)


async def test_foreign_images_of_a_transcript_are_refused(model):
    for part in (
        {"type": "image", "at": 3},
        {"type": "image", "image": {"url": "https://example.com/a.png"}},
        {"type": "image", "image": {"url": "data:image/png;base64,AAAA", "mode": "huge"}},
    ):
        entry = {"role": "user", "id": "A", "contents": [part]}
        document = {
            "type": "FoundationModels.Transcript",
            "version": 1,
            "transcript": {"entries": [entry]},
        }
        read = await fm.Transcript.from_dict(document)
        assert await read.to_dict() == document
        session = fm.LanguageModelSession.from_transcript(read, model)
        with pytest.raises(
            fm.DecodingFailureError, match=r"Entry 0 .* 'image'; this model reads text, images"
        ):
            await session.respond("Hello", options=FEW)


async def test_data_that_is_no_base64_is_refused(model):
    for uri in ("data:image/png,abc", "data:image/png;base64,@@@"):
        part = {"type": "image", "image": {"url": uri}}
        entry = {"role": "user", "id": "A", "contents": [part]}
        read = await fm.Transcript.from_dict({"transcript": {"entries": [entry]}})
        session = fm.LanguageModelSession.from_transcript(read, model)
        with pytest.raises(fm.ImagePromptError, match="An image of the prompt"):
            await session.respond("Hello", options=FEW)


async def test_token_counts(model, seeing, photo):
    small = fm.ImageAttachment(photo("small.png", 20))
    text = await model.token_count(["Look:", "now"])
    assert await model.token_count("Look:\nnow") == text
    counts = {"rapid": 4, "balanced": 16, "high": 80}
    base = await model.token_count(["Look:", small])
    for mode, count in counts.items():
        image = fm.ImageAttachment(small.path, mode=mode)
        assert await model.token_count(["Look:", image]) - base == count - 4
    session = fm.LanguageModelSession("Look.", model=model)
    empty = await session.token_count()
    assert await session.token_count(small) > empty + 4


def test_a_wrong_mode_is_refused(photo):
    with pytest.raises(ValueError, match="mode is 'huge'; allowed are auto, high, balanced, rapid"):
        fm.ImageAttachment(photo(), mode="huge")


async def test_prewarm_with_an_image(model, photo):
    session = fm.LanguageModelSession("Look.", model=model)
    image = fm.ImageAttachment(photo())
    await session.prewarm(["What?", image])
    before = passes(model)
    await session.respond(["What?", image, "Say."], options=FEW)
    assert passes(model) == before
    assert session.last_answer.computed_tokens < 16


@fm.generable("A picture")
class Seen:
    colour: str = fm.guide("The colour", anyOf=["red", "blue"])
    count: int = fm.guide("How many", range=(0, 9))


async def test_guided_answers_about_images(model, photo):
    session = fm.LanguageModelSession("Look.", model=model)
    answer = await session.respond(["What?", fm.ImageAttachment(photo())], generating=Seen)
    assert answer.colour in ("red", "blue")
    assert 0 <= answer.count <= 9


async def test_old_turns_with_images_are_dropped(model, photo):
    session = fm.LanguageModelSession("Look.", model=model, context_policy="drop_oldest")
    size = model.context_size
    image = fm.ImageAttachment(photo(), mode="high")
    turns = size // 80 + 1
    for _ in range(turns):
        session.transcript.add_prompt(["Look", image])
        session.transcript.add_response("Fine.")
    assert await session.token_count() > size
    await session.respond("Well?", options=FEW)
    assert session.last_answer.prompt_tokens < size
    assert len(session.transcript) < 2 * turns
