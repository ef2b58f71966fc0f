"""Prompts as calls of fixed lengths, and what an exported model refuses, whichever framework runs it."""

import functools

import numpy as np
import pytest

from afm_mlx.errors import AFMError, ContextLengthError
from afm_mlx.model.exported_model import ONE_TOKEN, ExportedModel, prompt_chunks
from tests.tools.cases import each
from tests.tools.models import random_config


@each(
    "count, lengths, room, chunks",
    [
        (0, (64, 512), 100, []),
        (512, (64, 512), 0, [512]),
        (64 + 512, (64, 512), 100, [512, 64]),
        (40, (64, 512), 100, [64]),  # padding is cheaper than 40 steps
        (1, (64, 512), 100, [ONE_TOKEN]),  # and a step cheaper than padding
        (40, (64, 512), 23, [ONE_TOKEN] * 40),  # padding would pass the context's end
        (70, (64, 512), 0, [64, *[ONE_TOKEN] * 6]),
        (3, (1, 64), 0, [1, 1, 1]),
    ],
)
def test_some_prompts(count, lengths, room, chunks):
    found = prompt_chunks(count, lengths, room)
    assert sorted(found) == sorted(chunks)


def test_random_prompts_are_read_whole_and_in_the_least_time(rng):
    for _ in range(300):
        count, room = int(rng.integers(1, 60)), int(rng.integers(0, 20))
        lengths = tuple(rng.choice([1, 2, 5, 8, 16, 31, 64], 2, replace=False).tolist())
        chunks = prompt_chunks(count, lengths, room)
        read = [length or 1 for length in chunks]
        # Only the last call may have padding, and one token of the prompt at least.
        assert sum(read[:-1]) < count <= sum(read) <= count + room
        assert sum(map(seconds, chunks)) == least(count, lengths, room)


def seconds(length):
    return 66 if length == ONE_TOKEN else 32 + length


@functools.cache
def least(count, lengths, room):
    if count <= 0:
        return 0
    ways = [seconds(n) + least(count - n, lengths, room) for n in lengths if n - count <= room]
    return min([*ways, seconds(ONE_TOKEN) + least(count - 1, lengths, room)])


class Recorder(ExportedModel):
    """Computes nothing, and keeps the tokens that it is given, without padding."""

    def __init__(self, config):
        super().__init__(config, (4, 12))
        self.read = []

    def read_prompt(self, tokens, count):
        self.read += tokens[:count].tolist()

    def read_token(self, token):
        self.read.append(token)
        return np.zeros(self.config.vocab_size, np.float32)


@each(
    "use, kind, words",
    [
        (lambda m: m.logits([]), AFMError, "no tokens"),
        (lambda m: m.decode(300), AFMError, "token 300 is none of this model; ids are 0 to 299"),
        (lambda m: m.prefill([-1]), AFMError, "token -1 is none"),
        (lambda m: m.logits([0] * 62), ContextLengthError, "62 tokens after 3 are more than .* 64"),
        (lambda m: m.rewind(4), AFMError, "position is 4; 0 to 3"),
    ],
)
def test_what_is_refused(rng, use, kind, words):
    model = Recorder(random_config(rng, vocab_size=300, context_length=64))
    model.prefill([5, 7, 6])
    with pytest.raises(kind, match=words):
        use(model)
    assert (model.position, model.read) == (3, [5, 7, 6])
