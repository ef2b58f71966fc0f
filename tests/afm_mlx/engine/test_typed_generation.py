"""Chats answered with instances of types, by a random model."""

import itertools
import json
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import pytest

import afm_mlx
from afm_mlx.engine.generation import generate, generate_as, stream_generate_as
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.errors import ConstraintError, IncompleteError, RequestError, TokenizerError
from afm_mlx.guidance.types import answer_type
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.models import random_config, random_model


@dataclass
class Animal:
    """An animal."""

    name: Literal["fox", "dog"]
    legs: Annotated[int, msgspec.Meta(ge=2, le=4)]
    likes: Annotated[list[Literal["a", "b"]], msgspec.Meta(min_length=1, max_length=3)]


def look_up(word: Literal["fox", "dog"], deep: bool = False): ...


@pytest.fixture
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def model(rng):
    return random_model(random_config(rng, vocab_size=1000, context_length=2048), rng)


def test_an_answer_is_an_instance(model, tokenizer):
    animal = generate_as(Animal, model, tokenizer, "Who?")
    assert type(animal) is Animal
    assert (animal.name in ("fox", "dog"), animal.legs in (2, 3, 4)) == (True, True)
    assert set(animal.likes) <= {"a", "b"}
    drawn = generate_as(
        answer_type(list[Animal]),
        model,
        tokenizer,
        "Who?",
        max_tokens=-1,
        at_limit="complete",
        sampler=make_sampler(2.0),
        seed=3,
    )
    assert all(type(each) is Animal for each in drawn)
    arguments = generate_as(look_up, model, tokenizer, "Who?")
    assert arguments["word"] in ("fox", "dog")
    assert arguments.keys() <= {"word", "deep"}
    assert afm_mlx.generate_as is generate_as


def test_the_last_users_message_shows_the_schema(model, tokenizer):
    answers = answer_type(Animal)
    asked = {"role": "user", "content": "Who?", "response_format": answers.response_format}
    before = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hi."}]
    for messages, shown in [
        ("Who?", [asked]),
        ([*before, {"role": "user", "content": "Who?"}], [*before, asked]),
        ([*before, asked], [*before, asked]),
    ]:
        prompt = tokenizer.apply_chat_template(shown, add_generation_prompt=True)
        text = generate(model, tokenizer, prompt, constraint=answers.constraint)
        given = json.dumps(messages)
        assert generate_as(Animal, model, tokenizer, messages) == answers.instance(text)
        assert json.dumps(messages) == given


def test_snapshots_grow_into_the_instance(model, tokenizer):
    *snapshots, animal = stream_generate_as(Animal, model, tokenizer, "Who?")
    assert type(animal) is Animal
    assert {type(snapshot).__name__ for snapshot in snapshots} == {"PartialAnimal"}
    assert vars(snapshots[-1]) == vars(animal)
    assert all(one != other for one, other in itertools.pairwise(snapshots))


def test_what_can_not_be_generated(model, tokenizer):
    with pytest.raises(ConstraintError, match="The type is bytes"):
        generate_as(bytes, model, tokenizer, "Who?")
    with pytest.raises(IncompleteError) as error:
        generate_as(Animal, model, tokenizer, "Who?", max_tokens=3)
    assert error.value.text.startswith('{"')
    for messages, says in [([], "messages is empty"), ([5], r"messages\[0\] must be a dict")]:
        with pytest.raises(TokenizerError, match=says):
            generate_as(Animal, model, tokenizer, messages)
    for nothing in (None, 5):
        with pytest.raises(RequestError, match="a text or a list of messages is needed"):
            generate_as(Animal, model, tokenizer, nothing)


def test_without_a_chat_template_a_text_is_continued(model, tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "has_chat_template", False)
    kind = Literal["fox", "dog"]
    text = generate(model, tokenizer, "The quick", constraint=answer_type(kind).constraint)
    assert generate_as(kind, model, tokenizer, "The quick") == json.loads(text)
    with pytest.raises(RequestError, match="no chat template"):
        generate_as(kind, model, tokenizer, [{"role": "user", "content": "The quick"}])
